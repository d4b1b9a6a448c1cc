"""Tensor leaves: takes values of any structure apart, and gives each leaf to the recorder.

Nothing here returns a value to the model, keeps a tensor, or runs a torch function that a mode of the user
would see; an error with a value becomes a loss with a reason, never an error of the model.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final

import numpy as np
import torch
from torch import nn

from tensorcap.adapters.protocol import NotCapturableError
from tensorcap.adapters.torch.dtensors import Placements, local_part
from tensorcap.adapters.torch.staging_buffer import StagingBuffer
from tensorcap.adapters.torch.tensors import on_host, plain, stored
from tensorcap.recording import Call, Kinds, NothingLeftError, Recorder, leaf_slot, walk

KINDS: Final = Kinds(
    tensors=(torch.Tensor, np.ndarray),
    opaque=(nn.Module,),
    texts=(torch.dtype, torch.device, torch.layout, torch.memory_format),
)
_REFUSALS: Final = (NotCapturableError, NothingLeftError, RuntimeError, NotImplementedError, TypeError)
_SIMPLE: Final = (type(None), bool, int, str)


class TensorLeaves:
    """Gives leaves to a recorder; those on a device through staging.

    Attributes:
        recorder: The recorder of the capture.
        on_record: Called for each tensor that is recorded, if it is set: with call, slot, tensor, and
            whether it is required and so recorded whole.
        placements: Says what tensors of this rank are parts of.
    """

    def __init__(self, recorder: Recorder, staging: StagingBuffer) -> None:
        self.recorder = recorder
        self.on_record: Callable[[Call, str, Any, bool], None] | None = None
        self.placements = Placements()
        self._staging = staging

    def record(
        self, call: Call, slot: str, value: object, *, required: bool = False, only_tensors: bool = False
    ) -> None:
        """Record all leaves of a value.

        Args:
            call: The call that the value belongs to.
            slot: Its name, escaped; a leaf of a structure has its path behind it.
            value: Anything.
            required: Whether every filter is passed.
            only_tensors: Whether leaves that are no tensors are left out.
        """
        recorder = self.recorder
        try:
            if type(value) is torch.Tensor:
                self.tensor(call, slot, value, required=required)
            elif type(value) in _SIMPLE:
                if not only_tensors:
                    self._value(call, slot, value, required=required)
            else:
                for leaf in walk(value, KINDS):
                    name = leaf_slot(slot, leaf.name)
                    if leaf.is_tensor:
                        self.tensor(call, name, leaf.value, required=required)
                    elif leaf.reason:
                        recorder.lose(call.point, name, leaf.reason, required=required)
                    elif not only_tensors:
                        self._value(call, name, leaf.value, required=required)
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            recorder.lose(call.point, slot, reason, required=required)

    def tensor(self, call: Call, slot: str, tensor: Any, *, required: bool = False) -> bool:
        """Record one tensor, or a numpy array; as `record`. Return whether there is, or will be, a record."""
        is_taken = self._take(call, slot, tensor, required=required)
        if is_taken and self.on_record is not None:
            self.on_record(call, slot, tensor, required)
        return is_taken

    def _take(self, call: Call, slot: str, tensor: Any, *, required: bool) -> bool:
        recorder = self.recorder
        if not recorder.wants(call, slot, required=required):
            return False
        try:
            is_whole = required or not recorder.has_slices
            placement = None
            if not isinstance(tensor, np.ndarray):
                placement, tensor = self.placements.find(tensor), local_part(tensor)
            part = None if is_whole else recorder.part(call, slot, tuple(tensor.shape))
            if placement is not None and part is None:  # what is cut of a part has another place in the whole
                recorder.place_tensor(call, slot, placement)
            if isinstance(tensor, np.ndarray):
                values = stored(tensor, part)
            else:
                if tensor.is_quantized:  # whole numbers that stand for floats, by a step of their own
                    tensor = tensor.dequantize()
                on_device = plain(tensor, part)
                if self._staging.take(call, slot, on_device, required=required):
                    return True
                values = on_host(on_device)
        except _REFUSALS as error:
            reason = str(error).partition("\n")[0]
            if not isinstance(error, (NotCapturableError, NothingLeftError)):
                reason = f"{type(error).__name__}: {reason}"
            recorder.lose(call.point, slot, reason, call=call, required=required)
            return False
        recorder.tensor(call, slot, values.bits, values.dtype, values.shape, required=required)
        return recorder.stopped is None

    def _value(self, call: Call, slot: str, value: object, *, required: bool) -> None:
        if self.recorder.wants(call, slot, required=required):
            self.recorder.value(call, slot, value, required=required)


def untraced() -> AbstractContextManager[Any]:
    """Hide our own ops from modes: the user's, and ours that records ops."""
    if not torch._C._len_torch_dispatch_stack() and not torch._C._len_torch_function_stack():
        return _NOTHING
    return _Untraced()


class _Untraced:
    """Disables modes where they are; to take them off the stack would cost more than the ops it hides."""

    def __enter__(self) -> None:
        self._dispatch = torch._C._DisableTorchDispatch()
        self._dispatch.__enter__()  # type: ignore[no-untyped-call] # torch's C code
        self._functions = torch._C.DisableTorchFunction()
        self._functions.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._functions.__exit__(*error)
        self._dispatch.__exit__(*error)


_NOTHING: Final = nullcontext()
