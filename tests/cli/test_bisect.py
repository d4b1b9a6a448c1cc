"""`tcap bisect` on two archives."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result

from tensorcap_cli.main import main
from tests.support.archives import write_archive


def _write(path: Path, first_bad: int) -> None:
    tensors = {}
    for i in range(16):
        values = np.random.default_rng(i).standard_normal((4, 16)).astype(np.float32)
        noisy = values * np.float32(1 + 1e-7 * (path.stem == "tgt")) if i < first_bad else values[::-1].copy()
        tensors[f"layers.{i}"] = noisy
    write_archive(path, tensors, run={"compute_dtype": "float32"})


def tcap(*arguments: str, status: int) -> Result:
    found = CliRunner().invoke(main, list(arguments))
    assert found.exit_code == status, found.output
    return found


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    _write(tmp_path / "ref.h5", 16)
    _write(tmp_path / "tgt.h5", 11)
    return tmp_path


@pytest.mark.spec("BIS-4")
def test_the_first_bad_result_and_what_was_read_are_told() -> None:
    lines = tcap("bisect", "ref.h5", "tgt.h5", status=1).output.splitlines()
    assert lines[0] == "FIRST BAD RESULT  0/layers.11/output  (diverged)"
    assert "  before it 0/layers.10/output is within-rounding" in lines
    assert "  module layers.11: layers.11 made this tensor." in lines
    assert lines[-2].endswith("of each side read, of 16 results (by search)")


@pytest.mark.spec("BIS-5")
def test_json_names_it_and_the_exit_status_says_it() -> None:
    found = json.loads(tcap("bisect", "ref.h5", "tgt.h5", "--json", status=1).stdout)
    assert (found["format"], found["version"], found["results"]) == ("tensorcap-bisection", 1, 16)
    assert (found["first"], found["module"], found["how"]) == ("0/layers.11/output", "layers.11", "search")
    assert 0 < len(found["read"]) < 10
    alike = json.loads(tcap("bisect", "ref.h5", "ref.h5", "--json", status=0).stdout)
    assert (alike["first"], alike["read"], alike["exit_status"]) == (None, [], 0)
    assert "No result that was looked at is bad." in tcap("bisect", "ref.h5", "ref.h5", status=0).output


def test_live_options_go_without_a_target_archive() -> None:
    error = tcap("bisect", "ref.h5", "tgt.h5", "--target-model", "x.py:y", status=2).output
    assert "TGT is an archive, expected no --target-model, --limit, --check, --level or --state." in error
    error = tcap("bisect", "ref.h5", "--target-model", "x.py:y", "--rtol", "1", status=2).output
    assert "--rtol, --atol and --compute-dtype are for archives, expected TGT." in error


@pytest.mark.spec("BIS-12")
def test_a_running_port_is_bisected_down_to_the_op(folder: Path) -> None:
    pytest.importorskip("transformers")
    models = Path(__file__).parents[2] / "examples" / "models.py"
    tcap("capture", "torch", f"{models}:reference", "-o", "llama.h5", status=0)
    arguments = "bisect", "llama.h5", "--target-model", f"{models}:port", "--level", "op"
    lines = tcap(*arguments, status=1).output.splitlines()
    assert "GUILTY  model.layers.2.mlp.act_fn: its own result is wrong" in lines
    ops = [line for line in lines if line.startswith("  op ")]
    assert ops == [
        "  op 0/model.layers.2.mlp.act_fn:aten.silu.default/output is missing-in-target",
        "  op 0/model.layers.2.mlp.act_fn:aten.gelu.default/output is missing-in-reference",
    ]
    found = json.loads(tcap(*arguments, "--json", status=1).stdout)
    assert (found["module"], found["blame"]) == ("model.layers.2.mlp.act_fn", "module")
    assert len(found["runs"]) <= 9
