"""Tolerances and limits that somebody gave, in a file by glob."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tensorcap.comparison import METRICS, Comparison, Thresholds, compare, metric_named
from tensorcap.reports.pair_examination import examine
from tensorcap.reports.results import judge_again, load_result, save_result
from tensorcap_formats.errors import ReadError, UsageError
from tensorcap_formats.open import open_archive
from tests.support.archives import write_archive

MakeArchive = Callable[..., Any]
SPEC = (Path(__file__).parents[2] / "specs/metrics.md").read_text()


@pytest.fixture
def judged(make_archive: MakeArchive, tmp_path: Path) -> Callable[..., Comparison]:
    """Compare `a`, `b` and `c`, each 1 % off, by a file of thresholds."""

    def run(text: str, **options: Any) -> Comparison:
        path = tmp_path / "thresholds.toml"
        path.write_text(text)
        keys = [f"0/{site}/output" for site in "abc"]
        reference = make_archive({key: np.ones(64, np.float32) for key in keys})
        target = make_archive({key: np.full(64, 1.01, np.float32) for key in keys})
        return compare(reference, target, thresholds=path, **options)

    return run


def statuses(comparison: Comparison) -> list[str]:
    return [pair.status for pair in comparison.pairs]


@pytest.mark.spec("POL-40", "POL-42")
def test_the_last_table_counts_and_goes_before_the_options(judged: Callable[..., Comparison]) -> None:
    text = """
        [[threshold]]
        match = "0/*/output"
        rtol = 1e-6
        [[threshold]]
        match = "b"
        rtol = 0.02
    """
    assert statuses(judged(text)) == ["diverged", "match", "diverged"]
    only_b = '[[threshold]]\nmatch = "b"\natol = 1e-3\n'
    assert statuses(judged(only_b, rtol=0.02)) == ["match", "diverged", "match"]
    assert statuses(judged(only_b)) == ["diverged", "diverged", "diverged"]  # the others by the policy


@pytest.mark.spec("POL-41", "POL-42")
@pytest.mark.parametrize(
    ("limits", "status"),
    [
        pytest.param('metric = "relative_frobenius"\nlimit = 0.0101', "match", id="within"),
        pytest.param('metric = "relative_frobenius"\nlimit = 0.0099', "diverged", id="above"),
        pytest.param('metric = "psnr_db"\nlimit = 39', "match", id="more-is-better"),
        pytest.param('metric = "psnr_db"\nlimit = 41', "diverged", id="too-few-decibels"),
        pytest.param('metric = "psnr_db"\nlimit = 39\nrtol = 1e-3', "diverged", id="both-are-to-be-met"),
        pytest.param('metric = "pearson"\nlimit = 0.9', "unjudged", id="undefined"),
        pytest.param('metric = "max_abs"\nlimit = inf', "match", id="infinite"),
    ],
)
def test_metrics_may_be_limited(judged: Callable[..., Comparison], limits: str, status: str) -> None:
    comparison = judged(f'[[threshold]]\nmatch = "*"\n{limits}\n')
    assert statuses(comparison) == [status] * 3
    assert all(finding.text for pair in comparison.pairs for finding in pair.findings)


@pytest.mark.spec("POL-43")
def test_a_table_that_matches_nothing_is_a_slip(judged: Callable[..., Comparison]) -> None:
    with pytest.raises(UsageError, match=r"threshold for '0/a/outputs' matches no key of 3") as caught:
        judged('[[threshold]]\nmatch = "0/a/outputs"\nrtol = 1\n')
    assert caught.value.hint is not None
    assert "'0/a/output'" in caught.value.hint


@pytest.mark.spec("POL-40")
@pytest.mark.parametrize(
    ("text", "message"),
    [
        pytest.param("", "has no thresholds", id="empty"),
        pytest.param("[[thresholds]]\nmatch = '*'\n", "has 'thresholds'", id="other-table"),
        pytest.param("[[threshold]]\nrtol = 1\n", "expected a glob as match", id="no-glob"),
        pytest.param("[[threshold]]\nmatch = '*'\n", "limits nothing", id="nothing"),
        pytest.param("[[threshold]]\nmatch = '*'\nrtoll = 1\n", "has 'rtoll'", id="misspelt"),
        pytest.param("[[threshold]]\nmatch = '*'\nrtol = -1\n", "rtol: is -1.0", id="negative"),
        pytest.param("[[threshold]]\nmatch = '*'\nrtol = '1'\n", "rtol is '1'", id="text"),
        pytest.param("[[threshold]]\nmatch = '*'\nrtol = true\n", "rtol is True", id="bool"),
        pytest.param("[[threshold]]\nmatch = '*'\nlimit = 1\n", "metric and limit together", id="no-metric"),
        pytest.param(
            "[[threshold]]\nmatch = '*'\nmetric = 'rmse'\n", "metric and limit together", id="no-limit"
        ),
        pytest.param("[[threshold]\n", "no TOML", id="no-toml"),
    ],
)
def test_a_file_that_is_no_file_of_thresholds_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "t.toml"
    path.write_text(text)
    with pytest.raises(UsageError, match=message):
        Thresholds.parse(None, None, path)


def test_a_number_beyond_float64_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "t.toml"
    path.write_text(f'[[threshold]]\nmatch = "*"\nrtol = 1{"0" * 400}\n')
    with pytest.raises(UsageError, match=r"threshold 1: rtol is beyond float64"):
        Thresholds.parse(None, None, path)


def test_a_file_that_is_not_there_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ReadError, match=r"none\.toml: No such file"):
        Thresholds.parse(None, None, tmp_path / "none.toml")


@pytest.mark.spec("POL-41")
def test_a_misspelt_metric_is_answered_with_the_one_that_was_meant(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="metric 'relative_frobenus' is unknown") as caught:
        metric_named("relative_frobenus")
    assert caught.value.hint == "Did you mean 'relative_frobenius' or 'relative_linf'?"
    path = tmp_path / "t.toml"
    path.write_text("[[threshold]]\nmatch = '*'\nmetric = 'psnr'\nlimit = 40\n")
    with pytest.raises(UsageError, match="threshold 1: metric 'psnr' is unknown"):
        Thresholds.parse(None, None, path)


@pytest.mark.spec("POL-41")
def test_metrics_are_those_of_the_specification() -> None:
    import re

    table = SPEC.partition("| name | unit | better |")[2].partition("\n\n")[0]
    rows = [row.split("|") for row in table.splitlines()[2:]]
    found = {
        name: better.strip() for _, names, _, better, *_ in rows for name in re.findall(r"`(\w+)`", names)
    }
    found.pop("mismatches")  # what a tolerance counts
    assert found == dict(METRICS)


def logits_judged(folder: Path, limits: str, scale: float = 1.0) -> Any:
    """Two rows of two logits: row 0 from p = (0.5, 0.5) to (0.25, 0.75), row 1 the same but for `scale`."""
    table = '[[threshold]]\nmatch = "*"\n' + limits
    (folder / "t.toml").write_text(table)
    reference = np.array([[0.0, 0.0], [1.0, 0.0]])
    target = np.array([[0.0, math.log(3)], [scale, 0.0]])
    paths = [
        write_archive(folder / f"{i}.h5", {"0/@root/output.logits": values})
        for i, values in enumerate((reference, target))
    ]
    return paths, folder / "t.toml"


# KL of row 0 is ln 2 - (ln 3)/2 = 0.14384, of row 1 nothing; the first choice agrees in both (a tie counts)
@pytest.mark.spec("POL-41")
@pytest.mark.parametrize(
    ("limits", "status"),
    [
        pytest.param('metric = "kl_max"\nlimit = 0.1439', "match", id="kl-max"),
        pytest.param('metric = "kl_max"\nlimit = 0.1438', "diverged", id="kl-max-above"),
        pytest.param('metric = "kl_mean"\nlimit = 0.0720', "match", id="kl-mean"),
        pytest.param('metric = "kl_mean"\nlimit = 0.0719', "diverged", id="kl-mean-above"),
        pytest.param('metric = "top1"\nlimit = 1.0', "match", id="top1"),
    ],
)
def test_logits_are_limited_by_their_own_metrics(tmp_path: Path, limits: str, status: str) -> None:
    paths, thresholds = logits_judged(tmp_path, limits)
    comparison = compare(*paths, thresholds=thresholds)
    assert statuses(comparison) == [status]
    with open_archive(paths[0]) as ours, open_archive(paths[1]) as theirs:
        save_result(tmp_path / "r.json", comparison, examine(comparison, ours, theirs))
    again = judge_again(load_result(tmp_path / "r.json"), Thresholds.parse(None, None, thresholds))
    assert statuses(again) == [status]


@pytest.mark.spec("POL-41")
def test_fewer_first_choices_that_agree_than_the_limit_are_not_green(tmp_path: Path) -> None:
    paths, thresholds = logits_judged(tmp_path, 'metric = "top1"\nlimit = 0.9', scale=-1.0)
    (pair,) = compare(*paths, thresholds=thresholds).pairs
    assert (pair.status, pair.findings[0].text) == ("diverged", "top1 is 0.5, expected at least 0.9")


@pytest.mark.spec("POL-41")
def test_a_value_near_to_its_limit_is_told_from_it(make_archive: MakeArchive, tmp_path: Path) -> None:
    x = np.ones(64, np.float32)
    sides = [
        make_archive({"0/a/output": side}) for side in (x, x + np.resize([1, -1], 64) * np.float32(0.0053))
    ]
    (tmp_path / "t.toml").write_text('[[threshold]]\nmatch = "*"\nmetric = "cosine"\nlimit = 0.99999\n')
    (pair,) = compare(*sides, thresholds=tmp_path / "t.toml").pairs
    assert (pair.status, pair.findings[0].text) == (
        "diverged",
        "cosine is 0.999986, expected at least 0.99999",  # 1 / sqrt(1 + 0.0053^2)
    )


@pytest.mark.spec("POL-41")
def test_equal_distributions_of_other_values_are_within_a_limit_of_zero(
    judged: Callable[..., Comparison],
) -> None:
    assert statuses(judged('[[threshold]]\nmatch = "*"\nmetric = "kl_max"\nlimit = 0.0\n')) == ["match"] * 3
