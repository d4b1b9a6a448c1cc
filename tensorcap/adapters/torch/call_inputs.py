"""What a call was given, to be given again any number of times, whatever a call writes into it."""

from __future__ import annotations

import copy
from typing import Any

import torch

Inputs = tuple[tuple[Any, ...], dict[str, Any]]  # positional ones, and those by name


class CallInputs:
    """Copies of the inputs of a call.

    Objects are copied for each call. Tensors are shared by all calls, since copies of a cache may take longer
    than the module, and are put back after a call that wrote into one, which its version tells.
    """

    def __init__(self, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> None:
        """Copy the inputs."""
        copied: dict[int, Any] = {}
        self._kept: Inputs = copy.deepcopy((args, kwargs or {}), copied)
        tensors = {id(value): value for value in copied.values() if isinstance(value, torch.Tensor)}
        self._shared = [tensor for tensor in tensors.values() if not tensor.is_inference()]
        self._before = [tensor.detach().clone() for tensor in self._shared]
        self._versions = [tensor._version for tensor in self._shared]

    @property
    def kept(self) -> Inputs:
        """The inputs as they were, not to be written to."""
        with torch.no_grad():
            for at, (tensor, before) in enumerate(zip(self._shared, self._before, strict=True)):
                if tensor._version != self._versions[at]:
                    tensor.copy_(before)
                    self._versions[at] = tensor._version
        return self._kept

    def give(self) -> Inputs:
        """Give the inputs to a call."""
        return copy.deepcopy(self.kept, {id(tensor): tensor for tensor in self._shared})
