"""Parameters and buffers, recorded once: as they are when the capture begins.

A tensor without values then, since it is offloaded or made lazily, is recorded in the first call of its
module in which it has them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import nn

from tensorcap.adapters.torch.modules import unwrapped
from tensorcap.adapters.torch.packed_weights import packed_tensors, quantised_weights
from tensorcap.adapters.torch.tensor_leaves import TensorLeaves, untraced
from tensorcap.adapters.torch.tensors import PLAIN_CLASSES
from tensorcap.recording import Call
from tensorcap_formats.keys import escape

_NO_DATA: Final = "meta: no data, neither before the run nor in a call of the module"
# What ends names beside that of a weight in few bits: as it is kept, if its floats have its own name, what
# its numbers are multiplied by, and those that stand for 0
_KEPT: Final = "_packed"
_STEPS: Final = "_step"
_ZEROS: Final = "_zero"
_Contents = torch.Tensor | Callable[[], torch.Tensor]
_OFFLOADED: Final = "_old_forward"  # the function that accelerate calls once it has loaded the values


@contextmanager
def record_parameters(modules: Mapping[str, nn.Module], leaves: TensorLeaves) -> Iterator[None]:
    """Record the parameters and buffers of modules; those without values yet, until the block ends.

    Args:
        modules: The modules by name; a shared module has its first name alone. A parameter that several
            modules share is recorded at each of them, and its bytes are stored once.
        leaves: Takes the values.
    """
    holders = [_Holder(name, module, leaves) for name, module in modules.items()]
    with torch.no_grad(), untraced():
        for holder in holders:
            holder.take()
    late = [holder for holder in holders if holder.left]
    for holder in late:
        holder.await_call()
    try:
        yield
    finally:
        for holder in late:
            holder.finish()


class _Holder:
    """A module, and which of its tensors are not recorded yet."""

    def __init__(self, name: str, module: nn.Module, leaves: TensorLeaves) -> None:
        point = leaves.recorder.points[name]
        self._module = module
        self._leaves = leaves
        self._call = Call(point, 0, 0, is_of_run=True)
        self._undo: Callable[[], object] = lambda: None
        self._known: dict[str, _Contents] | None = self._tensors()
        self.left = [slot for slot in self._known if leaves.recorder.wants(self._call, slot)]

    def take(self) -> None:
        """Record the tensors that have values now."""
        tensors, self._known = self._known or self._tensors(), None
        for slot in list(self.left):
            tensor = tensors.get(slot)
            if tensor is None or (isinstance(tensor, torch.Tensor) and _is_empty(tensor)):
                continue
            self.left.remove(slot)
            self._leaves.record(self._call, slot, tensor if isinstance(tensor, torch.Tensor) else tensor())

    def await_call(self) -> None:
        """Wait for a call of the module, and record the rest in it."""
        module = self._module
        forward = vars(module).get(_OFFLOADED)
        if forward is None:
            self._undo = module.register_forward_pre_hook(self._before_call).remove
            return
        wrapper = _LoadedForward(forward, self._in_call)
        setattr(module, _OFFLOADED, wrapper)

        def undo() -> None:
            if vars(module).get(_OFFLOADED) is wrapper:
                setattr(module, _OFFLOADED, forward)

        self._undo = undo

    def finish(self) -> None:
        """Leave the module as it was, and report the tensors that never had values."""
        self._undo()
        for slot in self.left:
            self._leaves.recorder.lose(self._call.point, slot, _NO_DATA, call=self._call)

    def _before_call(self, module: nn.Module, args: object) -> None:
        self._in_call()

    def _in_call(self) -> None:
        if self.left and self._leaves.recorder.is_recording:
            with torch.no_grad(), untraced():
                self.take()

    def _tensors(self) -> dict[str, _Contents]:
        """The tensors by slot; of a weight in few bits the floats have its name, and it has another."""
        module = unwrapped(self._module)
        tensors: dict[str, _Contents] = {}
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            tensors[f"param.{escape(name)}"] = parameter
        for name, buffer in module.named_buffers(recurse=False, remove_duplicate=False):
            tensors[f"buffer.{escape(name)}"] = buffer
        for name, packed in packed_tensors(module).items():
            if not packed.is_quantized:
                tensors[f"param.{escape(name)}"] = packed
        for name, weight in quantised_weights(module).items():
            slot = f"param.{escape(name)}"
            if slot in tensors and type(tensors[slot]) in PLAIN_CLASSES:
                tensors[f"{slot}{_KEPT}"] = tensors[slot]
            if weight.kept.is_meta:
                tensors[slot] = weight.kept
                continue
            tensors[slot] = weight.values
            if weight.steps is not None and weight.number:
                tensors[f"{slot}{_STEPS}"] = weight.steps
            if weight.zeros is not None and weight.number:
                tensors[f"{slot}{_ZEROS}"] = weight.zeros
        return tensors


class _LoadedForward:
    """Stands in the place of a forward that is called once the values are loaded."""

    def __init__(self, forward: Any, note: Callable[[], None]) -> None:
        self._forward = forward
        self._note = note

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._note()
        return self._forward(*args, **kwargs)

    def __reduce__(self) -> Any:
        return self._forward.__reduce__()  # a copy of the model has its own forward


def _is_empty(tensor: torch.Tensor) -> bool:
    return nn.parameter.is_lazy(tensor) or tensor.is_meta
