"""Number steps and calls, apply the filters, and hand records to the writer, for the hooks of adapters."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, Final, NamedTuple, Protocol

from tensorcap.recording.placement import Placement, PlacementLog
from tensorcap.recording.point import Absence, Kind, Phase, Point
from tensorcap.recording.record_filter import RecordFilter
from tensorcap_formats.dtypes import Array, DType, decode
from tensorcap_formats.errors import TensorcapError, UsageError, WriteError, abbreviate
from tensorcap_formats.keys import PROBES, ROOT_SITE, Key, inner_site, module_site, unescape
from tensorcap_formats.progress import Progress

_FREELY: Final = nullcontext()
_BLOCK: Final = 1 << 16  # elements that are hashed at once, so that an image is not widened as a whole


class Sink(Protocol):
    """What records are added to: a `Writer`, or the tally of a dry run."""

    @property
    def stored_bytes(self) -> int:
        """Bytes that the records so far take up."""

    def add(
        self, key: Key, bits: Array, dtype: DType, shape: tuple[int, ...], *, order: int | None = None
    ) -> None:
        """Add one tensor; its memory is free again on return."""

    def add_value(self, key_text: str, value: object) -> None:
        """Add one leaf that is no tensor."""


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
        token: Distinguishes it from other calls under way in its thread.
        within: The step itself.
        ordinal: How many calls of the site came before it in the run.
        is_of_run: Whether it stands for the whole run, to which limits on calls do not apply.
    """

    point: Point
    step: int
    number: int
    token: int = 0
    within: _Step | None = None
    ordinal: int = 0
    is_of_run: bool = False

    def key(self, slot: str) -> Key:
        """The key of the record of one of its slots."""
        return Key(self.point.site, slot, self.step, self.number)


class _Stacks(threading.local):
    """The calls under way in each thread, outermost first."""

    def __init__(self) -> None:
        self.calls: list[Call] = []


class Recorder:
    """Numbers steps and calls, applies the filters, and hands records to the sink; in any thread.

    A step begins with an outermost call of the model, and lasts until the next one begins, however the call
    ends. So calls between two outermost calls belong to the step before; those before the first belong to
    the first. Threads that call the model at the same time have a step each.

    Attributes:
        points: The sites, by unescaped name, in the model's order.
        last_step: Number of the last step in which a site was called; -1 before.
        failure: The error of ours that ended the capture.
        is_paused: Whether calls that begin now are not recorded.
        is_off: Whether nothing is recorded any more: in a forked process, whose parent writes the archive.
        inputs: Each tensor of integers that the model itself was called with, by key text: its shape, its
            dtype, and the SHA-256 of its values as little-endian int64.
        placements: What tensors of this rank are parts of, in a run of several processes.
        facts: Run metadata that an adapter adds while the model runs.
        lines: File and line of the user's code that ran ops which were recorded.
        phases: The phase of each step by its number: `prefill`, `decode` or `forward`.
        stopped: The key at which the limit of bytes ended the recording, as a text; None if it did not.
        unmatched: Functions to watch that were never called, as the user named them.
    """

    def __init__(
        self,
        sink: Sink,
        points: dict[str, Point],
        record_filter: RecordFilter,
        progress: Progress | None = None,
    ) -> None:
        self.points = points
        self.stopped: str | None = None
        self.last_step = -1
        self._step = _Step(0)
        self._is_step_begun = False
        self._threads: list[int] = []  # that began each step
        self._callers: dict[str, tuple[int, int]] = {}  # by site: step and thread of its last call
        self.threaded: dict[str, None] = {}  # sites that several threads called in one step
        self._last_call: Call | None = None
        self.failure: TensorcapError | None = None
        self.is_paused = False
        self.is_off = False
        self.inputs: dict[str, dict[str, Any]] = {}
        self.placements = PlacementLog()
        self._placed: dict[tuple[str, str], Placement] = {}  # by site and slot
        self.facts: dict[str, Any] = {}
        self.lines: set[tuple[str, int]] = set()
        self.phases: dict[int, Phase] = {}
        self.unmatched: list[str] = []
        self._sink = sink
        self._filter = record_filter
        self._progress = progress
        self._stage = ""
        self._records_count = 0
        self._lock = threading.Lock()
        self._filling = threading.Lock()  # what is left of a limit of bytes
        self._stacks = _Stacks()
        self._order = 0

    @property
    def last_point(self) -> str | None:
        """The call that returned last, as `STEP/SITE@CALL`."""
        call = self._last_call
        return None if call is None else call.key("output").where

    @contextmanager
    def stage(self, text: str) -> Iterator[None]:
        """Report a stage of the run as its progress; the stage around the block goes on after it.

        Args:
            text: What is being done in the block, as a short phrase: `MAX compiles the model`.
        """
        if self._progress is None:
            yield
            return
        outer, self._stage = self._stage, text
        self._progress.stage(text)
        try:
            yield
        finally:
            self._stage = outer
            if outer:
                self._progress.stage(outer)

    @property
    def is_recording(self) -> bool:
        """Whether a call that begins now is recorded."""
        return not (self.is_paused or self.is_off or self.failure is not None or self.stopped is not None)

    @property
    def current(self) -> Call | None:
        """The innermost call of a module that is under way in this thread."""
        stack = self._stacks.calls
        return stack[-1] if stack else None

    def is_under_way(self, point: Point) -> bool:
        """Whether a call of the site seems under way in this thread (it may have ended by an error)."""
        return any(call.point is point for call in self._stacks.calls)

    def enter(self, point: Point, token: int, *, is_outermost: bool = False) -> Call | None:
        """Begin a call of a site.

        Args:
            point: The site.
            token: Any number that no other call under way in this thread has.
            is_outermost: Whether this is an outermost call of the model, which begins a step.

        Returns:
            The call, or None while nothing is to be recorded.
        """
        if not self.is_recording:
            self._drop(token)
            if self.stopped is not None:
                point.left_out += 1
            return None
        stack = self._stacks.calls
        if is_outermost:
            stack.clear()
        with self._lock:
            if is_outermost:
                if self._is_step_begun:
                    self._step = _Step(self._step.number + 1)
                self._is_step_begun = True
                self._threads.append(threading.get_ident())
            call = self._count(point, token)
            if not is_outermost:
                self._note_caller(call)
        stack.append(call)
        return call

    @property
    def threads(self) -> list[int]:
        """The thread that began each step, numbered as they come."""
        numbers = {ident: number for number, ident in enumerate(dict.fromkeys(self._threads))}
        return [numbers[ident] for ident in self._threads]

    def note_phase(self, step: int, phase: Phase) -> None:
        """Note the phase of a step; the step before a decoding one filled the cache, so it is a prefill."""
        self.phases[step] = phase
        if phase == "decode" and self.phases.get(step - 1) == "forward":
            self.phases[step - 1] = "prefill"

    def inner(
        self, point_name: str, kind: Kind, *, in_module: bool = True, outer: Call | None = None
    ) -> Call | None:
        """Begin a call of a place within a module's code: an op, a function, a probe (NAM-9).

        Args:
            point_name: Its name, unescaped.
            kind: What it is.
            in_module: Whether its site lies within the module whose call is under way in this thread, or
                within the root if there is none; else it lies within `probe`, in whichever module it is.
            outer: The module's call, if it is not the one under way.

        Returns:
            A call that is over as soon as it is recorded, but for a function's, which `finish` ends; None
            while nothing is to be recorded.
        """
        if not self.is_recording:
            return None
        outer = outer or self.current
        module = (outer.point.site if outer else ROOT_SITE) if in_module else PROBES
        with self._lock:
            point = self._place(module, point_name, kind)
            call = self._count(point, 0)
            if kind != "function":  # which may end by an error
                point.returned += 1
        return call

    def place(self, module: str, point_name: str, kind: Kind) -> Point:
        """Return the point of a place within a module's code, whether the place is reached or not.

        Args:
            module: The site of the module, or `PROBES`.
            point_name: The name of the place, unescaped.
            kind: What it is.
        """
        with self._lock:
            return self._place(module, point_name, kind)

    def module(self, name: str) -> Point:
        """The point of a module, of which a framework may know only once it is called.

        Args:
            name: Its path, unescaped.
        """
        with self._lock:
            if name not in self.points:
                site = module_site(name)
                self.points[name] = Point(site, wanted=self._filter.keeps_site(site))
            return self.points[name]

    def _place(self, module: str, point_name: str, kind: Kind) -> Point:
        site = inner_site(module, point_name)
        point = self.points.get(site)
        if point is None:
            enclosing = self.points.get("" if module == ROOT_SITE else unescape(module))
            aliases = () if enclosing is None else (enclosing.site, *enclosing.aliases)
            wanted = self._filter.keeps_site(site, aliases)
            point = self.points[site] = Point(site, aliases, wanted=wanted, kind=kind)
        return point

    def _count(self, point: Point, token: int) -> Call:
        """Number a call that begins now; the lock is held."""
        outer = self.current
        step = (outer.within if outer else None) or self._step
        number = step.counts.get(point.site, 0)
        step.counts[point.site] = number + 1
        call = Call(point, step.number, number, token, step, point.calls)
        point.calls += 1
        if not self._filter.options.allows_call(call.step, call.ordinal):
            point.left_out += 1
        if step.number > self.last_step:
            self.last_step = step.number
        return call

    def _note_caller(self, call: Call) -> None:
        """Note if several threads call a site in one step, so that chance numbers its calls."""
        site, caller = call.point.site, (call.step, threading.get_ident())
        step, thread = self._callers.get(site, caller)
        if step == caller[0] and thread != caller[1]:
            self.threaded[site] = None
        self._callers[site] = caller

    def leave(self, point: Point, token: int) -> Call | None:
        """End the call that began with this token; calls inside it that did not return are dropped."""
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
        """Count a call as returned, when all its tensors are recorded."""
        with self._lock:
            call.point.returned += 1
            self._last_call = call
            if self.stopped is not None:
                call.point.left_out += 1  # at least its output

    def recompute(self, point: Point, token: int) -> None:
        """Count a call of a site by a backward pass, which computes a forward's values anew."""
        self._drop(token)
        if self.is_recording:
            point.recomputed += 1

    def _drop(self, token: int) -> None:
        """Forget a call of this token and those inside it: they ended by an error, or it would be in use."""
        stack = self._stacks.calls
        for i, call in enumerate(stack):
            if call.token == token:
                del stack[i:]
                break

    def wants(self, call: Call, slot: str, *, required: bool = False) -> bool:
        """Decide whether a tensor or a value of a call is recorded; `required` ones pass every filter."""
        if required:
            return True
        if not call.is_of_run and not self._filter.options.allows_call(call.step, call.ordinal):
            return False
        point = call.point
        if point.wanted is not None:
            return point.wanted
        return self._filter.keeps(Key(point.site, slot, call.step, call.number), point.aliases)

    @property
    def has_slices(self) -> bool:
        """Whether only a part of some tensors is recorded."""
        return bool(self._filter.options.slices)

    def part(self, call: Call, slot: str, shape: tuple[int, ...]) -> tuple[slice, ...] | None:
        """Find which part of a tensor that is not required is recorded: a slice for each axis, None for all.

        Raises:
            NothingLeftError: No element would be.
        """
        return self._filter.find_part(call.key(slot), call.point.aliases, shape)

    def next_order(self) -> int:
        """Return the execution order number of a tensor that is recorded now, or on its way."""
        with self._lock:
            self._order += 1
            return self._order - 1

    def tensor(
        self,
        call: Call,
        slot: str,
        bits: Array,
        dtype: DType,
        shape: tuple[int, ...],
        *,
        required: bool = False,
        order: int | None = None,
    ) -> None:
        """Record one tensor of a call, which `wants` has accepted.

        If the sink fails, nothing more is recorded, and `failure` says why: the model's run goes on.

        Args:
            call: The call.
            slot: Which tensor of it.
            bits: Its stored elements; free again on return.
            dtype: Its logical dtype.
            shape: Its shape.
            required: Whether it passed every filter.
            order: Its number by `next_order`; the next one if None.
        """
        key = call.key(slot)
        max_bytes = self._filter.options.max_bytes
        with _FREELY if max_bytes is None else self._filling:
            if self.stopped is not None or self.failure is not None:
                return
            if max_bytes is not None and self._sink.stored_bytes + bits.nbytes > max_bytes:
                self.stopped = key.text
                return
            order = self.next_order() if order is None else order
            if not self._hand_over(call.point, key, self._sink.add, key, bits, dtype, shape, order=order):
                return
        if self._progress is not None:
            with self._lock:
                self._records_count += 1
            self._progress.advance(self._records_count, None)
        if self._placed and (placement := self._placed.get((key.site, slot))) is not None:
            self.place_tensor(call, slot, placement)
        if not required or self.wants(call, slot):
            with self._lock:
                call.point.records += 1
        if required and dtype.is_whole:
            ids = _sha256(bits.reshape(-1), dtype)
            self.inputs[key.text] = {"sha256": ids, "shape": list(shape), "dtype": dtype.name}

    def place_tensor(self, call: Call, slot: str, placement: Placement) -> None:
        """Note what a tensor that is recorded on this rank is a part of."""
        with self._lock:
            self.placements.add(call.key(slot).text, placement)

    def place_slot(self, site: str, slot: str, placement: Placement) -> None:
        """Say what each tensor that is recorded of a slot from now on is a part of.

        Args:
            site: The site, as keys spell it: of a layer whose class says how ranks hold its tensors.
            slot: Which of them, as `output` or `param.weight`.
            placement: What each is a part of.
        """
        self._placed[site, slot] = placement

    def value(self, call: Call, slot: str, value: object, *, required: bool = False) -> None:
        """Record one leaf that is no tensor, which `wants` has accepted; arguments as for `tensor`."""
        if self.stopped is not None or self.failure is not None:
            return
        key = call.key(slot)
        is_added = self._hand_over(call.point, key, self._sink.add_value, key.text, value)
        if is_added and slot == "op" and isinstance(value, dict) and value.get("file") and value.get("line"):
            self.lines.add((value["file"], value["line"]))
        if is_added and (not required or self.wants(call, slot)):
            with self._lock:
                call.point.values += 1

    def _hand_over(
        self, point: Point, key: Key, add: Callable[..., None], *arguments: Any, **options: Any
    ) -> bool:
        """Add something to the sink; return whether the sink took it."""
        try:
            add(*arguments, **options)
        except OSError as error:  # a full disk, mostly
            self.failure = error if isinstance(error, WriteError) else WriteError(str(error))
            if self._progress is not None:
                self._progress.stage(f"nothing more is recorded: {error}")
            return False
        except UsageError as error:
            if self.failure is None:  # else the sink has ended while this thread was on its way to it
                self.lose(point, key.slot, str(error), required=True)
            return False
        return True

    def add_point(self, name: str, site: str, reason: str) -> None:
        """Add a site that is known only after the run, and was not captured for this reason."""
        self.points[name] = Point(
            site, reason=reason, is_capturable=False, wanted=self._filter.keeps_site(site)
        )

    def lose(
        self,
        point: Point,
        slot: str,
        reason: str,
        *,
        call: Call | None = None,
        required: bool = False,
        absence: Absence | None = None,
    ) -> None:
        """Note that something could not be captured, and why, if it was asked for.

        Args:
            point: The site.
            slot: What was lost.
            reason: Why.
            call: The call, if `slot` names one tensor: globs for keys are then applied to it.
            required: Whether the loss is noted even if no filter asks for the tensor.
            absence: Why a program has no such value by its nature; the capture is whole without it.
        """
        if self.is_off:  # in a forked process, whose copy of the lock may be held for ever
            return
        if not required:
            if point.wanted is False:
                return
            if call and not self.wants(call, slot):
                return
        slot = abbreviate(slot)
        with self._lock:
            known, count = point.lost.get(slot, ("", 0))
            if not absence:
                point.absent.pop(slot, None)
            elif not count or slot in point.absent:
                point.absent[slot] = absence
            else:  # another call simply lost it
                reason = known
            point.lost[slot] = (abbreviate(reason, 300), count + 1)


def _sha256(flat: Array, dtype: DType) -> str:
    """The SHA-256 of integers as little-endian int64."""
    hasher = hashlib.sha256()
    for start in range(0, flat.size, _BLOCK):
        hasher.update(decode(flat[start : start + _BLOCK], dtype).astype("<i8").tobytes())
    return hasher.hexdigest()
