"""Records of ops: the inputs and outputs of every op in a call of a module, and its line in the code.

A dispatch mode sees the ops, the recorder knows the module, the stack of frames has the line. Nothing is
kept of a tensor but what `Ledger` knows of its storage, and nothing is copied that a record holds already.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from types import FrameType
from typing import Any, Final, TypeVar

import torch
from torch import nn

from tensorcap.adapters.torch.frames import Frames, Source
from tensorcap.adapters.torch.modules import unwrapped
from tensorcap.adapters.torch.operators import Operator, leaves_of, plain, tensors_of
from tensorcap.adapters.torch.storage import Ledger
from tensorcap.adapters.torch.tensor_leaves import TensorLeaves, untraced
from tensorcap.recording import Call

_T = TypeVar("_T")
_HIGHER_ORDER: Final = "a higher-order op, which is not looked into"
_PLAIN_CLASSES: Final = (torch.Tensor, nn.Parameter)
_NO_MEMORY: Final = -1  # in the place of the id of a parameter, or buffer, that had no memory at first
_Reference = dict[str, Any]  # of `specs/capture.md`


class OpRecorder:
    """Runs ops and records them, in any thread."""

    def __init__(self, modules: Mapping[str, nn.Module], leaves: TensorLeaves) -> None:
        """Enter the model's parameters and buffers into the ledger.

        Args:
            modules: All modules of the model, by name.
            leaves: Takes the tensors.
        """
        self._leaves = leaves
        self._recorder = leaves.recorder
        points = self._recorder.points
        self._modules = {points[name].site: (name, module) for name, module in modules.items()}
        self._ledger = Ledger()
        self._frames = Frames()
        self._operators: dict[Any, Operator | None] = {}
        self._counts: Counter[str] = Counter(recorded=0)
        self._lock = threading.RLock()  # held also while `_hold_record` is called
        self._is_over = False
        self._weights: dict[str, int] = {}  # by name, the ids of parameters and buffers at first
        self._opaque: dict[int, tuple[weakref.ref[torch.Tensor], str]] = {}  # by id, weights without strides
        with untraced():
            for name, module in modules.items():
                for full, weight, is_parameter in _weights(name, module):
                    self._weights[full] = _NO_MEMORY if weight.is_meta else id(weight)
                    dense = _dense(weight)
                    if dense is None:
                        self._opaque[id(weight)] = weakref.ref(weight), full
                    elif not weight.is_meta:
                        self._ledger.hold_weight(full, dense, is_parameter=is_parameter)
        leaves.on_record = self._hold_record

    def finish(self) -> None:
        """Stop recording, and put the counts of recorded and skipped ops into the run's metadata."""
        self._is_over = True
        self._recorder.facts["ops"] = dict(self._counts)

    def forget_records(self) -> None:
        """Forget which record holds which memory: ops that were not seen may have written to anything."""
        with self._lock:
            self._ledger.forget_records()

    def reference(self, tensor: torch.Tensor) -> _Reference | None:
        """Refer to what holds a tensor's values now: a record, a view, a weight; None if nothing does."""
        dense = _dense(tensor)
        if dense is None:
            known, weight = self._opaque.get(id(tensor), (None, ""))
            return {"parameter": weight} if known is not None and known() is tensor else None
        return self._ledger.find(dense)

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *, gap: str) -> Any:
        """Run an op as it would run anyway, and record it.

        Args:
            func: The op.
            args: Its arguments.
            kwargs: Its arguments by name.
            gap: Why no op of the call that it belongs to is recorded; empty if ops are.
        """
        if self._is_over or self._recorder.is_off:  # in a forked process, another thread may hold our lock
            return func(*args, **kwargs)
        try:
            operator = self._operators[func]
        except KeyError:
            known = isinstance(func, torch._ops.OpOverload)
            operator = self._operators[func] = Operator.of(func) if known else None
        place = self._locate(func, operator, sys._getframe(1), gap)
        if operator is None:
            result = func(*args, **kwargs)
            self.forget_records()
            return result
        call = None if place is None else self._recorder.inner(operator.name, "op", outer=place[0])
        return self.record(operator, call, place, args, kwargs, partial(func, *args, **kwargs))

    def record(
        self,
        operator: Operator,
        call: Call | None,
        place: tuple[Call, Source] | None,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        compute: Callable[[], Any],
        **further: Any,
    ) -> Any:
        """Run an op and record it.

        Args:
            operator: The properties of the op.
            call: The call that it is recorded as; None if it is not recorded.
            place: The module's call that it is run in, and its line; None only if `call` is None.
            args: Its arguments.
            kwargs: Its arguments by name.
            compute: Runs it.
            further: Further members of its record.

        Returns:
            The result of `compute`.
        """
        if call is None or place is None or call.point.wanted is False:
            result = compute()
            self._note_writes(operator, args, kwargs)
            return result
        facts = self._try(call, lambda: {**self._describe(operator, call, *place, args, kwargs), **further})
        result = compute()
        self._try(call, lambda: self._record_outputs(operator, call, facts, args, kwargs, result))
        return result

    def _try(self, call: Call, action: Callable[[], _T]) -> _T | None:
        """Do something to record an op, unseen by modes; an error is a loss, and None is returned."""
        with self._lock, untraced():
            try:
                return action()
            except Exception as error:
                self._recorder.lose(call.point, "op", f"{type(error).__name__}: {error}")
                return None

    def _locate(
        self, func: Any, operator: Operator | None, frame: FrameType, gap: str
    ) -> tuple[Call, Source] | None:
        """Find the module's call and the line of an op; None, and counted, if the op is not recorded."""
        recorder = self._recorder
        if not recorder.is_recording:
            return None
        if torch._C._current_graph_task_id() != -1:
            self._count_skipped("in a backward pass")
            return None
        call = recorder.current
        frame_gap = None
        while call is not None and (frame_gap := self._frames.gap(call.token, frame)) is None:
            recorder.leave(call.point, call.token)  # it ended by an error
            call = recorder.current
        if call is None:
            self._count_skipped("outside of all calls")
            return None
        source = None
        reason = gap or frame_gap
        if not reason and operator is None:
            reason = f"{func}: {_HIGHER_ORDER}"
        if not reason:
            source = self._frames.source(frame)
            reason = "inside a compiled graph (torch.compile)"
        if source is None:
            recorder.lose(call.point, "op", reason)
            self._count_skipped(reason)
            return None
        return call, source

    def _count_skipped(self, reason: str) -> None:
        with self._lock:
            self._counts[reason] += 1

    def _note_writes(self, operator: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Forget the records of memory that an op writes to which is not recorded itself."""
        if operator.written or operator.switch is not None:
            with self._lock, untraced():
                for _, tensor in operator.writes(args, kwargs):
                    self._forget(tensor)

    def _forget(self, tensor: torch.Tensor) -> None:
        dense = _dense(tensor)
        if dense is not None:
            self._ledger.note_write(dense)

    def _describe(
        self,
        operator: Operator,
        call: Call,
        outer: Call,
        source: Source,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> dict[str, Any]:
        """Describe an op before it runs; inputs that no record holds are recorded."""
        name, module = self._modules[outer.point.site]
        inputs = []
        arguments = {}
        for argument, value in operator.items(args, kwargs):
            if isinstance(value, torch.Tensor):
                tensors = [(argument, value)]
            elif isinstance(value, (list, tuple)):
                tensors = list(tensors_of(argument, value))
            else:
                tensors = []
            for full, tensor in tensors:
                reference = self._input_reference(operator, call, argument, full, tensor, name, module)
                inputs.append({"name": full, **reference})
            if not tensors:
                arguments[argument] = plain(value)
        return {
            "op": operator.name,
            "order": self._recorder.next_order(),
            "module": outer.point.site,
            "module_call": outer.number,
            "class": type(unwrapped(module)).__qualname__,
            "file": source.file,
            "line": source.line,
            "function": source.function,
            "inputs": inputs,
            "arguments": arguments,
        }

    def _input_reference(
        self,
        operator: Operator,
        call: Call,
        argument: str,
        full: str,
        tensor: torch.Tensor,
        name: str,
        module: nn.Module,
    ) -> _Reference:
        """Refer to the values of an input: a record, a view, a weight; they are recorded if there is none."""
        reference = self.reference(tensor)
        if reference is not None:
            return reference
        dense = _dense(tensor)
        if dense is None:
            return self._record_tensor(call, f"input.{full}", tensor)
        if not self._ledger.knows(dense) and self._hold_new_weight(dense, name, module):
            reference = self._ledger.find(dense)
            if reference is not None:
                return reference
        if argument in operator.overwritten:
            return {"overwritten": True}
        if operator.makes_views and self._ledger.is_unfilled(dense):
            return {"unfilled": True}
        if argument in operator.written and self._ledger.is_untouched(dense):
            return {"unfilled": True}  # the memory for the result of a kernel
        return self._record_tensor(call, f"input.{full}", tensor)

    def _hold_new_weight(self, tensor: torch.Tensor, name: str, module: nn.Module) -> bool:
        """Enter a weight of the module that has got this memory since the start; whether there is one."""
        address = tensor.untyped_storage()._cdata
        for full, weight, is_parameter in _weights(name, module):
            first = self._weights.get(full)
            dense = _dense(weight)
            if first not in (_NO_MEMORY, id(weight)) or weight.is_meta or dense is None:
                continue
            if dense.untyped_storage()._cdata == address:
                writes = 0 if first == _NO_MEMORY else 1  # it may have other values now
                self._ledger.hold_weight(full, dense, is_parameter=is_parameter, writes=writes)
                return True
        return False

    def _record_tensor(self, call: Call, slot: str, tensor: torch.Tensor) -> _Reference:
        """Record a tensor as it is now, and refer to its record."""
        if not self._recorder.wants(call, slot):
            return {"lost": "not asked for"}
        if not self._leaves.tensor(call, slot, tensor):
            return {"lost": call.point.lost.get(slot, ("beyond the limit of bytes", 1))[0]}
        return {"record": call.key(slot).text}

    def _hold_record(self, call: Call, slot: str, tensor: Any, required: bool) -> None:
        """Enter a new record of a tensor into the ledger; of equal records the first counts."""
        dense = _dense(tensor) if isinstance(tensor, torch.Tensor) else None
        if dense is None:
            return
        with self._lock:
            if self._ledger.find(dense) is None:
                recorder = self._recorder
                is_whole = required or not recorder.has_slices
                is_whole = is_whole or recorder.part(call, slot, tuple(dense.shape)) is None
                self._ledger.hold(dense, call.key(slot).text, is_whole=is_whole)

    def _record_outputs(
        self,
        operator: Operator,
        call: Call,
        facts: dict[str, Any] | None,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        result: Any,
    ) -> None:
        """Record the results of an op, and the tensors that it has written to."""
        written = operator.writes(args, kwargs)
        for _, tensor in written:
            self._forget(tensor)
        if facts is None:
            return
        outputs = []
        returned = []
        for slot, leaf in leaves_of("output", result):
            if isinstance(leaf, torch.Tensor):
                returned.append(id(leaf))
                is_written = any(leaf is tensor for _, tensor in written)
                reference = self._output_reference(operator, call, slot, leaf, is_written=is_written)
                outputs.append({"slot": slot, **reference})
            elif leaf is not None:
                outputs.append({"slot": slot, "value": plain(leaf)})
        for name, tensor in written:
            if id(tensor) not in returned:
                slot = f"written.{name}"
                reference = self._output_reference(operator, call, slot, tensor, is_written=True)
                outputs.append({"slot": slot, **reference})
        self._counts["recorded"] += 1
        if self._recorder.wants(call, "op"):
            self._recorder.value(call, "op", {**facts, "outputs": outputs})

    def _output_reference(
        self, operator: Operator, call: Call, slot: str, tensor: torch.Tensor, *, is_written: bool
    ) -> _Reference:
        """Refer to the values of a result: a view of earlier ones, or a record that is made now."""
        dense = _dense(tensor)
        if dense is not None and not is_written:
            if self._ledger.knows(dense):
                view = self._ledger.view(dense)
                if view is not None:
                    self._ledger.hold_view(dense, call.key(slot).text)
                    return view
                if self._ledger.is_unfilled(dense):
                    return {"unfilled": True}
            elif operator.makes_unfilled:
                self._ledger.note_unfilled(dense)
                return {"unfilled": True}
        return self._record_tensor(call, slot, tensor)


def _weights(name: str, module: nn.Module) -> list[tuple[str, torch.Tensor, bool]]:
    """The parameters and buffers of a module itself: full name, tensor, whether it is a parameter."""
    prefix = f"{name}." if name else ""
    module = unwrapped(module)
    return [
        (prefix + own, weight, is_parameter)
        for weights, is_parameter in ((module._parameters, True), (module._buffers, False))
        for own, weight in weights.items()
        if weight is not None and not nn.parameter.is_lazy(weight)
    ]


def _dense(tensor: torch.Tensor) -> torch.Tensor | None:
    """The tensor as a plain one, if it lies in memory by strides; None if it does not."""
    if type(tensor) not in _PLAIN_CLASSES:
        if type(tensor).__torch_dispatch__ is not torch._C._disabled_torch_dispatch_impl:
            return None
        with torch._C.DisableTorchFunctionSubclass():
            tensor = tensor.as_subclass(torch.Tensor)
    if tensor.layout is not torch.strided or tensor.is_nested:
        return None
    return tensor
