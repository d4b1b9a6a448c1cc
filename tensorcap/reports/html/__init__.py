"""The report of a comparison as one page of HTML that needs nothing else, and as Markdown for an issue.

A `ReportSource` goes in, text comes out. Read `sources` (a pair of archives, a saved comparison or the folder
of a verification), `page` (all that the page says, as dataclasses) with `charts` (curves and heat map) and
`panels` (pictures of tensors), and `writing`; `templates/` only print. Normative in `specs/report.md`.
"""

from tensorcap.reports.html.charts import HEIGHT, WIDTH, Curve, draw_curves, place_of
from tensorcap.reports.html.page import Page, gather_page, number_text, points_of, results_of, verdict_of
from tensorcap.reports.html.panels import (
    AxisErrors,
    Histogram,
    draw_histogram,
    draw_picture,
    errors_along,
    finite_range,
    widened,
    worst_element,
)
from tensorcap.reports.html.sources import (
    MAP,
    VERIFICATION,
    ReportSource,
    own_errors_json,
    source_of,
    source_of_archives,
    source_of_folder,
    source_of_result,
    source_of_verification,
)
from tensorcap.reports.html.writing import (
    HTML_BEGINNING,
    MARKDOWN_BEGINNING,
    html_of,
    markdown_of,
    write_html,
    write_markdown,
)

__all__ = [
    "HEIGHT",
    "HTML_BEGINNING",
    "MAP",
    "MARKDOWN_BEGINNING",
    "VERIFICATION",
    "WIDTH",
    "AxisErrors",
    "Curve",
    "Histogram",
    "Page",
    "ReportSource",
    "draw_curves",
    "draw_histogram",
    "draw_picture",
    "errors_along",
    "finite_range",
    "gather_page",
    "html_of",
    "markdown_of",
    "number_text",
    "own_errors_json",
    "place_of",
    "points_of",
    "results_of",
    "source_of",
    "source_of_archives",
    "source_of_folder",
    "source_of_result",
    "source_of_verification",
    "verdict_of",
    "widened",
    "worst_element",
    "write_html",
    "write_markdown",
]
