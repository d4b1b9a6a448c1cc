"""Limits from known-good ports, and comparisons by them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tensorcap.comparison import Calibration, calibrate, compare, write_calibration
from tensorcap_formats.archive import Archive
from tensorcap_formats.errors import UsageError
from tests.support.archives import write_archive

X = np.random.default_rng(0).standard_normal((64, 64)).astype(np.float32)
NOISE = np.where(np.random.default_rng(1).standard_normal(X.shape) > 0, 1, -1).astype(np.float32)
MODULES = [{"path": f"layers.{i}", "class": "models.Block", "parameters": {}} for i in range(30)]


def write(path: Path, error: float, *, count: int = 30, low: str = "bfloat16") -> Path:
    """A run of `count` blocks whose outputs are off by `error`, `error` / 2, … relative."""
    is_reference = not error
    noises = [1 + np.float32(error / (1 + i % 2)) * NOISE for i in range(count)]
    tensors = {f"layers.{i}": (i + 1) * X * noise for i, noise in enumerate(noises)}
    return write_archive(path, tensors, run={"modules": MODULES, "dtype": "float32" if is_reference else low})


@pytest.fixture
def good(tmp_path: Path) -> list[Path]:
    return [
        write(tmp_path / "r1.h5", 0.0),
        write(tmp_path / "t1.h5", 4e-3),
        write(tmp_path / "r2.h5", 0.0),
        write(tmp_path / "t2.h5", 2e-3),
    ]


@pytest.mark.spec("POL-70")
def test_a_limit_is_a_quantile_with_a_margin(good: list[Path], tmp_path: Path) -> None:
    found = calibrate(good, metrics=["relative_frobenius"], quantile=0.75, margin=2.0)
    assert found.failing == ()
    # 15 each of 4e-3, 2e-3, 2e-3 and 1e-3
    assert found.calibration.limits.keys() == {("Block", "output")}
    limit, count = found.calibration.limits["Block", "output"]["relative_frobenius"]
    assert count == 60
    assert limit == pytest.approx(8e-3, rel=1e-2)
    path = tmp_path / "calibration.toml"
    write_calibration(found.calibration, path)
    again = Calibration.read(path)
    assert (again.limits, again.precision, again.quantile, again.margin, again.runs) == (
        found.calibration.limits,
        "bfloat16",
        0.75,
        2.0,
        2,
    )


@pytest.mark.spec("POL-71")
def test_a_run_that_does_not_pass_takes_no_part(good: list[Path], tmp_path: Path) -> None:
    bad = write(tmp_path / "bad.h5", 3e-3, count=29)
    found = calibrate([*good, good[0], bad, good[0], good[0]])
    assert [(str(path), trouble) for _, path, trouble in found.failing] == [
        (str(bad), "0/layers.29/output is missing-in-target"),
        (str(good[0]), "nothing differs"),
    ]
    assert found.calibration.runs == 2


@pytest.mark.spec("POL-71")
@pytest.mark.parametrize(
    ("choose", "options", "message"),
    [
        pytest.param(lambda good: good[:2], {}, "1 passing runs, expected at least 2", id="one-run"),
        pytest.param(lambda good: good[:3], {}, "3 archives, expected pairs", id="odd"),
        pytest.param(lambda good: good + good[:2], {}, r"t1.h5: the pair was given twice", id="twice"),
        pytest.param(lambda good: good, {"quantile": 99}, "quantile: is 99", id="percent"),
        pytest.param(lambda good: good, {"margin": 0.5}, "margin: is 0.5", id="margin"),
        pytest.param(lambda good: good, {"metrics": ["cosine"]}, "more of it is better", id="higher"),
        pytest.param(
            lambda good: good, {"metrics": ["outlyer"]}, "metric 'outlyer' is unknown", id="misspelt"
        ),
    ],
)
def test_too_little_is_refused(
    good: list[Path], choose: Callable[[list[Path]], list[Path]], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        calibrate(choose(good), **options)


@pytest.mark.spec("POL-71")
def test_too_few_tensors_and_mixed_precisions_are_refused(good: list[Path], tmp_path: Path) -> None:
    few = [write(tmp_path / f"few{i}.h5", 2e-3 * (i % 2), count=9) for i in range(4)]
    with pytest.raises(UsageError, match="no kind of module has the 20 samples"):
        calibrate(few)
    other = [write(tmp_path / "r3.h5", 0.0), write(tmp_path / "t3.h5", 2e-4, low="float16")]
    with pytest.raises(UsageError, match="runs of several precisions: bfloat16, float16"):
        calibrate([*good, *other])


@pytest.mark.spec("POL-72")
def test_limits_take_the_place_of_the_envelope(good: list[Path], tmp_path: Path) -> None:
    path = tmp_path / "calibration.toml"
    write_calibration(calibrate(good, margin=1.25).calibration, path)
    for error, status in ((4e-3, "within-rounding"), (8e-3, "suspect")):
        target = write(tmp_path / f"{error}.h5", error)
        assert compare(good[0], target).counts == {"within-rounding": 30}
        comparison = compare(good[0], target, calibration=path)
        assert comparison.pairs[0].status == status
        tests = {finding.test for finding in comparison.pairs[0].findings}
        assert tests == {"row_error_median", "row_error_p95", "relative_frobenius", "outlier"}
    with pytest.raises(UsageError, match=r"is of bfloat16 runs, these are float16"):
        compare(good[0], good[1], calibration=path, compute_dtype="float16")


@pytest.mark.spec("POL-72")
def test_limits_of_another_quantity_leave_the_envelope_where_it_is(good: list[Path], tmp_path: Path) -> None:
    path = tmp_path / "calibration.toml"
    write_calibration(calibrate(good, metrics=["max_abs"], margin=1e3).calibration, path)
    target = write(tmp_path / "grown.h5", 0.1)
    found = compare(good[0], target, calibration=path)
    assert found.pairs[0].status == "suspect"
    assert {finding.test for finding in found.pairs[0].findings} == {"growth", "outlier_element", "max_abs"}


HEAD = (
    'format = "tensorcap-calibration"\nversion = 1\nprecision = "bfloat16"\n'
    "quantile = 1\nmargin = 1\nruns = 2\n"
)
LIMIT = '[[limit]]\nmodule = "m"\nslot = "output"\ncount = 20\n'


@pytest.mark.spec("POL-71", "POL-70")
@pytest.mark.parametrize(
    ("text", "message"),
    [
        pytest.param("[[threshold]]\nmatch = '*'\n", "is no calibration of version 1", id="thresholds"),
        pytest.param(
            'format = "tensorcap-calibration"\nversion = 1\n', "is no whole calibration", id="cut-short"
        ),
        pytest.param(
            'format = "tensorcap-calibration"\nversion = 1\n[[limit]]\nmetric = "x"\n',
            "metric 'x'",
            id="metric",
        ),
        pytest.param(
            HEAD + LIMIT + 'metric = "cosine"\nlimit = 1\n', "limit 1: metric 'cosine': more", id="higher"
        ),
        pytest.param(
            HEAD + LIMIT + 'metric = "outlier"\nlimit = "a"\n', "limit 1: limit is 'a', expected", id="text"
        ),
        pytest.param(
            HEAD + LIMIT + 'metric = "outlier"\nlimit = nan\n', "limit 1: limit is nan, expected", id="nan"
        ),
        pytest.param(HEAD + "limit = 3\n", r"no tables \[\[limit\]\]", id="no-tables"),
    ],
)
def test_a_file_that_is_no_calibration_is_refused(
    make_archive: Callable[..., Archive], tmp_path: Path, text: str, message: str
) -> None:
    path = tmp_path / "c.toml"
    path.write_text(text)
    archive = make_archive({"a": X})
    with pytest.raises(UsageError, match=message):
        compare(archive, archive, calibration=path)


@pytest.mark.spec("POL-70", "POL-72")
def test_the_divergence_of_logits_is_calibrated(tmp_path: Path) -> None:
    def logits(path: Path, error: float) -> Path:
        # rows (2, 2) become (2, 2 + error): KL is ln((1 + e^error) / 2) - error / 2
        rows = np.full((4, 2), 2, np.float32) + np.array([0.0, error], np.float32)
        return write_archive(path, {f"{step}/lm_head/output": rows for step in range(10)})

    reference, one, two, good, bad = (
        logits(tmp_path / f"{name}.h5", error)
        for name, error in {
            "r": 0.0,
            "one": 2**-7,
            "two": -(2**-7),
            "good": 1.1 * 2**-7,
            "bad": 1.5 * 2**-7,
        }.items()
    )
    runs = [reference, one, reference, two]
    calibration = calibrate(runs, metrics=["kl_mean"], margin=1.5, compute_dtype="bfloat16").calibration
    (limit, count) = calibration.limits["lm_head", "output"]["kl_mean"]
    assert count == 20
    assert limit == pytest.approx(1.5 * 2**-14 / 8, rel=1e-4)
    write_calibration(calibration, tmp_path / "c.toml")

    def findings(target: Path) -> set[str]:
        pairs = compare(reference, target, calibration=tmp_path / "c.toml", compute_dtype="bfloat16").pairs
        return {f.status for pair in pairs for f in pair.findings if f.test == "kl_mean"}

    assert (findings(good), findings(bad)) == ({"within-rounding"}, {"suspect"})
