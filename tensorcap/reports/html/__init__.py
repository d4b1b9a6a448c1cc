"""The report of a comparison as one page of HTML that needs nothing else, and as Markdown for an issue.

A `ReportSource` goes in, text comes out. Read `sources` (a pair of archives, a saved comparison or the folder
of a verification), `page` (all that the page says, as dataclasses), whose parts are `run_facts` (both runs),
`suspect_card`, `tensor_panel` with `panels` (pictures of tensors), `tensor_rows` and `charts` (curves, heat
map), and `writing`; `templates/` only print. Normative in `specs/report.md`.
"""

from tensorcap.reports.html.page import Page, gather_page
from tensorcap.reports.html.sources import (
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
    "HTML_BEGINNING",
    "MARKDOWN_BEGINNING",
    "Page",
    "ReportSource",
    "gather_page",
    "html_of",
    "markdown_of",
    "own_errors_json",
    "source_of",
    "source_of_archives",
    "source_of_folder",
    "source_of_result",
    "source_of_verification",
    "write_html",
    "write_markdown",
]
