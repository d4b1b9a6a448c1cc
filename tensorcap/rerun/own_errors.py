"""The error that each module makes itself: which module made a tensor, and what states hand on.

`replay_judge` and `injection_judge` judge such errors by the tests of `specs/replay.md`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

from tensorcap.comparison import Finding, Pair, Status, called_sites, caller_of, state_writer
from tensorcap.rerun.producers import Producers
from tensorcap.runs import StateWriters, calls_of, is_handed_on
from tensorcap.wording import conjugated
from tensorcap_formats.archive import Archive
from tensorcap_formats.keys import Key
from tensorcap_formats.records import Record

BAD: Final = frozenset({"suspect", "diverged", "nonfinite", "shape-mismatch"})
TOO_LARGE: Final = frozenset({"suspect", "diverged"})


@dataclass(frozen=True, slots=True)
class OwnError:
    """The error of one tensor, as far as the module that made it added it itself.

    Attributes:
        key: Key text of the tensor, in the names of the model that was run.
        module: The module whose code made it: of an argument, the caller; of a state, who wrote it in place.
        made: Whether it is a result of `module`, an argument that it hands on, or a state that it writes.
        is_leaf: Whether a leaf of known kind made it.
        error: Row error, no unit; None if none is defined.
        ratio: R against the twin on the same values; None without one.
        status: `identical`, `within-rounding`, `suspect` or `diverged`, or `unjudged`.
        findings: One for each test that looked at it.
        is_precise: Whether it was rounded less than the model itself rounds it in that precision.
    """

    key: str
    module: str
    made: Literal["result", "argument", "state"]
    is_leaf: bool
    error: float | None
    ratio: float | None
    status: Status
    findings: tuple[Finding, ...]
    is_precise: bool

    @property
    def is_bad(self) -> bool:
        """Whether it is suspect or worse."""
        return self.status in TOO_LARGE

    @property
    def is_undone(self) -> bool:
        """Whether a rerun shows that it is undone by what comes of it."""
        return self.status == "explained" and self.findings[:1] != () and self.findings[0].test == "undone"


class Makers:
    """Which module made a tensor, by the reference's calls.

    Args:
        reference: The trusted archive.
        producers: Who made what the target has no tensors before.
    """

    def __init__(self, reference: Archive, producers: Producers | None = None) -> None:
        self.calls = calls_of(reference)
        self._producers = producers or Producers()
        self.writers = StateWriters(reference)
        self._called = called_sites(reference)
        self._inputs = {call.place: call.inputs for call in self.calls.calls}

    def inputs(self, key: Key) -> Sequence[Record]:
        """What the call that a key belongs to was given."""
        return self._inputs.get((key.rank, key.step, key.site, key.call), ())

    def is_leaf(self, key: Key) -> bool:
        """Whether a leaf of known kind made the tensor of a key."""
        is_result = key.slot.startswith("output")
        is_alone = is_result and not self.is_of_span(key)
        return is_alone and self.calls.is_leaf(key.site) and self.calls.is_simple(key.site)

    def is_of_span(self, key: Key) -> bool:
        """Whether a leaf was given what the target has no tensor for, and shows all that lies between."""
        return key.text in self._producers.spans

    def module(self, key: Key) -> str:
        """The module whose code made the tensor of a key, states aside."""
        maker = key.site if key.slot.startswith("output") else caller_of(key.site, self._called)
        return self._producers.site(key, maker)

    def own_error(
        self,
        pair: Pair,
        status: Status,
        findings: tuple[Finding, ...],
        *,
        ratio: float | None = None,
        is_precise: bool = False,
    ) -> OwnError:
        """State what a pair shows of the module whose code made its tensor."""
        key = both_records(pair)[0].key
        is_result = key.slot.startswith("output") and not self.is_of_span(key)
        is_result |= key.text in self._producers.results
        writer = state_writer(self.writers, pair)
        return OwnError(
            pair.key,
            writer or self.module(key),
            "state" if writer else "result" if is_result else "argument",
            self.is_leaf(key) and not writer,
            pair.row_error,
            ratio,
            status,
            findings,
            is_precise,
        )


class States:
    """What states that calls share, and that no run replaces, hand on from one call to the next.

    Args:
        writers: Who wrote each, by the reference's calls.
        runs: Both runs, under the reference's keys.
    """

    def __init__(self, writers: StateWriters, runs: tuple[Archive, Archive]) -> None:
        self._writers = writers
        self._runs = runs
        self._wrong: set[str] = set()  # key texts of what differs

    def inherited(self, pair: Pair) -> Finding | None:
        """From where a tensor that differs has its error, if not from the module whose code made it.

        1. A state that both runs hand on as it was at the moment before.
        2. A state that was wrong at the moment before, and what a call makes that was handed a wrong one of
           those that its own module writes.

        Args:
            pair: The tensor; those before it were asked for before.
        """
        record = both_records(pair)[0]
        self._wrong.add(pair.key)
        before = self._writers.before(record)
        if before is not None and all(is_handed_on(run, before.key.text, pair.key) for run in self._runs):
            return Finding("state", 0, 0, "identical", f"handed on as it is in {before.key.text}")
        handed = (before,) if before is not None else self._writers.own_states(record)
        wrong = next((one.key.text for one in handed if one.key.text in self._wrong), "")
        text = f"made of a state that differs before, in {wrong}"
        return Finding("state", 1, 0, "unjudged", text) if wrong else None


def mismatch_text(pair: Pair) -> str:
    """What is wrong with a pair that no test judged: elements that are not finite, or shapes."""
    if pair.status == "nonfinite" and pair.difference is not None:
        count, elements = pair.difference.mask_mismatches, pair.difference.elements
        return f"{count} of {elements} elements {conjugated(count, 'are')} finite on one side only"
    return pair.reason or "the shapes differ"


def mismatch_finding(pair: Pair) -> Finding:
    """The finding of a pair that no test judged."""
    return Finding(pair.status, 1, 0, "diverged", mismatch_text(pair))


def both_records(pair: Pair) -> tuple[Record, Record]:
    """The records of a pair that has both."""
    assert pair.reference is not None
    assert pair.target is not None
    return pair.reference, pair.target
