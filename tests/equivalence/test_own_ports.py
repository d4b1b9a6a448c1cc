"""All stages on a decoder and an encoder of our own against transformers', right and with a mistake each."""

from __future__ import annotations

from pathlib import Path

import pytest

from tensorcap.equivalence import FILE, Experiment, run_stages, write_settings
from tensorcap.equivalence.parameters import new_settings

PORTS = """
import torch

import tensorcap
from tests.equivalence.own_models import Decoder, Encoder, bert, llama

IDS = torch.randint(3, 256, (2, 12), generator=torch.Generator().manual_seed(5))


def workload(model):
    return tensorcap.Workload(model.eval(), {"input_ids": IDS})


def decoder_source(dtype: torch.dtype = torch.float32):
    return tensorcap.Workload(llama(dtype), {"input_ids": IDS, "use_cache": False})


def decoder(mistake=""):
    return workload(Decoder(llama(torch.bfloat16).state_dict(), mistake))


def scale():
    return decoder("scale")


def encoder_source(dtype: torch.dtype = torch.float32):
    return workload(bert(dtype))


def encoder(mistake=""):
    return workload(Encoder(bert(torch.bfloat16).state_dict(), mistake))


def causal():
    return encoder("causal")
"""


def run(folder: Path, source: str, target: str) -> dict[str, tuple[str, str]]:
    """State and summary of each stage that `tcap equivalence run` runs."""
    (folder / "port.py").write_text(PORTS)
    parameters = {
        "source_model_path": f"port.py:{source}",
        "target_modeling_file": "port.py",
        "target_causal_class": target,
    }
    write_settings(folder / FILE, new_settings(folder, parameters, {"plots": False, "num_tokens": 16}))
    states = run_stages(Experiment.open(folder))
    return {
        state.stage.name: (state.state, "" if state.result is None else state.result.words[0])
        for state in states
    }


@pytest.mark.slow
@pytest.mark.spec("EQL-4", "EQL-20", "EQL-30")
@pytest.mark.parametrize("port", ["decoder", "encoder"])
def test_a_right_port_passes_all_stages(tmp_path: Path, port: str) -> None:
    states = run(tmp_path, f"{port}_source", port)
    gates = {name: state for name, (state, _) in states.items() if state != "done"}
    assert gates == {"smoke": "passed", "components": "passed", "forced": "passed"}


@pytest.mark.slow
@pytest.mark.spec("EQL-20", "EQL-31")
@pytest.mark.parametrize(
    ("source", "mistake", "module"),
    [
        ("decoder_source", "scale", "model.layers.1.self_attn"),
        ("encoder_source", "causal", "bert.encoder.layer.1.attention.self"),
    ],
)
def test_a_mistake_that_matching_tokens_hide_is_named(
    tmp_path: Path, source: str, mistake: str, module: str
) -> None:
    states = run(tmp_path, source, mistake)
    assert states["smoke"][0] == "passed"
    assert states["components"][0] == "failed"
    assert states["localize"][1] == f"1 fault, first {module} (spike)."
    assert "forced" not in states
