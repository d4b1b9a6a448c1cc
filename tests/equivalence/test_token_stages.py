"""Stages 1, 5 and 6 on the folder of an experiment: their files, exit statuses, and runs that were ended."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from tensorcap.equivalence import Experiment, StageState, run_stage, stage_named
from tensorcap.equivalence.token_runs import SideRuns
from tensorcap_cli.main import main
from tensorcap_formats.errors import UsageError

PORT = """
import torch

import tensorcap
from tests.equivalence.own_models import Decoder, llama

IDS = torch.randint(3, 256, (2, 12), generator=torch.Generator().manual_seed(5))


def source(dtype: torch.dtype = torch.float32):
    return tensorcap.Workload(llama(dtype), {"input_ids": IDS, "use_cache": False})


def target(mistake=""):
    return tensorcap.Workload(Decoder(llama(torch.bfloat16).state_dict(), mistake).eval(), {"input_ids": IDS})


def wrong():
    return target("activation")
"""


@pytest.fixture
def experiment(tmp_path: Path) -> Experiment:
    (tmp_path / "port.py").write_text(PORT)
    (tmp_path / "equivalence.toml").write_text(
        "# Equivalence:\n[parameters]\n"
        'source_model_path = "port.py:source"\ntarget_modeling_file = "port.py"\n'
        'target_causal_class = "target"\n[run]\nnum_tokens = 16\n'
    )
    return Experiment.open(tmp_path)


def run(experiment: Experiment, name: str) -> StageState:
    return run_stage(experiment, stage_named(name))


@pytest.mark.slow
@pytest.mark.spec("EQL-1", "EQL-20", "EQL-30", "EQL-33")
def test_files_are_written_once_and_again_only_for_another_port(experiment: Experiment) -> None:
    smoke, forced = run(experiment, "smoke"), run(experiment, "forced")
    assert (smoke.exit_status, forced.exit_status) == (0, 0)
    results = experiment.folder / "results"
    stage1 = json.loads((results / "stage1.json").read_text())
    assert stage1["device"].startswith("a CPU (")
    assert stage1["token_matching"]["total_tokens_compared"] == 32
    assert len(json.loads((results / "teacher_forced.json").read_text())["per_prompt"]) == 2
    assert (results / "teacher_forced.png").is_file()

    def times() -> list[int]:
        return [path.stat().st_mtime_ns for path in sorted(results.rglob("*.*"))]

    before = times()
    assert run(experiment, "forced").exit_status == 0
    assert times() == before
    # what a run that was ended has left is not read
    (results / "stage5" / "source.npz").write_bytes(b"PK")
    (results / "stage5" / "target.npz").unlink()
    wrong = experiment.changed({"parameters.target_causal_class": "wrong"})
    state = run(wrong, "forced")
    assert state.exit_status == 1
    assert state.next[0].startswith("The port as a whole is farther off than rounding makes it")
    assert SideRuns.read(results / "stage5" / "target.npz").device == stage1["device"]


@pytest.mark.spec("EQL-6")
def test_texts_need_a_tokenizer(experiment: Experiment) -> None:
    with pytest.raises(UsageError, match=r"\[run\]: prompts: are texts") as error:
        run(experiment.changed({"run.prompts": ["The capital of France is"]}), "smoke")
    assert (
        error.value.hint == "Leave them out: the token ids of the source's own workload are then the prompts."
    )


@pytest.mark.spec("EQL-40")
def test_stage_7_says_what_file_it_needs(experiment: Experiment) -> None:
    result = CliRunner().invoke(main, ["equivalence", "downstream", str(experiment.folder)], prog_name="tcap")
    assert result.exit_code == 3
    assert "bench_config.yaml: cannot be read: No such file or directory" in result.output
