"""The error by execution order as a picture; needs matplotlib, the extra `report`."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from typing import Final

from tensorcap.reports.layer_report import Layer, by_component
from tensorcap_formats.errors import missing_package

_COLOURED: Final = 9  # components with a colour of their own; the others share one


def plot_errors(path: str | os.PathLike[str], title: str, layers: Sequence[Layer]) -> None:
    """Draw the mean squared error of each layer by its place in the execution order, on a log scale.

    Layers with an error of zero are drawn as open circles at the foot; what has none is left out.

    Raises:
        MissingPackageError: matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "matplotlib":
            raise
        raise missing_package("mse_plot.png", "matplotlib", extra="report") from error
    places = [(at, one) for at, one in enumerate(layers) if one.mse is not None and math.isfinite(one.mse)]
    least = min((one.mse for _, one in places if one.mse), default=1.0)
    figure = Figure(figsize=(11, 5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    names = list(by_component(one for _, one in places))
    for number, name in enumerate(names):
        colour = f"C{number}" if number < _COLOURED else "0.6"
        label = name if number < _COLOURED else "others" if number == _COLOURED else None
        mine = [(at, one.mse or 0.0) for at, one in places if one.component == name]
        wrong = [(at, mse) for at, mse in mine if mse]
        axes.scatter([at for at, _ in wrong], [mse for _, mse in wrong], s=18, color=colour, label=label)
        right = [at for at, mse in mine if not mse]
        axes.scatter(right, [least / 10] * len(right), s=18, facecolors="none", edgecolors=colour)
    axes.set(yscale="log", xlabel="execution order", ylabel="mean squared error", title=title)
    if names:
        axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), fontsize="small")
    figure.savefig(path, dpi=120)
