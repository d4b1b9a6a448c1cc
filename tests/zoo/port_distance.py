"""How far what a port gives is from what the reference gives, in float32 and in float64."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from tests.zoo.architectures import ALL_ARCHITECTURES, make
from tests.zoo.effect import calls_of, difference


class Double(TorchFunctionMode):
    """Computes in float64 whatever says that it computes in float32."""

    def __torch_function__(
        self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        def wide(value: Any) -> Any:
            return torch.float64 if value is torch.float32 else value

        if function is torch.Tensor.float:
            function = torch.Tensor.double
        options = {name: wide(value) for name, value in (kwargs or {}).items()}
        return function(*[wide(arg) for arg in args], **options)


def in_float64(architecture: str) -> Any:
    model = make(architecture).double()
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")  # the grouped one knows no float64
    return model


def outputs(architecture: str, model: Any) -> list[Tensor]:
    """What each call of the whole model gives first: scores, a wave, a map."""
    calls = calls_of(ALL_ARCHITECTURES[architecture].workload(model))["@root"]
    return [next(t for t in call.result if t.is_floating_point()) for call in calls]


def apart(expected: Sequence[Tensor], ported: Sequence[Tensor]) -> float:
    """How far outputs are from each other, of the tokens that the port scores."""
    cut = [
        ours[:, -theirs.shape[1] :] if ours.ndim == 3 else ours
        for ours, theirs in zip(expected, ported, strict=True)
    ]
    return difference(cut, ported)


def distance(architecture: str, port: Any, *, double: bool) -> float:
    """How far what a port gives is from what the reference gives."""
    if not double:
        reference, ported = make(architecture), port(make(architecture)).eval()
        return apart(outputs(architecture, reference), outputs(architecture, ported))
    with Double():
        expected = outputs(architecture, in_float64(architecture))
        ours = outputs(architecture, port(in_float64(architecture)).eval())
    assert all(tensor.dtype == torch.float64 for tensor in (*expected, *ours))
    return apart(expected, ours)
