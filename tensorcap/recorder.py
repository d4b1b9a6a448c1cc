"""Between an adapter's hooks and the writer: steps, calls, filters, and what became of each point."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from tensorcap.scope import Scope
from tensorcap_formats.dtypes import Array, DType, decode
from tensorcap_formats.errors import TensorcapError, UsageError, WriteError, abbreviate
from tensorcap_formats.keys import Key


class Sink(Protocol):
    """Where records go: a `Writer`, or the tally of a dry run."""

    def add(
        self, key: Key, bits: Array, dtype: DType, shape: tuple[int, ...], *, order: int | None = None
    ) -> None:
        """Take one tensor; its memory is free again on return."""

    def add_value(self, key_text: str, value: object) -> None:
        """Take one leaf that is no tensor."""


@dataclass(slots=True)
class Point:
    """A site of the model under capture, and what became of it.

    Attributes:
        site: Escaped name.
        aliases: Further names of the same module.
        reason: Why it cannot be captured, or why it is never called; empty for none known beforehand.
        is_capturable: Whether it may be tapped.
        wanted: True, False, or None if it depends on the slot.
        calls: How often it was called.
        returned: How many of these calls returned.
        recomputed: How many further calls a backward pass made to compute values anew; not recorded.
        records: How many of its tensors were recorded.
        values: How many of its leaves that are no tensors were.
        lost: What could not be captured: by slot, the reason and how often.
        note: What else a reader has to know.
    """

    site: str
    aliases: tuple[str, ...] = ()
    reason: str = ""
    is_capturable: bool = True
    wanted: bool | None = True
    calls: int = 0
    returned: int = 0
    recomputed: int = 0
    records: int = 0
    values: int = 0
    lost: dict[str, tuple[str, int]] = field(default_factory=dict)
    note: str = ""

    @property
    def status(self) -> str:
        """`captured`, `never-called`, `excluded` or `not-capturable`."""
        if self.wanted is False:
            return "excluded"
        if not self.is_capturable:
            return "not-capturable"
        if not self.calls:
            return "not-capturable" if self.lost else "never-called"
        if self.records or self.values:
            return "captured"
        if self.lost or self.returned < self.calls:
            return "not-capturable"
        return "excluded" if self.wanted is None else "captured"

    @property
    def unfinished(self) -> int:
        """How many calls were not seen to return: they ended by an error, or their hook was gone."""
        return self.calls - self.returned

    def describe(self) -> list[dict[str, Any]]:
        """The entries of this point in the run's metadata: one, and one for each reason of a loss."""
        status = self.status
        entry: dict[str, Any] = {"site": self.site, "status": status, "calls": self.calls}
        if self.unfinished:
            entry["unfinished"] = self.unfinished
        reasons = [self.reason]
        if status == "not-capturable" and not self.reason:
            causes = {reason for reason, _ in self.lost.values()}
            reasons = sorted(causes) or ["none of its calls returned"]
        if self.recomputed:
            reasons.append(f"not recorded: calls of a backward pass to compute anew, {self.recomputed}")
        said = "; ".join(reason for reason in (*reasons, self.note) if reason)
        if said:
            entry["reason"] = said
        entries = [entry]
        if status != "not-capturable":
            by_reason: dict[str, list[str]] = {}
            for slot, (reason, _) in self.lost.items():
                by_reason.setdefault(reason, []).append(slot)
            for reason, slots in by_reason.items():
                count = max(self.lost[slot][1] for slot in slots)
                entries.append(
                    {
                        "site": self.site,
                        "slots": slots,
                        "status": "not-capturable",
                        "calls": count,
                        "reason": reason,
                    }
                )
        return entries


class _Step:
    """One step: its number, and how often each site was called in it."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.counts: dict[str, int] = {}


class Call(NamedTuple):
    """One call of a site, from its beginning to its end.

    Attributes:
        point: The site.
        step: Number of the step it belongs to.
        number: Its number within the step.
        token: Tells it from other calls that are under way.
        within: The step itself.
    """

    point: Point
    step: int
    number: int
    token: int = 0
    within: _Step | None = None


class _Stacks(threading.local):
    """The calls under way in each thread, outermost first."""

    def __init__(self) -> None:
        self.calls: list[Call] = []


class Recorder:
    """Numbers steps and calls, applies the filters, and hands records to the sink.

    A step begins with an outermost call of the model, save the first, to which belongs what is called
    before. It lasts until the next one begins, however the call ends; so calls outside of any belong to
    the step before. Threads that call the model at the same time have a step each.

    Attributes:
        points: By unescaped name of the site, in the model's order.
        last_step: Number of the last step in which a site was called; -1 before.
        failure: The error of ours that ended the capture.
        is_paused: Whether calls are let pass unrecorded.
        is_off: Whether nothing is recorded any more, in a process that another has to write for.
        inputs: Of each tensor of whole numbers that the model itself was given, by key text: the SHA-256
            of its values as little-endian int64.
        facts: Run metadata that an adapter found out while the model ran.
    """

    def __init__(self, sink: Sink, points: dict[str, Point], scope: Scope) -> None:
        self.points = points
        self.last_step = -1
        self._step = _Step(0)
        self._is_step_begun = False
        self._last_call: Call | None = None
        self.failure: TensorcapError | None = None
        self.is_paused = False
        self.is_off = False
        self.inputs: dict[str, dict[str, Any]] = {}
        self.facts: dict[str, Any] = {}
        self._sink = sink
        self._scope = scope
        self._lock = threading.Lock()
        self._stacks = _Stacks()

    @property
    def last_point(self) -> str | None:
        """The call that returned last, as `STEP/SITE@CALL`."""
        call = self._last_call
        return None if call is None else Key(call.point.site, "output", call.step, call.number).where

    @property
    def is_recording(self) -> bool:
        """Whether a call that begins now is recorded."""
        return not (self.is_paused or self.is_off or self.failure is not None)

    def is_under_way(self, point: Point) -> bool:
        """Whether a call of the site seems under way in this thread (it may have ended by an error)."""
        return any(call.point is point for call in self._stacks.calls)

    def enter(self, point: Point, token: int, *, is_outermost: bool = False) -> Call | None:
        """A call of the site begins.

        Args:
            point: The site.
            token: As long as the call lasts, that of no other call in this thread.
            is_outermost: Whether this is an outermost call of the model, which begins a step.

        Returns:
            The call, or None while nothing is to be recorded.
        """
        if self.is_paused or self.is_off or self.failure is not None:
            self._drop(token)
            return None
        stack = self._stacks.calls
        if is_outermost:
            stack.clear()
        with self._lock:
            if is_outermost:
                if self._is_step_begun:
                    self._step = _Step(self._step.number + 1)
                self._is_step_begun = True
            step = (stack[-1].within if stack else None) or self._step
            number = step.counts.get(point.site, 0)
            step.counts[point.site] = number + 1
            call = Call(point, step.number, number, token, step)
            point.calls += 1
            if step.number > self.last_step:
                self.last_step = step.number
        stack.append(call)
        return call

    def leave(self, point: Point, token: int) -> Call | None:
        """The call that began with this token returns; calls inside that did not return are dropped."""
        if self.is_off:
            return None
        stack = self._stacks.calls
        for i in range(len(stack) - 1, -1, -1):
            call = stack[i]
            if call.token == token and call.point is point:
                del stack[i:]
                return call
        return None

    def finish(self, call: Call) -> None:
        """The call is over and everything of it is recorded."""
        with self._lock:
            call.point.returned += 1
            self._last_call = call

    def recompute(self, point: Point, token: int) -> None:
        """The site is called by a backward pass, which computes anew what a forward has computed."""
        self._drop(token)
        if self.is_recording:
            point.recomputed += 1

    def _drop(self, token: int) -> None:
        """Forget a call of this token and those inside: they ended by an error, or it would be in use."""
        stack = self._stacks.calls
        for i, call in enumerate(stack):
            if call.token == token:
                del stack[i:]
                break

    def tensor(
        self, call: Call, slot: str, bits: Array, dtype: DType, shape: tuple[int, ...], *, required: bool
    ) -> None:
        """Record one tensor of a call; `required` ones pass every filter.

        Raises:
            WriteError: The sink failed; nothing more is recorded.
        """
        key = Key(call.point.site, slot, call.step, call.number)
        taken = self._hand_over(call.point, key, required, self._sink.add, key, bits, dtype, shape)
        if taken and self._is_wanted(call.point, key):
            call.point.records += 1
        if taken and required and dtype.kind in ("int", "uint"):
            ids = hashlib.sha256(decode(bits, dtype).astype("<i8").tobytes()).hexdigest()
            self.inputs[key.text] = {"sha256": ids, "shape": list(shape), "dtype": dtype.name}

    def value(self, call: Call, slot: str, value: object, *, required: bool) -> None:
        """Record one leaf that is no tensor; as `tensor`."""
        key = Key(call.point.site, slot, call.step, call.number)
        taken = self._hand_over(call.point, key, required, self._sink.add_value, key.text, value)
        if taken and self._is_wanted(call.point, key):
            call.point.values += 1

    def _hand_over(
        self, point: Point, key: Key, required: bool, add: Callable[..., None], *arguments: Any
    ) -> bool:
        """Give the sink what passes the filters; return whether it took it."""
        if not required and not self._is_wanted(point, key):
            return False
        try:
            add(*arguments)
        except WriteError as error:
            self.failure = error
            raise
        except UsageError as error:
            self.lose(point, key.slot, str(error), required=True)
            return False
        return True

    def add_point(self, name: str, site: str, reason: str) -> None:
        """Add a site that is found when all is over, and was not captured for this reason."""
        self.points[name] = Point(site, reason=reason, is_capturable=False, wanted=self._scope.of_site(site))

    def lose(
        self, point: Point, slot: str, reason: str, *, call: Call | None = None, required: bool = False
    ) -> None:
        """Note that something could not be captured, and why, unless it was not asked for.

        Args:
            point: The site.
            slot: What was lost.
            reason: Why.
            call: The call, if `slot` names one tensor: it is then held against globs for keys.
            required: Whether every filter is to be passed.
        """
        if not required:
            if point.wanted is False:
                return
            if call and not self._is_wanted(point, Key(point.site, slot, call.step, call.number)):
                return
        slot = abbreviate(slot)
        point.lost[slot] = (abbreviate(reason, 300), point.lost.get(slot, ("", 0))[1] + 1)

    def _is_wanted(self, point: Point, key: Key) -> bool:
        if point.wanted is None:
            return self._scope.allows(key, point.aliases)
        return point.wanted
