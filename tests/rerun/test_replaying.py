"""Seeded mistakes in a Llama, found by its own model on the target's values, or by archives alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tensorcap.comparison import compare
from tensorcap.localization import localize
from tensorcap.rerun import OwnError, Replay, replay, shares_off
from tensorcap.session import capture_workload
from tensorcap.workload import Workload
from tensorcap_formats.errors import UsageError
from tests.localization.llama import (
    NORM,
    Plant,
    gelu_tanh,
    half_scale,
    llama,
    low_sum,
    narrow,
    normed,
    other_theta,
    without_activation,
    workload,
)


@pytest.fixture
def captured(tmp_path: Path) -> Callable[..., tuple[Path, Path]]:
    def make(plant: Plant | None, activation: str = "silu", *, is_narrow: bool = True) -> tuple[Path, Path]:
        capture_workload(workload(llama(activation)), tmp_path / "ref.h5")
        target = narrow(llama(activation)) if is_narrow else llama(activation)
        if plant is not None:
            plant(target)
        capture_workload(workload(target), tmp_path / "tgt.h5")
        return tmp_path / "ref.h5", tmp_path / "tgt.h5"

    return make


def own(found: Replay, key: str) -> OwnError:
    return next(one for one in found.own_errors if one.key == key)


@pytest.mark.spec("RPL-8")
@pytest.mark.parametrize("plant", [None, half_scale], ids=["right", "wrong"])
def test_scores_that_an_open_attention_rounds_are_no_mistake(tmp_path: Path, plant: Plant | None) -> None:
    def make() -> Any:
        model = llama("silu")
        with torch.no_grad():  # scores of some tens, which bfloat16 rounds by a tenth
            for layer in model.model.layers:
                layer.self_attn.q_proj.weight.mul_(6)
        return model

    capture_workload(workload(make()), tmp_path / "ref.h5")
    target = narrow(make())
    target.set_attn_implementation("eager")
    if plant is not None:
        plant(target)
    capture_workload(workload(target), tmp_path / "tgt.h5")
    found = replay(tmp_path / "ref.h5", tmp_path / "tgt.h5", reference_model=workload(make()))
    assert {one.module for one in found.bad} == (set() if plant is None else {"model.layers.1.self_attn"})


@pytest.mark.spec("RPL-2")
@pytest.mark.parametrize("is_narrow", [False, True], ids=["float32", "bfloat16"])
def test_roundings_of_a_reference_in_low_precision_are_not_the_targets(
    tmp_path: Path, is_narrow: bool
) -> None:
    reference = narrow(llama("gelu_new"))  # each of its steps is rounded
    capture_workload(workload(reference), tmp_path / "ref.h5")
    for name, plant in (("right", None), ("wrong", half_scale)):
        target = narrow(llama("gelu_new")) if is_narrow else llama("gelu_new")
        if plant is not None:
            plant(target)
        capture_workload(workload(target), tmp_path / f"{name}.h5")
    model = workload(narrow(llama("gelu_new")))
    assert localize(tmp_path / "ref.h5", tmp_path / "right.h5", reference_model=model).suspects == ()
    wrong = localize(tmp_path / "ref.h5", tmp_path / "wrong.h5", reference_model=model)
    assert [one.module for one in wrong.suspects] == ["model.layers.1.self_attn"]
    assert next(model.model.parameters()).dtype == torch.bfloat16


@pytest.mark.spec("RPL-1", "RPL-6", "RPL-7")
@pytest.mark.parametrize(
    ("plant", "module"),
    [
        pytest.param(normed(low_sum), NORM, id="norm-variance-in-bf16"),
        pytest.param(
            normed(lambda x: (x * x).float().mean(-1, keepdim=True)), NORM, id="norm-squares-in-bf16"
        ),
        pytest.param(without_activation, "model.layers.1.mlp.act_fn", id="no-activation"),
        pytest.param(other_theta, "model.rotary_emb", id="rope-theta"),
        pytest.param(half_scale, "model.layers.1.self_attn", id="attention-scale"),
    ],
)
def test_only_the_wrong_module_makes_an_error_of_its_own(captured: Any, plant: Plant, module: str) -> None:
    reference, target = captured(plant)
    found = replay(reference, target, reference_model=workload(llama()))
    assert {one.module for one in found.bad} == {module}
    assert found.exit_status == 1


@pytest.mark.spec("RPL-7")
def test_a_norm_that_rounds_less_than_the_model_is_reported_but_no_suspect(captured: Any) -> None:
    mean = normed(lambda x: x.float().pow(2).mean(-1, keepdim=True), rounds=False)
    reference, target = captured(mean)
    found = replay(reference, target, reference_model=workload(llama()))
    assert not found.bad
    ratio = own(found, f"0/{NORM}/output").ratio
    assert ratio is not None
    assert ratio < 0.9
    assert [one.key for one in found.precise] == [f"0/{NORM}/output"]
    assert f"{NORM}: rounds less than the reference's model does in bfloat16" in found.notes[-1]
    reference, target = captured(None)
    assert not replay(reference, target, reference_model=workload(llama())).precise


@pytest.mark.spec("RPL-9")
def test_gelu_tanh_for_erf_in_bfloat16_is_seen_in_bits_alone(captured: Any) -> None:
    reference, target = captured(gelu_tanh, "gelu")
    found = replay(reference, target, reference_model=workload(llama("gelu")))
    assert [one.key for one in found.bad] == ["0/model.layers.1.mlp.act_fn/output"]
    assert {f.test for f in found.bad[0].findings if f.status != "within-rounding"} == {"ulp_share"}
    without = replay(reference, target, reference_model=workload(llama("gelu")), twin=False)
    assert not without.bad


@pytest.mark.spec("RPL-9")
def test_elements_count_that_are_neither_the_twins_nor_the_exact_ones_rounded() -> None:
    exact = np.array([1.0, 1.003, 2.0, 4.0])
    twin = np.array([1.0, 1.0078125, 2.0, 4.0])
    target = np.array([1.0, 1.0, 2.015625, 4.125])  # equal; rounded once; 1 ulp off; 4 ulp off
    assert shares_off(exact, twin, target, 2.0**-8) == (0.25, 0.5)


@pytest.mark.spec("RPL-6")
def test_float32_runs_are_held_against_wide_limits(captured: Any) -> None:
    reference, target = captured(gelu_tanh, "gelu", is_narrow=False)
    found = replay(reference, target, reference_model=workload(llama("gelu")))
    assert [(one.module, one.status) for one in found.bad] == [("model.layers.1.mlp.act_fn", "diverged")]
    assert found.precision == "float32"


@pytest.mark.spec("RPL-3")
def test_a_model_gives_its_own_run_back_bit_for_bit(captured: Any) -> None:
    reference, _ = captured(None)
    found = replay(reference, reference_model=workload(llama()))
    assert {one.status for one in found.own_errors} == {"identical"}
    assert found.exit_status == 0


@pytest.mark.spec("RPL-3")
def test_another_model_is_not_believed(captured: Any) -> None:
    reference, _ = captured(None)
    model = llama()
    half_scale(model)
    found = replay(reference, reference_model=workload(model))
    assert found.exit_status == 1
    assert "believe nothing else" in found.notes[0]


@pytest.mark.spec("RPL-4")
def test_arguments_that_the_target_lacks_stay_natural_and_are_counted(captured: Any, tmp_path: Path) -> None:
    reference, _ = captured(None)
    target = tmp_path / "less.h5"
    capture_workload(workload(narrow(llama())), target, exclude="*.q_proj/input*")
    found = replay(reference, target, reference_model=workload(llama()))
    assert len(found.natural) == 3
    assert not found.bad


@pytest.mark.spec("RPL-4", "LCL-6")
def test_a_result_that_the_target_lacks_is_no_success(captured: Any, tmp_path: Path) -> None:
    reference, _ = captured(None)
    target = tmp_path / "less.h5"
    capture_workload(workload(narrow(llama())), target, exclude="*layers.2.mlp.down_proj/output")
    lacking = "0/model.layers.2.mlp.down_proj/output"
    found = replay(reference, target, reference_model=workload(llama()))
    assert (found.bad, found.lacking, found.exit_status) == ([], (lacking,), 1)
    assert any(lacking in note for note in found.notes)
    grown = {pair.key for pair in compare(reference, target).pairs if pair.status == "suspect"}
    for model in (workload(llama()), None):
        told = localize(reference, target, reference_model=model)
        assert (told.suspects, told.exit_status) == ((), 1)
        assert set(told.open) == {lacking} | (set() if model else grown)
        assert told.open[0] in told.notes[-1]


class Tables(nn.Module):
    """Two tables: each of a module of its own, or one module that is called twice, the other table first."""

    def __init__(self, is_upgraded: bool) -> None:
        super().__init__()
        self.is_upgraded = is_upgraded
        self.table = Table() if is_upgraded else Table(2.0)
        if not is_upgraded:
            self.local_table = Table(3.0)
        self.one, self.other = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.is_upgraded:
            local, whole = self.table(x, 3.0), self.table(x, 2.0)
        else:
            whole, local = self.table(x), self.local_table(x)
        out: torch.Tensor = self.one(x) * whole + self.other(x) * local
        return out


class Table(nn.Module):
    def __init__(self, base: float = 0.0) -> None:
        super().__init__()
        self.base = base

    def forward(self, x: torch.Tensor, base: float = 0.0) -> torch.Tensor:
        return torch.cos(torch.arange(x.shape[-1]) / (base or self.base))


@pytest.mark.spec("RPL-30")
@pytest.mark.parametrize("factor", [1.0, 1.1])
def test_calls_of_a_module_that_another_version_calls_more_often_are_not_replayed(
    tmp_path: Path, factor: float
) -> None:
    def made(is_upgraded: bool) -> Workload:
        torch.manual_seed(0)
        return Workload(Tables(is_upgraded).eval(), (torch.linspace(-1, 1, 32).reshape(4, 8),))

    reference, target = tmp_path / "ref.h5", tmp_path / "tgt.h5"
    capture_workload(made(False), reference)
    port = made(True)
    with torch.no_grad():
        port.model.other.weight.mul_(factor)
    capture_workload(port, target)
    found = localize(reference, target, reference_model=made(True))  # the code that was upgraded
    assert [one.module for one in found.suspects] == ([] if factor == 1 else ["other"])
    assert found.exit_status == (factor != 1)
    assert any("calls table more or less often" in note for note in found.notes)


class Narrow(nn.Module):
    """A product through a narrow space, which one version of the code computes with an axis more."""

    def __init__(self, is_upgraded: bool) -> None:
        super().__init__()
        self.is_upgraded = is_upgraded
        self.down, self.norm, self.up, self.out = (
            nn.Linear(8, 6),
            nn.LayerNorm(6),
            nn.Linear(6, 8),
            nn.Linear(8, 8),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        low = self.norm(self.down(x))
        up = self.up(low[:, None])[:, 0] if self.is_upgraded else self.up(low)
        out: torch.Tensor = x + self.out(up)
        return out


@pytest.mark.spec("RPL-102")
@pytest.mark.parametrize("wrong", ["", "down", "norm", "up", "out"])
def test_a_tensor_that_another_version_has_in_another_shape_stays_natural(tmp_path: Path, wrong: str) -> None:
    def made(is_upgraded: bool) -> Workload:
        torch.manual_seed(0)
        return Workload(Narrow(is_upgraded).eval(), (torch.linspace(-1, 1, 64).reshape(2, 4, 8).sin(),))

    reference, target = tmp_path / "ref.h5", tmp_path / "tgt.h5"
    capture_workload(made(False), reference)
    port = made(False)
    if wrong:
        with torch.no_grad():
            bias = port.model.get_submodule(wrong).bias
            bias.add_(torch.linspace(-1, 2, len(bias)))
    capture_workload(port, target)
    result = localize(reference, target, reference_model=made(True))  # the code that was upgraded
    assert [one.module for one in result.suspects] == ([wrong] if wrong not in ("", "up") else [])
    assert result.exit_status == bool(wrong)  # of up nothing can be said, nor of who uses its result
    note = "left natural: 2 tensors, first 0/up/input.input."
    assert any(text.endswith(note) for text in result.notes)


@pytest.mark.spec("RPL-102")
def test_nothing_is_said_of_what_is_made_of_an_argument_of_another_shape(tmp_path: Path) -> None:
    class Port(Narrow):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            low = 1.5 * self.norm(self.down(x))  # a mistake between two modules
            out: torch.Tensor = x + self.out(self.up(low))
            return out

    def made(kind: type[Narrow], is_upgraded: bool) -> Workload:
        torch.manual_seed(0)
        return Workload(kind(is_upgraded).eval(), (torch.linspace(-1, 1, 64).reshape(2, 4, 8).sin(),))

    reference, target = tmp_path / "ref.h5", tmp_path / "tgt.h5"
    capture_workload(made(Narrow, False), reference)
    capture_workload(made(Port, False), target)
    result = localize(reference, target, reference_model=made(Narrow, True))
    assert (result.suspects, result.exit_status) == ((), 1)


@pytest.mark.spec("RPL-102")
def test_another_model_and_other_inputs_do_not_fit(tmp_path: Path) -> None:
    def made(width: int, rows: int) -> Workload:
        torch.manual_seed(0)
        layers = nn.Sequential(
            nn.Linear(8, width), nn.Linear(width, width), nn.Linear(width, width), nn.Linear(width, 8)
        )
        return Workload(layers, (torch.ones(rows, 8),))

    reference, target = tmp_path / "ref.h5", tmp_path / "tgt.h5"
    capture_workload(made(4, 2), reference)
    capture_workload(made(4, 2), target)
    with pytest.raises(UsageError, match=r"does not fit: \[2, 4\] in the archive, \[2, 5\] in the model"):
        replay(reference, target, reference_model=made(5, 2))
    with pytest.raises(UsageError, match=r"does not fit: \[2, 8\] in the archive, \[3, 8\] in the model"):
        replay(reference, target, reference_model=made(4, 3))


@pytest.mark.spec("RPL-4")
def test_archives_with_nothing_in_common_are_refused(captured: Any, tmp_path: Path) -> None:
    reference, _ = captured(None)
    capture_workload(Workload(nn.Sequential(nn.Linear(3, 3)), (torch.ones(1, 3),)), tmp_path / "o.h5")
    with pytest.raises(UsageError, match="has no argument or result"):
        replay(reference, tmp_path / "o.h5", reference_model=workload(llama()), mapping="none")


@pytest.mark.spec("RPL-11", "LCL-5")
def test_a_nan_is_blamed_on_the_module_that_makes_it(captured: Any) -> None:
    def plant(model: Any) -> None:
        with torch.no_grad():
            model.model.layers[1].mlp.up_proj.weight[3] = float("nan")

    reference, target = captured(plant)
    found = localize(reference, target, reference_model=workload(llama()))
    assert [s.module for s in found.suspects] == ["model.layers.1.mlp.up_proj"]
    assert found.nonfinite is not None
    assert found.nonfinite.key == "0/model.layers.1.mlp.up_proj/output"
    assert found.nonfinite.module == "model.layers.1.mlp.up_proj"


@pytest.mark.spec("LCL-1", "LCL-2", "LCL-3")
def test_suspects_are_ranked_with_their_errors_and_explained(captured: Any) -> None:
    def plant(model: Any) -> None:
        half_scale(model)
        without_activation(model)

    reference, target = captured(plant, is_narrow=False)
    found = localize(reference, target, reference_model=workload(llama()))
    assert [s.module for s in found.suspects] == ["model.layers.1.mlp.act_fn", "model.layers.1.self_attn"]
    leaf, attention = found.suspects
    assert leaf.own is not None
    assert leaf.inherited is not None
    assert leaf.total is not None
    assert leaf.own > 0.1
    assert leaf.inherited > 0.01
    assert attention.key == "0/model.layers.1.self_attn.o_proj/input.input"
    assert attention.diagnosis is not None
    assert attention.diagnosis.kind == "attention-scale"


@pytest.mark.spec("LCL-4", "LCL-23")
def test_archives_alone_name_what_stands_out_and_say_so(captured: Any) -> None:
    reference, target = captured(without_activation)
    found = localize(reference, target)
    assert found.by == "archives"
    assert found.suspects[0].module == "model.layers.1.mlp.act_fn"
    assert found.notes[0].startswith("Before any tensor: modules model.layers.1.mlp.act_fn: SiLUActivation")
    after = [note for note in found.notes if not note.startswith("Before any tensor: ")]
    assert "No model was replayed" in after[0]


@pytest.mark.spec("LCL-1", "LCL-4")
@pytest.mark.parametrize("has_model", [True, False])
def test_a_correct_port_has_no_suspect(captured: Any, has_model: bool) -> None:
    reference, target = captured(None)
    found = localize(reference, target, reference_model=workload(llama()) if has_model else None)
    assert not found.suspects
    # errors grow past what archives alone can excuse; the replay proves that no module makes them
    assert found.exit_status == (0 if has_model else compare(reference, target).exit_status)


def test_a_replay_needs_a_model(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no model, expected reference_model or target_model"):
        replay(tmp_path / "ref.h5")
