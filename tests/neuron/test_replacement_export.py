"""`tcap export --format neuron` writes what NxDI's tensor replacement reads."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.cli.conftest import Tcap, folder, tcap, tcap_json, write

__all__ = ["folder", "tcap", "tcap_json", "write"]

# What NxDI looks for in the folder: a step and a module (its README names the layout).
FILE = re.compile(
    r"^captured_tensors_(?:cte|ctx|tkg)_step_(\d+)_module_([\w\.]+?)(?:[._]outputs?(?:_\d+)?)\.pt$"
)
GATE = np.arange(12, dtype=np.float32).reshape(2, 3, 2)
TENSORS = {
    "0/model.layers.0.mlp.gate/output": GATE,
    "0/model.layers.0.mlp/output": GATE,
    "1/model.layers.0.mlp.gate/output": GATE[:, :1],
    "1/model.layers.0.mlp.gate/input.x": GATE[:, :1],
}
MAP = """
[[pair]]
reference = "model.layers.{i}.mlp.gate"
target = "layers.{i}.mlp.router.linear_router"
i = "0"
"""


@pytest.mark.spec("NRN-81")
def test_results_become_rows_of_channels_under_the_names_of_the_port(
    folder: Path, write: Callable[..., Path], tcap: Tcap
) -> None:
    write("ref.h5", TENSORS, run={"phases": ["prefill", "decode"], "steps": 2})
    (folder / "map.toml").write_text(MAP)
    result = tcap("export", "ref.h5", "refs", "--format", "neuron", "--only", "*/output", "--map", "map.toml")
    steps = {}
    for path in sorted((folder / "refs").iterdir()):
        match = FILE.match(path.name)
        assert match is not None
        steps[int(match[1]), match[2]] = torch.load(path, weights_only=True)
    assert list(steps) == [(1, "layers.0.mlp.router.linear_router"), (2, "layers.0.mlp.router.linear_router")]
    assert torch.equal(steps[1, "layers.0.mlp.router.linear_router"], torch.arange(12.0).reshape(6, 2))
    assert steps[2, "layers.0.mlp.router.linear_router"].tolist() == [[0.0, 1.0], [6.0, 7.0]]
    assert "tf_map={1: ['layers.0.mlp.router.linear_router'], 2: [" in result.stdout
    names = sorted(path.name.split("_step")[0] for path in (folder / "refs").iterdir())
    assert names == ["captured_tensors_cte", "captured_tensors_tkg"]


@pytest.mark.spec("NRN-81")
def test_without_a_map_names_stay(
    folder: Path, write: Callable[..., Path], tcap_json: Callable[..., Any]
) -> None:
    write("ref.h5", TENSORS)
    only = ("--only", "0/*/output")
    content = tcap_json("export", "ref.h5", "refs", "--format", "neuron", *only)
    assert content["tf_map"] == {"1": ["model.layers.0.mlp.gate", "model.layers.0.mlp"]}
    assert (folder / "refs/captured_tensors_cte_step_1_module_model.layers.0.mlp_output.pt").exists()


@pytest.mark.spec("NRN-81")
@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        pytest.param({"0/a/input.x": GATE}, "is no result of the first call", id="argument"),
        pytest.param({"0/a@1/output": GATE}, "is no result of the first call", id="second-call"),
        pytest.param({"rank1/0/a/output": GATE}, "is no result of the first call", id="rank"),
        pytest.param({"0/a/output": GATE[0, 0]}, "is of shape [2], expected tokens and channels", id="axes"),
        pytest.param({"0/a-b/output": GATE}, "reads no module of the name 'a-b'", id="name"),
        pytest.param(
            {"0/a/output": GATE, "1/a/output": GATE.astype(np.float16)}, "expected one dtype", id="dtypes"
        ),
    ],
)
def test_what_nxdi_does_not_replace_is_refused(
    folder: Path, write: Callable[..., Path], tcap: Tcap, tensors: Any, message: str
) -> None:
    write("ref.h5", tensors)
    result = tcap("export", "ref.h5", "refs", "--format", "neuron", status=2)
    assert message in result.stderr
    assert not (folder / "refs").exists()


@pytest.mark.spec("NRN-81")
def test_a_map_that_moves_elements_is_refused(folder: Path, write: Callable[..., Path], tcap: Tcap) -> None:
    write("ref.h5", TENSORS)
    (folder / "map.toml").write_text(
        '[[pair]]\nreference = ["a", "b"]\ntarget = "ab"\nsteps = ["concat 0"]\n'
    )
    result = tcap("export", "ref.h5", "refs", "--format", "neuron", "--map", "map.toml", status=2)
    assert "has several places or steps" in result.stderr
    result = tcap("export", "ref.h5", "refs", "--format", "max", "--map", "map.toml", status=2)
    assert "--map is for --format neuron" in result.stderr
