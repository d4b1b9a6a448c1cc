"""The report of a comparison as one page of HTML that needs nothing else, and as Markdown for an issue.

A `ReportSource` goes in, text comes out. Read `sources` (a pair of archives, a saved comparison or the folder
of a verification), `page` (all that the page says, as dataclasses), whose parts are `run_facts` (both runs),
`suspect_card`, `tensor_panel` with `panels` (pictures of tensors), `tensor_rows`, `matrix` (several targets),
`experiment_page` (of the Equivalence workflow), `writing` and `paper_plots`; `templates/` only print.
Normative in `specs/report.md`.
"""

from tensorcap.reports.html.experiment_page import ComponentRow, ExperimentPage, StageRow
from tensorcap.reports.html.matrix import Matrix, gather_matrix
from tensorcap.reports.html.page import Page, gather_page, verdict_of
from tensorcap.reports.html.panels import worst_element
from tensorcap.reports.html.paper_plots import write_plots
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
    sources_of,
)
from tensorcap.reports.html.tensor_rows import points_of, results_of
from tensorcap.reports.html.writing import (
    HTML_BEGINNING,
    MARKDOWN_BEGINNING,
    html_of,
    markdown_of,
    write_html,
    write_markdown,
)

__all__ = [
    "HTML_BEGINNING",
    "MAP",
    "MARKDOWN_BEGINNING",
    "VERIFICATION",
    "ComponentRow",
    "ExperimentPage",
    "Matrix",
    "Page",
    "ReportSource",
    "StageRow",
    "gather_matrix",
    "gather_page",
    "html_of",
    "markdown_of",
    "own_errors_json",
    "points_of",
    "results_of",
    "source_of",
    "source_of_archives",
    "source_of_folder",
    "source_of_result",
    "source_of_verification",
    "sources_of",
    "verdict_of",
    "worst_element",
    "write_html",
    "write_markdown",
    "write_plots",
]
