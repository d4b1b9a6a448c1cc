"""From values that torch code hands about to the recorder: every leaf, whatever holds it.

Nothing here returns a value to the model, keeps a tensor, or runs a torch function that a mode of the user
would see; trouble with a value becomes a loss that is told, never trouble of the model.
"""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any, Final

import numpy as np
import torch
from torch import nn

from tensorcap.adapters._torch_tensors import NotCapturableError, stored
from tensorcap.recorder import Call, Recorder
from tensorcap.structure import Kinds, walk
from tensorcap_formats.errors import WriteError
from tensorcap_formats.keys import escape

KINDS: Final = Kinds(
    tensors=(torch.Tensor, np.ndarray),
    opaque=(nn.Module,),
    texts=(torch.dtype, torch.device, torch.layout, torch.memory_format),
)
_SIMPLE: Final = (type(None), bool, int, str)


class Leaves:
    """Hands leaves to a recorder.

    Attributes:
        recorder: Takes them.
    """

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder

    def record(
        self, call: Call, slot: str, value: object, *, required: bool = False, only_tensors: bool = False
    ) -> None:
        """Record all leaves of a value.

        Args:
            call: Whose value it is.
            slot: Its name, escaped; a leaf of a structure has its path behind it.
            value: Anything.
            required: Whether every filter is passed.
            only_tensors: Whether leaves that are no tensors are left out.

        Raises:
            WriteError: The archive cannot be written.
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
                    name = f"{slot}.{escape(leaf.name)}" if leaf.name else slot
                    if leaf.is_tensor:
                        self.tensor(call, name, leaf.value, required=required)
                    elif leaf.reason:
                        recorder.lose(call.point, name, leaf.reason, required=required)
                    elif not only_tensors:
                        self._value(call, name, leaf.value, required=required)
        except WriteError:
            raise
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            recorder.lose(call.point, slot, reason, required=required)

    def tensor(self, call: Call, slot: str, tensor: Any, *, required: bool = False) -> None:
        """Record one tensor, or a numpy array; as `record`."""
        recorder = self.recorder
        if not recorder.wants(call, slot, required=required):
            return
        try:
            found = stored(tensor)
        except (NotCapturableError, RuntimeError, NotImplementedError, TypeError) as error:
            reason = str(error).partition("\n")[0]
            if not isinstance(error, NotCapturableError):
                reason = f"{type(error).__name__}: {reason}"
            recorder.lose(call.point, slot, reason, call=call, required=required)
            return
        recorder.tensor(call, slot, found.bits, found.dtype, found.shape, required=required)

    def _value(self, call: Call, slot: str, value: object, *, required: bool) -> None:
        if self.recorder.wants(call, slot, required=required):
            self.recorder.value(call, slot, value, required=required)


def unseen() -> AbstractContextManager[Any]:
    """Keep what a hook does out of the sight of modes that the user has switched on."""
    if not torch._C._len_torch_dispatch_stack() and not torch._C._len_torch_function_stack():
        return _NOTHING
    stack = ExitStack()
    if torch._C._len_torch_dispatch_stack() and "torch.utils._python_dispatch" in sys.modules:
        from torch.utils._python_dispatch import _disable_current_modes

        stack.enter_context(_disable_current_modes())
    stack.enter_context(torch._C.DisableTorchFunction())
    return stack


_NOTHING: Final = nullcontext()
