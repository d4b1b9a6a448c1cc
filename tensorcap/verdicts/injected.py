"""What an injected run says: which of its values are natural ones that show a module's own error."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, Literal

from tensorcap.recording.limits import parse_steps
from tensorcap.verdicts.pairing import Pair
from tensorcap_formats.archive import Archive
from tensorcap_formats.keys import Key
from tensorcap_formats.records import Record

Own = Literal["result", "between"]
_FLOATS: Final = ("float", "complex")
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
        for slot in slots_of(archive.run):
            calls = slot.get("calls")
            if isinstance(calls, Mapping):
                spans = [(int(call), parse_steps(str(steps))) for call, steps in calls.items()]
                self._replaced[str(slot.get("site")), str(slot.get("slot"))] = spans
        self._given: dict[_Place, list[Key]] = {}
        for record in archive.records if self._replaced else ():
            key = record.key
            if key.slot.startswith("input") and record.dtype.kind in _FLOATS:
                self._given.setdefault(_place(key), []).append(key)

    def __bool__(self) -> bool:
        return bool(self._replaced)

    def own(self, pair: Pair) -> Own | None:
        """What the error of a pair is made of.

        Returns:
            `result` if a call made it of archived arguments only, `between` if it was an argument that was
            replaced, so that what lies between other modules made it; None if it may be inherited.
        """
        keys = self._keys(pair)
        if not keys or not self._replaced:
            return None
        kind = keys[0].slot.partition(".")[0]
        if kind == "input":
            return "between" if all(map(self.is_replaced, keys)) else None
        is_own = kind == "output" and all(self._was_given_all(key) for key in keys)
        return "result" if is_own else None

    def was_replaced(self, pair: Pair) -> bool:
        """Whether another value went on in the place of what was recorded."""
        return any(map(self.is_replaced, self._keys(pair)))

    def is_replaced(self, key: Key) -> bool:
        """Whether another value went on in the place of that of a key of the run."""
        spans = self._replaced.get((key.site, key.slot), ())
        return any(call == key.call and any(key.step in span for span in steps) for call, steps in spans)

    def _was_given_all(self, key: Key) -> bool:
        given = self._given.get(_place(key), ())
        return bool(given) and all(map(self.is_replaced, given))

    def _keys(self, pair: Pair) -> list[Key]:
        if pair.target is None:
            return []
        records: Iterable[Record] = self._sources.get(pair.target.key.text, (pair.target,))
        return [record.key for record in records if not record.key.is_bare]


def slots_of(run: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """What a run's metadata say of each slot that was to be replaced."""
    injected = run.get("injected")
    slots = injected.get("slots") if isinstance(injected, Mapping) else None
    return [slot for slot in slots if isinstance(slot, Mapping)] if isinstance(slots, list) else []


def injection_text(run: Mapping[str, Any]) -> str:
    """What was injected into a run, in a sentence; "" where nothing was."""
    injected = run.get("injected")
    if not isinstance(injected, Mapping):
        return ""
    done = [slot for slot in slots_of(run) if slot.get("status") == "injected"]
    kinds = [str(slot.get("slot")).partition(".")[0] for slot in done]
    counts = [f"{kinds.count(kind)} {kind}s" for kind in ("input", "output") if kind in kinds]
    sites = len({slot.get("site") for slot in done})
    what = " and ".join(counts) or "nothing"
    return (
        f"{what} of {sites} modules were replaced by those of {injected.get('source')}, after they were "
        "recorded"
    )


def _place(key: Key) -> _Place:
    return key.step, key.site, key.call
