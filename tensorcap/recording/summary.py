"""The outcome of a capture in numbers and names, for the terminal; and the tally of a dry run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tensorcap.recording.point import Absence, Kind, Phase
from tensorcap.recording.record_filter import RecordFilter
from tensorcap.recording.recorder import Recorder
from tensorcap_formats.dtypes import Array, DType
from tensorcap_formats.json_values import json_object
from tensorcap_formats.keys import Key
from tensorcap_formats.records import Record
from tensorcap_formats.writing import Writer


@dataclass(frozen=True, slots=True)
class Summary:
    """The outcome of a capture.

    Attributes:
        path: The archive, or None for a dry run.
        is_complete: Whether the run ended as it should.
        tensors: Count of records.
        tensor_bytes: Sum of their sizes.
        stored_bytes: Bytes of the distinct ones that are in the archive.
        steps: Count of steps.
        phases: Count of steps by phase: `prefill`, `decode`, `forward`.
        captured: Modules of which there are records.
        never_called: Modules that were asked for and never called, but for containers, which cannot be.
        not_capturable: Why something could not be captured, by site or `SITE/SLOT`.
        fused: Why a compiled program has no value of an operation, by `SITE/SLOT`.
        held: What a program holds and goes on writing to, as a cache, in words, by `SITE/SLOT`.
        unfinished: Counts of calls that did not return, or were not seen to, by site.
        excluded: Modules that were not asked for, or that the limits left out.
        ops: Count of the calls of ops of which there are records.
        functions: Watched functions, as sites, of which there are records.
        probes: Probes, as sites, of which there are records.
        unmatched: Globs of `only`, slices, steps, and functions to watch, of which nothing was captured.
        stopped: The key at which the limit of bytes ended the recording; None if it did not.
        max_bytes: That limit.
        notes: Further sentences for the user.
    """

    path: Path | None
    is_complete: bool
    tensors: int
    tensor_bytes: int
    stored_bytes: int
    steps: int
    phases: Mapping[Phase, int]
    captured: tuple[str, ...]
    never_called: tuple[str, ...]
    not_capturable: Mapping[str, str]
    fused: Mapping[str, str]
    held: Mapping[str, str]
    unfinished: Mapping[str, int]
    excluded: tuple[str, ...]
    ops: int
    functions: tuple[str, ...]
    probes: tuple[str, ...]
    unmatched: tuple[str, ...]
    stopped: str | None
    max_bytes: int | None
    notes: tuple[str, ...]

    @property
    def is_whole(self) -> bool:
        """Whether everything that was asked for was captured."""
        lost = self.not_capturable or self.unmatched or self.unfinished
        return not lost and self.stopped is None

    @property
    def exit_status(self) -> int:
        """0 if everything that was asked for was captured, else 1."""
        return 0 if self.is_whole else 1

    def to_json(self) -> dict[str, Any]:
        """The outcome as JSON values, as `tcap capture --json` prints it."""
        members = json_object(self)
        del members["max_bytes"]  # an option, no outcome
        return members


class Tally:
    """Counts records in place of a writer, and keeps no bytes.

    Attributes:
        records: The records so far.
        stored_bytes: The same as `tensor_bytes`: which records are equal is not known.
    """

    def __init__(self) -> None:
        self.records: list[Record] = []
        self.tensor_bytes = 0
        self.stored_bytes = 0

    @property
    def records_count(self) -> int:
        """Count of records."""
        return len(self.records)

    def add(
        self, key: Key, bits: Array, dtype: DType, shape: tuple[int, ...], *, order: int | None = None
    ) -> None:
        """Count one tensor."""
        row = len(self.records)
        order = row if order is None else order
        self.records.append(Record(key, dtype, shape, order, "", None, stored=False, row=row))
        self.tensor_bytes += bits.nbytes
        self.stored_bytes = self.tensor_bytes

    def add_value(self, key_text: str, value: object) -> None:
        """Ignore a value."""

    def to_json(self) -> dict[str, Any]:
        """The records as JSON values, as `tcap capture --dry-run --json` prints them."""
        records = [
            {"key": r.key.text, "dtype": r.dtype.name, "shape": list(r.shape), "bytes": r.nbytes}
            for r in self.records
        ]
        return {"records": records, "bytes": self.tensor_bytes}


def summarise(
    path: Path | None,
    sink: Writer | Tally,
    recorder: Recorder,
    record_filter: RecordFilter,
    *,
    is_complete: bool,
) -> Summary:
    """Sum up a capture that is over."""
    sites_by_status: dict[tuple[Kind, str], list[str]] = {}
    not_capturable: dict[str, str] = {}
    absent: dict[Absence, dict[str, str]] = {"fused": {}, "held": {}}
    points = list(recorder.points.values())
    for point in points:
        if not (point.status == "never-called" and point.reason):
            sites_by_status.setdefault((point.kind, point.status), []).append(point.site)
        for entry in point.describe():
            if entry["status"] == "not-capturable":
                for slot in entry.get("slots", [""]):
                    absence = point.absence(slot)
                    reasons = absent[absence] if absence else not_capturable
                    reasons[f"{point.site}/{slot}" if slot else point.site] = entry["reason"]

    def sites(kind: Kind, status: str) -> tuple[str, ...]:
        return tuple(sites_by_status.get((kind, status), ()))

    steps = recorder.last_step + 1
    unmatched = record_filter.unmatched(((p.site, p.aliases) for p in points if p.records), steps)
    return Summary(
        path=path,
        is_complete=is_complete,
        tensors=sink.records_count,
        tensor_bytes=sink.tensor_bytes,
        stored_bytes=sink.stored_bytes,
        steps=steps,
        phases=Counter(recorder.phases.values()),
        captured=sites("module", "captured"),
        never_called=sites("module", "never-called"),
        not_capturable=not_capturable,
        fused=absent["fused"],
        held=absent["held"],
        unfinished={point.site: point.unfinished for point in points if point.unfinished},
        excluded=sites("module", "excluded"),
        ops=sum(p.calls - p.left_out for p in points if p.kind == "op" and p.status == "captured"),
        functions=sites("function", "captured"),
        probes=sites("probe", "captured"),
        unmatched=(*unmatched, *recorder.unmatched),
        stopped=recorder.stopped,
        max_bytes=record_filter.options.max_bytes,
        notes=tuple(recorder.facts.get("notes", ())),
    )
