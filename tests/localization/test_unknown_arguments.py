"""By injection, layers that are given something that the reference's are not."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tensorcap.comparison import compare
from tensorcap.localization import Localization, localize
from tensorcap.localization.evidence import (
    Evidence,
    EvidenceSource,
    evidence_of_injection,
    with_modules_within,
)
from tensorcap.rerun import InjectedRun, OwnError
from tensorcap.session import capture_workload
from tensorcap.workload import Workload
from tests.comparison.conftest import MemoryArchive

X = torch.randn(2, 16, 32, generator=torch.Generator().manual_seed(0)).bfloat16().float()
V = np.random.default_rng(4).normal(size=(8, 64)).astype(np.float32)
ALL = "0/m/output", "0/n/input.x"


class Layer(nn.Module):
    """Fades what it adds, by rates that it has or that a port gives it."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor, self.mix = factor, nn.Linear(32, 32)

    def forward(self, x: Tensor, rates: Tensor | None = None) -> Tensor:
        if rates is None:
            rates = torch.linspace(1, 2, 32, dtype=x.dtype).square()
        made: Tensor = x + self.factor * (self.mix(x) * rates.sqrt()).tanh()
        return made


class Stack(nn.Module):
    """Layers one after the other; a port makes their rates."""

    def __init__(self, factors: tuple[float, ...], *, is_port: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers, self.is_port = nn.ModuleList(map(Layer, factors)), is_port

    def forward(self, x: Tensor) -> Tensor:
        rates = torch.linspace(1, 2, 32, dtype=x.dtype).square() if self.is_port else None
        for layer in self.layers:
            x = layer(x, rates)
        made: Tensor = x * 1
        return made


def located(folder: Path, factors: tuple[float, ...], dtype: torch.dtype) -> Localization:
    """What an injected run of a port in a dtype says."""
    port = Stack(factors, is_port=True).eval().to(dtype)
    target = Workload(port, (X.to(dtype),), seed=0)
    capture_workload(Workload(Stack((1.0,) * len(factors)).eval(), (X,)), folder / "ref.h5")
    capture_workload(target, folder / "tgt.h5")
    return localize(folder / "ref.h5", folder / "tgt.h5", target_model=target)


@pytest.mark.spec("LCL-310")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("factors", "expected"),
    [
        pytest.param((1.0, 1.0, 1.0), [], id="right"),
        pytest.param((1.0, 0.5, 1.0), ["layers.1"], id="wrong"),
    ],
)
def test_an_argument_of_which_other_layers_make_right_results_is_right(
    tmp_path: Path, dtype: torch.dtype, factors: tuple[float, ...], expected: list[str]
) -> None:
    found = located(tmp_path, factors, dtype)
    assert [suspect.module for suspect in found.suspects] == expected
    assert all(
        suspect.by == ("injection",) and suspect.key.endswith("layers.1/output") for suspect in found.suspects
    )


@pytest.mark.spec("LCL-311")
def test_a_result_that_is_not_judged_is_its_own_modules_and_not_of_who_hands_it_on(tmp_path: Path) -> None:
    """Of one layer alone nothing proves what it is given."""
    found = located(tmp_path, (0.5,), torch.bfloat16)
    assert [suspect.module for suspect in found.suspects] == ["layers.0"]


@pytest.mark.spec("LCL-311")
@pytest.mark.parametrize(
    ("unjudged", "expected"), [((), ("@root", "0/n/input.x")), (("0/m/output",), ("m", "0/m/output"))]
)
def test_who_hands_on_a_result_answers_for_it_if_it_was_judged(
    unjudged: tuple[str, ...], expected: tuple[str, str]
) -> None:
    reference = MemoryArchive(dict.fromkeys(ALL, V), is_ordered=True)
    natural = MemoryArchive(dict.fromkeys(ALL, V + 1))
    found = compare(reference, natural)
    argument = OwnError("0/n/input.x", "@root", "argument", False, 0.8, None, "diverged", (), False)
    run = InjectedRun(Path("injected.h5"), reference, natural, found, (argument,), (), unjudged)
    source = evidence_of_injection(run, found)
    (evidence,) = source.evidence
    assert (evidence.module, evidence.keys[0]) == expected
    assert source.unjudged == unjudged


@pytest.mark.spec("LCL-312")
@pytest.mark.parametrize(
    ("module", "key", "accused", "expected"),
    [
        pytest.param("a.m", "0/a.m/output", ("a",), ["a.m"], id="within"),
        pytest.param("b.m", "0/b.m/output", ("a",), ["a"], id="elsewhere"),
        pytest.param("a.m", "0/a.n/output", ("a",), ["a"], id="judged"),
        pytest.param("a.m", "0/a.m/output", ("a", "c"), ["a", "c"], id="several"),
    ],
)
def test_the_free_runs_accuse_within_a_module_what_could_not_be_judged_there(
    module: str, key: str, accused: tuple[str, ...], expected: list[str]
) -> None:
    archive = MemoryArchive(dict.fromkeys(ALL, V))

    def evidence(of: str, text: str) -> Evidence:
        return Evidence(of, (text,), "diverged", (), None, None, "")

    injected = tuple(evidence(one, f"0/{one}/output") for one in accused)
    sources = (
        EvidenceSource("injection", archive, archive, None, injected),
        EvidenceSource("archives", archive, archive, None, (evidence(module, key),)),
    )
    found = compare(archive, archive)
    unjudged = "0/a.m/output", "0/b.m/output"
    run = InjectedRun(Path("injected.h5"), archive, archive, found, (), ("0/a.m/input.y",), unjudged)
    merged = with_modules_within(*sources, run)
    assert [one.module for source in merged for one in source.evidence] == expected


@pytest.mark.spec("LCL-313")
@pytest.mark.parametrize("is_handed_on", [False, True])
def test_a_result_of_which_the_code_around_makes_what_is_right_accuses_nobody(is_handed_on: bool) -> None:
    """The scores of a router, of which its caller makes shares; or which the next module is given."""
    given, scores, shares, made = (np.roll(V, i) * (i + 1) for i in range(4))
    tensors = {
        "0/@root/input.x": given,
        "0/a/input.x": given,
        "0/a.r/input.x": given,
        "0/a.r/output": scores,
        "0/a.e/input.x": scores if is_handed_on else shares,
        "0/a.e/output": made,
        "0/a/output": made * 2,
        "0/@root/output": made * 2,
    }
    natural = {**tensors, "0/a.r/output": scores + 1}
    if is_handed_on:
        natural["0/a.e/input.x"] = scores + 1
    wrong = {key: tensor if key.endswith("root/input.x") else tensor[::-1] for key, tensor in tensors.items()}
    reference = MemoryArchive(tensors, is_ordered=True)
    found, free = (compare(reference, MemoryArchive(run)) for run in (natural, wrong))
    own = OwnError("0/a.r/output", "a.r", "result", True, 0.8, None, "diverged", (), False)
    around = OwnError("0/a/output", "a", "result", False, 0.0, None, "identical", (), False)
    for errors, is_judged in (((own, around), True), ((own,), False)):
        run = InjectedRun(Path("injected.h5"), reference, MemoryArchive(natural), found, errors, ())
        source = evidence_of_injection(run, replace(free, divergence=None))
        accused = [one.module for one in source.evidence]
        assert accused == ([] if is_judged and not is_handed_on else ["a.r"])
