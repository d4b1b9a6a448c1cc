"""Logits as distributions and experts as sets, against float64 numpy and by hand."""

from __future__ import annotations

import math
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tensorcap.comparison import compare
from tensorcap.metrics import (
    LogitDifference,
    RoutingDifference,
    agreement,
    are_logits,
    is_routing,
    logit_metrics,
    routing_metrics,
)
from tensorcap.reports.pair_examination import examine
from tensorcap_formats.dtypes import Array
from tensorcap_formats.errors import UsageError
from tensorcap_formats.keys import Key

MakeArchive = Callable[..., Any]
INF = math.inf


@pytest.fixture
def logits(make_archive: MakeArchive) -> Callable[..., LogitDifference]:
    def run(reference: Any, target: Any, **options: Any) -> LogitDifference:
        ours, theirs = make_archive({"a": np.asarray(reference)}), make_archive({"a": np.asarray(target)})
        return logit_metrics(ours, ours.records[0], theirs, theirs.records[0], **options)

    return run


@pytest.fixture
def routing(make_archive: MakeArchive) -> Callable[..., RoutingDifference]:
    def run(reference: Any, target: Any) -> RoutingDifference:
        ours, theirs = make_archive({"a": np.asarray(reference)}), make_archive({"a": np.asarray(target)})
        return routing_metrics(ours, ours.records[0], theirs, theirs.records[0])

    return run


def softmax(row: Array) -> Array:
    powers = np.exp(row - row.max())
    return np.asarray(powers / powers.sum())


@pytest.mark.spec("LOG-3", "LOG-4", "LOG-9")
def test_divergences_are_those_of_the_formulae(logits: Callable[..., LogitDifference]) -> None:
    generator = np.random.default_rng(0)
    reference = generator.normal(size=(3, 4, 50)) * 3
    target = reference + generator.normal(size=reference.shape) / 2
    kl, js, ranks = [], [], []
    for r, t in zip(reference.reshape(-1, 50), target.reshape(-1, 50), strict=True):
        p, q = softmax(r), softmax(t)
        m = (p + q) / 2
        kl.append(float((p * np.log(p / q)).sum()))
        js.append(float((p * np.log(p / m)).sum() + (q * np.log(q / m)).sum()) / 2)
        ranks.append(1 + int((t > t[r.argmax()]).sum()))
    found = logits(reference, target)
    worst = int(np.argmax(kl))
    assert found.kl_mean == pytest.approx(sum(kl) / 12)
    assert found.kl_max == pytest.approx(max(kl))
    assert found.kl_max_row == (worst // 4, worst % 4)
    assert found.js_mean == pytest.approx(sum(js) / 12)
    assert found.js_max == pytest.approx(max(js))
    assert (found.rank_mean, found.rank_max) == (sum(ranks) / 12, max(ranks))
    assert (found.rows, found.undefined_rows, found.vocabulary) == (12, 0, 50)


@pytest.mark.spec("LOG-3")
def test_a_constant_added_to_all_logits_changes_nothing(logits: Callable[..., LogitDifference]) -> None:
    found = logits([[1.0, 2.0, 3.0]], [[1001.0, 1002.0, 1003.0]])
    assert found.kl_max == pytest.approx(0, abs=1e-12)
    assert (found.top1, found.flips) == (1.0, 0)


@pytest.mark.spec("LOG-2")
def test_undefined_rows_are_counted_and_enter_nothing(logits: Callable[..., LogitDifference]) -> None:
    reference = [[math.nan, 0], [INF, 0], [-INF, -INF], [1.0, 0.0]]
    found = logits(reference, [[0.0, 0], [1, 0], [1, 0], [1.0, 0.0]])
    assert (found.rows, found.undefined_rows, found.kl_mean, found.top1) == (4, 3, 0.0, 1.0)
    empty = logits(reference[:3], reference[:3])
    assert (empty.undefined_rows, empty.kl_mean, empty.top1, empty.rank_max, empty.kl_max_row) == (
        3,
        None,
        None,
        None,
        None,
    )
    assert logits(np.zeros((0, 4)), np.zeros((0, 4))).rows == 0


@pytest.mark.spec("LOG-3", "LOG-4")
def test_a_masked_vocabulary_is_a_probability_of_zero(logits: Callable[..., LogitDifference]) -> None:
    both = logits([[1.0, 0.0, -INF]], [[0.0, 1.0, -INF]])
    bare = logits([[1.0, 0.0]], [[0.0, 1.0]])
    assert (both.kl_mean, both.js_mean) == (bare.kl_mean, bare.js_mean)
    lost = logits([[0.0, 0.0]], [[0.0, -INF]])
    assert (lost.kl_max, lost.kl_mean) == (INF, INF)
    # p = (1/2, 1/2), q = (1, 0), m = (3/4, 1/4)
    expected = (0.5 * math.log(2 / 3) + 0.5 * math.log(2)) / 2 + math.log(4 / 3) / 2
    assert lost.js_max == pytest.approx(expected)
    assert logits([[0.0, -INF]], [[0.0, 0.0]]).kl_max == pytest.approx(math.log(2))
    assert logits([[0.0, -INF]], [[-INF, 0.0]]).js_max == pytest.approx(math.log(2))


@pytest.mark.spec("LOG-5", "LOG-6")
@pytest.mark.parametrize(
    ("ours", "theirs", "k", "expected"),
    [
        pytest.param([3, 2, 1, 0], [3, 1, 2, 0], 2, 0.5, id="plain"),
        pytest.param([2, 2, 1], [1, 2, 0], 1, 1.0, id="tie-in-the-reference"),
        pytest.param([2, 1, 0], [2, 2, 0], 1, 1.0, id="tie-in-the-target"),
        pytest.param([2, 2, 0], [0, 2, 2], 1, 1.0, id="ties-that-meet"),
        pytest.param([2, 0, 0], [0, 2, 2], 1, 0.0, id="ties-that-do-not"),
        pytest.param([9, 5, 5, 5, 0], [9, 0, 0, 5, 5], 3, 2 / 3, id="boundary"),
        pytest.param([1, 1, 1, 1], [0, 1, 2, 3], 2, 1.0, id="all-equal"),
        pytest.param([2, 1], [1, 2], 5, 1.0, id="fewer-than-k"),
        pytest.param([-INF, 1, -INF], [0, 1, -INF], 2, 1.0, id="masked"),
    ],
)
def test_equal_logits_at_the_boundary_count_in_favour(
    ours: list[float], theirs: list[float], k: int, expected: float
) -> None:
    assert agreement(np.array(ours, float), np.array(theirs, float), k) == expected


@pytest.mark.spec("LOG-7")
def test_a_flip_within_rounding_is_a_tie(logits: Callable[..., LogitDifference]) -> None:
    reference = [[4.0039, 4.0, 1.0], [3.0, 2.0, 0.0], [1.0, 0.0, 0.0]]  # case 63
    target = [[4.0, 4.0039, 1.0], [2.25, 2.75, 0.0], [1.001, 0.0, 0.0]]
    found = logits(reference, target, compute_dtype="bfloat16")
    assert (found.flips, found.ties, found.first_flip_row, found.flip_margin) == (2, 1, (1,), 1.0)
    assert found.top1 == pytest.approx(1 / 3)
    assert (found.rank_mean, found.rank_max) == (5 / 3, 2)
    exact = logits(reference, target, compute_dtype="float32")
    assert (exact.flips, exact.ties, exact.first_flip_row) == (2, 0, (0,))
    assert logits(np.array(reference, np.float16), np.array(target, np.float16)).ties == 1
    assert logits(np.array(reference, np.float32), np.array(target, np.float32)).ties == 0


@pytest.mark.spec("LOG-6", "LOG-7")
def test_another_rule_for_ties_is_no_flip(logits: Callable[..., LogitDifference]) -> None:
    found = logits([[4.0, 4.0, 1.0]], [[4.0, 4.001, 1.0]])
    assert (found.flips, found.top1, found.rank_max) == (0, 1.0, 2)


@pytest.mark.spec("LOG-8")
def test_padding_behind_the_vocabulary_is_left_out(
    logits: Callable[..., LogitDifference], make_archive: MakeArchive
) -> None:
    reference, target = [[1.0, 2.0, 0.0, 0.0]], [[1.0, 2.0, 99.0, math.nan]]
    found = logits(reference, target, vocabulary=2)
    assert (found.vocabulary, found.kl_max, found.top1, found.undefined_rows) == (2, 0.0, 1.0, 0)
    runs = [{"model": {"config": {"vocab_size": size}}} for size in (2, 3)]
    archives = [
        make_archive({"0/@root/output.logits": np.array(side)}, run=run)
        for side, run in zip((reference, target), runs, strict=True)
    ]
    examined = examine(compare(*archives), *archives)
    assert examined.logits["0/@root/output.logits"].vocabulary == 2


@pytest.mark.spec("LOG-1")
@pytest.mark.parametrize(
    ("key", "expected"),
    [
        ("0/@root/output.logits", True),
        ("0/lm_head/output", True),
        ("0/model.lm_head/output", True),
        ("logits", True),
        ("0/lm_head/input.input", False),
        ("0/lm_head/param.weight", False),
        ("0/lm_head/grad_param.weight", False),
        ("0/@root/grad_output.logits", False),
        ("0/@root/output.0", False),
        ("0/model.logits_processor/output", False),
    ],
)
def test_logits_are_known_by_name(key: str, expected: bool) -> None:
    assert are_logits(Key.parse(key)) is expected


@pytest.mark.spec("LOG-1", "LOG-20")
def test_others_are_measured_when_asked(make_archive: MakeArchive) -> None:
    reference = make_archive({"0/mlp/output": np.ones((2, 3)), "0/pick/output": np.array([[1, 2]])})
    target = make_archive({"0/mlp/output": np.zeros((2, 3)), "0/pick/output": np.array([[2, 1]])})
    comparison = compare(reference, target)
    silent = examine(comparison, reference, target)
    assert (dict(silent.logits), dict(silent.routing)) == ({}, {})
    asked = examine(comparison, reference, target, logits=True, routing=True)
    assert asked.logits["0/mlp/output"].kl_max == pytest.approx(0, abs=1e-15)
    assert asked.routing["0/pick/output"].share == 1.0


@pytest.mark.spec("LOG-10")
def test_rows_longer_than_a_block_are_whole(logits: Callable[..., LogitDifference]) -> None:
    reference = np.zeros((2, 300_000), np.float32)
    reference[:, -1] = 20
    target = reference.copy()
    target[1, 0] = 21
    found = logits(reference, target)
    assert (found.rows, found.flips, found.first_flip_row, found.rank_max) == (2, 1, (1,), 2)


@pytest.mark.parametrize(
    ("reference", "target"),
    [
        pytest.param(np.zeros((2, 3)), np.zeros((2, 4)), id="shapes"),
        pytest.param(np.zeros(()), np.zeros(()), id="0-d"),
        pytest.param(np.zeros(2, complex), np.zeros(2, complex), id="complex"),
    ],
)
def test_what_is_no_distribution_is_refused(
    logits: Callable[..., LogitDifference], reference: Array, target: Array
) -> None:
    with pytest.raises(UsageError, match="expected"):
        logits(reference, target)


@pytest.mark.spec("LOG-21", "LOG-22")
def test_experts_are_compared_as_sets(routing: Callable[..., RoutingDifference]) -> None:
    reference = np.array([[[0, 1], [2, 3]], [[4, 5], [6, 6]]])
    target = np.array([[[0, 1], [3, 2]], [[4, 7], [6, 1]]], np.uint64)
    found = routing(reference, target)
    assert found == RoutingDifference(
        rows=4,
        equal_sets=2,
        equal_order=1,
        share=0.5,
        mean_overlap=0.75,
        least_overlap=0.5,
        first_unequal=(1, 0),
    )


@pytest.mark.spec("LOG-21")
def test_numbers_are_compared_exactly_whatever_their_width(routing: Callable[..., RoutingDifference]) -> None:
    found = routing(np.array([[-1, 3]]), np.array([[2**64 - 1, 3]], np.uint64))
    assert (found.share, found.mean_overlap) == (0.0, 0.5)


@pytest.mark.spec("LOG-22")
def test_without_rows_nothing_is_defined(routing: Callable[..., RoutingDifference]) -> None:
    found = routing(np.zeros((0, 2), int), np.zeros((0, 2), int))
    assert (found.rows, found.share, found.mean_overlap) == (0, None, None)


def test_many_rows_are_counted_across_blocks(routing: Callable[..., RoutingDifference]) -> None:
    reference = np.tile(np.array([[1, 2, 3, 4]]), (30_000, 1))
    target = reference[:, ::-1].copy()
    target[25_000, 0] = 9
    found = routing(reference, target)
    assert (found.rows, found.equal_sets, found.first_unequal) == (30_000, 29_999, (25_000,))


@pytest.mark.spec("LOG-20")
@pytest.mark.parametrize(
    ("key", "values", "expected"),
    [
        pytest.param("0/model.layers.0.mlp.gate/output.1", np.zeros((2, 8), int), True, id="gate"),
        pytest.param("0/mlp.router/output.1", np.zeros((2, 8), np.int32), True, id="router"),
        pytest.param("0/mlp/output.topk", np.zeros((2, 8), int), True, id="slot"),
        pytest.param("0/mlp/output.expert_indices", np.zeros((2, 8), int), True, id="part-of-a-name"),
        pytest.param("0/mlp.gate_proj/output", np.zeros((2, 8), int), False, id="gate-proj"),
        pytest.param("0/mlp.gate/output", np.zeros((2, 8)), False, id="floats"),
        pytest.param("0/mlp.gate/output", np.zeros((2, 65), int), False, id="wide"),
        pytest.param("0/mlp.gate/output", np.zeros(8, int), False, id="one-axis"),
    ],
)
def test_choices_of_experts_are_known_by_name_and_shape(
    make_archive: MakeArchive, key: str, values: Array, expected: bool
) -> None:
    assert is_routing(make_archive({key: values}).records[0]) is expected


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.spec("LOG-10")
def test_a_large_vocabulary_fits_into_250_mb(tmp_path: Path) -> None:
    reference = np.zeros((64, 256_000), np.float32)
    reference[:, 7] = 9
    np.savez(tmp_path / "ref.npz", logits=reference)
    reference[5, 8] = 10
    np.savez(tmp_path / "tgt.npz", logits=reference)
    root = Path(__file__).parents[2]
    paths = os.pathsep.join(str(root / part) for part in (".", "formats", "cli"))
    code = (
        "from tensorcap_cli.main import main\n"
        "try: main(['compare', 'ref.npz', 'tgt.npz'])\n"
        "except SystemExit: pass\n"
        # not ru_maxrss, which a child begins with that of its parent
        "lines = open('/proc/self/status').read().splitlines()\n"
        "print([int(line.split()[1]) // 1024 for line in lines if line.startswith('VmHWM')][0])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "1 flip of the first choice, 0 ties among them, the first that is none at [5]" in done.stdout
    assert int(done.stdout.splitlines()[-1]) < 250


def test_the_table_of_the_specification_has_every_metric() -> None:
    spec = (Path(__file__).parents[2] / "specs/logits.md").read_text()
    listed = {name for row in re.findall(r"(?m)^\| (`.*?) \|", spec) for name in re.findall(r"`(\w+)`", row)}
    counts_and_places = {"rows", "undefined_rows", "vocabulary", "kl_max_row", "first_flip_row"}
    assert listed == {field.name for field in fields(LogitDifference)} - counts_and_places
