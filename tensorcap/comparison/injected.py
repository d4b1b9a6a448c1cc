"""What an injected run says: which of its values are natural ones that show a module's own error."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

from tensorcap.comparison.pair import Pair
from tensorcap.recording import HELD, parse_steps
from tensorcap.runs import is_inner
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
        archive: The run, under its own keys.
        sources: Its records behind each record under other keys, by key text; none where keys are its own.
    """

    def __init__(self, archive: Archive, sources: Mapping[str, Sequence[Record]] | None = None) -> None:
        self._sources = sources or {}
        self._replaced: dict[tuple[str, str], list[tuple[int, tuple[range, ...]]]] = {}
        self._held: set[tuple[str, str]] = set()
        for slot in archive.info.injected.slots if archive.info.injected else ():
            name = slot.site, slot.slot
            if slot.calls:
                self._replaced[name] = [(call, _spans(steps)) for call, steps in slot.calls.items()]
            if slot.reason == HELD:
                self._held.add(name)
        self._given: dict[_Place, list[Record]] = {}
        for record in archive.records if self._replaced else ():
            if record.key.slot.startswith("input") and not is_inner(record.key):
                self._given.setdefault(_place(record.key), []).append(record)
        self._begins: dict[tuple[int, str], list[tuple[int, _Place]]] = {}  # calls by step and site
        for place, records in self._given.items():
            calls_there = self._begins.setdefault(place[:2], [])
            calls_there.append((min(record.order for record in records), place))
            calls_there.sort()

    def __bool__(self) -> bool:
        return bool(self._replaced)

    def own(self, pair: Pair) -> Own | None:
        """What the error of a pair is made of.

        Returns:
            `result` if a call made it of archived arguments only, `between` if it is an argument that the
            code of such a call made, of these and of what modules within it made; None if it may inherit.
        """
        if self.left(pair) != ():
            return None
        return "between" if self.keys_of(pair)[0].slot.startswith("input") else "result"

    def left(self, pair: Pair) -> tuple[Key, ...] | None:
        """What went into the making of a pair's tensor as it was, though it might have been replaced.

        Of a result these are arguments of its call, of an argument those of the call of the module around it;
        whole numbers count where nothing else was given. The inputs of the run count as archived.

        Returns:
            None where it is not known what went in, or the tensor is held by an object that models write to.
        """
        keys = self.keys_of(pair)
        if not keys or not self._replaced:
            return None
        found: dict[Key, None] = {}
        for record in self._records(pair):
            key = record.key
            kind = key.slot.partition(".")[0]
            if kind == "input" and (key.site, key.slot) not in self._held:
                made = self._call_around(record)
            elif kind == "output" and not is_inner(key):
                made = _place(key) if _place(key) in self._given else None
            else:
                made = None
            if made is None:
                return None
            found.update((one.key, None) for one in self._arguments(made) if not self.is_replaced(one.key))
        return tuple(found)

    def was_replaced(self, pair: Pair) -> bool:
        """Whether another value went on in the place of what was recorded."""
        return any(map(self.is_replaced, self.keys_of(pair)))

    def is_replaced(self, key: Key) -> bool:
        """Whether another value went on in the place of that of a key of the run."""
        spans = self._replaced.get((key.site, key.slot), ())
        return any(call == key.call and any(key.step in span for span in steps) for call, steps in spans)

    def keys_of(self, pair: Pair) -> list[Key]:
        """The run's own keys of the tensors that a pair's target is made of."""
        return [record.key for record in self._records(pair)]

    def _records(self, pair: Pair) -> list[Record]:
        if pair.target is None:
            return []
        records: Iterable[Record] = self._sources.get(pair.target.key.text, (pair.target,))
        return [record for record in records if not record.key.is_bare]

    def _arguments(self, place: _Place) -> Sequence[Record]:
        """What a call was given that carries errors."""
        if place[1] == ROOT_SITE:
            return ()
        given = self._given.get(place, ())
        return [record for record in given if record.dtype.is_inexact] or given

    def _call_around(self, record: Record) -> _Place | None:
        """The call of the nearest module around that of an argument."""
        site = record.key.site
        while site != ROOT_SITE:
            site = site.rpartition(".")[0] or ROOT_SITE
            begun = [p for order, p in self._begins.get((record.key.step, site), ()) if order <= record.order]
            if begun:
                return begun[-1]
        return (record.key.step, ROOT_SITE, 0)


def injection_text(injected: InjectionInfo) -> str:
    """What was injected into a run, in a sentence."""
    done = [slot for slot in injected.slots if slot.status == "injected"]
    kinds = [slot.slot.partition(".")[0] for slot in done]
    counts = [f"{kinds.count(kind)} {kind}s" for kind in ("input", "output") if kind in kinds]
    sites = len({slot.site for slot in done})
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
