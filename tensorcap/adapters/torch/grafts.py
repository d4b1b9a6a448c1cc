"""Modules of one model in the place of another's: which can be exchanged, and what the models make then."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn

from tensorcap.adapters.protocol import Grafts, GraftSide, Layer
from tensorcap.adapters.torch.description import main_dtype
from tensorcap.adapters.torch.modules import tree, unwrapped
from tensorcap.adapters.torch.packed_weights import packed_tensors, quantised_weights
from tensorcap.adapters.torch.tensor_leaves import KINDS
from tensorcap.adapters.torch.tensors import equal_values
from tensorcap.recording import walk
from tensorcap.workload import Workload, class_name
from tensorcap_formats.dtypes import Array
from tensorcap_formats.errors import UsageError

_LOGITS = "logits"


class TorchGrafts(Grafts):
    """Grafts between two torch models whose modules have the same paths.

    1. Modules that hold tensors of their own, and hold others in the other model, are layers.
    2. One that the other model has not is part of the nearest module around it that both have.
    """

    def __init__(self, reference: Workload, target: Workload) -> None:
        """Find the layers.

        Raises:
            UsageError: The workloads have unlike values in inputs of one shape.
        """
        _refuse_other_inputs(reference, target)
        self._workloads = {"reference": reference, "target": target}
        self._modules = {side: tree(workload.model)[0] for side, workload in self._workloads.items()}
        self._dtypes = {side: main_dtype(workload.model) for side, workload in self._workloads.items()}
        self.left_out = {}
        self.layers = {}
        ours, theirs = self._modules["reference"], self._modules["target"]
        for path in self._unlike():
            self.layers[path] = Layer(
                path, class_name(type(unwrapped(theirs[path]))), _nbytes(ours[path]), _nbytes(theirs[path])
            )

    def output(self, side: GraftSide, exchanged: Collection[str] = ()) -> Array:
        """Run a model with some layers of the other one."""
        workload = self._workloads[side]
        if workload.seed is not None:
            torch.manual_seed(workload.seed)
        with self._exchanged(side, exchanged), torch.no_grad():
            result = workload.call(workload.model)
        return _final(result, side)

    def _unlike(self) -> Iterator[str]:
        """The layers that are not the same in both models, in the target's order, none within another."""
        ours, theirs = self._modules["reference"], self._modules["target"]
        found: dict[str, None] = {}
        for path in {**theirs, **ours}:
            sides = [unwrapped(side[path]) if path in side else None for side in (ours, theirs)]
            if all(side is None or not _holds(side) for side in sides):
                continue
            if sides[0] is not None and sides[1] is not None and _is_same(sides[0], sides[1]):
                continue
            common = path
            while common and (common not in ours or common not in theirs):
                common = common.rpartition(".")[0]
            if common:
                found[common] = None
            else:
                which = "target" if sides[0] is None else "reference"
                self.left_out[path] = f"the {which} alone has it, and no module around it is in both"
        for path in found:
            if not any(path.startswith(f"{other}.") for other in found):
                yield path

    @contextmanager
    def _exchanged(self, side: GraftSide, paths: Collection[str]) -> Iterator[None]:
        """Put modules of the other model in the place of some, until the block ends."""
        other: GraftSide = "target" if side == "reference" else "reference"
        model = unwrapped(self._workloads[side].model)
        undo = []
        try:
            for path in paths:
                parent_path, _, name = path.rpartition(".")
                parent = unwrapped(model.get_submodule(parent_path))
                module: Any = self._modules[other][path]
                if self._dtypes[side] != self._dtypes[other]:
                    module = _Cast(module, self._dtypes[side], self._dtypes[other])
                undo.append((parent, name, parent._modules[name]))
                parent._modules[name] = module
            yield
        finally:
            for parent, name, own in reversed(undo):
                parent._modules[name] = own


def _refuse_other_inputs(reference: Workload, target: Workload) -> None:
    """Refuse inputs of other values, in whichever precision of both: what they cost would be the layers'."""
    ours, theirs = (
        {leaf.name: leaf.value for leaf in walk(workload.inputs, KINDS) if leaf.is_tensor}
        for workload in (reference, target)
    )
    for name, one in ours.items():
        other = theirs.get(name)
        if other is None or one.shape != other.shape:
            continue
        other = other.to(one.device)
        if not equal_values(one.to(other.dtype), other) and not equal_values(one, other.to(one.dtype)):
            raise UsageError(
                f"input {name}: the target's has other values than the reference's, expected the same",
                hint="Make both workloads of the same inputs.",
            )


class _Cast(nn.Module):
    """A module of a model of another precision: it is given that, and gives back the model's."""

    def __init__(self, module: nn.Module, outer: str | None, inner: str | None) -> None:
        super().__init__()
        self.module = module
        self._outer, self._inner = (getattr(torch, name or "float32") for name in (outer, inner))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        args = tuple(_cast(arg, self._inner) for arg in args)
        result = self.module(*args, **{name: _cast(arg, self._inner) for name, arg in kwargs.items()})
        if isinstance(result, tuple):
            return tuple(_cast(part, self._outer) for part in result)
        return _cast(result, self._outer)


def _cast(value: Any, dtype: torch.dtype) -> Any:
    return value.to(dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value


def _holds(module: nn.Module) -> bool:
    """Whether a module has tensors of its own."""
    return bool(module._parameters or module._buffers or packed_tensors(module))


def _is_same(one: nn.Module, other: nn.Module) -> bool:
    """Whether two modules hold the same values in the same form, in whatever precision of floats."""
    if quantised_weights(one) or quantised_weights(other) or type(one) is not type(other):
        return False
    sides = [
        {n: t for n, t in {**module._parameters, **module._buffers}.items() if t is not None}
        for module in (one, other)
    ]
    return sides[0].keys() == sides[1].keys() and all(
        equal_values(tensor.detach(), sides[1][name].detach()) for name, tensor in sides[0].items()
    )


def _nbytes(module: nn.Module) -> int:
    """Bytes of the tensors of a module and of those within it."""
    total = 0
    for part in module.modules():
        part = unwrapped(part)
        weights = quantised_weights(part)
        for name, tensor in {**part._parameters, **part._buffers, **packed_tensors(part)}.items():
            if tensor is None:
                continue
            weight = weights.get(name)
            if weight is None:
                total += tensor.numel() * tensor.element_size()
                continue
            total += weight.kept.numel() * weight.kept.element_size()
            beside = getattr(tensor, "scale", None)  # of a class that holds them itself
            if weight.kept is not tensor and isinstance(beside, torch.Tensor):
                total += beside.numel() * beside.element_size()
    return total


def _final(result: Any, side: str) -> Array:
    """The logits of a model's result, or its first tensor of floats, float64."""
    leaves = [leaf for leaf in walk(result, KINDS) if leaf.is_tensor]
    floats = [leaf for leaf in leaves if getattr(leaf.value, "is_floating_point", lambda: False)()]
    chosen = next((leaf for leaf in floats if leaf.name.endswith(_LOGITS)), floats[0] if floats else None)
    if chosen is None:
        raise UsageError(f"the {side} returns no tensor of floats, expected logits or another result")
    values: Array = chosen.value.detach().double().cpu().numpy()
    if not np.isfinite(values).all():
        raise UsageError(f"the {side}: its result is not finite")
    return values
