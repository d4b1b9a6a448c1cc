"""What the policy makes of single pairs and of small runs with a known right answer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest

from tensorcap.comparison import (
    POLICY,
    Comparison,
    Finding,
    Pair,
    RunSummary,
    Status,
    compare,
    first_divergence,
    sample,
)
from tensorcap.comparison.policy_tests import (
    EVIDENCE_TESTS,
    GROWTH_TESTS,
    LOCAL_TESTS,
    ROUNDED_INPUT_TESTS,
    TESTS,
)
from tensorcap_formats.dtypes import Array, dtype
from tensorcap_formats.errors import UsageError
from tests.comparison.limits_table import limits_table, written_table
from tests.support.floats import bfloat16, to_bfloat16

MakeArchive = Callable[..., Any]
KEY = "0/mlp/output"
BF16 = {"dtype": "bfloat16", "compute_dtype": "bfloat16"}


def normal(*shape: int, seed: int = 3) -> Array:
    found: Array = np.random.default_rng(seed).standard_normal(shape).astype(np.float32)
    return found


def changed(values: Array, index: int, value: float) -> Array:
    values = values.copy()
    values.reshape(-1)[index] = value
    return values


X = normal(1, 64, 64)
BIG = np.arange(16777210, 16777274).reshape(1, 8, 8)
FLOAT64 = X.astype(np.float64) + 1e8
FP8 = (np.arange(64, dtype=np.uint8), dtype("float8_e4m3fn"))
PAIRS = {  # of the survey of other tools: reference, target, what it has to be
    "same": (X, X.copy(), "identical"),
    "noise1e-3": (X, X * (1 + 1e-3 * normal(1, 64, 64, seed=4)), "within-rounding"),
    "oneoutlier": (X, changed(X, 100, float(X.reshape(-1)[100]) + 1.0), "diverged"),
    "scaled2x": (X, X * 2, "diverged"),
    "shifted": (X + 100, X + np.float32(100.5), "diverged"),
    "samenan": (changed(X, 5, np.nan), changed(X, 5, np.nan), "identical"),
    "newnan": (X, changed(X, 5, np.nan), "nonfinite"),
    "sameinf": (changed(X, 5, np.inf), changed(X, 5, np.inf), "identical"),
    "infsign": (changed(X, 5, np.inf), changed(X, 5, -np.inf), "nonfinite"),
    "int64off1": (BIG, BIG + np.arange(64).reshape(1, 8, 8) % 2, "diverged"),
    "f64tiny": (FLOAT64, FLOAT64 + 1e-1, "diverged"),
    "zeros": (np.zeros((1, 8, 8), np.float32), np.zeros((1, 8, 8), np.float32), "identical"),
    "zerovstiny": (np.zeros((1, 8, 8), np.float32), np.full((1, 8, 8), 1e-12, np.float32), "suspect"),
    "transposed": (X, np.ascontiguousarray(X.transpose(0, 2, 1)), "diverged"),
    "shape": (X, X[:, :32], "shape-mismatch"),
    "reshaped": (X, X.reshape(1, 32, 128), "shape-mismatch"),
    "bf16": (X, bfloat16(X), "within-rounding"),
    "bool": (X > 0, (X > 0) ^ (np.arange(4096).reshape(1, 64, 64) == 7), "diverged"),
    "empty": (X[:, :0], X[:, :0], "identical"),
    "scalar": (np.array(1.0, np.float32), np.array(2.0, np.float32), "diverged"),
    "fp8": (FP8, FP8, "identical"),
}


@pytest.mark.spec("POL-1", "POL-2", "POL-17")
@pytest.mark.parametrize("name", PAIRS)
def test_pairs_that_other_tools_get_wrong_get_the_right_verdict(make_archive: MakeArchive, name: str) -> None:
    reference, target, status = PAIRS[name]
    option = "bfloat16" if name == "noise1e-3" else None
    comparison = compare(make_archive({name: reference}), make_archive({name: target}), compute_dtype=option)
    assert [pair.status for pair in comparison.pairs] == [status]
    is_green = status in ("identical", "match", "within-rounding")
    assert comparison.exit_status == (0 if is_green else 1)


def test_one_wrong_element_in_a_million_is_found(make_archive: MakeArchive) -> None:
    reference = normal(1, 1024, 1024)
    target = changed(reference, 77, float(reference.reshape(-1)[77]) + 3.0)
    (pair,) = compare(make_archive({"x": reference}), make_archive({"x": target})).pairs
    assert (pair.status, [f.test for f in pair.findings if f.status == "diverged"]) == (
        "diverged",
        ["outlier_element"],
    )


def test_tensors_of_one_side_are_told_of_and_the_reference_ones_required(make_archive: MakeArchive) -> None:
    comparison = compare(
        make_archive({"x": X, "only_reference": X}), make_archive({"x": X, "only_target": X})
    )
    assert comparison.counts == {"identical": 1, "missing-in-target": 1, "missing-in-reference": 1}
    assert comparison.exit_status == 1


def test_a_target_that_ends_early_is_unreadable(make_archive: MakeArchive) -> None:
    target = make_archive({"x": X * 2}, unreadable="x")
    assert compare(make_archive({"x": X}), target).exit_status == 3


def test_case_61_values_near_zero_are_measured_by_the_scale_of_their_row(make_archive: MakeArchive) -> None:
    x, w = normal(64, 256), normal(256, 128, seed=5) / 16
    reference = x.astype(np.float64) @ w.astype(np.float64)
    target = to_bfloat16(to_bfloat16(x).astype(np.float64) @ to_bfloat16(w).astype(np.float64)).astype(
        np.float64
    )
    assert (np.abs(target - reference) / np.abs(reference)).max() > 1
    small = np.random.default_rng(0).standard_normal(1000) * 1e-6
    found = compare(
        make_archive({"x": reference, "small": small}),
        make_archive({"x": target, "small": 2 * small}),
        compute_dtype="bfloat16",
    )
    assert [pair.status for pair in found.pairs] == ["within-rounding", "suspect"]
    assert compare(make_archive({"x": small}), make_archive({"x": 2 * small})).counts == {"diverged": 1}


@pytest.mark.spec("POL-18")
def test_case_63_a_flip_is_a_tie_only_within_the_noise(make_archive: MakeArchive) -> None:
    rows = 400
    scores = np.tile(np.array([4.0, 2.0, 1.0, 0.0], np.float32), (rows, 1))
    scores[0] = [4.0039, 4.0, 1.0, 0.0]
    noisy = scores * (1 + 2e-3 * np.where(normal(rows, 4) > 0, 1, -1).astype(np.float32))
    chosen = np.zeros((rows, 1), np.int64)
    flipped = chosen.copy()
    flipped[0] = 1
    for row, status in ((0, "within-rounding"), (7, "suspect")):
        flipped = chosen.copy()
        flipped[row] = 1
        reference = make_archive({"0/mlp.gate/output.0": scores, "0/mlp.gate/output.1": chosen}, run=BF16)
        target = make_archive({"0/mlp.gate/output.0": noisy, "0/mlp.gate/output.1": flipped}, run=BF16)
        comparison = compare(reference, target)
        assert [pair.status for pair in comparison.pairs] == ["within-rounding", status]
    wrong = make_archive({"0/mlp.gate/output.0": noisy, "0/mlp.gate/output.1": chosen + 2}, run=BF16)
    assert [pair.status for pair in compare(reference, wrong).pairs] == ["within-rounding", "diverged"]
    blind = [make_archive({"0/mlp.gate/output.1": side}, run=BF16) for side in (chosen, flipped)]
    assert [pair.status for pair in compare(*blind).pairs] == ["suspect"]


@pytest.mark.spec("POL-18")
@pytest.mark.parametrize(("flips", "status"), [(3, "within-rounding"), (40, "suspect")])
def test_where_groups_of_experts_decide_flips_are_counted(
    make_archive: MakeArchive, flips: int, status: str
) -> None:
    scores = np.tile(np.array([3.0, 2.0, 1.0, 0.0], np.float32), (100, 1))
    chosen = np.full((100, 1), 1)  # not the largest: its group was left out
    other = chosen.copy()
    other[:flips] = 3
    archives = [
        make_archive({"0/mlp.gate/output.0": made, "0/mlp.gate/output.1": side}, run=BF16)
        for made, side in ((scores, chosen), (scores * np.float32(1.001), other))
    ]
    assert [pair.status for pair in compare(*archives).pairs] == ["within-rounding", status]


@pytest.mark.spec("POL-19")
@pytest.mark.parametrize("is_wrong", [False, True])
def test_rows_that_are_ordered_by_expert_are_brought_together(
    make_archive: MakeArchive, is_wrong: bool
) -> None:
    tokens = normal(40, 64)
    chosen = np.tile(np.array([[0], [1]]), (20, 1))
    other = chosen.copy()
    other[6] = 1  # a near tie: its scores are nearly equal
    scores = np.where(np.arange(2) == chosen, 2.0, 1.0).astype(np.float32)
    scores[6] = [1.001, 1.0]

    def run(choices: Array, low: bool) -> Any:
        given = tokens[np.argsort(choices[:, 0], kind="stable")]
        given = to_bfloat16(given) if low else given
        made = (given if is_wrong and low else silu(given)).astype(np.float32)
        tensors = {
            "0/mlp.gate/input.x": tokens,
            "0/mlp.gate/output.0": to_bfloat16(scores) if low else scores,
            "0/mlp.gate/output.1": choices,
            "0/mlp.experts/input.x": tokens,
            "0/mlp.experts/input.index": choices,
            "0/mlp.experts.act/input.x": given,
            "0/mlp.experts.act/output": to_bfloat16(made) if low else made,
            "0/mlp.experts/output": tokens,
        }
        modules = [{"path": "mlp.experts.act", "class": "SiLU", "parameters": {}}]
        return make_archive(tensors, run={"modules": modules, **(BF16 if low else {})})

    found = compare(run(chosen, False), run(other, True))
    assert finding_of(found, "0/mlp.gate/output.1", "routing").status == "within-rounding"
    assert finding_of(found, "0/mlp.experts/input.index", "routing").status == "within-rounding"
    pairs = {pair.key: pair.status for pair in found.pairs}
    assert pairs["0/mlp.experts.act/input.x"] == "within-rounding"
    assert pairs["0/mlp.experts.act/output"] == ("diverged" if is_wrong else "within-rounding")


@pytest.mark.spec("POL-23")
@pytest.mark.parametrize("children", [True, False])
def test_a_wrong_expert_is_found_behind_tokens_that_flipped(
    make_archive: MakeArchive, children: bool
) -> None:
    tokens = normal(40, 64)
    chosen = np.zeros((40, 1), np.int64)
    chosen[30] = 1  # the only token of the second expert
    flipped = chosen.copy()
    flipped[6] = 1
    scores = np.where(np.arange(2) == chosen, 2.0, 1.0).astype(np.float32)
    scores[6] = [1.001, 1.0]

    def run(choices: Array, second: Array, low: bool) -> Any:
        given = to_bfloat16(tokens) if low else tokens
        made = np.where(choices == 0, given @ W, given @ second)
        tensors = {
            "0/mlp.gate/input.x": given,
            "0/mlp.gate/output.0": to_bfloat16(scores) if low else scores,
            "0/mlp.gate/output.1": choices,
            "0/mlp.experts/input.x": given,
            "0/mlp.experts/input.index": choices,
            **({"0/mlp.experts.act/output": np.abs(given)} if children else {}),
            "0/mlp.experts/output": to_bfloat16(made) if low else made,
        }
        return make_archive(tensors, run=BF16 if low else {})

    key = "0/mlp.experts/output"
    clean = compare(run(chosen, W.T, False), run(flipped, W.T, True))
    assert [finding_of(clean, key, test).status for test in ("attention_gain", "attention_gain_tail")] == [
        "within-rounding"
    ] * 2
    found = compare(run(chosen, W.T, False), run(flipped, W, True))
    assert finding_of(found, key, "attention_gain_tail").status == "diverged"
    assert found.divergence is not None
    assert found.divergence.module == "mlp.experts"


@pytest.mark.spec("POL-18")
@pytest.mark.parametrize("best", [2, 1])
def test_other_choices_by_the_same_scores_are_wrong(make_archive: MakeArchive, best: int) -> None:
    scores = np.tile(np.array([3.0, 2.999, 1.0, 1.0], np.float32), (400, 1))
    chosen = np.full((400, 1), best - 1)  # the best, or the second best where a bias has a say
    statuses = []
    for place, other in ((7, 0), (7, 1), (7, 3)):
        flipped = chosen.copy()
        flipped[place] = other
        sides = [
            make_archive({"0/mlp.gate/output.0": scores, "0/mlp.gate/output.1": side}, run=BF16)
            for side in (chosen, flipped)
        ]
        statuses.append(compare(*sides).pairs[1].status)
    assert statuses == (
        ["diverged", "identical", "diverged"] if best == 2 else ["identical", "diverged", "diverged"]
    )


@pytest.mark.spec("POL-18")
def test_an_exact_tie_may_be_broken_either_way(make_archive: MakeArchive) -> None:
    scores = np.tile(np.array([3.0, 1.0, 1.0, 0.0], np.float32), (400, 1))
    chosen = np.tile(np.array([0, 1]), (400, 1))
    flipped = chosen.copy()
    flipped[7, 1] = 2
    sides = [
        make_archive({"0/mlp.gate/output.0": scores, "0/mlp.gate/output.1": side}, run=BF16)
        for side in (chosen, flipped)
    ]
    assert compare(*sides).counts == {"identical": 1, "within-rounding": 1}


@pytest.mark.spec("POL-18")
@pytest.mark.parametrize(("error", "status"), [(1e-6, "within-rounding"), (5e-5, "suspect")])
def test_flips_by_scores_that_are_off_in_float32_are_not_green(
    make_archive: MakeArchive, error: float, status: str
) -> None:
    scores = np.tile(np.array([3.0, 1.000001, 1.0, 0.0], np.float32), (400, 1))
    noisy = scores * (1 + np.float32(error) * np.where(normal(400, 4) > 0, 1, -1).astype(np.float32))
    chosen = np.tile(np.array([0, 1]), (400, 1))
    flipped = chosen.copy()
    flipped[7, 1] = 2
    reference = make_archive({"0/mlp.gate/output.0": scores, "0/mlp.gate/output.1": chosen})
    target = make_archive({"0/mlp.gate/output.0": noisy, "0/mlp.gate/output.1": flipped})
    assert finding_of(compare(reference, target), "0/mlp.gate/output.1", "routing").status == status


@pytest.mark.spec("POL-24")
@pytest.mark.parametrize("blocked", [-np.inf, -65504.0, -1e9, float(np.finfo(np.float32).min)])
@pytest.mark.parametrize("is_swapped", [False, True])
def test_masks_of_two_kinds_are_compared_by_what_they_say(
    make_archive: MakeArchive, blocked: float, is_swapped: bool
) -> None:
    attends = np.tril(np.ones((1, 1, 8, 8), np.bool_))
    added = np.where(attends, 0, blocked).astype(np.float32)
    wrong = changed(added, 9, blocked)
    no_mask = changed(added, 9, 0.5)
    statuses = []
    for other in (added, wrong, no_mask):
        sides = (other, attends) if is_swapped else (attends, other)
        (pair,) = compare(*(make_archive({"0/attn/input.mask": side}) for side in sides)).pairs
        statuses.append(pair.status)
    assert statuses[:2] == ["match", "diverged"]
    assert statuses[2] in ("diverged", "nonfinite")


@pytest.mark.spec("POL-3")
@pytest.mark.parametrize(
    ("run", "is_both", "status"),
    [
        pytest.param({"dtype": "float32"}, False, "suspect", id="one"),
        pytest.param({"dtype": "float32"}, True, "within-rounding", id="both-records"),
        pytest.param(BF16, False, "within-rounding", id="bfloat16-runs"),
        pytest.param({}, False, "within-rounding", id="not-stated"),
    ],
)
def test_a_record_coarser_than_both_runs_state_is_suspect(
    make_archive: MakeArchive, run: Mapping[str, str], is_both: bool, status: str
) -> None:
    ours = bfloat16(X * np.float32(1.002)) if is_both else X
    found = compare(make_archive({KEY: ours}, run=run), make_archive({KEY: bfloat16(X)}, run=run))
    assert found.counts == {status: 1}


@pytest.mark.spec("POL-25")
def test_growth_alone_makes_no_suspect(make_archive: MakeArchive) -> None:
    x = normal(64, 64)
    error = (1 + 0.02 * np.where(normal(64, 64, seed=5) > 0, 1, -1)).astype(np.float32)
    found = compare(make_archive({KEY: x}, run=BF16), make_archive({KEY: x * error}, run=BF16))
    assert found.divergence is not None
    explanation = found.divergence.explanation
    assert explanation == "The error grew past what is expected here; no module stands out."


@pytest.mark.spec("POL-25")
@pytest.mark.parametrize(
    ("given", "module"),
    [
        (("outlier_element", "diverged"), "act"),
        (("outlier_element", "within-rounding"), "out"),
        (None, "out"),
    ],
)
def test_an_outlier_that_an_input_brought_does_not_go_before_a_modules_own_error(
    make_archive: MakeArchive, given: tuple[str, Status] | None, module: str
) -> None:
    archive = make_archive({"0/act/output": X, "0/out/input.x": X, "0/out/output": X})
    inherited = () if given is None else (Finding(given[0], 1, 0, given[1], ""),)
    own, outlier = Finding("gain", 2, 1.5, "suspect", ""), Finding("outlier_element", 1, 0, "diverged", "")
    records = archive.records
    pairs = [
        Pair("0/act/output", "suspect", records[0], records[0], findings=(own,)),
        Pair("0/out/input.x", "identical", records[1], records[1], findings=inherited),
        Pair("0/out/output", "diverged", records[2], records[2], findings=(outlier,)),
    ]
    found = first_divergence(archive, pairs)
    assert found is not None
    assert found.module == module


@pytest.mark.spec("POL-25")
def test_rows_that_came_in_wrong_are_not_the_outliers_of_the_next_module(make_archive: MakeArchive) -> None:
    run = Run("fc", "act", "out", classes={"fc": "Linear", "act": "SiLU", "out": "Linear"})
    reference = make_archive(run.tensors(normal(256, 64), RIGHT, False), run=run.metadata(False))

    def wrong(x: Array) -> Array:
        made = silu(x)
        made[:20] *= -1
        return made

    tensors = run.tensors(normal(256, 64), {**RIGHT, "act": wrong}, True)
    pairs = compare(reference, make_archive(tensors, run=run.metadata(True))).pairs
    out = [pair for pair in pairs if pair.key.startswith("0/out/")]
    assert [pair.status for pair in out] == ["diverged", "diverged"]  # by outliers
    fc = replace(pairs[0], status="suspect", findings=(Finding("gain", 2, 1.5, "suspect", ""),))
    told = replace(out[0], status="within-rounding", findings=())
    found = first_divergence(reference, [fc, told, out[1]])
    assert found is not None
    assert found.module == "@root"  # that of the first pair, fc's input


def test_case_66_nothing_compared_is_no_success(make_archive: MakeArchive) -> None:
    reference = make_archive(dict.fromkeys("abc", X))
    assert compare(reference, make_archive(dict.fromkeys(("model.a", "x", "y"), X))).exit_status == 1
    one = compare(reference, make_archive({"a": X}))
    assert (one.compared, one.records, one.exit_status) == (1, 3, 1)


@pytest.mark.spec("POL-3")
@pytest.mark.parametrize(
    ("reference", "target", "option", "status"),
    [
        pytest.param({}, {}, None, "diverged", id="records-say-float32"),
        pytest.param({"dtype": "float32"}, BF16, None, "within-rounding", id="target-in-bfloat16"),
        pytest.param(BF16, {"dtype": "float32"}, None, "within-rounding", id="reference-in-bfloat16"),
        pytest.param(BF16, BF16, None, "within-rounding", id="both"),
        pytest.param(
            {}, {"dtype": "bfloat16", "compute_dtype": "float32"}, None, "diverged", id="stored-low"
        ),
        pytest.param({}, BF16, "float32", "diverged", id="option-wins"),
        pytest.param({}, {}, "tf32", "suspect", id="tf32"),
    ],
)
def test_the_precision_of_the_runs_counts_and_not_that_of_the_records(
    make_archive: MakeArchive,
    reference: Mapping[str, str],
    target: Mapping[str, str],
    option: str | None,
    status: str,
) -> None:
    ours, theirs = make_archive({KEY: X}, run=reference), make_archive({KEY: to_bfloat16(X)}, run=target)
    comparison = compare(ours, theirs, compute_dtype=option)
    assert [pair.status for pair in comparison.pairs] == [status]


def test_a_compute_dtype_that_does_not_exist_is_refused(make_archive: MakeArchive) -> None:
    archive = make_archive({KEY: X})
    with pytest.raises(UsageError, match="compute dtype 'bf61' is unknown"):
        compare(archive, archive, compute_dtype="bf61")


def test_findings_of_local_tests_speak_of_the_module_itself() -> None:
    assert {name for test in TESTS for name in test.names} - LOCAL_TESTS == {
        "growth",
        "wide_error",
        "statistics",
        "parameter",
        "weight_rounding",
    }
    assert sorted(LOCAL_TESTS) == [
        "angles",
        "attention_gain",
        "attention_gain_tail",
        "code_gain",
        "dtype",
        "gain",
        "gain_tail",
        "input_dependence",
        "integers",
        "mask",
        "outlier_element",
        "own_error_composite",
        "own_error_leaf",
        "quantisation",
        "range",
        "recomputed",
        "routing",
        "row_gain",
        "run_gain",
        "unequal_copies",
        "zeros",
    ]


def test_attributes_of_tests_say_what_their_findings_mean() -> None:
    assert {"growth"} == GROWTH_TESTS
    assert {"outlier_element", "input_dependence"} == ROUNDED_INPUT_TESTS
    gains = {"gain", "attention_gain", "gain_tail", "attention_gain_tail", "code_gain"}
    others = {"angles", "outlier_element", "quantisation", "range", "recomputed", "unequal_copies"}
    assert gains | others == EVIDENCE_TESTS


def test_the_table_of_limits_in_the_specification_is_that_of_the_policy() -> None:
    assert written_table() == limits_table()


@pytest.mark.spec("POL-12")
def test_an_outlier_is_held_against_rows_and_few_rows_do_not_hide_it(make_archive: MakeArchive) -> None:
    noise = 1 + 2e-3 * normal(256, 64, seed=9)
    reference = normal(256, 64)
    for rows in (256, 4):
        target = (reference * noise)[:rows]
        archives = (
            make_archive({KEY: reference[:rows]}),
            make_archive({KEY: changed(target, 70, 5.0)}, run=BF16),
        )
        assert compare(*archives).counts == {"diverged": 1}
        archives = make_archive({KEY: reference[:rows]}), make_archive({KEY: target}, run=BF16)
        assert compare(*archives).counts == {"within-rounding": 1}


@pytest.mark.spec("POL-13")
def test_the_envelope_grows_with_the_blocks_that_are_over(make_archive: MakeArchive) -> None:
    x = normal(64, 64)
    error = (1 + 0.021 * np.where(normal(64, 64, seed=5) > 0, 1, -1)).astype(np.float32)
    keys = [f"0/layers.{i}.mlp/output" for i in range(9)]
    reference, target = (make_archive(dict.fromkeys(keys, side), run=BF16) for side in (x, x * error))
    found = compare(reference, target)
    # 2 * 0.425 * 2**-8 * sqrt(4 + 30 n): 0.0194 at block 1, 0.0266 at block 2, 0.0549 at block 9;
    # times 1 + 3 / sqrt(64 * 64)
    assert [pair.status for pair in found.pairs] == ["suspect"] + ["within-rounding"] * 8
    limits = [finding_of(found, key, "growth").limit for key in keys]
    assert limits[:2] == pytest.approx([0.02027, 0.02781], abs=1e-5)
    assert limits[8] == pytest.approx(0.05754, abs=1e-5)
    wrong = compare(reference, make_archive(dict.fromkeys(keys, -x), run=BF16))
    assert wrong.counts == {"suspect": 9}  # never more by itself
    bare = [make_archive({"act_7": side, "x": side}, run=BF16) for side in (x, x * error)]
    assert [pair.status for pair in compare(*bare).pairs] == ["within-rounding", "suspect"]


@pytest.mark.spec("POL-20")
def test_rows_of_zeros_with_an_error_are_suspect_until_a_tolerance_says_more(
    make_archive: MakeArchive,
) -> None:
    x = normal(64, 64)
    x[5] = 0
    target = x.copy()
    target[5] = 1e-12
    archives = make_archive({KEY: x}), make_archive({KEY: target})
    assert finding_of(compare(*archives), KEY, "zeros").value == 1
    assert compare(*archives).counts == {"suspect": 1}
    assert compare(*archives, atol=1e-9).counts == {"match": 1}


@pytest.mark.spec("POL-21")
def test_statistics_prove_a_least_error(make_archive: MakeArchive) -> None:
    x = normal(64, 64)
    reference = make_archive({"a": x, "b": x, "c": x}, stored=False)
    target = make_archive({"a": x * np.float32(1.01), "b": x + np.float32(0.5), "c": -x})
    found = compare(reference, target)
    assert [pair.status for pair in found.pairs] == ["diverged", "diverged", "diverged"]
    assert finding_of(found, "a", "statistics").value == pytest.approx(0.01, rel=1e-3)
    assert found.compared == 0
    same = np.concatenate([x[32:], x[:32]])
    hidden = compare(make_archive({"a": x}, stored=False), make_archive({"a": same}))
    assert [pair.status for pair in hidden.pairs] == ["unjudged"]


class Run:
    """A run of leaves, each of which is given what the one before made."""

    def __init__(self, *names: str, classes: Mapping[str, str] | None = None) -> None:
        self.names = names
        self.classes = classes or {}

    def tensors(
        self, x: Array, functions: Mapping[str, Callable[[Array], Array]], low: bool
    ) -> dict[str, Any]:
        found = {}
        value = to_bfloat16(x) if low else x
        for name in self.names:
            found[f"0/{name}/input.x"] = value
            value = functions[name](value.astype(np.float64)).astype(np.float32)
            value = to_bfloat16(value) if low else value
            found[f"0/{name}/output"] = value
        return found

    def metadata(self, low: bool) -> dict[str, Any]:
        modules = [
            {"path": name, "class": f"torch.{kind}", "parameters": {}} for name, kind in self.classes.items()
        ]
        return {"modules": modules, **(BF16 if low else {"dtype": "float32"})}


def finding_of(comparison: Comparison, key: str, test: str) -> Finding:
    (pair,) = [pair for pair in comparison.pairs if pair.key == key]
    (finding,) = [finding for finding in pair.findings if finding.test == test]
    return finding


W = normal(64, 64, seed=11) / 8


def silu(x: Array) -> Array:
    found: Array = x / (1 + np.exp(-x))
    return found


RIGHT: dict[str, Callable[[Array], Array]] = {"fc": lambda x: x @ W, "act": silu, "out": lambda x: x @ W.T}


def run_pair(
    make_archive: MakeArchive,
    wrong: Mapping[str, Callable[[Array], Array]],
    *,
    low: bool = True,
    **classes: str,
) -> Comparison:
    run = Run("fc", "act", "out", classes={"fc": "Linear", "act": "SiLU", "out": "Linear", **classes})
    reference = make_archive(run.tensors(normal(256, 64), RIGHT, False), run=run.metadata(False))
    target = make_archive(run.tensors(normal(256, 64), {**RIGHT, **wrong}, low), run=run.metadata(low))
    return compare(reference, target)


@pytest.mark.spec("POL-10")
def test_a_leaf_that_adds_more_error_than_rounding_is_named(make_archive: MakeArchive) -> None:
    clean = run_pair(make_archive, {})
    assert set(clean.counts) <= {"identical", "within-rounding"}
    assert 0.2 < finding_of(clean, "0/act/output", "gain").value < 1.5
    wrong: dict[str, Callable[[Array], Array]] = {
        "suspect": lambda x: 1.007 * silu(x),
        "diverged": lambda x: 1.1 * silu(x),
    }
    for status, function in wrong.items():
        found = run_pair(make_archive, {"act": function})
        assert finding_of(found, "0/act/output", "gain").status == status
        assert finding_of(found, "0/out/output", "gain").status == "within-rounding"  # it only inherits
        assert found.divergence is not None
        assert found.divergence.module == "act"


@pytest.mark.spec("POL-11")
def test_a_leaf_of_unknown_kind_has_larger_limits(make_archive: MakeArchive) -> None:
    def wrong(x: Array) -> Array:
        found: Array = 1.012 * silu(x)
        return found

    assert finding_of(run_pair(make_archive, {"act": wrong}), "0/act/output", "gain").status == "diverged"
    found = run_pair(make_archive, {"act": wrong}, act="FusedThing")
    assert finding_of(found, "0/act/output", "attention_gain").status == "within-rounding"


@pytest.mark.spec("POL-22")
@pytest.mark.parametrize(("kind", "test"), [("SiLU", "gain_tail"), ("FusedThing", "attention_gain_tail")])
def test_a_mistake_in_a_part_of_the_rows_is_found_where_the_median_row_is_right(
    make_archive: MakeArchive, kind: str, test: str
) -> None:
    def wrong(x: Array) -> Array:
        made = silu(x)
        made[:100] *= 1.05  # of 256 rows
        return made

    assert finding_of(run_pair(make_archive, {}, act=kind), "0/act/output", test).status == "within-rounding"
    found = run_pair(make_archive, {"act": wrong}, act=kind)
    assert finding_of(found, "0/act/output", test).status == "diverged"
    assert (
        finding_of(found, "0/act/output", "gain" if test == "gain_tail" else "attention_gain").status
        == "within-rounding"
    )
    assert finding_of(found, "0/out/output", "gain_tail").status == "within-rounding"  # it only inherits
    assert found.divergence is not None
    assert found.divergence.module == "act"


@pytest.mark.spec("POL-22")
@pytest.mark.parametrize(
    ("shape", "factor", "status"),
    [
        pytest.param((16, 8, 8, 32), 1.013, "within-rounding", id="small channels of images"),
        pytest.param((16, 32, 64), 1.013, "diverged", id="rows of tokens"),
        pytest.param((16, 8, 8, 32), 1.05, "diverged", id="wrong channels of images"),
    ],
)
def test_rows_of_images_are_channels_and_some_are_worse(
    make_archive: MakeArchive, shape: tuple[int, ...], factor: float, status: str
) -> None:
    x = normal(1 << 7, 1 << 8).reshape(shape)
    made = 2 * x
    rounded = bfloat16(made)
    worse = rounded.copy().reshape(-1, 64)
    worse[::8] *= factor  # an eighth of the rows: 64 elements, or channels of as many
    run = {"modules": [{"path": "m", "class": "Conv2d", "parameters": {}}], **BF16}
    sides = [
        make_archive({"0/m/input.x": given, "0/m/output": result}, run=run)
        for given, result in ((x, made), (bfloat16(x), worse.reshape(shape)))
    ]
    assert finding_of(compare(*sides), "0/m/output", "gain_tail").status == status


@pytest.mark.spec("POL-15")
def test_a_second_look_reads_rows_of_the_whole_tensor(make_archive: MakeArchive) -> None:
    x = normal(3 << 10, 512)
    made = np.maximum(x, 0)
    wrong = made.copy()
    wrong[1 << 11 :] *= 1.1  # behind the first 2^20 elements
    wrong[: 1 << 11] *= 1.02
    run = {"modules": [{"path": "m", "class": "ReLU", "parameters": {}}], **BF16}
    sides = [make_archive({"0/m/input.x": x, "0/m/output": side}, run=run) for side in (made, wrong)]
    reference, target = sides
    assert finding_of(compare(reference, target), "0/m/output", "gain_tail").status == "diverged"
    read = sample(reference, reference.get("0/m/input.x"), 512 * 4).reshape(-1, 512)
    assert [int(np.flatnonzero((x == row).all(axis=1))[0]) for row in read] == [0, 1023, 2047, 3071]


@pytest.mark.spec("POL-15")
def test_a_second_look_that_does_not_show_what_was_measured_clears_nothing(make_archive: MakeArchive) -> None:
    x = normal(3 << 10, 512)
    made = np.maximum(x, 0)
    is_read = np.zeros(3 << 10, np.bool_)
    for start in np.linspace(0, 3064, 256).astype(int):  # 2048 of 3072 rows, 8 together
        is_read[start : start + 8] = True
    wrong = np.where(is_read[:, None], made, 1.1 * made).astype(np.float32)
    run = {"modules": [{"path": "m", "class": "ReLU", "parameters": {}}], **BF16}
    sides = [make_archive({"0/m/input.x": x, "0/m/output": side}, run=run) for side in (made, wrong)]
    assert finding_of(compare(*sides), "0/m/output", "gain_tail").status == "diverged"


@pytest.mark.spec("POL-100")
@pytest.mark.parametrize(
    ("function", "factor", "statuses"),
    [
        pytest.param(lambda x: x / (1 + np.exp(-x)), 1.0, {"within-rounding"}, id="right"),
        pytest.param(lambda x: x / (1 + np.exp(-x)), 1.2, {"suspect", "diverged"}, id="scaled"),
        pytest.param(
            lambda x: x * np.linspace(1, 3, 256)[:, None], 1.2, {"diverged"}, id="no-function-of-elements"
        ),
    ],
)
def test_what_a_function_makes_of_its_inputs_error_is_not_its_own(
    make_archive: MakeArchive, function: Callable[[Array], Array], factor: float, statuses: set[str]
) -> None:
    is_small = normal(256, 64, seed=8) > 0  # where silu is not flat
    x = (np.where(is_small, 0.5, -12) + 0.1 * normal(256, 64)).astype(np.float32)
    given = (x + np.where(is_small, 0.03, 0.001) * normal(256, 64, seed=5)).astype(np.float32)
    run = {"modules": [{"path": "act", "class": "SiLU", "parameters": {}}], **BF16}
    reference, target = (
        make_archive({"0/act/input.x": x_, "0/act/output": y.astype(np.float32)}, run=run)
        for x_, y in ((x, function(x)), (given, factor * function(given)))
    )
    finding = finding_of(compare(reference, target), "0/act/output", "gain")
    assert finding.status in statuses, finding


@pytest.mark.spec("POL-14")
def test_another_function_shows_in_the_error_by_the_input(make_archive: MakeArchive) -> None:
    def almost(x: Array) -> Array:
        found: Array = silu(x) + 2e-3 * np.sin(3 * x)
        return found

    assert (
        finding_of(run_pair(make_archive, {}), "0/act/output", "input_dependence").status == "within-rounding"
    )
    found = finding_of(run_pair(make_archive, {"act": almost}), "0/act/output", "input_dependence")
    assert found.status == "suspect"
    assert found.value > 0.1


@pytest.mark.spec("POL-14")
def test_roundings_that_do_not_cancel_are_no_other_function(make_archive: MakeArchive) -> None:
    def almost(x: Array) -> Array:
        found: Array = silu(x) + 2e-3 * np.sin(40 * x)
        return found

    x = np.random.default_rng(0).uniform(1.1, 1.35, (256, 64)).astype(np.float32)  # 33 values of bfloat16
    run = Run("act", classes={"act": "SiLU"})
    reference = make_archive(run.tensors(x, {"act": silu}, False), run=run.metadata(False))
    for function, status in ((silu, "within-rounding"), (almost, "suspect")):
        target = make_archive(run.tensors(x, {"act": function}, True), run=run.metadata(True))
        assert finding_of(compare(reference, target), "0/act/output", "input_dependence").status == status


@pytest.mark.spec("POL-14")
def test_another_kernel_of_the_same_function_is_no_other_function_in_float32(
    make_archive: MakeArchive,
) -> None:
    x = np.random.default_rng(0).standard_normal((256, 64)).astype(np.float32)
    run = Run("act", classes={"act": "GELU"})
    tensors = run.tensors(x, {"act": silu}, False)
    (name,) = (key for key in tensors if key.endswith("act/output"))
    far = {**tensors, name: np.where(x > 0, tensors[name] * (1 + 3e-5 * np.sin(3 * x)), tensors[name])}
    near = {**tensors, name: np.where(x > 0, np.nextafter(tensors[name], np.float32(9)), tensors[name])}
    reference = make_archive(tensors, run=run.metadata(False))
    for target, status in ((near, "within-rounding"), (far, "suspect")):
        values = {key: np.asarray(value, np.float32) for key, value in target.items()}
        comparison = compare(reference, make_archive(values, run=run.metadata(False)))
        assert finding_of(comparison, name, "input_dependence").status == status


@pytest.mark.spec("POL-14")
@pytest.mark.parametrize("kind", ["parameters", "buffers"])
def test_a_leaf_with_numbers_of_its_own_is_no_function_of_its_input(
    make_archive: MakeArchive, kind: str
) -> None:
    x = np.random.default_rng(0).standard_normal((256, 64)).astype(np.float32)
    run = Run("act", classes={"act": "FrozenBatchNorm2d"})
    archives = []
    for is_target, scale in ((False, 1.0), (True, 1.004)):  # rounded in the target
        metadata = run.metadata(is_target)
        for module in metadata["modules"]:
            if module["path"] == "act":
                module[kind] = {"weight": {"shape": [1], "dtype": "float32"}}
        tensors = run.tensors(x, {"act": partial(np.multiply, scale)}, is_target)
        archives.append(make_archive(tensors, run=metadata))
    findings = compare(*archives).pairs[-1].findings
    assert findings
    assert all(finding.test != "input_dependence" for finding in findings)


@pytest.mark.spec("POL-14")
def test_what_the_input_brings_along_is_not_held_against_a_leaf(make_archive: MakeArchive) -> None:
    found = run_pair(make_archive, {"fc": lambda x: 1.02 * (x @ W)})
    assert finding_of(found, "0/act/output", "input_dependence").status == "within-rounding"
    assert finding_of(found, "0/fc/output", "gain").status == "diverged"


@pytest.mark.spec("POL-15")
@pytest.mark.parametrize(
    ("kind", "make"),
    [
        pytest.param("Linear", lambda x: np.concatenate([x[:, :1] * 1000, x[:, 1:]], axis=1), id="massive"),
        pytest.param("LayerNorm", lambda x: x + 30, id="large-mean"),
    ],
)
def test_a_huge_element_does_not_make_the_next_module_guilty(
    make_archive: MakeArchive, kind: str, make: Callable[[Array], Array]
) -> None:
    x = make(normal(256, 64)).astype(np.float32)
    noise = np.where(normal(256, 64, seed=5) > 0, 1, -1) * 0.02
    if kind == "Linear":
        noise[:, 0] = 0

        def function(x: Array) -> Array:
            made: Array = x[:, 1:].astype(np.float64) @ W[1:]
            return made
    else:

        def function(x: Array) -> Array:
            wide = x.astype(np.float64)
            made: Array = (wide - wide.mean(axis=1, keepdims=True)) / wide.std(axis=1, keepdims=True)
            return made

    given = (x + noise).astype(np.float32)
    run = {"modules": [{"path": "m", "class": kind, "parameters": {"weight": {}}}], **BF16}
    sides = [
        make_archive({"0/m/input.x": side, "0/m/output": function(side).astype(np.float32)}, run=run)
        for side in (x, given)
    ]
    finding = finding_of(compare(*sides), "0/m/output", "gain")
    assert finding.status == "within-rounding", finding.text


@pytest.mark.spec("POL-16")
def test_float32_runs_are_held_against_the_noise_of_accumulation(make_archive: MakeArchive) -> None:
    def tanh_gelu(x: Array) -> Array:
        found: Array = 0.5 * x * (1 + np.tanh(0.7978845608 * (x + 0.044715 * x**3)))
        return found

    def erf_gelu(x: Array) -> Array:
        from math import erf

        found: Array = 0.5 * x * (1 + np.vectorize(erf)(x / 2**0.5))
        return found

    run = Run("fc", "act", classes={"fc": "Linear", "act": "GELU"})
    x = normal(256, 64)
    right = {"fc": RIGHT["fc"], "act": erf_gelu}
    reference = make_archive(run.tensors(x, right, False), run=run.metadata(False))
    target = make_archive(run.tensors(x, {**right, "act": tanh_gelu}, False), run=run.metadata(False))
    found = compare(reference, target)
    assert [pair.status for pair in found.pairs] == ["identical", "identical", "identical", "diverged"]
    finding = finding_of(found, "0/act/output", "gain")
    assert (finding.status, finding.limit) == ("diverged", 1e-5)
    assert 1e-4 < finding.value < 1e-3
    double = [make_archive({KEY: x.astype(np.float64) * factor}) for factor in (1, 1 + 1e-12)]
    assert compare(*double).counts == {"diverged": 1}


def account(comparison: Comparison) -> RunSummary:
    assert comparison.account is not None
    return comparison.account


@pytest.mark.spec("POL-50", "POL-51", "POL-54")
def test_the_report_says_what_was_found_and_what_it_cannot_see(make_archive: MakeArchive) -> None:
    found = account(run_pair(make_archive, {}, act="GELUActivation"))
    assert (found.precision, found.gains, found.policy) == ("bfloat16", 3, POLICY)
    assert found.worst_gain is not None
    (depth,) = found.growth
    # nothing comes before: sqrt(1.5**2 * 4) roundings of 0.425 * 2**-8
    assert depth.visible == pytest.approx(3 * 0.425 / 256)
    assert found.blind == (
        "An own error of a leaf below 0.005 at depth 0 cannot be seen.",
        "GELU by tanh in the place of erf, or the other way round, errs by 0.0002: it cannot be excluded.",
    )
    assert found.commands == (
        "tcap capture torch --like memory --dtype bfloat16 -o twin.h5",
        "tcap compare memory memory --baseline twin.h5",
    )
    assert found.sentences[0].startswith("Error 0.00")


@pytest.mark.spec("POL-52")
def test_without_inputs_only_two_tests_are_left_and_the_report_says_so(make_archive: MakeArchive) -> None:
    found = compare(make_archive({KEY: X}, run=BF16), make_archive({KEY: to_bfloat16(X)}, run=BF16))
    assert [finding.test for finding in found.pairs[0].findings] == ["growth", "outlier_element"]
    assert account(found).blind[0] == (
        "Inputs of modules were not captured, or there are no modules: only outliers and the growth of the "
        "error were tested."
    )


@pytest.mark.spec("POL-53")
def test_features_that_the_inputs_did_not_reach_are_listed(make_archive: MakeArchive) -> None:
    config = {
        "sliding_window": 4096,
        "rope_parameters": {"rope_type": "dynamic", "original_max_position_embeddings": 2048},
        "final_logit_softcapping": 30.0,
        "num_experts": 4,
    }
    ids = np.arange(8).reshape(1, 8)
    tensors = {
        "0/@root/input.input_ids": ids,
        "0/@root/input.attention_mask": np.ones((1, 8), np.int64),
        "0/mlp.gate/output.0": normal(8, 4),
        "0/mlp.gate/output.1": np.tile([[0, 2]], (8, 1)),
        "0/@root/output.logits": normal(1, 8, 16) / 4,
    }
    run = {"model": {"config": config}}
    other = {**tensors, "0/@root/output.logits": tensors["0/@root/output.logits"] * np.float32(1.0000001)}
    found = compare(make_archive(tensors, run=run), make_archive(other, run=run))
    assert account(found).blind[-5:] == (
        "The sliding window of 4096 tokens was not reached by 8.",
        "Rotary scaling (dynamic) acts beyond 2048 tokens; there were 8.",
        "The cap of 30 on logits was idle: the largest is 0.83.",
        "There was no padding.",
        "2 of 4 experts were never chosen.",
    )


@pytest.mark.spec("POL-162")
@pytest.mark.parametrize(
    ("row", "error", "status"),
    [
        pytest.param(0, 0.002, "within-rounding", id="rest-of-a-channel"),
        pytest.param(0, 0.5, "diverged", id="wrong-element-of-a-small-row"),
        pytest.param(1, 0.5, "diverged", id="wrong-element-of-a-usual-row"),
    ],
)
def test_a_row_is_not_taken_for_smaller_than_a_tenth_of_the_usual_one(
    make_archive: MakeArchive, row: int, error: float, status: str
) -> None:
    x = normal(64, 64)
    x[0] = 1e-3 * np.abs(x[0])
    y = bfloat16(x)
    y[row, 5] += error
    sides = [make_archive({"0/m/output": side}, run=BF16) for side in (x, y)]
    assert finding_of(compare(*sides), "0/m/output", "outlier_element").status == status
