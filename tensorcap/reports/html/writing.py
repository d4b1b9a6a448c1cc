"""A report as HTML or Markdown text, and in a file; HTML needs Jinja2, the extra `report`."""

from __future__ import annotations

import base64
import hashlib
import math
import os
import re
from collections.abc import Iterable, Iterator
from importlib.resources import files
from typing import Any, Final

from tensorcap.drawing import HEIGHT, WIDTH
from tensorcap.reports.html.experiment_page import ExperimentPage
from tensorcap.reports.html.matrix import Matrix
from tensorcap.reports.html.page import Page
from tensorcap.wording import one_line, three_digits
from tensorcap_formats.errors import missing_package
from tensorcap_formats.output_path import publish_text

HTML_BEGINNING: Final = '<!doctypehtml><htmllang="en"data-tensorcap-report="1">'  # without white space
MARKDOWN_BEGINNING: Final = "<!--tensorcapreport-->"
_TEMPLATES: Final = "templates"
_LINES: Final = 60  # of Markdown at most
_SUSPECTS, _FACTS, _TENSORS, _TARGETS = 5, 8, 10, 40  # that Markdown lists
_WIDEST_CELL: Final = 100  # characters
_MARKDOWN: Final = re.compile(r"([\\`*_{}\[\]<>()#+!|~@&$-])")  # what Markdown, or an issue tracker, obeys
_REFERENCE: Final = re.compile(r"(?<!\w)([@#])(?=\w)")  # of a person or an issue, escaped or not


def html_of(page: Page | Matrix | ExperimentPage) -> str:
    """A report as HTML: one text that loads nothing, and whose policy allows its own script alone.

    All text is escaped, and characters that are not printed are replaced by spaces or left out.

    Raises:
        MissingPackageError: Jinja2 is not installed.
    """
    return "".join(_html_pieces(page))


def _html_pieces(page: Page | Matrix | ExperimentPage) -> Iterator[str]:
    """The text in pieces, of which a page of many tensors has far more than memory needs to hold at once."""
    try:
        from jinja2 import DictLoader, Environment, StrictUndefined
        from markupsafe import Markup
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("jinja2", "markupsafe"):
            raise
        raise missing_package("report.html", "jinja2", extra="report") from error

    def printed(value: Any) -> Any:
        return one_line(value) if isinstance(value, str) and not isinstance(value, Markup) else value

    folder = files(__package__).joinpath(_TEMPLATES)
    names = "report.html", "panel.html", "matrix.html", "experiment.html", "report.css", "report.js"
    texts = {name: folder.joinpath(name).read_text(encoding="utf-8") for name in names}
    environment = Environment(
        loader=DictLoader(texts),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=printed,
    )
    environment.filters["number"] = three_digits
    if isinstance(page, Matrix | ExperimentPage):
        name = "matrix.html" if isinstance(page, Matrix) else "experiment.html"
        template = environment.get_template(name)
        return template.generate(page=page, style=Markup(texts["report.css"]), infinite=math.inf)
    script = texts["report.js"]
    return environment.get_template("report.html").generate(
        page=page,
        style=Markup(texts["report.css"]),
        script=Markup(script),  # ours; the policy of the page allows it by its digest
        digest=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode("ascii"),
        width=WIDTH,
        height=HEIGHT,
        statuses=[status for status, _, _ in page.counts],
        infinite=math.inf,
        components=sorted({row.component for row in page.rows if row.component}),
    )


def markdown_of(page: Page | Matrix | ExperimentPage) -> str:
    """A report as Markdown for an issue tracker: 60 lines at most.

    All names and sentences are escaped, so that nothing in them is markup, a mention or a link.
    """
    if isinstance(page, Page):
        lines = [*_markdown(page)]
    else:
        lines = [*(_matrix_markdown(page) if isinstance(page, Matrix) else _experiment_markdown(page))]
    return "\n".join(lines[:_LINES]) + "\n"


def write_html(
    path: str | os.PathLike[str], page: Page | Matrix | ExperimentPage, *, force: bool = False
) -> None:
    """Write a report as HTML, whole or not at all.

    Args:
        path: The file; a report that is there is replaced.
        page: The report.
        force: Whether another file that is there is replaced too.

    Raises:
        MissingPackageError: Jinja2 is not installed.
        WriteError: Something else is there, or it cannot be written.
    """
    _publish(path, _html_pieces(page), "" if force else HTML_BEGINNING)


def write_markdown(
    path: str | os.PathLike[str], page: Page | Matrix | ExperimentPage, *, force: bool = False
) -> None:
    """Write a report as Markdown, whole or not at all; else as `write_html`."""
    _publish(path, [markdown_of(page)], "" if force else MARKDOWN_BEGINNING)


def _publish(path: str | os.PathLike[str], pieces: Iterable[str], beginning: str) -> None:
    with publish_text(path, beginning=beginning) as file:
        file.writelines(pieces)


def _markdown(page: Page) -> Iterator[str]:
    yield "<!-- tensorcap report -->"
    yield f"## {_plain(page.title)}"
    yield ""
    yield f"**{_plain(page.verdict)}**"
    yield ""
    if page.culprit:
        yield _plain(page.culprit)
        yield ""
    for sentence in page.exchanged[:_SUSPECTS]:
        yield _plain(sentence)
        yield ""
    yield f"Next: {_plain(page.next.text)}"
    if page.next.command:
        yield ""
        yield f"    {one_line(page.next.command)}"
    yield ""
    yield ", ".join(f"{count} {_plain(status)}" for status, count, _ in page.counts)
    for number, suspect in enumerate(page.suspects[:_SUSPECTS], 1):
        name = f"{suspect.name} ({suspect.class_name})" if suspect.class_name else suspect.name
        errors = ", ".join(f"{kind} {value}" for kind, value in suspect.errors)
        yield ""
        what = f"{name}: {suspect.mistake or suspect.reason}"
        yield f"{number}. {_plain(f'{what} (error {errors})' if errors else what)}"
    differing = [fact for fact in page.facts if fact.differs]
    if differing:
        yield ""
        yield "| what differs | reference | target |"
        yield "|---|---|---|"
        for fact in differing[:_FACTS]:
            yield f"| {_plain(fact.name)} | {_plain(fact.reference)} | {_plain(fact.target)} |"
        yield from _more(len(differing) - _FACTS, "difference")
    bad = [row for row in page.rows if not row.is_green]
    if bad:
        yield ""
        yield "| tensor | status | relative error |"
        yield "|---|---|---|"
        for row in bad[:_TENSORS]:
            yield f"| {_plain(row.key)} | {_plain(row.status)} | {three_digits(row.error)} |"
        yield from _more(len(bad) - _TENSORS, "tensor")
    for warning in page.warnings[:3]:
        yield ""
        yield f"Note: {_plain(warning)}"


def _matrix_markdown(matrix: Matrix) -> Iterator[str]:
    yield "<!-- tensorcap report -->"
    yield f"## {_plain(matrix.title)}"
    yield ""
    yield f"**{_plain(matrix.verdict)}**"
    yield ""
    yield "| target | verdict | first divergence | suspect |"
    yield "|---|---|---|---|"
    for target in matrix.targets[:_TARGETS]:
        counts = ", ".join(f"{count} {status}" for status, count, _ in target.counts)
        suspect = target.suspects[0] if target.suspects else ""
        cells = " | ".join(map(_plain, (target.name, counts, target.first, suspect)))
        yield f"| {cells} |"
    yield from _more(len(matrix.targets) - _TARGETS, "target")
    for target in matrix.targets[:_TARGETS]:
        if target.next.command:
            yield ""
            yield f"    {one_line(target.next.command)}"
            return


def _experiment_markdown(page: ExperimentPage) -> Iterator[str]:
    yield "<!-- tensorcap report -->"
    yield f"## {_plain(page.title)}"
    for text in (f"**{_plain(page.verdict)}**", _plain(page.culprit), f"Next: {_plain(page.next.text)}"):
        if text:
            yield ""
            yield text
    if page.next.command:
        yield ""
        yield f"    {one_line(page.next.command)}"
    yield ""
    yield "| stage | state | |"
    yield "|---|---|---|"
    for stage in page.stages:
        words = stage.words[0] if stage.words else stage.title
        yield f"| {stage.number} {_plain(stage.name)} | {stage.state} | {_plain(words)} |"
    failed = [one for one in page.components if not one.passed]
    if failed:
        yield ""
        yield "| component | R | limit | |"
        yield "|---|---|---|---|"
        for one in failed[:_TENSORS]:
            numbers = f"{three_digits(one.ratio)} | {three_digits(one.limit)}"
            yield f"| {_plain(one.name)} | {numbers} | {_plain(one.text)} |"
        yield from _more(len(failed) - _TENSORS, "component")


def _more(count: int, noun: str) -> Iterator[str]:
    if count > 0:
        yield ""
        yield f"And {count} more {noun}{'s' * (count != 1)}."


def _plain(text: str) -> str:
    """Text in one line that Markdown prints as it is."""
    line = one_line(text)
    line = line if len(line) <= 4 * _WIDEST_CELL else f"{line[: 4 * _WIDEST_CELL]}…"
    return _MARKDOWN.sub(r"\\\1", _REFERENCE.sub("\\1\u200b", line))
