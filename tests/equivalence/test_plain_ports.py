"""Stages 0, 2 and 3 on plain PyTorch ports of transformers' models: no ranks, other names, other layouts."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tensorcap.equivalence import FILE, Experiment, new_settings, run_stage, stage_named, write_settings

ROOT = Path(__file__).parents[2]
PORTS = Path(__file__).parent / "plain_ports.py"


@pytest.fixture(scope="module", autouse=True)
def import_path() -> Iterator[None]:
    """Processes that a stage starts import the same code."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(str(ROOT / part) for part in (".", "formats", "cli")))
        yield


@pytest.mark.slow
@pytest.mark.spec("EQV-31", "EQV-32")
@pytest.mark.parametrize(
    ("source", "port", "tested", "fault"),
    [
        ("gpt2_source", "gpt2_port", 43, None),
        ("gpt2_source", "gpt2_wrong", 43, "transformer.h.1.mlp.act"),
        ("bert_source", "bert_port", 62, None),
    ],
)
def test_a_port_in_plain_pytorch(
    tmp_path: Path, source: str, port: str, tested: int, fault: str | None
) -> None:
    parameters = {
        "source_model_path": f"{PORTS}:{source}",
        "target_modeling_file": str(PORTS),
        "target_causal_class": port,
    }
    run = {"dtype": "float32", "reference_dtype": "float64", "plots": False}  # masks of the ports are float32
    write_settings(tmp_path / FILE, new_settings(tmp_path, parameters, run))
    experiment = Experiment.open(tmp_path)
    state = run_stage(experiment, stage_named("components"))
    assert state.result is not None
    assert state.result.figures["total"] == tested
    assert (state.state == "passed") is (fault is None)
    localized = run_stage(experiment, stage_named("localize")).result
    assert localized is not None
    assert localized.figures.get("primary_fault") == fault
