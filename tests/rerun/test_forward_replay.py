"""The target's own modules, run alone on what the reference's were given."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tensorcap.rerun import replay
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


class Renamed(nn.Module):
    """The same model under other names."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.port = model
        for layer in model.model.layers:
            layer.feed_forward = layer.mlp
            del layer._modules["mlp"]
            layer.__class__ = type("Block", (layer.__class__,), {"mlp": property(_feed_forward)})

    def forward(self, input_ids: Any) -> Any:
        return self.port(input_ids)


def _feed_forward(layer: Any) -> Any:
    return layer.feed_forward


@pytest.fixture
def reference(tmp_path: Path) -> Callable[..., Path]:
    def make(activation: str = "silu") -> Path:
        capture_workload(workload(llama(activation)), tmp_path / "ref.h5")
        return tmp_path / "ref.h5"

    return make


def port(plant: Plant | None = None, activation: str = "silu", *, is_narrow: bool = True) -> Workload:
    model = narrow(llama(activation)) if is_narrow else llama(activation)
    if plant is not None:
        plant(model)
    return workload(model)


@pytest.mark.spec("RPL-5")
@pytest.mark.parametrize("has_twin", [False, True])
@pytest.mark.parametrize("is_narrow", [False, True])
def test_a_correct_port_makes_no_error_of_its_own(reference: Any, is_narrow: bool, has_twin: bool) -> None:
    model = workload(llama()) if has_twin else None
    found = replay(reference(), target_model=port(is_narrow=is_narrow), reference_model=model)
    assert not found.bad
    assert (found.way, found.exit_status) == ("forward", 0)
    assert len(found.own_errors) > 100
    assert any("no twin" in note for note in found.notes) == (is_narrow and not has_twin)


@pytest.mark.spec("RPL-5", "RPL-10")
@pytest.mark.parametrize("is_narrow", [False, True])
@pytest.mark.parametrize(
    ("plant", "module"),
    [
        pytest.param(without_activation, "model.layers.1.mlp.act_fn", id="no-activation"),
        pytest.param(other_theta, "model.rotary_emb", id="rope-theta"),
        pytest.param(half_scale, "model.layers.1.self_attn", id="attention-scale"),
    ],
)
def test_only_the_wrong_module_makes_an_error(
    reference: Any, plant: Plant, module: str, is_narrow: bool
) -> None:
    found = replay(reference(), target_model=port(plant, is_narrow=is_narrow))
    assert {one.module for one in found.bad} == {module}
    assert found.exit_status == 1


@pytest.mark.spec("RPL-10")
@pytest.mark.parametrize(
    ("plant", "activation", "module"),
    [
        pytest.param(normed(low_sum), "silu", NORM, id="norm-variance-in-bf16"),
        pytest.param(gelu_tanh, "gelu", "model.layers.1.mlp.act_fn", id="gelu-tanh-for-erf"),
    ],
)
def test_the_twin_shows_what_roundings_hide(
    reference: Any, plant: Plant, activation: str, module: str
) -> None:
    archive = reference(activation)
    found = replay(archive, target_model=port(plant, activation), reference_model=workload(llama(activation)))
    assert {one.module for one in found.bad} == {module}


@pytest.mark.spec("RPL-5")
def test_a_port_of_other_names_is_run_through_the_mapping(reference: Any, tmp_path: Path) -> None:
    ids = workload(llama()).inputs["input_ids"]  # type: ignore[call-overload]  # a mapping
    archive = reference()
    right = Workload(Renamed(llama()), {"input_ids": ids})
    found = replay(archive, target_model=right)
    assert (found.bad, found.lacking, found.exit_status) == ([], (), 0)
    wrong = llama()
    without_activation(wrong)
    target = Workload(Renamed(wrong), {"input_ids": ids})
    capture_workload(right, tmp_path / "free.h5")  # names and shapes are all that counts of it
    for given in (None, tmp_path / "free.h5"):
        found = replay(archive, given, target_model=target)
        assert {one.module for one in found.bad} == {"model.layers.1.mlp.act_fn"}


@pytest.mark.spec("RPL-5")
def test_a_model_with_nothing_in_common_is_refused(reference: Any) -> None:
    other = Workload(nn.Sequential(nn.Linear(3, 3)), (torch.ones(1, 3),))
    with pytest.raises(UsageError, match="has no argument or result"):
        replay(reference(), target_model=other, mapping="none")


@pytest.mark.slow
@pytest.mark.spec("RPL-5", "RPL-10", "INJ-10")
@pytest.mark.parametrize("name", ["llama_rope_side_by_side", "llama_padded_vocabulary", "gpt2_gelu"])
def test_a_map_of_a_few_tensors_leaves_the_others_as_they_are(name: str, tmp_path: Path) -> None:
    from tests.zoo.catalogue import ENTRIES
    from tests.zoo.entry import Correct, build

    entry = ENTRIES[name]
    assert isinstance(entry, Correct)
    pair, mapping = build(entry, "bfloat16"), None
    capture_workload(pair.reference, tmp_path / "ref.h5")
    if entry.mapping is not None:
        mapping = tmp_path / "map.toml"
        mapping.write_text(entry.mapping)
    found = replay(
        tmp_path / "ref.h5", target_model=pair.target, reference_model=pair.reference, mapping=mapping
    )
    assert (found.bad, found.natural, found.exit_status) == ([], (), 0)
