"""What a report is made of: a comparison, who is suspected, and the archives, as far as they are at hand."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, Literal

from tensorcap.alignment import MappingSource, sides
from tensorcap.comparison import Comparison, Examination, compare, exchanged_operations
from tensorcap.localization import (
    ComparedRuns,
    Verification,
    gather_evidence,
    gather_operation_evidence,
    rank_suspects,
)
from tensorcap.reports.pair_examination import examine, op_sources, site_classes
from tensorcap.reports.results import load_result
from tensorcap.rerun import OwnError, is_compiled
from tensorcap.wording import counted, some
from tensorcap_formats.archive import Archive
from tensorcap_formats.errors import CorruptArchiveError, ReadError, UsageError
from tensorcap_formats.json_values import json_value
from tensorcap_formats.open import Source, opened_both

VERIFICATION: Final = "verify.json"
MAP: Final = "map.toml"  # of a folder: what its free runs were compared by


@dataclass(frozen=True, slots=True)
class ReportSource:
    """What a report is made of.

    Attributes:
        comparison: The comparison of the free runs.
        examination: What was examined besides.
        suspects: Who is suspected, as `tcap localize --json` has it.
        by: What accuses them: `replay`, `injection` or `archives`; "" if nobody looked for suspects.
        own_errors: Error that each tensor's module made itself, by key text; None if none is defined. Empty
            if neither model could be run again.
        archives: Both sides as they were compared; None if their values are not at hand.
        paths: Both archives, as a command names them.
        mapping: The map file that a command needs for this pair, "" for none.
        notes: What else a reader should know, as sentences.
        exit_status: What the command that judged ended with.
        is_verified: Whether it is the report of `tcap verify`.
    """

    comparison: Comparison
    examination: Examination
    suspects: Sequence[Mapping[str, Any]]
    by: str
    own_errors: Mapping[str, float | None]
    archives: tuple[Archive, Archive] | None
    paths: tuple[str, str]
    mapping: str = ""
    notes: Sequence[str] = field(default=())
    exit_status: int = 0
    is_verified: bool = False


def source_of(
    reference: str | os.PathLike[str],
    target: str | os.PathLike[str] | None,
    *,
    mapping: MappingSource | Literal["none"] | None = None,
) -> AbstractContextManager[ReportSource]:
    """Take two archives, or alone the folder of a verification or a saved comparison.

    Raises:
        UsageError: What is alone is neither, or a mapping is given with it.
    """
    if target is not None:
        return source_of_archives(reference, target, mapping=mapping)
    path = Path(reference)
    if mapping is not None:
        raise UsageError("a mapping goes with two archives, expected REF and TGT")
    if (path / VERIFICATION).is_file():
        return source_of_folder(path)
    if path.suffix == ".json":
        return nullcontext(source_of_result(path))
    raise UsageError(
        f"{path}: alone is no folder of `tcap verify` or `tcap equivalence` and no .json of "
        "`tcap compare --save`, expected REF and TGT"
    )


def sources_of(
    reference: str | os.PathLike[str],
    targets: Sequence[str | os.PathLike[str]],
    *,
    mapping: MappingSource | Literal["none"] | None = None,
) -> list[AbstractContextManager[ReportSource]]:
    """Take a reference and its targets, or folders of verifications and saved comparisons, each alone.

    Raises:
        UsageError: Some are of the one kind and some of the other, or one is of none.
    """
    paths = [Path(path) for path in (reference, *targets)]
    judged = [path for path in paths if _is_judged(path)]
    if not targets:
        return [source_of(reference, None, mapping=mapping)]
    if not judged:
        return [source_of_archives(reference, target, mapping=mapping) for target in targets]
    if len(judged) < len(paths):
        other = next(path for path in paths if path not in judged)
        raise UsageError(
            f"{judged[0]}: is a verification or a saved comparison, and {other} is not, "
            "expected one reference and its targets, or these alone"
        )
    return [source_of(path, None, mapping=mapping) for path in paths]


def _is_judged(path: Path) -> bool:
    """Whether it is the folder of a verification or a saved comparison, not an archive."""
    return (path / VERIFICATION).is_file() or path.suffix == ".json"


@contextmanager
def source_of_archives(
    reference: Source,
    target: Source,
    *,
    mapping: MappingSource | Literal["none"] | None = None,
) -> Iterator[ReportSource]:
    """Compare two archives, and let them accuse whom they can; no model is run.

    Args:
        reference: The trusted archive, open or a path.
        target: The archive under test, open or a path.
        mapping: As for `compare`.

    Raises:
        ReadError: An archive cannot be read.
        UsageError: The mapping does not fit.
    """
    with ExitStack() as stack:
        trusted, tested = stack.enter_context(opened_both(reference, target))
        runs = _compared(stack, trusted, tested, mapping)
        localization = rank_suspects(*runs.sides, runs.free, runs.gathered.sources)
        document = localization.to_json()
        yield ReportSource(
            runs.free,
            examine(runs.free, *runs.sides, where="none"),
            document["suspects"],
            document["by"],
            {},
            runs.sides,
            (_path_text(reference), _path_text(target)),
            mapping=str(mapping) if isinstance(mapping, str | os.PathLike) else "",
            notes=localization.notes,
            exit_status=max(runs.free.exit_status, localization.exit_status),
        )


def _path_text(source: Source) -> str:
    return str(source.path if isinstance(source, Archive) else source)


def source_of_result(path: str | os.PathLike[str]) -> ReportSource:
    """Take a comparison that was saved: it has no values, and nobody looked for suspects.

    Raises:
        ReadError: It is none.
    """
    result = load_result(path)
    comparison = result.comparison
    return ReportSource(
        comparison,
        result.examination,
        (),
        "",
        {},
        None,
        (str(comparison.reference.path), str(comparison.target.path)),
        notes=("This is a saved comparison: it has no values to draw, and nobody looked for suspects.",),
        exit_status=comparison.exit_status,
    )


@contextmanager
def source_of_folder(folder: str | os.PathLike[str]) -> Iterator[ReportSource]:
    """Take the folder of a verification: its suspects and own errors, and its archives compared again.

    Raises:
        ReadError: It is no such folder, or an archive is not where it was.
    """
    folder = Path(folder)
    document = _document(folder)
    try:
        paths = [_archive_path(folder, document[side]["path"]) for side in ("reference", "target")]
        suspects, by = document["suspects"], document["by"]
        own_errors = _own_errors(document)
        notes, exit_status = document["notes"], document["exit_status"]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CorruptArchiveError(
            f"{folder / VERIFICATION}: is damaged: {error!r}, expected what `tcap verify` writes"
        ) from None
    mapping = folder / MAP if (folder / MAP).is_file() else None
    with ExitStack() as stack:
        trusted, tested = stack.enter_context(opened_both(*paths))
        runs = _compared(stack, trusted, tested, mapping)
        yield ReportSource(
            runs.free,
            examine(runs.free, *runs.sides, where="none"),
            suspects,
            by,
            own_errors,
            runs.sides,
            (str(paths[0]), str(paths[1])),
            mapping="" if mapping is None else str(mapping),
            notes=notes,
            exit_status=exit_status,
            is_verified=True,
        )


def source_of_verification(
    verification: Verification, free: tuple[Archive, Archive], folder: Path
) -> ReportSource:
    """Take a verification whose folder is being written.

    Args:
        verification: All but its summary.
        free: Both sides of the free runs, as they were compared.
        folder: Where it is being written; the page names the place that it is going to have.
    """
    localization = verification.localization.to_json()
    final = verification.path

    def named(path: Path) -> str:
        return str(final / path.relative_to(folder) if path.is_relative_to(folder) else path)

    def outside(texts: Sequence[str]) -> list[str]:
        return [text.replace(f"{folder}{os.sep}", "") for text in texts]

    comparison = verification.free
    reference, target = (
        replace(side, path=Path(named(side.path))) for side in (comparison.reference, comparison.target)
    )
    weights = verification.weights
    notes = list(verification.notes)
    if weights is not None and weights.exchanged:
        notes.insert(0, f"Weights are those of a module of another name: {weights.exchanged_text}.")
    if weights is not None and weights.unlike:
        keys = some([pair.key for pair in weights.unlike])
        notes.insert(0, f"{counted(len(weights.unlike), 'weight')} not the same numbers: {keys}.")
    if verification.why_not_injected:
        notes.append(f"Without injection: {verification.why_not_injected.rstrip('.')}.")
    return ReportSource(
        replace(comparison, reference=reference, target=target, warnings=outside(comparison.warnings)),
        Examination(
            preflight=verification.preflight,
            classes=site_classes(free[0]),
            sources=op_sources(comparison, free[0]),
            exchanged=exchanged_operations(comparison.pairs, *free),
        ),
        localization["suspects"],
        localization["by"],
        _own_errors({"own_errors": own_errors_json(verification.localization.own_errors)}),
        free,
        (str(reference.path), str(target.path)),
        mapping=str(final / MAP) if comparison.mapping else "",
        notes=outside([*notes, *verification.localization.notes]),
        exit_status=verification.exit_status,
        is_verified=True,
    )


def own_errors_json(own_errors: Sequence[OwnError]) -> dict[str, Any]:
    """The own errors of a localization by key text, as `verify.json` has them: the last of each key."""
    return {one.key: json_value(one.error) for one in own_errors}


def _archive_path(folder: Path, path: str) -> Path:
    """Where an archive of a folder is: in it, or, of a side that was not captured, where it was given."""
    return folder / path if (folder / path).exists() else Path(path)


def _own_errors(document: Mapping[str, Any]) -> dict[str, float | None]:
    entries = document.get("own_errors", {})  # reports of before had none
    return {key: None if value is None else float(value) for key, value in entries.items()}


def _document(folder: Path) -> Mapping[str, Any]:
    path = folder / VERIFICATION
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ReadError(f"{path}: cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError):
        raise CorruptArchiveError(f"{path}: is no JSON, expected what `tcap verify` writes") from None
    if not isinstance(document, dict) or document.get("format") != "tensorcap-verification":
        raise CorruptArchiveError(f"{path}: is no report of `tcap verify`")
    return document


def _compared(stack: ExitStack, trusted: Archive, tested: Archive, mapping: Any) -> ComparedRuns:
    """Compare both sides, and gather what the archives alone say."""
    if is_compiled(trusted, tested):
        return gather_operation_evidence(trusted, tested, None)
    compared = sides(trusted, tested, mapping)
    free = compare(*compared, mapping="none")
    gathered = gather_evidence(stack, trusted, tested, free, compared=compared, mapping=mapping)
    return ComparedRuns(compared, free, gathered)
