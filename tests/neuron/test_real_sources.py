"""NxDI's own files, if `NEURON_SRC` names a folder that holds its sources and NxD's: read, and run on CPUs.

`make test-neuron SRC=…` makes an environment for it. The classes are those that a reading of the sources of
July 2026 gives, one file after the other; models have random weights, in float32.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

import tensorcap
from tensorcap.source_analysis import divergence

SRC = os.environ.get("NEURON_SRC", "")
ROOT = Path(__file__).parents[2]
PORTS = Path(__file__).parent / "nxdi_ports.py"
TIMEOUT_SECONDS = 1800
LIMIT = 2e-6  # relative error of a tensor in float32, as the issue has it
# tensors of the reference that are compared, those that are explained, and stand-ins that are called
MODELS = {
    "Llama": (73, 19, ()),
    "Qwen2": (73, 19, ()),
    "Qwen3": (81, 19, ()),
    "Mistral": (73, 19, ()),
    "Mixtral": (61, 101, ("SkipMode",)),
    "Qwen3Moe": (69, 101, ("SkipMode", "ModuleMarkerStart.forward_impl", "ModuleMarkerEnd.forward_impl")),
}
PAIRS = {
    ("deepseek/modeling_deepseek.py", "cpu", "DeepseekV3RMSNorm", "CustomRMSNorm"),
    ("gemma3/modeling_gemma3.py", "cpu", "Gemma3RMSNorm", "NeuronGemma3RMSNorm"),
    ("gpt_oss/modeling_gpt_oss.py", "cpu", "GptOssRMSNormV2Padded", "CustomRMSNormV2Padded"),
    ("llama/modeling_llama.py", "cpu", "LlamaRMSNormPadded", "LlamaCustomRMSNormPadded"),
    ("llama/modeling_llama.py", "cpu", "LlamaRMSNorm", "CustomRMSNorm"),
    ("llama4/modeling_llama4_text.py", "cpu", "LlamaRMSNormV2", "CustomRMSNorm"),
    ("mistral/modeling_mistral.py", "cpu", "MistralRMSNorm", "CustomRMSNorm"),
    ("mixtral/modeling_mixtral.py", "cpu", "MixtralRMSNorm", "CustomRMSNorm"),
    ("mllama/modeling_mllama.py", "tp-size", "LlamaRMSNorm", "CustomRMSNorm"),
    ("pixtral/modeling_pixtral_vision.py", "cpu", "LlamaRMSNorm", "CustomRMSNorm"),
    ("qwen2/modeling_qwen2.py", "cpu", "LlamaRMSNorm", "CustomRMSNorm"),
    ("qwen2_vl/modeling_qwen2_vl_text.py", "cpu", "LlamaRMSNorm", "CustomRMSNorm"),
    ("qwen3/modeling_qwen3.py", "cpu", "Qwen3RMSNorm", "CustomRMSNorm"),
    ("qwen3_moe/modeling_qwen3_moe.py", "cpu", "Qwen3MoeRMSNorm", "CustomRMSNorm"),
    ("qwen3_vl/modeling_qwen3_vl_text.py", "cpu", "LlamaRMSNorm", "CustomRMSNorm"),
}


needs_sources = pytest.mark.skipif(not SRC, reason="needs NEURON_SRC, a folder of NxDI's sources and NxD's")
runs_sources = pytest.mark.skipif(
    not SRC or not version("transformers").startswith("4.57."),
    reason="needs NEURON_SRC, a folder of NxDI's sources and NxD's, and transformers 4.57",
)


@needs_sources
@pytest.mark.spec("NRN-50")
def test_every_pair_of_classes_is_found_and_none_is_invented() -> None:
    files = sorted(Path(SRC).glob("**/neuronx_distributed_inference/models/**/modeling*.py"))
    assert files, f"{SRC}: holds no models"
    pairs = {
        ("/".join(Path(each.file).parts[-2:]), each.switch, each.here, each.there)
        for each in divergence(files).classes
        if "contrib" not in Path(each.file).parts
    }
    assert pairs == PAIRS


def tcap(folder: Path, *arguments: str) -> str:
    """Run `tcap` on sources, and return what it prints; it has to end with 0."""
    paths = os.pathsep.join(str(ROOT / part) for part in (".", "formats", "cli"))
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tensorcap_cli", *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_SECONDS,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("nxdi")


def errors(comparison: Any) -> dict[str, float]:
    """The relative error of each tensor that was compared, by key."""
    return {
        pair.key: pair.difference.relative_frobenius or 0.0
        for pair in comparison.pairs
        if pair.difference is not None
    }


@runs_sources
@pytest.mark.slow
@pytest.mark.spec("NRN-171")
@pytest.mark.parametrize("name", MODELS)
def test_a_port_of_nxdi_is_verified_without_a_map(folder: Path, name: str) -> None:
    compared, explained, stand_ins = MODELS[name]
    sides = (f"{PORTS}:reference_{name}", f"{PORTS}:port_{name}")
    tcap(folder, "verify", *sides, "--neuron-src", SRC, "-o", name)
    reference, target = folder / name / "reference.h5", folder / name / "target.h5"
    tcap(folder, "align", str(reference), str(target), "-o", f"{name}.toml")
    comparison = tensorcap.compare(reference, target, mapping=folder / f"{name}.toml")
    assert comparison.exit_status == 0
    assert len(errors(comparison)) == compared
    assert max(errors(comparison).values()) < LIMIT
    statuses = [pair.status for pair in comparison.pairs if pair.status != "missing-in-reference"]
    assert statuses.count("explained") == explained
    assert len(statuses) == compared + explained
    assert json.loads((folder / name / "verify.json").read_text())["suspects"] == []
    with tensorcap.open_archive(target) as archive:
        (note,) = archive.info.notes
        names = {"CollectivesConfig", "get_platform_target", *stand_ins}
        assert {each for each in names if f"{each} (" in note} == names
        assert note.count(" call") == len(names) + 1  # and "were called"


@runs_sources
@pytest.mark.slow
@pytest.mark.spec("ALN-212", "INJ-90", "POL-230")
def test_mixtral_is_verified_on_prompts_of_unlike_lengths(folder: Path) -> None:
    sides = (f"{PORTS}:reference_padded", f"{PORTS}:port_padded")
    tcap(folder, "verify", *sides, "--neuron-src", SRC, "-o", "padded")
    comparison = tensorcap.compare(folder / "padded" / "reference.h5", folder / "padded" / "target.h5")
    assert comparison.exit_status == 0
    assert len(errors(comparison)) == 64


@runs_sources
@pytest.mark.slow
def test_llama_on_two_ranks_is_merged_and_verified(folder: Path) -> None:
    tcap(folder, "capture", "torch", f"{PORTS}:reference_Llama", "-o", "llama.h5")
    two = ("--tp", "2", "--neuron-src", SRC, "-o", "ranks.h5")
    tcap(folder, "capture", "neuron", f"{PORTS}:port_Llama", *two)
    comparison = tensorcap.compare(folder / "llama.h5", folder / "ranks.h5")
    assert comparison.exit_status == 0
    assert len(errors(comparison)) == MODELS["Llama"][0]
    assert max(errors(comparison).values()) < LIMIT
    assert tensorcap.localize(folder / "llama.h5", folder / "ranks.h5").suspects == ()


@runs_sources
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "port", "module"),
    [
        ("Llama", "wrong_epsilon", "model.layers.1.post_attention_layernorm"),
        ("Qwen3", "wrong_heads", "model.layers.0.self_attn.k_norm"),
    ],
)
def test_a_mistake_in_a_port_of_nxdi_is_named_first(folder: Path, name: str, port: str, module: str) -> None:
    tcap(folder, "capture", "torch", f"{PORTS}:reference_{name}", "-o", f"{port}_reference.h5")
    tcap(folder, "capture", "neuron", f"{PORTS}:{port}", "--neuron-src", SRC, "-o", f"{port}.h5")
    suspects = tensorcap.localize(folder / f"{port}_reference.h5", folder / f"{port}.h5").suspects
    assert suspects[0].module == module
