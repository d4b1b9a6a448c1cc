"""Which module wrote a state: what lies between two moments at which a run showed it.

A state, such as a cache, is an object that calls are handed and write to in place, so that no result shows
what they did: it shows when the object is handed to the next call, or is part of a result. Whoever hands it
on is not who wrote it.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Final

import numpy as np

from tensorcap.runs.calls import Call, calls_of, enclosing_sites, state_path
from tensorcap.runs.record_kinds import is_inner
from tensorcap_formats.archive import Archive
from tensorcap_formats.keys import Key
from tensorcap_formats.records import Record

_NUMBER: Final = re.compile(r"(?<![^.])\d+(?![^.])")


@dataclass(frozen=True, slots=True)
class _Moment:
    """A moment at which a call shows the states that it holds.

    Attributes:
        order: In execution order.
        call: The call.
        is_start: Whether it begins; else it returns them.
        shown: Its records of states, by their path within the object.
    """

    order: int
    call: Call
    is_start: bool
    shown: Mapping[str, Record]


class StateWriters:
    """Who wrote each state of a run, by what calls were handed and returned.

    1. A state is a tensor within an argument or result whose name says cache, past, memory or state
       (`state_path`). One of a path with a number and a name (`layers.0.keys`) is in an object that all calls
       share; of any other path each site has its own.
    2. Sites that are handed a shared one in some call, and sites of the same name but for numbers, are handed
       it in every call, though it may be empty.
    3. Between the start of such a call and the next moment that one of them shows the object, the code of
       that call ran, the innermost that holds it: it wrote what is new. After a call that returned it, its
       caller ran.
    4. A state of a site's own that is new in its next call was written by the innermost module that is handed
       it there, in that module's call before, unless a call returned it as a result.

    Args:
        archive: The run.
    """

    def __init__(self, archive: Archive) -> None:
        self._calls = calls_of(archive)
        self._is_ordered = archive.is_ordered

    def __bool__(self) -> bool:
        return bool(self._moments)

    def before(self, record: Record) -> Record | None:
        """Return the record of the same state at the moment before; None if there is none."""
        earlier = self._earlier(record)
        return None if earlier is None else earlier.shown.get(state_path(record.key.slot))

    def writer(self, record: Record) -> str | None:
        """Return the module whose code ran since the moment before; None if it is not known."""
        call = self.call(record)
        if call is not None:
            return call.site
        earlier = self._earlier(record)
        if earlier is None or earlier.is_start:
            return None
        return next((site for site in enclosing_sites(earlier.call.site) if site in self._sites), None)

    def call(self, record: Record) -> Call | None:
        """Return the call that holds the state since the moment before; None if it is not known."""
        earlier = self._earlier(record)
        if earlier is None or not earlier.is_start:
            return None
        if _is_shared(record.key):
            return earlier.call
        if record.digest and record.digest in self._returned:
            return None  # a result that is handed on
        key = record.key
        call = next(m.call for m in self._starts[key.rank, key.step, key.site] if m.call.place[3] == key.call)
        return self._holder(call, record.digest)

    def _holder(self, call: Call, digest: str) -> Call:
        """The call before, of the innermost module that a call hands a state on to, or of its own."""
        within = [
            inner
            for inner in self._calls.within(call)
            if digest and any(state.digest == digest for state in _states(inner.inputs).values())
        ]
        sites = sorted((inner.site for inner in within), key=lambda site: site.count("."))
        is_chain = all(inner.startswith(f"{outer}.") for outer, inner in pairwise(sites))
        site = sites[-1] if sites and is_chain else call.site
        earlier = [m for m in self._moments[call.place[0]] if m.call.site == site and m.order < call.start]
        return earlier[-1].call

    def own_states(self, record: Record) -> Sequence[Record]:
        """Return what a call was handed of the states that its own module writes.

        Args:
            record: A result of the call, or an argument that its code hands on.
        """
        key = record.key
        sites = [key.site] if key.slot.startswith("output") else list(enclosing_sites(key.site))
        site = next((site for site in sites if site in self._sites), "")
        starts = [m for m in self._starts.get((key.rank, key.step, site), ()) if m.order <= record.order]
        written = self._written.get(site, ())
        return [shown for path, shown in starts[-1].shown.items() if path in written] if starts else []

    def _earlier(self, record: Record) -> _Moment | None:
        """The moment before the one that shows a record."""
        key = record.key
        own = self._moment_of.get(key.text)
        if own is None:
            return None
        moments: Sequence[_Moment] = self._moments[key.rank]
        if not _is_shared(key):
            path = state_path(key.slot)
            moments = [m for m in moments if m.call.site == key.site and m.is_start and path in m.shown]
        at = bisect_left(moments, own, key=lambda moment: moment.order)
        return moments[at - 1] if at else None

    @cached_property
    def _sites(self) -> frozenset[str]:
        return frozenset(call.site for call in self._calls.calls)

    @cached_property
    def _moments(self) -> Mapping[int, Sequence[_Moment]]:
        """All moments of each rank, in execution order."""
        holders = {_template(call.site) for call in self._calls.calls if _states(call.inputs)}
        moments: dict[int, list[_Moment]] = {}
        for call in self._calls.calls if self._is_ordered and holders else ():
            of_rank = moments.setdefault(call.place[0], [])
            if _template(call.site) in holders:
                of_rank.append(_Moment(call.start, call, is_start=True, shown=_states(call.inputs)))
            if returned := _states(call.outputs):
                of_rank.append(_Moment(call.end, call, is_start=False, shown=returned))
        return {rank: sorted(of_rank, key=lambda m: m.order) for rank, of_rank in moments.items()}

    @cached_property
    def _moment_of(self) -> Mapping[str, int]:
        """Order of the moment that shows a record, by key text."""
        return {
            record.key.text: moment.order
            for of_rank in self._moments.values()
            for moment in of_rank
            for record in moment.shown.values()
        }

    @cached_property
    def _starts(self) -> Mapping[tuple[int, int, str], Sequence[_Moment]]:
        """Starts of calls by rank, step and site."""
        starts: dict[tuple[int, int, str], list[_Moment]] = {}
        for of_rank in self._moments.values():
            for moment in of_rank:
                if moment.is_start:
                    starts.setdefault(moment.call.place[:3], []).append(moment)
        return starts

    @cached_property
    def _returned(self) -> frozenset[str]:
        """Digests of all results."""
        return frozenset(record.digest for call in self._calls.calls for record in call.outputs)

    @cached_property
    def _written(self) -> Mapping[str, frozenset[str]]:
        """Paths of the states that each site writes."""
        written: dict[str, set[str]] = {}
        for of_rank in self._moments.values():
            for moment in of_rank:
                for path, record in moment.shown.items():
                    before, site = self.before(record), self.writer(record)
                    if site is not None and (before is None or before.digest != record.digest):
                        written.setdefault(site, set()).add(path)
        return {site: frozenset(paths) for site, paths in written.items()}


def is_handed_on(archive: Archive, before: str, after: str) -> bool:
    """Whether a tensor of an archive is, bit for bit, what another one was before; both are key texts."""
    if before not in archive or after not in archive:
        return False
    one, other = archive.get(before), archive.get(after)
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if one.digest and other.digest:
        return one.digest == other.digest
    return one.stored and other.stored and np.array_equal(archive.read(one), archive.read(other))


def _states(records: Sequence[Record]) -> dict[str, Record]:
    """Records of states by path."""
    paths = {state_path(record.key.slot): record for record in records if not is_inner(record.key)}
    return {path: record for path, record in paths.items() if path}


def _is_shared(key: Key) -> bool:
    """Whether a state is in an object that all calls are handed: its path has a number and a name."""
    path = state_path(key.slot)
    return _NUMBER.search(path) is not None and _NUMBER.sub("", path).strip(".") != ""


def _template(site: str) -> str:
    """A site without its numbers, which sites of the same kind have in common."""
    return _NUMBER.sub("{i}", site)
