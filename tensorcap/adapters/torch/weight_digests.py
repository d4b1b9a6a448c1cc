"""Digests and statistics of parameters and buffers, for the description of a model: no values are kept."""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import nn

from tensorcap.adapters.protocol import NotCapturableError
from tensorcap.adapters.torch.dtensors import local_part, placement_of
from tensorcap.adapters.torch.tensors import PLAIN_CLASSES, stored
from tensorcap.recording import summarize_weight

_REFUSALS: Final = (NotCapturableError, RuntimeError, NotImplementedError, TypeError)


class WeightDigests:
    """Digests the tensors of one model; memory that several names share is read once."""

    def __init__(self) -> None:
        self._known: dict[tuple[Any, ...], dict[str, Any]] = {}

    def describe(self, tensor: torch.Tensor) -> dict[str, Any]:
        """Return `digest` and `statistics` of a tensor's values; nothing if it has none that can be read."""
        if nn.parameter.is_lazy(tensor) or tensor.is_meta:
            return {}
        try:
            tensor = _whole(tensor)
            memory = (
                tensor.device,
                tensor.data_ptr(),
                tensor.dtype,
                tuple(tensor.shape),
                tensor.stride(),
                tensor.is_conj(),
                tensor.is_neg(),
            )
            if memory not in self._known:
                bits, dtype, _ = stored(tensor)
                self._known[memory] = summarize_weight(bits, dtype)
            return self._known[memory]
        except _REFUSALS:  # sparse, quantised, sharded: what it is says its dtype or its class
            return {}


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor itself, or what this rank holds of a DTensor if that is all of it."""
    if type(tensor) in PLAIN_CLASSES or (local := local_part(tensor)) is tensor:
        return tensor
    placement = placement_of(tensor)
    if placement is None or not set(placement.rules) <= {"replicated"}:
        raise NotCapturableError("a part of a DTensor")
    return local
