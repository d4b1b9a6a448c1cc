"""`tcap tree`: archives and real models, and their differences."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import Result

Tcap = Callable[..., Result]
Shell = Callable[..., subprocess.CompletedProcess[str]]

_TEXT = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 7,
    "head_dim": 8,
}


@pytest.fixture
def models(folder: Path) -> Path:
    """Folders with configurations alone."""
    for name, config in {
        "llama": {"model_type": "llama", **_TEXT},
        "moe": {
            "model_type": "qwen3_moe",
            **_TEXT,
            "moe_intermediate_size": 16,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "mlp_only_layers": [3],
        },
        "t5": {
            "model_type": "t5",
            "is_encoder_decoder": True,
            "vocab_size": 64,
            "d_model": 32,
            "d_kv": 8,
            "d_ff": 64,
            "num_layers": 3,
            "num_heads": 4,
        },
        "whisper": {
            "model_type": "whisper",
            "is_encoder_decoder": True,
            "vocab_size": 64,
            "d_model": 32,
            "encoder_layers": 2,
            "decoder_layers": 3,
            "encoder_attention_heads": 2,
            "decoder_attention_heads": 2,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "pad_token_id": 0,
            "decoder_start_token_id": 1,
        },
    }.items():
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(
    ("model", "lines"),
    [
        pytest.param("llama", ["layers[0..6] (7): LlamaDecoderLayer"], id="llama"),
        pytest.param(
            "moe",
            ["layers[0..2,4..6] (6): Qwen3MoeDecoderLayer", "layers[3]: Qwen3MoeDecoderLayer"],
            id="dense-and-sparse",
        ),
        pytest.param("t5", ["block[0]: T5Block", "block[1..2] (2): T5Block"] * 2, id="t5"),
        pytest.param(
            "whisper",
            [
                "layers[0..1] (2): WhisperEncoderLayer",
                "layers[0..2] (3): WhisperDecoderLayer",
            ],
            id="whisper",
        ),
    ],
)
def test_real_models_fold_where_their_layers_are_alike(
    tcap: Tcap, models: Path, model: str, lines: list[str]
) -> None:
    pytest.importorskip("transformers")
    shown = [line.lstrip("│├└─ ") for line in tcap("tree", model).stdout.splitlines()]
    assert [line for line in shown if line.startswith(("layers[", "block["))] == lines


def test_an_archive_has_the_tree_of_its_model(tcap: Tcap, models: Path) -> None:
    pytest.importorskip("transformers")
    tcap("capture", "torch", "llama", "--random-weights", "0", "--input-ids", "1,2", "-o", "ref.h5")
    assert tcap("tree", "ref.h5", "--diff", "llama").stdout.endswith("The trees are equal.\n")
    one, other = (tcap("tree", path, "--format", "full").stdout for path in ("ref.h5", "llama"))
    assert one == other


def test_a_layer_less_and_another_activation_end_with_status_1(tcap: Tcap, models: Path) -> None:
    pytest.importorskip("transformers")
    (models / "port").mkdir()
    config = {"model_type": "llama", **_TEXT, "num_hidden_layers": 6, "hidden_act": "gelu"}
    (models / "port/config.json").write_text(json.dumps(config))
    shown = tcap("tree", "llama", "--diff", "port", status=1).stdout
    assert "unlike count: model.layers: 7: [0..6], in the target 6: [0..5]\n" in shown
    assert (
        "other activation: model.layers[0..5].mlp.act_fn: SiLUActivation, in the target GELUActivation\n"
        in shown
    )
    assert "other activation: config.hidden_act: silu, in the target gelu\n" in shown
    found = json.loads(tcap("tree", "llama", "--diff", "port", "--json", status=1).stdout)
    assert [one["kind"] for one in found["differences"]] == ["count", "activation", "activation"]
    assert found["differences"][1]["paths"] == [f"model.layers.{i}.mlp.act_fn" for i in range(6)]


def test_a_function_gives_a_live_model(tcap: Tcap, folder: Path) -> None:
    pytest.importorskip("torch")
    (folder / "port.py").write_text(
        "import tensorcap, torch\n"
        "def make():\n"
        "    model = torch.nn.Sequential(torch.nn.Linear(4, 2), torch.nn.ReLU())\n"
        "    return tensorcap.Workload(model, (torch.ones(1, 4),))\n"
    )
    assert tcap("tree", "port.py:make", "--params").stdout.splitlines()[1:] == [
        "model: Sequential",
        "├─ [0]: Linear  weight[2x4] bias[2]",
        "└─ [1]: ReLU",
    ]


def test_json_and_formats_are_parsed_through_a_pipe(folder: Path, shell: Shell, tcap: Tcap) -> None:
    tensors: dict[str, Any] = {"h.0.w": np.ones(2), "h.1.w": np.ones(2)}
    np.savez(folder / "a.npz", **tensors)
    done = shell(
        "tcap tree a.npz --json | python3 -c 'import json, sys; print(json.load(sys.stdin)[\"modules\"])'"
    )
    assert (done.stdout, done.stderr) == ("6\n", "")
    assert tcap("tree", "a.npz", "--format", "paths").stdout.startswith("h\n")
    made = json.loads(tcap("tree", "a.npz", "--format", "compressed").stdout)
    assert made["children"][0]["children"][0]["names"] == ["0", "1"]
    same = tcap("tree", "a.npz", "--diff", "a.npz")
    assert same.stderr == ""
    assert "lists no modules, so this is a tree of the names of its tensors" in same.stdout


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        pytest.param(["no.h5"], 3, "no.h5: there is no such file", id="no-file"),
        pytest.param(["a.npz", "--diff", "a.npz", "--depth", "1"], 2, "--diff compares whole", id="depth"),
        pytest.param(["a.npz", "--json", "--format", "full"], 2, "exclude each other", id="json-format"),
        pytest.param(["a.npz", "--config", "a=1"], 2, "--config is for models", id="config"),
        pytest.param(["a.py:f"], 2, "there is no file 'a.py'", id="function"),
    ],
)
def test_wrong_usage_is_reported(
    tcap: Tcap, folder: Path, arguments: list[str], status: int, message: str
) -> None:
    np.savez(folder / "a.npz", x=np.ones(2))
    assert message in tcap("tree", *arguments, status=status).stderr


def test_compare_takes_a_component_mapping(tcap: Tcap, write: Callable[..., Path], folder: Path) -> None:
    one: dict[str, Any] = {"0/model.norm/output": np.arange(4, dtype=np.float32)}
    write("ref.h5", one)
    write("tgt.h5", {"0/norm/output": one["0/model.norm/output"]})
    (folder / "map.json").write_text(json.dumps({"component_mapping": [[["model.norm"], ["norm"]]]}))
    assert (
        "1 of 1 reference tensors compared" in tcap("compare", "ref.h5", "tgt.h5", "--map", "map.json").stdout
    )
    (folder / "map.json").write_text(json.dumps({"component_mapping": [[["model.norm"], ["norn"]]]}))
    assert "map.json: entry 1: " in tcap("compare", "ref.h5", "tgt.h5", "--map", "map.json", status=2).stderr
