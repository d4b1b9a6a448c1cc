"""The decoder of `examples/max_decoder.py` verified against its Hugging Face twin, on real MAX."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tensorcap import open_archive
from tensorcap_formats.dtypes import Array

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("decoder")]  # fixtures are made once

ROOT = Path(__file__).parents[2]
DECODER = "examples/max_decoder.py"
SITES = (  # of the decoder, all that its graph calls; the twin has them below `model.`
    "embed_tokens",
    *(
        f"layers.{i}{part}"
        for i in range(2)
        for part in (
            "",
            ".input_layernorm",
            ".self_attn",
            ".self_attn.q_proj",
            ".self_attn.k_proj",
            ".self_attn.v_proj",
            ".self_attn.o_proj",
            ".post_attention_layernorm",
            ".mlp",
            ".mlp.down_proj",
        )
    ),
    "norm",
    "lm_head",
)
FUSED = {f"layers.{i}.mlp.{name}_proj" for i in range(2) for name in ("gate", "up")}
GUILTY = "model.layers.0.self_attn.o_proj"
PROGRAM = """
import numpy as np
from max.driver import CPU, Buffer
from max.dtype import DType
from max.engine import InferenceSession
from max.graph import DeviceRef, Graph, TensorType

from examples.max_decoder import TOKENS, original, ported


def logits():
    decoder = ported(original())
    graph = Graph("served", decoder, input_types=[TensorType(DType.int64, [len(TOKENS)], DeviceRef.CPU())])
    model = InferenceSession(devices=[CPU()]).load(graph, weights_registry=decoder.state_dict())
    return model.execute(Buffer.from_numpy(np.array(TOKENS)))


(found,) = logits()
print(found.shape, found.to_numpy().argmax(-1))
"""


def tcap(folder: Path, *arguments: str, status: int = 0) -> subprocess.CompletedProcess[str]:
    """Run a command in a folder, in a process of its own, since a compiler cannot be interrupted."""
    paths = os.pathsep.join(str(ROOT / part) for part in (".", "formats", "cli"))
    done = subprocess.run(
        [sys.executable, "-m", "tensorcap_cli", *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == status, done.stdout + done.stderr
    return done


def results(path: Path, prefix: str = "") -> dict[str, Array]:
    """What each module gave, without a batch axis, by its site below a prefix."""
    with open_archive(path) as archive:
        return {
            r.key.site.removeprefix(prefix): np.squeeze(archive.load(r)).astype(np.float64)
            for r in archive.records
            if r.key.slot in ("output", "output.0", "output.logits")
        }


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the commands run: with the examples, and both sides captured."""
    made = tmp_path_factory.mktemp("decoder")
    (made / "examples").symlink_to(ROOT / "examples")
    tcap(made, "capture", "torch", f"{DECODER}:reference", "--params", "-o", "ref.h5")
    return made


@pytest.fixture(scope="module")
def captured(folder: Path) -> dict[str, Any]:
    done = tcap(folder, "capture", "max", f"{DECODER}:port", "--timeout", "1500", "-o", "tgt.h5", "--json")
    assert "capturing tcap_workload_max_decoder.Decoder from " in done.stderr
    assert "examples/max_decoder.py" in done.stderr
    told: dict[str, Any] = json.loads(done.stdout)
    return told


@pytest.fixture(scope="module")
def report(folder: Path) -> dict[str, Any]:
    """What comes of verifying the port with a wrong weight in layer 0, as the README says it."""
    (command,) = re.findall(r"```sh\ntcap (verify .*)\n```", (ROOT / "README.md").read_text())
    tcap(folder, *command.split(), status=1)
    told: dict[str, Any] = json.loads((folder / "report" / "verify.json").read_text())
    return told


def test_every_module_that_the_graph_calls_is_captured_under_its_name(captured: dict[str, Any]) -> None:
    assert set(captured["captured"]) == {"@root", *SITES}
    assert set(captured["never_called"]) == FUSED


def test_every_module_gives_what_its_twin_in_torch_gives(folder: Path, captured: dict[str, Any]) -> None:
    reference, target = results(folder / "ref.h5", "model."), results(folder / "tgt.h5")
    for site in ("@root", *SITES):
        assert target[site].shape == reference[site].shape
        assert np.abs(reference[site]).max() > 0.1
        assert np.abs(target[site] - reference[site]).max() <= 1e-5, site


def test_a_wrong_weight_is_reported_before_the_target_runs(folder: Path, report: dict[str, Any]) -> None:
    assert report["weights"]["compared"] == 21
    assert report["weights"]["unlike"] == [f"0/{GUILTY}/param.weight"]
    sides, weights = report["summary"][:2], next(t for t in report["summary"] if t.startswith("Weights: "))
    assert [side.partition(":")[0] for side in sides] == ["Reference", "Target"]
    assert weights == report["summary"][2]
    assert weights.startswith("Weights: 21 of 21 parameters compared, 1 of them not the same")
    assert weights.endswith("The target is the reference times 1.5.")


def test_the_free_run_floods_and_the_injected_run_has_one_suspect(report: dict[str, Any]) -> None:
    free, injected = report["without_injection"], report["with_injection"]
    before = {"embed_tokens", "layers.0.input_layernorm"}
    before |= {f"layers.0.self_attn.{name}_proj" for name in "qkv"}
    errors = {layer["key"]: layer["status"] for layer in free["layers"]}
    for site in SITES:
        key = f"0/{site if site == 'lm_head' else f'model.{site}'}/output"
        status = errors.get(key) or errors[f"{key}.0"]
        assert (status in ("identical", "within-rounding")) is (site in before), key
    assert free["is_green"] is False
    assert [suspect["module"] for suspect in report["suspects"]] == [GUILTY]
    assert report["suspects"][0]["is_own"] is True
    wrong = [layer["key"] for layer in injected["layers"] if layer["status"] == "diverged"]
    assert wrong == [f"0/{GUILTY}/output", "0/model.layers.0.self_attn/output.0", "0/model.layers.0/output"]


def test_the_folder_of_reports_is_complete(folder: Path, report: dict[str, Any]) -> None:
    files = {str(p.relative_to(folder / "report")) for p in (folder / "report").rglob("*") if p.is_file()}
    scenario = (
        "layer_verification_report_Decoder_float32.txt",
        "module_names_reference.txt",
        "module_names_target.txt",
        "mse_plot.png",
    )
    assert files == {
        "reference.h5",
        "target.h5",
        "map.toml",
        "report.html",
        "summary.txt",
        "verify.json",
        "with_injection/target.h5",
        *(f"{name}/{file}" for name in ("with_injection", "without_injection") for file in scenario),
    }
    for name in ("with_injection", "without_injection"):
        assert (folder / "report" / name / "mse_plot.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    names = (folder / "report" / "without_injection" / "module_names_target.txt").read_text().splitlines()
    assert "layers.0.mlp.gate_proj Linear (never called)" in names
    assert "layers.0.mlp.down_proj Linear" in names


def test_what_the_taps_change_is_reported(report: dict[str, Any]) -> None:
    (control,) = report["control"]
    assert control["slot"] == "output"
    assert control["max_abs"] <= 1e-5


def test_the_right_port_is_green(folder: Path) -> None:
    done = tcap(folder, "verify", f"{DECODER}:llama", "-o", "right")
    assert "Weights: 21 of 21 parameters compared, all of them the same numbers." in done.stdout
    assert "Nothing is wrong that these runs show." in done.stdout


def test_a_bisection_names_the_module(folder: Path) -> None:
    done = tcap(folder, "bisect", "ref.h5", "--target-model", f"{DECODER}:wrong", "--json", status=1)
    told = json.loads(done.stdout)
    assert (told["module"], told["blame"]) == (GUILTY, "module")
    assert told["cuts"] == len(SITES)
    assert len(told["runs"]) <= 7  # as it is, all grafted, and log2 of 23


def test_a_bisection_compiles_two_graphs_whatever_it_takes_to_find_the_module(folder: Path) -> None:
    code = (
        "from examples.max_decoder import wrong\n"
        "from tensorcap import MaxModel\n"
        "from tensorcap.localization.live_bisection import bisect_live\n"
        "workload = wrong()\n"
        "found = bisect_live('ref.h5', workload)\n"
        "print(len(found.runs), len(MaxModel.of(workload.model).compiled.graphs))\n"
    )
    paths = os.pathsep.join(str(ROOT / part) for part in (".", "formats", "cli"))
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        check=True,
    )
    runs, graphs = map(int, done.stdout.split())
    assert runs >= 5
    assert graphs == 2  # with switches, and the control


def test_an_injected_module_makes_no_error_but_its_own(folder: Path) -> None:
    done = tcap(folder, "inject", "ref.h5", "--target-model", f"{DECODER}:wrong", "-o", "own.h5", status=1)
    assert "not in the archive: layers.0.self_attn/input.cos, " in done.stderr  # of what torch has otherwise
    reference, own = results(folder / "ref.h5", "model."), results(folder / "own.h5")
    for site in SITES:
        error = np.abs(own[site] - reference[site]).max()
        if site in ("layers.0.self_attn.o_proj", "layers.0.self_attn", "layers.0"):
            assert error > 0.1, site
        else:
            assert error <= 1e-5, site
    made, right = own["layers.0.self_attn.o_proj"], reference["layers.0.self_attn.o_proj"]
    np.testing.assert_allclose(made, 1.5 * right, atol=1e-5)


def test_a_program_that_compiles_and_runs_the_graph_itself_is_captured_unchanged(folder: Path) -> None:
    (folder / "program.py").write_text(PROGRAM)
    done = tcap(folder, "capture", "script", "-o", "served.h5", "--", "program.py")
    reference, target = results(folder / "ref.h5", "model."), results(folder / "served.h5")
    assert done.stdout.strip() == f"(5, 64) {reference['@root'].argmax(-1)}"
    for site in ("@root", *SITES):
        assert np.abs(target[site] - reference[site]).max() <= 1e-5, site


@pytest.mark.entries
@pytest.mark.spec("MAX-113")
def test_the_port_runs_in_bfloat16_and_is_green(folder: Path) -> None:
    options = ("--dtype", "bfloat16", "--num-hidden-layers", "1")
    done = tcap(folder, "verify", f"{DECODER}:llama", "-o", "half", *options)
    assert "Nothing is wrong that these runs show." in done.stdout
    told = json.loads((folder / "half" / "verify.json").read_text())
    assert (told["reference"]["dtype"], told["target"]["dtype"]) == ("float32", "bfloat16")
