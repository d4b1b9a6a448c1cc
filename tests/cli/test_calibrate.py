"""`tcap calibrate`, and `tcap compare --calibration`."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from click.testing import CliRunner

from tensorcap_cli.main import main
from tests.support.archives import write_archive

X = np.random.default_rng(0).standard_normal((64, 64)).astype(np.float32)


def write(path: Path, error: float) -> str:
    tensors = {f"layers.{i}.mlp": X * np.float32(1 + error) for i in range(20)}
    return str(write_archive(path, tensors, run={"dtype": "bfloat16" if error else "float32"}))


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(main, arguments)
    return result.exit_code, result.output


def test_limits_are_written_and_used(tmp_path: Path) -> None:
    reference, good, worse = (write(tmp_path / f"{e}.h5", e) for e in (0.0, 2e-3, 9e-3))
    again = write(tmp_path / "again.h5", 2e-3)
    output = str(tmp_path / "c.toml")
    code, text = run("calibrate", reference, good, reference, again, reference, reference, "-o", output)
    assert code == 0
    assert f"left out: {reference} against {reference}: nothing differs" in text
    assert f"{output}: 4 limits of 1 kind of modules, from 2 runs in bfloat16" in text
    assert run("compare", reference, worse)[0] == 0
    assert run("compare", reference, worse, "--calibration", output)[0] == 1
    code, text = run("calibrate", reference, good, reference, again, "-o", output, "--json")
    assert (code, json.loads(text)["limits"]) == (0, 4)
    code, text = run("calibrate", reference, good, reference, good, "-o", output)
    assert (code, "the pair was given twice" in text) == (2, True)
    right = Path(output).read_text()
    for limit, shown in (('"x"', "'x'"), ("1" + "0" * 400, "1000")):
        Path(output).write_text(right.replace("\nlimit = ", f"\nlimit = {limit} # ", 1))
        code, text = run("compare", reference, worse, "--calibration", output)
        assert (code, f"{output}: limit 1: limit is {shown}" in text) == (2, True)
        assert "expected a finite number" in text


def test_too_few_runs_are_wrong_usage_and_write_nothing(tmp_path: Path) -> None:
    reference, good = (write(tmp_path / f"{e}.h5", e) for e in (0.0, 2e-3))
    output = tmp_path / "c.toml"
    code, text = run("calibrate", reference, good, "-o", str(output))
    assert (code, output.exists()) == (2, False)
    assert "1 passing runs, expected at least 2" in text


def test_an_error_for_too_few_runs_says_which_were_left_out_and_why(tmp_path: Path) -> None:
    reference, good, bad = (write(tmp_path / f"{e}.h5", e) for e in (0.0, 2e-3, float("nan")))
    code, text = run("calibrate", reference, good, reference, bad, "-o", str(tmp_path / "c.toml"))
    assert code == 2
    assert f"left out: {reference} against {bad}: 0/layers.0.mlp/output is nonfinite" in text
    early = write_archive(tmp_path / "early.h5", {"layers.0.mlp": X * np.float32(1.001)}, complete=False)
    code, text = run("calibrate", reference, good, reference, str(early), "-o", str(tmp_path / "c.toml"))
    assert code == 2
    assert f"left out: {reference} against {early}: the target is incomplete" in text
