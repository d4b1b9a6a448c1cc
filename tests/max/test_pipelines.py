"""MAX's own pipelines by name, verified against transformers on real MAX."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tensorcap import open_archive
from tensorcap.adapters.max.pipeline import load_pipeline
from tensorcap.workload import StoredInput
from tensorcap_formats.dtypes import DTYPES
from tensorcap_formats.errors import UsageError
from tests.max import tiny_folders

ROOT = Path(__file__).parents[2]
Make = Callable[[Path], Path]
FOLDERS: dict[str, Make] = {
    "bert": tiny_folders.bert,
    "llama": tiny_folders.llama,
}
PLANTED = {  # a weight of each, and the module of MAX that has it
    "bert": ("encoder.layer.1.output.dense.weight", "encoder.layer.1.output.dense"),
    "llama": ("model.layers.1.mlp.down_proj.weight", "layers.1.mlp.down_proj"),
}
FAMILIES = [
    pytest.param(name, marks=[pytest.mark.entries, pytest.mark.xdist_group(name)]) for name in FOLDERS
]


def tcap(folder: Path, *arguments: str, status: int = 0) -> subprocess.CompletedProcess[str]:
    """Run a command in a folder, in a process of its own, since a compiler cannot be interrupted."""
    paths = os.pathsep.join([*(str(ROOT / part) for part in (".", "formats", "cli")), *sys.path])
    done = subprocess.run(
        [sys.executable, "-m", "tensorcap_cli", *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": paths, "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == status, done.stdout + done.stderr
    return done


def report(folder: Path, *arguments: str, status: int) -> dict[str, Any]:
    """The report of a verification."""
    tcap(folder, "verify", *arguments, "--prompt", tiny_folders.PROMPT, "-o", "report", status=status)
    verification: dict[str, Any] = json.loads((folder / "report/verify.json").read_text(encoding="utf-8"))
    return verification


@pytest.mark.spec("MAX-100", "MAX-101")
@pytest.mark.parametrize("family", FAMILIES)
def test_a_pipeline_of_max_computes_what_transformers_does(tmp_path: Path, family: str) -> None:
    FOLDERS[family](tmp_path / "model")
    verification = report(tmp_path, "max:model", "--encoding", "float32", status=0)
    assert verification["weights"]["unlike"] == []
    assert verification["suspects"] == []
    with open_archive(tmp_path / "report/target.h5") as archive:
        assert archive.info.model_class.startswith("max.pipelines.architectures.")
        ids = next(r for r in archive.records if r.key.slot in ("input.input_ids", "input.tokens"))
        expected = {"bert": [2, *tiny_folders.IDS, 3], "llama": [4, *tiny_folders.IDS]}[family]
        assert archive.read(ids).ravel().tolist() == expected


@pytest.mark.spec("MAX-100")
@pytest.mark.parametrize("family", FAMILIES)
def test_a_weight_that_differs_in_the_targets_folder_is_named(tmp_path: Path, family: str) -> None:
    name, module = PLANTED[family]
    folder = FOLDERS[family](tmp_path / "model")
    tiny_folders.with_changed(folder, tmp_path / "wrong", name, lambda weight: weight * 1.5)
    verification = report(tmp_path, "model", "max:wrong", "--encoding", "float32", status=1)
    assert [key.split("/")[1] for key in verification["weights"]["unlike"]] == [name.rpartition(".")[0]]
    assert [suspect["module"] for suspect in verification["suspects"]] == [name.rpartition(".")[0]]
    assert verification["suspects"][0]["target"]["keys"] == [f"0/{module}/output"]
    for scenario in ("without_injection", "with_injection"):
        assert verification[scenario]["divergence"]["module"] == name.rpartition(".")[0]


@pytest.mark.entries
@pytest.mark.xdist_group("bert")
@pytest.mark.spec("MAX-100", "MAX-102", "MAX-112", "MAX-31")
def test_a_pipeline_by_name_is_captured_injected_and_bisected_with_the_graphs_compiled_ahead(
    tmp_path: Path,
) -> None:
    tiny_folders.bert(tmp_path / "model")
    options = ("--encoding", "float32")
    warmed = json.loads(tcap(tmp_path, "max", "warm", "model", *options, "--json").stdout)["graphs"]
    texts = [graph["text"] for graph in warmed]
    assert len(texts) == 2

    run = (*options, "--prompt", tiny_folders.PROMPT)
    tcap(tmp_path, "capture", "max", "model", *run, "-o", "free.h5")
    tcap(tmp_path, "inject", "max:model", *run, "-o", "own.h5")
    for name in ("free.h5", "own.h5"):
        with open_archive(tmp_path / name) as archive:
            graph = archive.run["graph"]
            assert f"BertModel with {graph['taps']} taps and switches at {graph['switches']} values" in texts

    name, module = PLANTED["bert"]
    tiny_folders.with_changed(tmp_path / "model", tmp_path / "wrong", name, lambda weight: weight * 1.5)
    bisection = tcap(tmp_path, "bisect", "max:model", "--target-model", "max:wrong", *run, status=1)
    assert f"GUILTY  {module}: its own result is wrong" in bisection.stdout
    assert f"tcap verify model max:wrong {shlex.join(run)} -o report" in bisection.stdout + bisection.stderr


@pytest.mark.spec("MAX-100", "INJ-110", "CMP-221")
@pytest.mark.parametrize("family", FAMILIES)
def test_what_one_side_alone_has_of_a_right_pipeline_is_explained_in_each_command(
    tmp_path: Path, family: str
) -> None:
    """Masks that torch makes within, and caches, numbers of layers and frequencies that MAX hands on."""
    FOLDERS[family](tmp_path / "model")
    run = ("--encoding", "float32", "--prompt", tiny_folders.PROMPT)
    injection = tcap(tmp_path, "inject", "max:model", *run, "-o", "own.h5")
    assert "without a counterpart, which is explained: " in injection.stderr
    assert "not in the archive" not in injection.stderr
    comparison = tcap(tmp_path, "compare", "own.reference.h5", "own.h5")
    assert "EXPLAINED" in comparison.stdout
    assert "Every reference tensor" in tcap(tmp_path, "align", "own.reference.h5", "own.h5").stdout


@pytest.mark.slow
@pytest.mark.parametrize("verb", ["inject", "bisect"])
def test_what_max_refuses_of_a_pipeline_is_a_line_before_the_reference_is_run(
    tmp_path: Path, verb: str
) -> None:
    tiny_folders.mixtral(tmp_path / "model")
    output = ("-o", "own.h5") if verb == "inject" else ()
    done = tcap(tmp_path, verb, "max:model", "--prompt", tiny_folders.PROMPT, *output, status=2)
    assert "MAX has no pipeline for MixtralForCausalLM" in done.stderr
    assert not (tmp_path / "own.reference.h5").exists()


@pytest.mark.slow
@pytest.mark.spec("MAX-105")
@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        pytest.param(
            tiny_folders.mixtral, {}, "MAX has no pipeline for MixtralForCausalLM", id="architecture"
        ),
        pytest.param(
            tiny_folders.gemma,
            {"encoding": "float32"},
            "Gemma3ForCausalLM of MAX has no encoding 'float32', expected one of: bfloat16",
            id="encoding",
        ),
        pytest.param(
            tiny_folders.llama, {"encoding": "float31"}, "has no encoding 'float31'", id="no-such-encoding"
        ),
        pytest.param(tiny_folders.qwen3, {}, "runs on accelerators alone", id="needs-accelerators"),
        pytest.param(tiny_folders.llama, {"devices": "gpu"}, "MAX finds no accelerator here", id="device"),
        pytest.param(tiny_folders.llama, {"devices": "tpu"}, "'tpu'", id="no-such-device"),
        pytest.param(tiny_folders.llama, {"random_weights": 0}, "--random-weights is not for", id="option"),
        pytest.param(tiny_folders.llama, {"input_ids": "1,2;3,4"}, "2 rows of token ids", id="rows"),
        pytest.param(tiny_folders.llama, {"input_ids": "64"}, "expected numbers from 0 to 63", id="no-token"),
        pytest.param(tiny_folders.llama, {"num_hidden_layers": 3}, "expected 1 to 2", id="layers"),
    ],
)
def test_a_pipeline_that_cannot_be_made_is_one_line(
    tmp_path: Path, make: Make, options: dict[str, Any], message: str
) -> None:
    folder = str(make(tmp_path / "model"))
    with pytest.raises(UsageError) as failure:
        load_pipeline(folder, {"input_ids": "1,2", **options})
    assert message in str(failure.value)
    assert "\n" not in str(failure.value)


@pytest.mark.slow
@pytest.mark.spec("MAX-102", "MAX-103", "MAX-104")
def test_archived_token_ids_are_run_without_padding_in_the_first_layers(tmp_path: Path) -> None:
    folder = str(tiny_folders.llama(tmp_path / "model"))
    ids, mask = np.array([[0, 0, 4, 6, 7]]), np.array([[0, 0, 1, 1, 1]])
    inputs = {
        "input_ids": StoredInput(ids, DTYPES["int64"]),
        "attention_mask": StoredInput(mask, DTYPES["int64"]),
    }
    workload = load_pipeline(folder, {"num_hidden_layers": 1}, inputs)
    assert isinstance(workload.inputs, tuple)
    assert workload.inputs[0].to_numpy().tolist() == [4, 6, 7]
    assert len(workload.model.module.layers) == 1
    assert not workload.model.keeps_state


@pytest.mark.slow
@pytest.mark.spec("MAX-104")
@pytest.mark.parametrize(
    ("options", "left_out"),
    [
        pytest.param({"num_hidden_layers": 1}, {"pooler.dense.weight", "pooler.dense.bias"}, id="first-look"),
        pytest.param({"config": {"layer_norm_eps": 1e-3}}, set(), id="another-configuration"),
    ],
)
def test_the_head_that_an_architecture_leaves_out_is_told_of_its_first_layers_too(
    tmp_path: Path, options: dict[str, Any], left_out: set[str]
) -> None:
    folder = str(tiny_folders.bert(tmp_path / "model"))
    workload = load_pipeline(folder, {"input_ids": "1,2", **options})
    assert set(workload.model.left_out_weights) == left_out
