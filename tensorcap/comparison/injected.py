"""Which tensors of an injected run show a module's own error, and which may have inherited one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Literal

from tensorcap.alignment import MappedArchive
from tensorcap.comparison.pair import Pair
from tensorcap.comparison.tensorless_calls import GivenValues, has_all_inputs
from tensorcap.recording import HELD, parse_steps
from tensorcap.runs import StateWriters, enclosing_sites, is_inner
from tensorcap_formats.archive import Archive
from tensorcap_formats.errors import UsageError
from tensorcap_formats.keys import ROOT_SITE, Key
from tensorcap_formats.records import Record
from tensorcap_formats.run_info import InjectionInfo

Own = Literal["result", "between"]
_Place = tuple[int, str, int]  # step, site, call


class Injected:
    """Which tensors of an injected run were replaced after they were recorded (INJ-20).

    Args:
        target: The run, under its own keys or mapped to those of the reference; it need not be injected.
        reference: What it is compared with.
    """

    def __init__(self, target: Archive, reference: Archive) -> None:
        archive = target
        self._sources: Mapping[str, Sequence[Record]] = {}
        if isinstance(target, MappedArchive):
            archive, self._sources = target.source, target.sources
        self._replaced: dict[tuple[str, str], list[tuple[int, tuple[range, ...]]]] = {}
        self._written: set[tuple[str, str]] = set()
        for slot in archive.info.injected.slots if archive.info.injected else ():
            name = slot.site, slot.slot
            if slot.calls:
                self._replaced[name] = [(call, _spans(steps)) for call, steps in slot.calls.items()]
            if slot.reason == HELD:
                self._written.add(name)
        self._run = archive
        self._reference = reference
        self._inputs: dict[_Place, list[Record]] = {}
        for record in archive.records if self._replaced else ():
            if record.key.slot.startswith("input") and not is_inner(record.key):
                self._inputs.setdefault(_place(record.key), []).append(record)
        self._starts: dict[tuple[int, str], list[tuple[int, _Place]]] = {}  # calls by step and site
        for place, records in self._inputs.items():
            starts = self._starts.setdefault(place[:2], [])
            starts.append((min(record.order for record in records), place))
            starts.sort()

    def __bool__(self) -> bool:
        return bool(self._replaced)

    @cached_property
    def _writers(self) -> StateWriters:
        return StateWriters(self._run)  # takes a look at every record: only for runs that were injected

    def own(self, pair: Pair) -> Own | None:
        """Say whether the error of a pair is a module's own.

        Returns:
            `result` if a call computed it from archived arguments only, `between` if it is an argument that
            the code of such a call computed, from these and from results of modules within it; None if its
            error may be inherited.
        """
        if self.left(pair) != ():
            return None
        return "between" if self.keys_of(pair)[0].slot.startswith("input") else "result"

    def left(self, pair: Pair) -> tuple[Key, ...] | None:
        """Return the inputs of a pair's tensor that were left in place, though they might have been replaced.

        Of a result these are arguments of its call, of an argument those of the call of the module around it,
        of a state those of the call that wrote it; whole numbers count if there is nothing else. The inputs
        of the run count as archived. A call without tensors, such as one of a table of positions, has none.

        Returns:
            None if the inputs are not known.
        """
        if not self._replaced or not self.keys_of(pair):
            return None
        left: dict[Key, None] = {}
        for record in self._records(pair):
            place = self._call_of(record)
            if place is None:
                if self._takes_no_tensors(pair, record.key):
                    continue
                return None
            left.update((one.key, None) for one in self._arguments(place) if not self.is_replaced(one.key))
        return tuple(left)

    def takes_replaced(self, pair: Pair) -> bool:
        """Whether each call that made a pair's tensor was given something that was replaced."""
        places = [self._call_of(record) for record in self._records(pair)]
        given = [self._arguments(place) if place is not None else () for place in places]
        return bool(given) and all(any(self.is_replaced(one.key) for one in each) for each in given)

    def was_replaced(self, pair: Pair) -> bool:
        """Whether the tensor was replaced by another one after it was recorded."""
        return bool(self._replaced) and any(map(self.is_replaced, self.keys_of(pair)))

    def is_replaced(self, key: Key) -> bool:
        """Whether the tensor of a key of the run was replaced by another one after it was recorded."""
        spans = self._replaced.get((key.site, key.slot), ())
        return any(call == key.call and any(key.step in span for span in steps) for call, steps in spans)

    def is_made_of_replaced(self, key: Key) -> bool:
        """Whether all that a tensor is made of was replaced; the key is the one that is compared."""
        records = self._sources.get(key.text, ())
        return all(map(self.is_replaced, [record.key for record in records] or [key]))

    def keys_of(self, pair: Pair) -> list[Key]:
        """Return the run's own keys of the tensors that a pair's target is made of."""
        return [record.key for record in self._records(pair)]

    def _records(self, pair: Pair) -> list[Record]:
        if pair.target is None:
            return []
        records: Iterable[Record] = self._sources.get(pair.target.key.text, (pair.target,))
        return [record for record in records if not record.key.is_bare]

    def _arguments(self, place: _Place) -> Sequence[Record]:
        """Return the arguments of a call that have errors: its floats, or all if there are none."""
        if place[1] == ROOT_SITE:
            return ()
        inputs = self._inputs.get(place, ())
        return [record for record in inputs if record.dtype.is_inexact] or inputs

    def _call_of(self, record: Record) -> _Place | None:
        """Return the call whose code computed a result, or an argument; None if it is not known."""
        key = record.key
        kind = key.slot.partition(".")[0]
        if (key.site, key.slot) in self._written:
            writer = self._writers.call(record)
            return None if writer is None else (writer.place[1], writer.site, writer.place[3])
        if kind == "input":
            return self._call_around(record)
        is_result = kind == "output" and not is_inner(key) and _place(key) in self._inputs
        return _place(key) if is_result else None

    def _takes_no_tensors(self, pair: Pair, key: Key) -> bool:
        """Whether a result is of a call that was given no tensors, and all else as in the reference."""
        if pair.reference is None or not key.slot.startswith("output") or is_inner(key):
            return False
        if _place(key) in self._inputs or not has_all_inputs(self._run.info, key.site):
            return False
        return self._values.are_equal(pair.reference.key, key)

    @cached_property
    def _values(self) -> GivenValues:
        return GivenValues(self._reference, self._run)

    def _call_around(self, record: Record) -> _Place:
        """Return the call of the nearest module around that of an argument."""
        for site in enclosing_sites(record.key.site):
            earlier = [
                p for order, p in self._starts.get((record.key.step, site), ()) if order <= record.order
            ]
            if earlier:
                return earlier[-1]
        return (record.key.step, ROOT_SITE, 0)


def injection_text(injected: InjectionInfo) -> str:
    """Say in a sentence what was injected into a run."""
    slots = [slot for slot in injected.slots if slot.status == "injected"]
    kinds = [slot.slot.partition(".")[0] for slot in slots]
    counts = [f"{kinds.count(kind)} {kind}s" for kind in ("input", "output") if kind in kinds]
    sites = len({slot.site for slot in slots})
    what = " and ".join(counts) or "nothing"
    source = injected.source or "an unknown archive"
    return f"{what} of {sites} modules were replaced by those of {source}, after they were recorded"


def _spans(steps: str) -> tuple[range, ...]:
    try:
        return parse_steps(steps)
    except UsageError:  # of a damaged file
        return ()


def _place(key: Key) -> _Place:
    return key.step, key.site, key.call
