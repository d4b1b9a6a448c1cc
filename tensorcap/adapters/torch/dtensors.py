"""DTensors: the part that this rank holds, and what it is a part of (RNK-2).

Parallel layers hand plain local tensors on, which do not say what they are parts of. So for the time of a
capture `DTensor.to_local` notes of which DTensor each is; it returns what it always returns. Nothing here
communicates: a collective that not all ranks take part in would never end.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from typing import Any, Final, cast

import torch
from torch.utils.weak import WeakIdKeyDictionary

from tensorcap.recording import Placement
from tensorcap.workload import replace_attribute

_HOMES: Final = ("torch.distributed.tensor", "torch.distributed._tensor")  # the second before torch 2.5
_TERMS: Final = ("sum", "avg", "max", "min")


def dtensor_class() -> type[torch.Tensor] | None:
    """The class of DTensors; None if the process has not imported it, and so has none."""
    for home in _HOMES:
        module = sys.modules.get(home)
        if (found := getattr(module, "DTensor", None)) is not None:
            return cast("type[torch.Tensor]", found)
    return None


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank holds of a DTensor, or what an asynchronous collective gives it; else the tensor."""
    dtensor = dtensor_class()
    if dtensor is not None and isinstance(tensor, dtensor):
        tensor = cast("Any", tensor)._local_tensor
    if type(tensor).__name__ == "AsyncCollectiveTensor":
        waiting = cast("Any", tensor)
        arrived: torch.Tensor = waiting.trigger_wait()
        return arrived
    return tensor


class Placements:
    """Says what tensors are parts of: of DTensors, and of what `to_local` made of them."""

    def __init__(self) -> None:
        self._local: MutableMapping[torch.Tensor, Placement] = WeakIdKeyDictionary()

    def find(self, tensor: torch.Tensor) -> Placement | None:
        """What a tensor is a part of; None if it is not known."""
        dtensor = dtensor_class()
        if dtensor is not None and isinstance(tensor, dtensor):
            return placement_of(tensor)
        return self._local.get(tensor) if self._local else None

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Note the local tensors that DTensors give, until the block ends."""
        dtensor = dtensor_class()
        if dtensor is None:
            yield
            return
        with replace_attribute(dtensor, "to_local", self._wrap):
            yield

    def _wrap(self, original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        @functools.wraps(original)
        def to_local(dtensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            local = original(dtensor, *args, **kwargs)
            placement = placement_of(dtensor)
            if placement is not None and not torch.compiler.is_compiling():
                self._local[local] = placement
            return local

        return to_local


def placement_of(dtensor: Any) -> Placement | None:
    """What this rank's tensor of a DTensor is a part of; None if it is placed in a way that has no rule."""
    rules = _rules(dtensor.placements)
    if rules is None:
        return None
    mesh = dtensor.device_mesh
    names = mesh.mesh_dim_names or tuple(f"mesh{i}" for i in range(mesh.mesh.ndim))
    sizes = dict(zip(names, mesh.mesh.shape, strict=True))
    text = rules[0] if len(rules) == 1 else "; ".join(f"{n}: {r}" for n, r in zip(names, rules, strict=True))
    ranks = tuple(mesh.mesh.reshape(-1).tolist())
    return Placement(text, "DTensor", tuple(sizes.items()), ranks, tuple(dtensor.shape))


def _rules(placements: Sequence[Any]) -> list[str] | None:
    """The rule of each mesh axis (RNK-10); strided shards and masked sums have none."""
    rules = []
    for placement in placements:
        kind = type(placement).__name__
        if kind == "Shard":
            rules.append(f"concat {placement.dim}")
        elif kind == "Replicate":
            rules.append("replicated")
        elif kind == "Partial" and placement.reduce_op in _TERMS:
            rules.append(placement.reduce_op)
        else:
            return None
    return rules
