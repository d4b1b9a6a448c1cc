"""What can be decided from saved metrics agrees with what the tensors say; and which pairs come first."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tensorcap.comparison import Comparison, Thresholds, by_module, compare, compare_records, shade, worst
from tensorcap.reports.json_decoder import decode_as
from tensorcap.reports.pair_examination import examine
from tensorcap.reports.results import Result, judge_again, load_result, save_result
from tensorcap_formats.dtypes import Array

MakeArchive = Callable[..., Any]
KEY = "0/mlp/output"
BF16 = {"dtype": "bfloat16"}


@pytest.fixture
def saved(make_archive: MakeArchive, tmp_path: Path) -> Callable[..., Result]:
    """Two tensors compared, saved and read back."""

    def run(reference: Array, target: Array, **options: Any) -> Result:
        ours, theirs = make_archive({KEY: reference}), make_archive({KEY: target})
        comparison = compare(ours, theirs, **options)
        save_result(tmp_path / "r.json", comparison, examine(comparison, ours, theirs, where="all"))
        return load_result(tmp_path / "r.json")

    return run


def again(result: Result, rtol: float | None = None, atol: float | None = None) -> Any:
    (pair,) = judge_again(result, Thresholds.parse(rtol, atol)).pairs
    return pair


@pytest.mark.spec("RES-12")
@pytest.mark.parametrize("seed", range(8))
def test_what_is_decided_is_what_the_tensors_say(
    saved: Callable[..., Result], make_archive: MakeArchive, seed: int
) -> None:
    generator = np.random.default_rng(seed)
    reference = (generator.normal(size=200) * 10.0 ** generator.integers(-3, 3, 200)).astype(np.float32)
    target = (reference * (1 + generator.normal(size=200) / 1000)).astype(np.float32)
    if seed % 2:
        reference[3], target[3] = 0, 1e-3
    result = saved(reference, target)
    decided = 0
    for rtol in (0.0, 1e-4, 2e-3, 0.1):
        for atol in (0.0, 1e-4, 1e-2, 10.0):
            pair = again(result, rtol, atol)
            x, y = reference.astype(np.float64), target.astype(np.float64)
            outside = int((np.abs(y - x) > atol + rtol * np.abs(x)).sum())
            if pair.status != "unjudged":
                decided += 1
                assert pair.status == ("diverged" if outside else "match")
                assert pair.difference.mismatches in (None, outside)
            elif rtol == 0 or atol == 0:
                pytest.fail("one tolerance alone is always decided")
    assert decided >= 10


@pytest.mark.spec("RES-13")
def test_the_count_outside_is_bounded_by_the_histogram(saved: Callable[..., Result]) -> None:
    reference = np.zeros(100)
    target = np.arange(100) / 64.0
    result = saved(reference, target)
    pair = again(result, atol=1.0)  # bins from 1 to 1.25 with 16 errors, and above with 20
    assert pair.findings[0].text.startswith("20 to 36 of 100 elements are outside rtol 0, atol 1")
    assert pair.difference.mismatches is None
    assert again(result, atol=1.25).findings[0].text.startswith("4 to 20 of 100 elements")
    assert again(result, rtol=0.5).findings[0].text.startswith("1 to 99 of 100 elements")


@pytest.mark.spec("RES-11")
@pytest.mark.parametrize(
    ("reference", "target", "status"),
    [
        pytest.param(np.ones(2), np.ones(2), "identical", id="identical"),
        pytest.param(np.array([0.0]), np.array([-0.0]), "match", id="minus-zero"),
        pytest.param(np.array([1.0, math.nan]), np.array([1.0, 2.0]), "nonfinite", id="masks"),
        pytest.param(np.ones(2), np.ones(3), "shape-mismatch", id="shape"),
        pytest.param(np.array([2**62]), np.array([2**62 + 1]), "match", id="int64"),
        pytest.param(np.array([3 + 4j]), np.array([3 + 4.5j]), "match", id="complex"),
        pytest.param(np.array([math.inf, 1.0]), np.array([math.inf, 1.5]), "match", id="infinite-alike"),
        pytest.param(np.array([1.7e308]), np.array([-1.7e308]), "diverged", id="infinite-error"),
    ],
)
def test_a_generous_tolerance_changes_only_what_was_measured(
    saved: Callable[..., Result], reference: Array, target: Array, status: str
) -> None:
    assert again(saved(reference, target), rtol=0.9, atol=1.0).status == status


@pytest.mark.spec("RES-11")
def test_what_is_explained_stays_so_if_it_is_outside_the_tolerance(saved: Callable[..., Result]) -> None:
    result = saved(np.array([1.0, 2.0]), np.array([1.0, 2.5]))
    (pair,) = result.comparison.pairs
    explained = replace(result.comparison, pairs=(replace(pair, status="explained", reason="it is undone"),))
    result = replace(result, comparison=explained)
    assert (again(result, atol=0.1).status, again(result, atol=0.1).reason) == ("explained", "it is undone")
    assert again(result, atol=1.0).status == "match"


@pytest.mark.spec("RES-10")
def test_nothing_given_leaves_all_as_it_was(saved: Callable[..., Result]) -> None:
    result = saved(np.array([1.0, 2.0]), np.array([1.0, 2.5]), rtol=1e-3)
    assert judge_again(result, Thresholds()).pairs == result.comparison.pairs
    assert result.comparison.tolerance is not None
    assert result.comparison.tolerance.rtol == 1e-3


@pytest.mark.spec("RES-10")
def test_what_judged_before_is_said_until_it_is_replaced(
    saved: Callable[..., Result], tmp_path: Path
) -> None:
    old, new = tmp_path / "old.toml", tmp_path / "new.toml"
    for path in (old, new):
        path.write_text('[[threshold]]\nmatch = "*"\nmetric = "max_abs"\nlimit = 1\n')
    result = saved(np.array([1.0, 2.0]), np.array([1.0, 2.5]), rtol=1e-3, thresholds=old)

    def limits(thresholds: Thresholds) -> tuple[float | None, Path | None]:
        found = judge_again(result, thresholds)
        return found.tolerance.rtol if found.tolerance else None, found.thresholds

    assert limits(Thresholds()) == (1e-3, old)
    assert limits(Thresholds.parse(None, None, new)) == (1e-3, new)
    assert limits(Thresholds.parse(0.5, None)) == (0.5, None)
    assert limits(Thresholds.parse(0.5, None, new)) == (0.5, new)


@pytest.mark.spec("RES-11", "CMP-17")
def test_values_in_doubt_stay_in_doubt(make_archive: MakeArchive, tmp_path: Path) -> None:
    target = make_archive({KEY: np.array([1.0, 0.0])})
    target.remark = lambda record: "1 of 2 chunks are missing"
    save_result(tmp_path / "r.json", compare(make_archive({KEY: np.ones(2)}), target))
    found = judge_again(load_result(tmp_path / "r.json"), Thresholds.parse(None, 9.0))
    assert (found.pairs[0].status, found.exit_status) == ("unreadable", 3)


@pytest.mark.spec("RES-11")
@pytest.mark.parametrize(
    ("saved_atol", "atol", "status"), [(None, 0.1, 0), (0.1, 0.001, 1), (0.1, None, 0), (None, None, 1)]
)
def test_numbers_that_were_returned_are_judged_again(
    make_archive: MakeArchive, tmp_path: Path, saved_atol: float | None, atol: float | None, status: int
) -> None:
    archives = [make_archive({KEY: np.ones(2)}, values={"0/mlp/output.n": n}) for n in (4.0, 4.01)]
    save_result(tmp_path / "r.json", compare(*archives, atol=saved_atol))
    found = judge_again(load_result(tmp_path / "r.json"), Thresholds.parse(None, atol))
    assert [value.is_within for value in found.value_differences] == [status == 0]
    assert found.exit_status == status


@pytest.mark.spec("RES-3")
def test_everything_reads_back_equal(make_archive: MakeArchive, tmp_path: Path) -> None:
    run = {"modules": [{"path": "fc", "class": "Linear"}], "compute_dtype": "bfloat16", "dtype": "bfloat16"}
    x = np.linspace(-1, 1, 64, dtype=np.float32).reshape(8, 8)
    tensors = {"0/fc/input.x": x, "0/fc/output": x, "0/c/output": x[0] + 1j, "0/n/output": x[1]}
    reference = make_archive(tensors, run=run)
    target = make_archive(
        {
            "0/fc/input.x": x,
            "0/fc/output": x * np.float32(1.5),
            "0/c/output": x[0] - 2j,
            "0/n/output": x[1] * np.inf,
        },
        run=run,
    )
    comparison = compare(reference, target, baseline=reference)
    examination = examine(comparison, reference, target, where="all", logits=True)
    save_result(tmp_path / "r.json", comparison, examination)
    found = load_result(tmp_path / "r.json")
    for name in ("reference", "target", "tolerance", "divergence", "warnings", "baseline"):
        assert getattr(found.comparison, name) == getattr(comparison, name), name
    assert found.comparison.pairs == comparison.pairs
    ours, theirs = found.comparison.account, comparison.account
    assert ours is not None
    assert theirs is not None
    assert repr(replace(ours, worst_gain=None)) == repr(replace(theirs, worst_gain=None))
    assert ours.worst_gain is not None
    assert theirs.worst_gain is not None
    assert ours.worst_gain.finding == theirs.worst_gain.finding
    assert found.examination == examination
    assert found.comparison.exit_status == comparison.exit_status


@pytest.mark.spec("RES-10")
def test_a_saved_divergence_by_growth_alone_is_read_back_as_one(
    make_archive: MakeArchive, tmp_path: Path
) -> None:
    x = np.random.default_rng(0).standard_normal((64, 64)).astype(np.float32)
    reference = make_archive({KEY: x})
    for run, is_growth in ((BF16, True), (None, False)):  # 2 % off: float32 runs have a limit that is certain
        save_result(tmp_path / "r.json", compare(reference, make_archive({KEY: x * 1.02}, run=run)))
        divergence = load_result(tmp_path / "r.json").comparison.divergence
        assert divergence is not None
        assert divergence.is_growth is is_growth


@pytest.mark.spec("RES-5")
def test_a_finding_is_saved_by_name_and_by_letter_and_read_by_either(
    make_archive: MakeArchive, tmp_path: Path
) -> None:
    x = np.ones((4, 64), np.float32)
    wrong = x.copy()
    wrong[0, 0] = 3
    limits = tmp_path / "limits.toml"
    limits.write_text('[[threshold]]\nmatch = "a"\nmetric = "outlier"\nlimit = 0.1\n')
    comparison = compare(
        make_archive({"a": x, "b": x}), make_archive({"a": wrong, "b": wrong}), thresholds=limits
    )
    path = tmp_path / "result.json"
    save_result(path, comparison)
    document = json.loads(path.read_text())
    written = [(f["test"], f["name"]) for pair in document["pairs"] for f in pair["findings"]]
    assert written == [("outlier", "outlier"), ("wide", "wide_error"), ("E", "outlier_element")]
    for pair in document["pairs"]:
        for finding in pair["findings"]:
            del finding["name"]
    before = tmp_path / "before.json"
    before.write_text(json.dumps(document))
    for file in (path, before):
        read = [f.test for pair in load_result(file).comparison.pairs for f in pair.findings]
        assert read == ["outlier", "wide_error", "outlier_element"]


def test_of_two_named_records_no_divergence_is_sought(make_archive: MakeArchive, tmp_path: Path) -> None:
    reference, target = make_archive({"a": np.ones(2)}), make_archive({"b": np.ones(2) * 2})
    save_result(tmp_path / "r.json", compare_records(reference, "a", target, "b"))
    found = judge_again(load_result(tmp_path / "r.json"), Thresholds.parse(None, 0.5))
    assert (found.divergence, found.pairs[0].status, found.is_of_archives) == (None, "diverged", False)


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        pytest.param(int, True, id="bool-for-int"),
        pytest.param(float, "x", id="text"),
        pytest.param(float, True, id="bool-for-float"),
        pytest.param(float, 10**400, id="beyond-float64"),
        pytest.param(tuple[int, ...], "12", id="text-for-list"),
        pytest.param(tuple[int, int], [1], id="short"),
        pytest.param(bytes, "?", id="base64"),
        pytest.param(dict[str, int], {"a": 1.5}, id="inner"),
    ],
)
def test_values_of_the_wrong_kind_are_refused(kind: Any, value: Any) -> None:
    with pytest.raises((TypeError, ValueError)):
        decode_as(kind, value)


def comparison_of(make_archive: MakeArchive) -> Comparison:
    reference = {f"0/l.{i}/output": np.full(2, i + 1.0) for i in range(5)}
    target = {key: value * (1.5 if "1" in key else 1.1) for key, value in reference.items()}
    target["0/l.3/output"] = np.array([math.nan, 4])
    target["0/l.0/output"] = reference["0/l.0/output"]
    reference["0/l.1.copy/output"], target["0/l.1.copy/output"] = (
        reference["0/l.1/output"],
        target["0/l.1/output"],
    )
    return compare(make_archive(reference), make_archive(target), atol=1e-3)


def test_the_worst_are_sorted_by_what_became_of_them_and_told_once(make_archive: MakeArchive) -> None:
    found = worst(comparison_of(make_archive).pairs, 3)
    assert [pair.key for pair in found] == ["0/l.3/output", "0/l.1/output", "0/l.2/output"]


def test_groups_have_the_spread_of_their_errors(make_archive: MakeArchive) -> None:
    classes = {"l.0": "A", "l.1": "A", "l.2": "A", "l.3": "B"}
    groups = by_module(comparison_of(make_archive).pairs, classes)
    found = {group.class_name: group for group in groups}
    assert [found["A"].minimum, found["A"].median, found["A"].maximum] == pytest.approx([0, 0.1, 0.5])
    assert (found["A"].count, found["A"].worst) == (3, "0/l.1/output")
    assert found["A"].statuses == {"identical": 1, "diverged": 2}
    assert (found["B"].count, found["B"].maximum, found["B"].statuses) == (1, 0.0, {"nonfinite": 1})


@pytest.mark.spec("RES-34")
@pytest.mark.parametrize(
    ("metric", "value", "precision", "expected"),
    [
        ("relative_frobenius", 8 * 2**-8, "bfloat16", "green"),
        ("relative_frobenius", 32 * 2**-8, "bfloat16", "yellow"),
        ("relative_frobenius", 0.126, "bfloat16", "red"),
        ("relative_frobenius", 0.0, "float32", "green"),
        ("cosine", 1 - 0.03125**2 / 2, "bfloat16", "green"),
        ("cosine", 0.9, "bfloat16", "red"),
        ("psnr_db", math.inf, "float32", "green"),
        ("sqnr_db", 25.0, "bfloat16", "yellow"),
        ("sqnr_db", -math.inf, "bfloat16", "red"),
        ("calc_diff", 0.0004, "bfloat16", "green"),
        ("kl_mean", math.inf, "bfloat16", "red"),
        ("max_abs", 1.0, "bfloat16", None),
        ("cosine", None, "bfloat16", None),
        ("cosine", 1.0, "", None),
    ],
)
def test_a_shade_is_that_of_the_relative_error(
    metric: str, value: float | None, precision: str, expected: str | None
) -> None:
    assert shade(metric, value, precision) == expected
