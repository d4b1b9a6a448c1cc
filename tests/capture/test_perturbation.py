"""Baselines from perturbed inputs, where only one precision can run."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import tensorcap
from tensorcap.adapters import adapter_named
from tensorcap.session import Recipe, capture_workload
from tensorcap.workload import Workload
from tensorcap_formats.errors import UsageError


@pytest.mark.spec("POL-64")
@pytest.mark.parametrize(("dtype", "epsilon"), [("bfloat16", 2**-7), ("float32", 2**-23)])
def test_every_floating_input_is_off_by_the_machine_epsilon(dtype: str, epsilon: float) -> None:
    model = nn.Linear(4, 4)
    x, count = torch.tensor([[1.0, -2.0, 4.0, 8.0]]), torch.tensor([3])
    found = adapter_named("torch").perturb(Workload(model, {"input": x, "count": count}), dtype)
    assert isinstance(found.inputs, dict)
    relative = (found.inputs["input"] / x - 1).double()
    assert relative.abs().numpy() == pytest.approx(np.full((1, 4), epsilon), rel=1e-6)
    assert len(set(relative.sign().flatten().tolist())) == 2  # up and down
    assert found.inputs["count"] is count
    assert x.tolist() == [[1.0, -2.0, 4.0, 8.0]]


@pytest.mark.spec("POL-64")
def test_of_token_ids_the_embedding_is_perturbed(tmp_path: Path) -> None:
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    pytest.importorskip("transformers")
    recipe = Recipe(str(tmp_path), {"input_ids": "1,2,3", "random_weights": 0})
    plain, perturbed = tmp_path / "plain.h5", tmp_path / "perturbed.h5"
    capture_workload(recipe.build(), plain)
    other = recipe.changed(perturb="bfloat16")
    capture_workload(other.build(), perturbed, run={"workload": other.describe()})
    with tensorcap.open_archive(plain) as one, tensorcap.open_archive(perturbed) as two:
        key = "0/model.embed_tokens/output"
        ours, theirs = (archive.load(archive.get(key)) for archive in (one, two))
        assert np.abs(theirs / ours - 1) == pytest.approx(np.full(ours.shape, 2**-7), rel=1e-4)
        assert two.run["workload"]["options"]["perturb"] == "bfloat16"
    comparison = tensorcap.compare(plain, perturbed, baseline=perturbed, compute_dtype="bfloat16")
    ratios = [pair.baseline for pair in comparison.pairs if pair.baseline is not None]
    assert {ratio.r for ratio in ratios} == {1.0}


def test_a_model_without_anything_to_perturb_is_refused() -> None:
    workload = Workload(nn.ReLU(), {"input": torch.tensor([1])})
    with pytest.raises(UsageError, match="has no floating input and no embedding to perturb"):
        adapter_named("torch").perturb(workload, "bfloat16")
    with pytest.raises(UsageError, match="'int8' is no floating dtype"):
        adapter_named("torch").perturb(workload, "int8")
