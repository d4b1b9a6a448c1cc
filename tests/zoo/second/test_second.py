"""The second zoo says the truth, which plain runs of the models show: no judge is asked."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from tests.zoo.architectures import ALL_ARCHITECTURES, make
from tests.zoo.effect import (
    around,
    calls_of,
    changed_sites,
    clean_calls,
    difference,
    effect,
    is_cured,
    is_exercised,
)
from tests.zoo.entry import Correct, Entry, Mistake, build
from tests.zoo.second.architectures import SECOND_ARCHITECTURES
from tests.zoo.second.catalogue import SECOND_CORRECT, SECOND_MISTAKES

REAL = 1e-3  # what a mistake changes at least, relative; roundings of float32 change 1e-6
DOUBLE = 1e-12  # of float64 through a few layers, relative; measured: 1e-14


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


def names(entries: Sequence[Entry]) -> list[str]:
    return [entry.name for entry in entries]


def in_float64(architecture: str) -> Any:
    model = make(architecture).double()
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")  # the grouped one knows no float64
    return model


def outputs(calls: Any) -> list[Any]:
    return [tensor for call in calls["@root"] for tensor in call.result]


def test_the_second_zoo_has_entries_of_each_architecture_and_none_of_the_first() -> None:
    mistakes = Counter(mistake.architecture for mistake in SECOND_MISTAKES)
    assert set(mistakes) <= set(SECOND_ARCHITECTURES)
    assert len(set(names((*SECOND_MISTAKES, *SECOND_CORRECT)))) == len(SECOND_MISTAKES) + len(SECOND_CORRECT)


@pytest.mark.slow
@pytest.mark.parametrize("mistake", SECOND_MISTAKES, ids=names(SECOND_MISTAKES))
def test_a_mistake_is_real_and_in_the_guilty_module_alone(mistake: Mistake) -> None:
    dtype = "bfloat16" if mistake.kind == "precision" else "float32"
    changed = changed_sites(mistake, dtype)
    assert mistake.guilty in changed
    assert changed <= {mistake.guilty, *around(mistake.guilty)}
    if mistake.guilty != "@root":
        assert is_cured(mistake, dtype)
    if mistake.kind != "precision":
        assert effect(mistake, dtype) > REAL
    assert is_exercised(mistake, "bfloat16")
    architecture = ALL_ARCHITECTURES[mistake.architecture]
    wrong = outputs(calls_of(architecture.workload(mistake.change(make(mistake.architecture, dtype)))))
    assert difference(outputs(clean_calls(mistake.architecture, dtype)), wrong) > REAL


@pytest.mark.slow
@pytest.mark.parametrize("port", SECOND_CORRECT, ids=names(SECOND_CORRECT))
def test_a_correct_port_gives_the_same_in_float64(port: Correct) -> None:
    architecture = ALL_ARCHITECTURES[port.architecture]
    with Double():
        right = calls_of(architecture.workload(in_float64(port.architecture)))
        ported = calls_of(architecture.workload(port.change(in_float64(port.architecture))))
    assert all(tensor.dtype == torch.float64 for tensor in outputs(right))
    assert difference(outputs(right), outputs(ported)) < DOUBLE


@pytest.mark.slow
@pytest.mark.parametrize("port", SECOND_CORRECT, ids=names(SECOND_CORRECT))
def test_a_correct_port_agrees_in_its_modules_too(port: Correct) -> None:
    pair = build(port, "float32")
    expected, ported = calls_of(pair.reference), calls_of(pair.target)
    both = [site for site in expected.keys() & ported.keys() if not site.endswith(port.relaid or ("-",))]
    assert len(both) >= 0.5 * len(expected)
    for site in both:
        for one, other in zip(expected[site], ported[site], strict=True):
            assert difference(one.result[:1], other.result[:1]) < 1e-4, site
