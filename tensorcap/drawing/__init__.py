"""What a page draws of numbers: shapes of an SVG and small PNGs, without a word of what they mean.

Arrays and errors go in, texts for a page come out. Read `maps` (a plane as a picture), `distributions`
(error by axis, histogram, quantiles), `curves` (errors in execution order, the heat map of layers and
components). The report and the page of `tcap view` draw with them.
"""

from tensorcap.drawing.curves import (
    HEIGHT,
    WIDTH,
    Cell,
    Curve,
    Dots,
    HeatMap,
    Point,
    draw_cells,
    draw_curves,
    draw_heat_map,
    place_of,
)
from tensorcap.drawing.distributions import (
    AxisErrors,
    Histogram,
    Quantiles,
    draw_histogram,
    draw_quantiles,
    errors_along,
    quantile_pairs,
)
from tensorcap.drawing.maps import draw_picture, finite_range

__all__ = [
    "HEIGHT",
    "WIDTH",
    "AxisErrors",
    "Cell",
    "Curve",
    "Dots",
    "HeatMap",
    "Histogram",
    "Point",
    "Quantiles",
    "draw_cells",
    "draw_curves",
    "draw_heat_map",
    "draw_histogram",
    "draw_picture",
    "draw_quantiles",
    "errors_along",
    "finite_range",
    "place_of",
    "quantile_pairs",
]
