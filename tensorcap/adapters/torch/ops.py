"""Every op that is run in a call of a module: its outputs, what it was given, where in the code it stands.

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
from typing import Any, Final

import torch
from torch import nn

from tensorcap.adapters.torch.frames import Frames, Source
from tensorcap.adapters.torch.operators import Operator, leaves_of, plain, tensors_of
from tensorcap.adapters.torch.storage import Ledger
from tensorcap.adapters.torch.tensor_leaves import TensorLeaves, untraced
from tensorcap.recording.recorder import Call
from tensorcap_formats.errors import WriteError
from tensorcap_formats.keys import Key

_COMPILED: Final = "inside a compiled graph (torch.compile)"
_HIGHER_ORDER: Final = "a higher-order op, which is not looked into"
_PLAIN_CLASSES: Final = (torch.Tensor, nn.Parameter)
_NO_MEMORY: Final = -1  # in the place of the id of a parameter, or buffer, that had none at first
_Reference = dict[str, Any]  # of `specs/capture.md`


class Ops:
    """Runs ops and records them, in any thread."""

    def __init__(self, modules: Mapping[str, nn.Module], leaves: TensorLeaves) -> None:
        """Learn the model's parameters and buffers.

        Args:
            modules: All modules of the model, by name.
            leaves: Take the tensors.
        """
        self._leaves = leaves
        self._recorder = leaves.recorder
        points = self._recorder.points
        self._modules = {points[name].site: (name, module) for name, module in modules.items()}
        self._ledger = Ledger()
        self._frames = Frames()
        self._operators: dict[Any, Operator | None] = {}
        self._counts: Counter[str] = Counter(recorded=0)
        self._lock = threading.RLock()  # what is recorded with it held is told to `_follow`
        self._is_over = False
        self._weights: dict[str, int] = {}  # by name, the ids of those that the model had at first
        self._opaque: dict[int, tuple[weakref.ref[torch.Tensor], str]] = {}  # by id, those without strides
        with untraced():
            for name, module in modules.items():
                for full, weight, is_parameter in _weights(name, module):
                    self._weights[full] = _NO_MEMORY if weight.is_meta else id(weight)
                    dense = _dense(weight)
                    if dense is None:
                        self._opaque[id(weight)] = weakref.ref(weight), full
                    elif not weight.is_meta:
                        self._ledger.hold_weight(full, dense, is_parameter=is_parameter)
        leaves.follow = self._follow

    def finish(self) -> None:
        """Record no more; put into the run's metadata what was recorded and what was not."""
        self._is_over = True
        self._recorder.facts["ops"] = dict(self._counts)

    def look_again(self) -> None:
        """Ops were not looked at for a while, and may have written to anything."""
        with self._lock:
            self._ledger.forget_records()

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *, obstacle: str) -> Any:
        """Run an op as it would run anyway, and record it.

        Args:
            func: The op.
            args: What it is given.
            kwargs: What it is given.
            obstacle: Why no op of the call that it belongs to is recorded; empty for no such reason.
        """
        if self._is_over or self._recorder.is_off:  # in a forked process, another thread may hold our lock
            return func(*args, **kwargs)
        try:
            operator = self._operators[func]
        except KeyError:
            known = isinstance(func, torch._ops.OpOverload)
            operator = self._operators[func] = Operator.of(func) if known else None
        place = self._place(func, operator, sys._getframe(1), obstacle)
        if operator is None:
            result = func(*args, **kwargs)
            self.look_again()
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
            operator: What is known of the op.
            call: What it is recorded as, or None if it is not.
            place: The call of the module that it is run in, and its line; None only where `call` is None.
            args: What it is given.
            kwargs: What it is given by name.
            compute: Runs it.
            further: What else is to be told of it.

        Returns:
            What `compute` returned.
        """
        if call is None or place is None or call.point.wanted is False:
            result = compute()
            self._note_writes(operator, args, kwargs)
            return result
        facts: dict[str, Any] | None = None
        with self._lock, untraced():
            try:
                facts = {**self._before(operator, call, *place, args, kwargs), **further}
            except WriteError:
                raise
            except Exception as error:
                self._recorder.lose(call.point, "op", f"{type(error).__name__}: {error}")
        result = compute()
        with self._lock, untraced():
            try:
                self._after(operator, call, facts, args, kwargs, result)
            except WriteError:
                raise
            except Exception as error:
                self._recorder.lose(call.point, "op", f"{type(error).__name__}: {error}")
        return result

    def _place(
        self, func: Any, operator: Operator | None, frame: FrameType, obstacle: str
    ) -> tuple[Call, Source] | None:
        """The module's call that an op belongs to, and its line; None, and noted, if it is not recorded."""
        recorder = self._recorder
        if not recorder.is_recording:
            return None
        if torch._C._current_graph_task_id() != -1:
            self._pass_over("in a backward pass")
            return None
        call = recorder.current
        found = None
        while call is not None and (found := self._frames.obstacle(call.token, frame)) is None:
            recorder.leave(call.point, call.token)  # it ended by an error
            call = recorder.current
        if call is None:
            self._pass_over("outside of all calls")
            return None
        source = None
        reason = obstacle or found
        if not reason and operator is None:
            reason = f"{func}: {_HIGHER_ORDER}"
        if not reason:
            source = self._frames.source(frame)
            reason = _COMPILED
        if source is None:
            recorder.lose(call.point, "op", reason)
            self._pass_over(reason)
            return None
        return call, source

    def _pass_over(self, reason: str) -> None:
        with self._lock:
            self._counts[reason] += 1

    def _note_writes(self, operator: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Forget what an op has written over that is not recorded."""
        if operator.written or operator.switch is not None:
            with self._lock, untraced():
                for _, tensor in operator.writes(args, kwargs):
                    self._forget(tensor)

    def _forget(self, tensor: torch.Tensor) -> None:
        dense = _dense(tensor)
        if dense is not None:
            self._ledger.note_write(dense)

    def _before(
        self,
        operator: Operator,
        call: Call,
        outer: Call,
        source: Source,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> dict[str, Any]:
        """What is known of an op before it runs; what it is given and no record holds is recorded."""
        name, module = self._modules[outer.point.site]
        inputs = []
        arguments = {}
        for argument, value in operator.items(args, kwargs):
            if isinstance(value, torch.Tensor):
                given = [(argument, value)]
            elif isinstance(value, (list, tuple)):
                given = list(tensors_of(argument, value))
            else:
                given = []
            for full, tensor in given:
                found = self._input(operator, call, argument, full, tensor, name, module)
                inputs.append({"name": full, **found})
            if not given:
                arguments[argument] = plain(value)
        return {
            "op": operator.name,
            "order": self._recorder.next_order(),
            "module": outer.point.site,
            "module_call": outer.number,
            "class": type(module).__qualname__,
            "file": source.file,
            "line": source.line,
            "function": source.function,
            "inputs": inputs,
            "arguments": arguments,
        }

    def _input(
        self,
        operator: Operator,
        call: Call,
        argument: str,
        full: str,
        tensor: torch.Tensor,
        name: str,
        module: nn.Module,
    ) -> _Reference:
        dense = _dense(tensor)
        if dense is None:
            known, weight = self._opaque.get(id(tensor), (None, ""))
            if known is not None and known() is tensor:
                return {"parameter": weight}
            return self._keep(call, f"input.{full}", tensor)
        found = self._ledger.find(dense)
        if found is None and not self._ledger.knows(dense) and self._learn(dense, name, module):
            found = self._ledger.find(dense)
        if found is not None:
            return found
        if argument in operator.overwritten:
            return {"overwritten": True}
        if operator.makes_views and self._ledger.is_unfilled(dense):
            return {"unfilled": True}
        if argument in operator.written and self._ledger.is_untouched(dense):
            return {"unfilled": True}  # what a kernel is handed for its result
        return self._keep(call, f"input.{full}", tensor)

    def _learn(self, tensor: torch.Tensor, name: str, module: nn.Module) -> bool:
        """Whether the tensor's memory is that of a weight of the module that has got it since the start."""
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

    def _keep(self, call: Call, slot: str, tensor: torch.Tensor) -> _Reference:
        """Record a tensor as it is now."""
        if not self._recorder.wants(call, slot):
            return {"lost": "not asked for"}
        if not self._leaves.tensor(call, slot, tensor):
            return {"lost": call.point.lost.get(slot, ("beyond the limit of bytes", 1))[0]}
        return {"record": _key(call, slot)}

    def _follow(self, call: Call, slot: str, tensor: Any, required: bool) -> None:
        """There is a record of a tensor now; of equal ones it is the first that counts."""
        dense = _dense(tensor) if isinstance(tensor, torch.Tensor) else None
        if dense is None:
            return
        with self._lock:
            if self._ledger.find(dense) is None:
                recorder = self._recorder
                is_whole = required or not recorder.has_slices
                is_whole = is_whole or recorder.part(call, slot, tuple(dense.shape)) is None
                self._ledger.hold(dense, _key(call, slot), is_whole=is_whole)

    def _after(
        self,
        operator: Operator,
        call: Call,
        facts: dict[str, Any] | None,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        result: Any,
    ) -> None:
        """Record what an op returns, and what it has written to."""
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
                is_written = any(leaf is other for _, other in written)
                found = self._output(operator, call, slot, leaf, is_written=is_written)
                outputs.append({"slot": slot, **found})
            elif leaf is not None:
                outputs.append({"slot": slot, "value": plain(leaf)})
        for name, tensor in written:
            if id(tensor) not in returned:
                slot = f"written.{name}"
                outputs.append({"slot": slot, **self._output(operator, call, slot, tensor, is_written=True)})
        self._counts["recorded"] += 1
        if self._recorder.wants(call, "op"):
            self._recorder.value(call, "op", {**facts, "outputs": outputs})

    def _output(
        self, operator: Operator, call: Call, slot: str, tensor: torch.Tensor, *, is_written: bool
    ) -> _Reference:
        dense = _dense(tensor)
        if dense is not None and not is_written:
            if self._ledger.knows(dense):
                told = self._ledger.view(dense)
                if told is not None:
                    self._ledger.hold_view(dense, _key(call, slot))
                    return told
                if self._ledger.is_unfilled(dense):
                    return {"unfilled": True}
            elif operator.makes_unfilled:
                self._ledger.note_unfilled(dense)
                return {"unfilled": True}
        return self._keep(call, slot, tensor)


def _key(call: Call, slot: str) -> str:
    return Key(call.point.site, slot, call.step, call.number).text


def _weights(name: str, module: nn.Module) -> list[tuple[str, torch.Tensor, bool]]:
    """The parameters and buffers of a module itself: full name, tensor, whether it is a parameter."""
    prefix = f"{name}." if name else ""
    return [
        (prefix + own, weight, is_parameter)
        for weights, is_parameter in ((module._parameters, True), (module._buffers, False))
        for own, weight in weights.items()
        if weight is not None and not nn.parameter.is_lazy(weight)
    ]


def _dense(tensor: torch.Tensor) -> torch.Tensor | None:
    """The tensor if it lies in memory by strides, as a plain one; None if it does not."""
    if type(tensor) not in _PLAIN_CLASSES:
        if type(tensor).__torch_dispatch__ is not torch._C._disabled_torch_dispatch_impl:
            return None
        with torch._C.DisableTorchFunctionSubclass():
            tensor = tensor.as_subclass(torch.Tensor)
    if tensor.layout is not torch.strided or tensor.is_nested:
        return None
    return tensor
