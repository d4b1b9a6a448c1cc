"""Limits from ports that pass, and what sets none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from click.testing import CliRunner

from tensorcap.equivalence import Experiment, calibrate
from tensorcap.equivalence.calibration import read_config
from tensorcap_cli.main import main
from tensorcap_formats.errors import ReadError, UsageError

RATIOS = np.linspace(0.9, 1.5, 30)  # of one port's components
KL = np.linspace(0.001, 0.03, 30).reshape(3, 10)  # three prompts of ten positions


def experiment(
    folder: Path,
    *,
    name: str,
    ratios: Any = RATIOS,
    kl: Any = KL,
    failed: str = "",
    has_passed: bool = True,
) -> Path:
    """A folder as the stages leave it, of a port by this name."""
    (folder / "results").mkdir(parents=True)
    (folder / "port.py").write_text(f"# {name}\n")
    (folder / "equivalence.toml").write_text(
        '# Equivalence:\n[parameters]\nsource_model_path = "llama"\ntarget_modeling_file = "port.py"\n'
        'target_causal_class = "port"\n'
    )
    results = [
        {"component": f"layers.{i}.{'mlp' if i % 2 else 'norm'}", "r_ratio": ratio, "passed": True}
        for i, ratio in enumerate(ratios)
    ]
    if failed:
        results.append({"component": failed, "r_ratio": 20.0, "passed": False})
    stage2 = {"results": results, "passed": len(ratios), "failed": int(bool(failed)), "total": len(results)}
    (folder / "results" / "stage2.json").write_text(json.dumps(stage2))
    forced = {
        "per_prompt": [{"per_position_kl": row} for row in np.asarray(kl).tolist()],
        "passed": has_passed,
    }
    (folder / "results" / "teacher_forced.json").write_text(json.dumps(forced))
    return folder


@pytest.fixture
def tested(tmp_path: Path) -> Path:
    return experiment(tmp_path / "tested", name="tested")


@pytest.mark.spec("EQL-50", "EQL-52")
def test_limits_are_the_documented_quantiles(tmp_path: Path, tested: Path) -> None:
    one = experiment(tmp_path / "one", name="one")
    other = experiment(tmp_path / "other", name="other", ratios=RATIOS * 0.5, kl=KL * 2)
    limits = calibrate([one, other], under_test=tested)
    assert limits.tau_r == 1.5  # the larger of 1.2 and the 0.99 quantile of 60 values, without a margin
    assert dict(limits.tau_r_of_type) == pytest.approx({"mlp": 1.5 * 1.1, "norm": float(RATIOS[28]) * 1.1})
    # of 60 values the 58th; of the six largest of a prompt the largest
    assert limits.delta_kl == pytest.approx(1.1 * np.sort(np.concatenate([KL, KL * 2]).ravel())[57])
    assert limits.delta_kl_max == pytest.approx(1.1 * 0.06)
    assert limits.samples == (60, 60)
    content = limits.to_json()
    assert content["calibration"]["constant"] == ["theta_cosine", "rho_tail", "token_match"]
    assert (content["theta_cosine"], content["rho_tail"], content["token_match"]) == (0.95, 0.05, 0.3)
    assert (
        "Constant, whatever the ports are: theta_cosine 0.95, rho_tail 0.05, token_match 0.3." in limits.words
    )


@pytest.mark.spec("EQL-50")
def test_a_limit_of_r_is_at_least_the_methods(tmp_path: Path, tested: Path) -> None:
    ports = [experiment(tmp_path / name, name=name, ratios=[1.0] * 30) for name in ("one", "other")]
    limits = calibrate(ports, under_test=tested)
    assert limits.tau_r == 1.2
    assert set(limits.tau_r_of_type.values()) == {1.2}


@pytest.mark.spec("EQL-51")
def test_ports_that_fail_are_left_out(tmp_path: Path, tested: Path) -> None:
    good = [experiment(tmp_path / name, name=name) for name in ("one", "other")]
    failing = experiment(tmp_path / "failing", name="failing", failed="layers.1.mlp")
    gates = experiment(tmp_path / "gates", name="gates", has_passed=False)
    nan = experiment(tmp_path / "nan", name="nan", kl=[[None] * 10])
    fresh = experiment(tmp_path / "fresh", name="fresh")
    (fresh / "results" / "stage2.json").unlink()
    limits = calibrate([*good, failing, gates, nan, fresh], under_test=tested)
    assert limits.ports == tuple(map(str, good))
    assert [reason for _, reason in limits.left_out] == [
        "1 component failed, first layers.1.mlp",
        "its gates of stages 5 and 6 are not all passed",
        "its gates of stages 5 and 6 are not all passed",
        "stage2.json is not there yet",
    ]
    with pytest.raises(UsageError, match=r"ports that pass: 1, expected at least 2; .*failing: 1 component"):
        calibrate([good[0], failing], under_test=tested)


@pytest.mark.spec("EQL-51")
def test_the_port_under_test_sets_no_limits_for_itself(tmp_path: Path, tested: Path) -> None:
    good = [experiment(tmp_path / name, name=name) for name in ("one", "other")]
    with pytest.raises(UsageError, match="is the experiment under test"):
        calibrate([*good, tested], under_test=tested)
    copy = experiment(tmp_path / "copy", name="tested")  # another folder with the same port
    with pytest.raises(UsageError, match="has the port of the port under test"):
        calibrate([*good, copy], under_test=tested)
    twice = experiment(tmp_path / "twice", name="one")
    with pytest.raises(UsageError, match=f"has the port of {good[0]}, expected another one"):
        calibrate([*good, twice], under_test=tested)


@pytest.mark.spec("EQL-52")
def test_few_values_set_no_limit(tmp_path: Path, tested: Path) -> None:
    ports = [
        experiment(tmp_path / name, name=name, ratios=[1.0] * 3, kl=KL[:1, :5]) for name in ("one", "other")
    ]
    limits = calibrate(ports, under_test=tested)
    assert (limits.tau_r, limits.delta_kl, limits.settings) == (None, None, {})
    assert "tau_r stays 1.2: 6 components with R are too few." in limits.words
    assert "KL decides nothing: 10 positions are too few." in limits.words


@pytest.mark.spec("EQL-53")
def test_the_command_sets_the_limits_of_the_experiment(tmp_path: Path, tested: Path) -> None:
    ports = [experiment(tmp_path / name, name=name) for name in ("one", "other")]
    arguments = ["equivalence", "calibrate", str(tested), *(f"--passing={port}" for port in ports)]
    result = CliRunner().invoke(main, arguments, prog_name="tcap")
    assert result.exit_code == 0, result.output
    assert result.output.startswith("Limits of 2 ports that pass: ")
    limits = Experiment.open(tested).settings.limits
    assert limits.tau_r == 1.5
    assert limits.delta_kl_max == pytest.approx(0.033)
    config = read_config(tested / "equiv_config.json")
    assert config is not None
    schemas = json.loads((Path(__file__).parents[2] / "specs/equivalence-logits.schema.json").read_text())
    content = json.loads((tested / "equiv_config.json").read_text())
    jsonschema.validate(content, {**schemas, "$ref": "#/$defs/equiv_config"})
    assert config.delta_kl == limits.delta_kl
    missing = CliRunner().invoke(main, [*arguments[:3], "--passing=none"], prog_name="tcap")
    assert missing.exit_code == 3


@pytest.mark.spec("EQL-53")
@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ("{", ReadError, "is no JSON"),
        ("{}", UsageError, "is no calibration"),
        ('{"calibration": {}, "delta_kl": "x"}', UsageError, "delta_kl: found 'x', expected a number"),
        ('{"calibration": {}, "delta_kl": NaN}', UsageError, "delta_kl: found nan, expected a number"),
    ],
)
def test_a_file_that_is_no_calibration_is_refused(
    tmp_path: Path, text: str, error: type[Exception], message: str
) -> None:
    path = tmp_path / "equiv_config.json"
    assert read_config(path) is None
    path.write_text(text)
    with pytest.raises(error, match=message):
        read_config(path)
