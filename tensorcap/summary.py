"""What a capture came to, for the terminal; and the tally of a dry run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tensorcap.recorder import Recorder
from tensorcap.scope import Scope
from tensorcap_formats.dtypes import Array, DType
from tensorcap_formats.keys import Key
from tensorcap_formats.writer import Writer


@dataclass(frozen=True, slots=True)
class Summary:
    """What a capture came to.

    Attributes:
        path: The archive, or None for a dry run.
        is_complete: Whether the run ended as it should.
        tensors: Count of records.
        tensor_bytes: Sum of their sizes.
        stored_bytes: Bytes of the distinct ones that are in the archive.
        steps: Count of steps.
        captured: Sites of which there are records.
        never_called: Sites that were asked for and never called, save containers that cannot be.
        not_capturable: Sites, or `SITE/SLOT`, that could not be captured: the reason of each.
        unfinished: Sites with calls that did not return, or were not seen to: how many.
        excluded: Sites that were not asked for.
        unmatched: Include globs of which nothing was captured.
    """

    path: Path | None
    is_complete: bool
    tensors: int
    tensor_bytes: int
    stored_bytes: int
    steps: int
    captured: tuple[str, ...]
    never_called: tuple[str, ...]
    not_capturable: Mapping[str, str]
    unfinished: Mapping[str, int]
    excluded: tuple[str, ...]
    unmatched: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Tallied:
    """A record that a dry run saw.

    Attributes:
        key: Where.
        dtype: Logical dtype.
        shape: As the framework gave it.
        nbytes: Its size, in bytes.
    """

    key: Key
    dtype: DType
    shape: tuple[int, ...]
    nbytes: int


class Tally:
    """Takes records in place of a writer, and keeps no bytes.

    Attributes:
        records: What it was given.
        stored_bytes: The same as `tensor_bytes`: what is equal to another is not known.
    """

    def __init__(self) -> None:
        self.records: list[Tallied] = []
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
        self.records.append(Tallied(key, dtype, shape, bits.nbytes))
        self.tensor_bytes += bits.nbytes
        self.stored_bytes = self.tensor_bytes

    def add_value(self, key_text: str, value: object) -> None:
        """Leave a value out of account."""


def summarise(
    path: Path | None,
    sink: Writer | Tally,
    recorder: Recorder,
    scope: Scope,
    *,
    is_complete: bool,
) -> Summary:
    """Sum a capture up."""
    by_status: dict[str, list[str]] = {}
    not_capturable = {}
    for point in recorder.points.values():
        if not (point.status == "never-called" and point.reason):
            by_status.setdefault(point.status, []).append(point.site)
        for entry in point.describe():
            if entry["status"] == "not-capturable":
                for slot in entry.get("slots", [""]):
                    not_capturable[f"{point.site}/{slot}" if slot else point.site] = entry["reason"]
    return Summary(
        path,
        is_complete,
        sink.records_count,
        sink.tensor_bytes,
        sink.stored_bytes,
        recorder.last_step + 1,
        tuple(by_status.get("captured", ())),
        tuple(by_status.get("never-called", ())),
        not_capturable,
        {point.site: point.unfinished for point in recorder.points.values() if point.unfinished},
        tuple(by_status.get("excluded", ())),
        scope.unmatched((p.site, p.aliases) for p in recorder.points.values() if p.records),
    )
