"""Digests and statistics of parameters and buffers, for the description of a model: no values are kept."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any, Final

import torch
from torch import nn

from tensorcap.adapters.protocol import NotCapturableError
from tensorcap.adapters.torch.tensors import Stored, stored
from tensorcap_formats.digests import ALGORITHMS, DEFAULT_ALGORITHM
from tensorcap_formats.statistics import StatisticsBuilder

_BLOCK: Final = 1 << 17  # elements that are hashed and summed up while they are in a core's cache
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
                self._known[memory] = _summarize(stored(tensor))
            return self._known[memory]
        except _REFUSALS:  # sparse, quantised, sharded: what it is says its dtype or its class
            return {}


def _summarize(tensor: Stored) -> dict[str, Any]:
    flat = tensor.bits.reshape(-1)
    hasher, builder = ALGORITHMS[DEFAULT_ALGORITHM](), StatisticsBuilder(tensor.dtype)
    for start in range(0, flat.size, _BLOCK):
        block = flat[start : start + _BLOCK]
        hasher.update(block.view("u1"))
        builder.add(block)
    return {
        "digest": f"{DEFAULT_ALGORITHM}:{hasher.hexdigest()}",
        "statistics": asdict(builder.result()),
    }
