"""Verbs that look for a mapping, or serve, before they do what a function of another room does with it."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Literal, overload

from tensorcap_formats.errors import missing_package
from tensorcap_formats.open import Source, opened, opened_both

if TYPE_CHECKING:
    from tensorcap.alignment import MappingSource
    from tensorcap.comparison.preflight import Preflight
    from tensorcap.diagnosis import Diagnosis
    from tensorcap.reports.html import ExperimentPage, Matrix, Page


def diagnose(
    reference: Source,
    target: Source,
    key: str,
    *,
    target_key: str | None = None,
    mapping: MappingSource | Literal["none"] | None = None,
    compute_dtype: str | None = None,
) -> Diagnosis:
    """Test hypotheses about a mistake on the values of one pair.

    Args:
        reference: The trusted archive.
        target: The archive under test.
        key: The reference's tensor.
        target_key: The target's, if it has another key; then no mapping is looked for.
        mapping: What belongs together, as for `compare`.
        compute_dtype: Precision in which the target computed, if its archive does not say.

    Raises:
        TensorNotFoundError: One of the tensors does not exist.
        UsageError: The values are complex or were not kept, or the mapping does not fit.
        ReadError: An archive cannot be read.
    """
    from tensorcap.alignment import sides
    from tensorcap.diagnosis import diagnose as diagnose_pair

    with opened_both(reference, target) as (trusted, tested):
        if target_key is None:
            trusted, tested = sides(trusted, tested, mapping)
        return diagnose_pair(trusted, tested, key, target_key=target_key, compute_dtype=compute_dtype)


def preflight(
    reference: Source,
    target: Source,
    *,
    mapping: MappingSource | Literal["none"] | None = None,
    reference_repeat: Source | None = None,
) -> Preflight:
    """Look at what can make two runs differ before any module is at fault.

    Args:
        reference: The trusted archive.
        target: The archive under test.
        mapping: What belongs together, as for `compare`.
        reference_repeat: A second run of the reference, which ought to be bit-equal to the first.

    Raises:
        UsageError: The mapping does not fit the archives.
        ReadError: Inputs or parameters cannot be read.
    """
    from tensorcap.alignment import sides
    from tensorcap.comparison.preflight import preflight as preflight_archives

    again = nullcontext() if reference_repeat is None else opened(reference_repeat)
    with opened_both(reference, target) as (trusted, tested), again as repeat:
        return preflight_archives(*sides(trusted, tested, mapping), repeat=repeat)


@overload
def report(
    reference: str | os.PathLike[str],
    target: str | os.PathLike[str],
    output: str | os.PathLike[str],
    *,
    mapping: MappingSource | Literal["none"] | None = ...,
    markdown: bool = ...,
    png: bool = ...,
    force: bool = ...,
) -> Page: ...


@overload
def report(
    reference: str | os.PathLike[str],
    target: None,
    output: str | os.PathLike[str],
    *,
    mapping: None = ...,
    markdown: bool = ...,
    png: bool = ...,
    force: bool = ...,
) -> Page | ExperimentPage: ...


@overload
def report(
    reference: str | os.PathLike[str],
    target: Sequence[str | os.PathLike[str]],
    output: str | os.PathLike[str],
    *,
    mapping: MappingSource | Literal["none"] | None = ...,
    markdown: bool = ...,
    png: bool = ...,
    force: bool = ...,
) -> Page | Matrix | ExperimentPage: ...


def report(
    reference: str | os.PathLike[str],
    target: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | None,
    output: str | os.PathLike[str],
    *,
    mapping: MappingSource | Literal["none"] | None = None,
    markdown: bool = False,
    png: bool = False,
    force: bool = False,
) -> Page | Matrix | ExperimentPage:
    """Write a comparison as one page of HTML, or as Markdown for an issue (`specs/report.md`).

    Args:
        reference: Path of the trusted archive; without a target, the folder that `verify` wrote, that of an
            experiment of `equivalence`, or a saved comparison.
        target: Path of the archive under test, or None. Several of them, in the order of their columns, or
            further folders and saved comparisons if the reference is one, make a matrix.
        output: The file, which is written whole or not at all.
        mapping: What belongs together, as for `compare`.
        markdown: Whether to write Markdown.
        png: Whether to write plots for papers, into `output` as a new folder.
        force: Whether to replace a file that is no report.

    Returns:
        All that it says; a `Matrix` of several targets, an `ExperimentPage` of an experiment.

    Raises:
        UsageError: The reference alone is none of these, plots are asked for of several targets, or the
            output would replace an input.
        WriteError: Something else is in the output's place, or it cannot be written.
        ReadError: An input cannot be read.
        MissingPackageError: Jinja2 is not installed.
    """
    from tensorcap.reports import html
    from tensorcap_formats.errors import UsageError
    from tensorcap_formats.output_path import refuse_overlap, refuse_to_replace_unlike

    path = Path(output)
    targets = [] if target is None else [target] if isinstance(target, str | os.PathLike) else [*target]
    for source in (reference, *targets, mapping):
        if isinstance(source, str | os.PathLike) and source != "none" and not Path(source).is_dir():
            refuse_overlap(Path(source), path)
    if png and markdown:
        raise UsageError("plots are no Markdown, expected --png or --markdown")
    beginning = html.MARKDOWN_BEGINNING if markdown else html.HTML_BEGINNING
    if not png:
        refuse_to_replace_unlike(path, "" if force else beginning)
    if not targets and (Path(reference) / "equivalence.toml").is_file():
        from tensorcap.equivalence import gather_experiment

        if png or mapping is not None:
            raise UsageError(
                f"{reference}: is an experiment of `tcap equivalence`, expected no --png and no --map"
            )
        experiment = gather_experiment(Path(reference))
        (html.write_markdown if markdown else html.write_html)(path, experiment, force=force)
        return experiment
    if target is None or isinstance(target, str | os.PathLike):
        sources = [html.source_of(reference, target, mapping=mapping)]
    else:
        sources = html.sources_of(reference, targets, mapping=mapping)
    if png and len(sources) > 1:
        raise UsageError("plots are of one target, expected --png with one TGT")
    page: Page | Matrix
    if len(sources) > 1:
        page = html.gather_matrix(sources)
    else:
        with sources[0] as source_of_page:
            page = html.gather_page(source_of_page)
            if png:
                html.write_plots(path, source_of_page)
                return page
    (html.write_markdown if markdown else html.write_html)(path, page, force=force)
    return page


def view(
    reference: str | os.PathLike[str],
    target: str | os.PathLike[str] | None = None,
    *,
    mapping: MappingSource | Literal["none"] | None = None,
    port: int = 0,
    opened: Callable[[str], None] = print,
) -> None:
    """Serve a page to look at one archive, or at two and where they differ, until interrupted.

    Args:
        reference: Path of the trusted archive; without a target also the folder that `verify` wrote, or a
            saved comparison.
        target: Path of the archive under test, or None.
        mapping: What belongs together, as for `compare`.
        port: Of this machine's loopback, 0 for any that is free.
        opened: Called with the address once it answers; whoever has the address can look.

    Raises:
        UsageError: The port is in use, or the mapping does not fit.
        ReadError: An archive cannot be read.
        MissingPackageError: A package of the extra `view` is not installed.
    """
    try:
        from tensorcap.viewer.server import listen, serve
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in ("starlette", "uvicorn", "jinja2", "pygments"):
            raise
        raise missing_package("the page", package, extra="view") from error
    from tensorcap.viewer import open_subject

    with listen(port) as listener:
        serve(listener, open_subject(reference, target, mapping=mapping), mapping=mapping, opened=opened)
