"""What is looked at: one archive, or two with their comparison, held open with all that pages are made of."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, Final, Literal

from tensorcap.alignment import MappingSource, sides
from tensorcap.comparison import Bands, SyncPoint, compare, has_sync_points
from tensorcap.comparison import points_of as points_of_program
from tensorcap.diagnosis import Diagnosis
from tensorcap.drawing import Curve, draw_curves
from tensorcap.localization import joined_modules
from tensorcap.reports.html import (
    MAP,
    VERIFICATION,
    ReportSource,
    points_of,
    results_of,
    source_of,
    source_of_archives,
    verdict_of,
)
from tensorcap.runs import forget_ops
from tensorcap.viewer.flow import Flow
from tensorcap.viewer.rows import (
    Module,
    Row,
    Scale,
    rows_of_archive,
    rows_of_pairs,
    shortened,
    tree_of,
)
from tensorcap.viewer.source_texts import SourceTexts
from tensorcap.wording import counted
from tensorcap_formats.archive import Archive
from tensorcap_formats.errors import TensorcapError
from tensorcap_formats.keys import module_of, module_path
from tensorcap_formats.open import opened
from tensorcap_formats.output_path import is_locked, journal_path
from tensorcap_formats.records import Record
from tensorcap_formats.view import ArchiveView, recorded
from tensorcap_formats.writing import is_growing, open_growing

MappingChoice = MappingSource | Literal["none"] | None
_INJECTED: Final = Path("with_injection") / "target.h5"  # of the folder of a verification
_MOST_NOTES: Final = 8


@dataclass(frozen=True, slots=True)
class SuspectLine:
    """One suspect of the head of the page.

    Attributes:
        name: Its module, with the numbers of all layers.
        text: The kind of mistake, or why it is suspected.
        row: The number of the row of its tensor; None if it has none.
    """

    name: str
    text: str
    row: int | None


@dataclass(frozen=True, slots=True)
class Stamp:
    """A file as it was when it was opened, to tell if it changes or another one is in its place."""

    path: Path
    state: tuple[int, ...] | None

    @classmethod
    def of(cls, path: str | os.PathLike[str]) -> Stamp:
        """Look at a file, a folder, or the journal of an archive that is being written."""
        path = Path(path)
        return cls(path, _state(path))

    def remark(self) -> str:
        """What became of it, as a sentence; "" if nothing did."""
        now = _state(self.path)
        if now == self.state:
            return ""
        if now is None:
            return f"{self.path} is gone. What is shown is of before; values may be lost."
        if is_growing(self.path):
            return f"{self.path} has grown. Open it again to see what is new."
        return f"{self.path} has changed. What is shown is of before: open it again."


def _state(path: Path) -> tuple[int, ...] | None:
    states: list[int] = []
    for one in (path, journal_path(path)):
        try:
            status = os.stat(one)
        except (OSError, ValueError):
            continue
        states += [status.st_ino, status.st_size, status.st_mtime_ns]
    return tuple(states) or None


@dataclass
class Subject:
    """What is looked at; `use` it while reading, and `close` it.

    Attributes:
        paths: What was opened: one or two.
        source: The comparison with its suspects; None of one archive alone.
        archives: The open archives, reference first; none if a saved comparison is looked at.
        rows: All tensors.
        injected: The comparison of the injected run; None without one.
        stamps: The files as they were.
        notes: What a reader should know, as sentences.
    """

    paths: tuple[str, ...]
    source: ReportSource | None
    archives: tuple[Archive, ...]
    rows: tuple[Row, ...]
    injected: ReportSource | None
    stamps: tuple[Stamp, ...]
    notes: tuple[str, ...]
    _stack: ExitStack = field(repr=False)

    def __post_init__(self) -> None:
        self._condition = threading.Condition()
        self._users = 0
        self._is_closed = False
        self.diagnoses: dict[str, Diagnosis] = {}  # by key, those that were asked for
        self.reading = threading.Lock()  # of archives that threads may not read at once
        self.chosen = lru_cache(16)(lambda choice: choice.of(self.rows, self.scale, self.classes))

    @contextmanager
    def use(self) -> Iterator[bool]:
        """Keep the archives open for a block; False if they are closed already."""
        with self._condition:
            is_open = not self._is_closed
            self._users += is_open
        try:
            yield is_open
        finally:
            with self._condition:
                self._users -= is_open
                self._condition.notify_all()

    def close(self) -> None:
        """Close the archives, once nobody uses them."""
        with self._condition:
            self._is_closed = True
            self._condition.wait_for(lambda: not self._users)
        self._stack.close()

    def prepare(self) -> None:
        """Compute what the first selection would wait for, and drop what only comparing needed."""
        for _ in (self.flows, self.points, self.tree, self.numbers, self.curve_places, self.module_places):
            pass
        for archive in self.archives:
            forget_ops(archive)
            while isinstance(archive, ArchiveView):
                archive = archive.source
                forget_ops(archive)

    @property
    def title(self) -> str:
        """What is looked at, in a line."""
        return " against ".join(shortened(Path(path).name, 60) for path in reversed(self.paths))

    @cached_property
    def scale(self) -> Scale:
        """Metrics and their colours."""
        if self.source is None:
            return Scale(Bands.of(""), "")
        comparison = self.source.comparison
        account = comparison.account
        precision = (account.precision if account else "") or comparison.target.compute_dtype
        return Scale(Bands.of(precision or "float32"), precision)

    @cached_property
    def tree(self) -> Module:
        """The modules with their counts."""
        return tree_of(self.rows)

    @cached_property
    def numbers(self) -> Mapping[str, int]:
        """The number of the row of each key."""
        return {row.key: row.number for row in self.rows}

    @cached_property
    def classes(self) -> Mapping[str, str]:
        """The class of each module of the reference, by path."""
        return self.class_names[0] if self.class_names else {}

    @cached_property
    def class_names(self) -> tuple[Mapping[str, str], ...]:
        """The class of each module by path, of each archive."""
        return tuple(
            {module.path: module.class_name for module in archive.info.modules.values()}
            for archive in self.archives
        )

    def class_of(self, row: Row) -> str:
        """The class of a row's module, of the side that has the row; "" if unknown."""
        side = self.owner(row) == "target" and len(self.class_names) > 1
        return self.class_names[side].get(self.module_of(row, side), "") if self.class_names else ""

    @cached_property
    def counts(self) -> Mapping[str, tuple[int, str]]:
        """How many rows have each status, and its colour."""
        counts: dict[str, tuple[int, str]] = {}
        for row in self.rows:
            if row.status:
                count, colour = counts.get(row.status, (0, row.colour))
                counts[row.status] = count + 1, colour if colour != "grey" else row.colour
        return counts

    @cached_property
    def colours(self) -> tuple[str, ...]:
        """The colours that rows have, the worst first."""
        known = {row.colour for row in self.rows}
        return tuple(colour for colour in ("red", "yellow", "green", "grey") if colour in known)

    @cached_property
    def components(self) -> tuple[str, ...]:
        """The components that rows have."""
        return tuple(sorted({row.component for row in self.rows if row.component}))

    @cached_property
    def points(self) -> Mapping[str, SyncPoint]:
        """The sync point of each key, if one of the runs is of a compiled program."""
        if (
            self.source is None
            or len(self.archives) != 2
            or not has_sync_points(self.archives[0], self.archives[1])
        ):
            return {}
        points = points_of_program(self.source.comparison, self.archives[0], self.archives[1]).points
        return {point.key: point for point in points if point.key}

    @cached_property
    def flows(self) -> tuple[Flow, ...]:
        """What is computed of what in each run; of a saved comparison of none."""
        return tuple(self._flow(side) for side in range(max(1, len(self.archives))))

    def _flow(self, side: int) -> Flow:
        if not self.archives:
            return Flow.of(None, ((row, row.record) for row in self.rows))
        archive = self.archives[side]
        known = ((row, self.record_of(row, side)) for row in self.rows)
        behind = recorded(archive, self.rows[0].record)[0] if self.rows else archive
        return Flow.of(behind, ((row, record) for row, record in known if record is not None))

    def flow_of(self, row: Row, side: str = "") -> Flow:
        """That of the side that is wanted, if it has the row; else of the one that has it."""
        wanted = self.flows[(side or self.owner(row)) == "target" and len(self.flows) > 1]
        has_row = row.number in wanted.places
        return wanted if has_row else self.flows[self.owner(row) == "target" and len(self.flows) > 1]

    def record_of(self, row: Row, side: int) -> Record | None:
        """The record in a side's own archive; None if it has none, or one that is made of several."""
        record = row.record if row.pair is None else (row.pair.reference, row.pair.target)[side]
        return None if record is None else recorded(self.archives[side], record)[1]

    def owner(self, row: Row) -> str:
        """The side that has a row, the reference if both have."""
        return "target" if row.pair is not None and row.pair.reference is None else "reference"

    def module_of(self, row: Row, side: int) -> str:
        """The path of a row's module, as a side calls it."""
        record = self.record_of(row, side) if self.archives else None
        if record is None or record.key.is_bare:
            return row.module
        return module_path(module_of(record.key.site))

    @cached_property
    def texts(self) -> tuple[SourceTexts, ...]:
        """The source texts of each archive."""
        return tuple(SourceTexts.of(archive.run) for archive in self.archives)

    @cached_property
    def verdict(self) -> str:
        """The verdict as a sentence; of one archive what it holds."""
        if self.source is not None:
            return verdict_of(self.source)
        (archive,) = self.archives
        model = archive.info.model_class.rpartition(".")[2]
        of = f" of {model}" if model else ""
        return f"{counted(len(self.rows), 'tensor')}{of}, and nothing to compare with."

    @cached_property
    def suspects(self) -> tuple[SuspectLine, ...]:
        """Who is suspected, the first one first."""
        lines = []
        for suspect in self.source.suspects if self.source else ():
            mistake = suspect["diagnosis"]
            text = mistake["text"] if mistake else suspect["reason"]
            name = shortened(joined_modules(suspect["modules"]))
            lines.append(SuspectLine(name, shortened(text, 400), self.numbers.get(suspect["key"])))
        return tuple(lines)

    @cached_property
    def exchanged(self) -> Mapping[str, str]:
        """What the target runs in the place of other operations, by the key that is wrong first."""
        examination = self.source.examination if self.source else None
        return {one.key: one.text for one in examination.exchanged} if examination else {}

    @cached_property
    def curves(self) -> Mapping[str, tuple[Curve, ...]]:
        """Curves of the free and of the injected run, as far as they are known."""
        sources = {"free": self.source, "injected": self.injected}
        return {name: draw_curves(tuple(points_of(source))) for name, source in sources.items() if source}

    @cached_property
    def curve_rows(self) -> tuple[int, ...]:
        """The row of each point of a curve, from left to right."""
        if self.source is None:
            return ()
        return tuple(self.numbers[pair.key] for pair in results_of(self.source.comparison))

    @cached_property
    def curve_places(self) -> Mapping[int, int]:
        """The number of the point of a curve that each row has, if it has one."""
        return {number: at for at, number in enumerate(self.curve_rows)}

    @cached_property
    def module_places(self) -> Mapping[str, int]:
        """The number of the first point of a curve that each module has."""
        places: dict[str, int] = {}
        for at, number in enumerate(self.curve_rows):
            places.setdefault(self.rows[number].module, at)
        return places

    def remarks(self) -> list[str]:
        """What became of the files since they were opened, as sentences."""
        return [remark for stamp in self.stamps if (remark := stamp.remark())]


def open_subject(
    reference: str | os.PathLike[str],
    target: str | os.PathLike[str] | None = None,
    *,
    mapping: MappingChoice = None,
) -> Subject:
    """Open what is to be looked at, and compare it.

    Args:
        reference: The trusted archive; without a target also the folder of a verification, or a saved
            comparison. An archive that is still being written is opened as far as it is.
        target: The archive under test, or None to look at one alone.
        mapping: What belongs together, as for `compare`.

    Raises:
        ReadError: Something cannot be read.
        UsageError: The mapping does not fit.
    """
    path = Path(reference)
    with ExitStack() as stack:
        is_folder = target is None and (path / VERIFICATION).is_file()
        if target is None and not is_folder and path.suffix != ".json":
            subject = _of_one(stack, reference)
        else:
            subject = _of_pair(stack, reference, target, mapping)
    try:
        subject.prepare()
    except BaseException:
        subject.close()
        raise
    return subject


def _of_one(stack: ExitStack, path: str | os.PathLike[str]) -> Subject:
    stamps = (Stamp.of(path),)
    archive = stack.enter_context(_opened(path))
    return Subject(
        (os.fspath(path),),
        None,
        (archive,),
        rows_of_archive(archive),
        None,
        stamps,
        tuple(_notes_of_runs([archive])),
        stack.pop_all(),
    )


def _of_pair(
    stack: ExitStack,
    reference: str | os.PathLike[str],
    target: str | os.PathLike[str] | None,
    mapping: MappingChoice,
) -> Subject:
    if target is None:
        source = stack.enter_context(source_of(reference, None, mapping=mapping))
        stamps = [Stamp.of(reference), *map(Stamp.of, source.paths if source.archives else ())]
    else:
        stamps = [Stamp.of(reference), Stamp.of(target)]
        both = [stack.enter_context(_opened(p)) if is_growing(p) else p for p in (reference, target)]
        source = stack.enter_context(source_of_archives(*both, mapping=mapping))
    notes = [*source.comparison.warnings, *source.notes, *source.examination.notes]
    archives = source.archives or ()
    injected = None
    if target is None and archives and (Path(reference) / _INJECTED).is_file():
        try:
            injected = _injected(stack, Path(reference), source, archives[0])
        except TensorcapError as error:
            notes.append(f"The injected run cannot be looked at: {error}.")
    notes += _notes_of_runs(archives)
    return Subject(
        (os.fspath(reference),) if target is None else (os.fspath(reference), os.fspath(target)),
        source,
        tuple(archives),
        rows_of_pairs(source.comparison.pairs, source.own_errors),
        injected,
        tuple(dict.fromkeys(stamps)),
        tuple(_few(list(dict.fromkeys(notes)))),
        stack.pop_all(),
    )


def _injected(stack: ExitStack, folder: Path, source: ReportSource, trusted: Archive) -> ReportSource:
    """The injected run of a verification, compared as the free run was."""
    tested = stack.enter_context(opened(folder / _INJECTED))
    known: Any = folder / MAP if (folder / MAP).is_file() else None
    while isinstance(trusted, ArchiveView):
        trusted = trusted.source
    compared = sides(trusted, tested, known)
    comparison = compare(*compared, mapping="none")
    return replace(source, comparison=comparison, own_errors={})


@contextmanager
def _opened(path: str | os.PathLike[str]) -> Iterator[Archive]:
    """Open an archive; one that is still being written, or whose writer died, as far as it is."""
    if is_growing(path):
        with open_growing(path) as archive:
            yield archive
        return
    with opened(path) as archive:
        yield archive


def _notes_of_runs(archives: Sequence[Archive]) -> Iterator[str]:
    """That a run is not complete, and why, as far as it is known."""
    for archive in archives:
        if archive.is_complete:
            continue
        count = counted(len(archive.records), "tensor")
        if is_growing(archive.path):
            lives = is_locked(archive.path)
            why = "is still being written" if lives else "was left unfinished, its writer died"
            yield f"{archive.path} {why}: {count} so far."
        else:
            error = archive.info.error
            why = f": {error.text}" if error and error.text else ""
            yield f"{archive.path} is of a run that did not end as it should{why}. It has {count}."


def _few(notes: list[str]) -> list[str]:
    if len(notes) <= _MOST_NOTES:
        return notes
    return [*notes[: _MOST_NOTES - 1], f"And {len(notes) - _MOST_NOTES + 1} more notes: see tcap compare."]
