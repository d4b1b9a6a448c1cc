"""What must not be forgotten in a comparison whose tensors all agree."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from tensorcap.comparison import compare
from tensorcap_cli.main import main
from tensorcap_formats.errors import TensorNotFoundError
from tensorcap_formats.records import Record

ONE = {"0/a/output": np.array([1, 2], np.float32)}


def run_with(*points: dict[str, Any]) -> dict[str, Any]:
    return {"points": [{"site": "a", "status": "captured", "calls": 1}, *points]}


@pytest.mark.spec("CMP-16")
def test_what_the_reference_could_not_capture_is_not_green(make_archive: Any) -> None:
    lost = {"site": "b", "status": "not-capturable", "calls": 1, "reason": "layout sparse_coo"}
    partly = {"site": "a", "slots": ["output.1"], "status": "not-capturable", "calls": 1, "reason": "meta"}
    found = compare(make_archive(ONE, run=run_with(lost, partly)), make_archive(ONE))
    assert [(p.key, p.status, p.reason) for p in found.pairs[1:]] == [
        ("0/b/output", "not-capturable", "in the reference: layout sparse_coo"),
        ("0/a/output.1", "not-capturable", "in the reference: meta"),
    ]
    assert (found.records, found.compared, found.exit_status) == (1, 1, 1)
    assert found.divergence is None
    assert compare(make_archive(ONE, run=run_with(lost)), make_archive(ONE), exclude="b").exit_status == 0


@pytest.mark.spec("CMP-2")
def test_digests_of_an_edited_archive_prove_nothing(make_archive: Any) -> None:
    edited = make_archive(ONE, trusts_digests=False)
    edited.bits[0] = np.array([1, 99], np.float32)
    found = compare(make_archive(ONE), edited, atol=0.5)
    assert (edited.reads > 0, found.pairs[0].status, found.exit_status) == (True, "diverged", 1)


@pytest.mark.spec("CMP-15")
@pytest.mark.parametrize(
    ("key", "target", "atol", "status"),
    [
        pytest.param("0/a/output.loss", 8.0, None, 1, id="a-number-returned"),
        pytest.param("0/a/output.loss", 4.001, 0.01, 0, id="within-the-tolerance"),
        pytest.param("0/a/output.loss", 8.0, 0.01, 1, id="outside-the-tolerance"),
        pytest.param("0/a/input.layer", 8.0, None, 0, id="an-argument"),
        pytest.param("0/a/output.loss", "text", 0.01, 1, id="no-number-any-more"),
        pytest.param("0/a/output.loss", math.nan, 0.01, 1, id="no-number-in-the-target"),
        pytest.param("0/a/output.loss", 10**400, 0.01, 1, id="beyond-float64"),
    ],
)
def test_a_number_that_a_module_returns_counts(
    make_archive: Any, key: str, target: object, atol: float | None, status: int
) -> None:
    found = compare(make_archive(ONE, values={key: 4.0}), make_archive(ONE, values={key: target}), atol=atol)
    assert found.exit_status == status
    (value,) = found.value_differences
    assert (value.key, value.is_within) == (key, target == 4.001)


@pytest.mark.spec("CMP-15")
def test_a_number_that_the_target_lacks_counts(make_archive: Any) -> None:
    reference = make_archive(
        ONE, values={"0/a/output.loss": 4.0, "0/a/input.n": 4.0, "0/a/output.none": None}
    )
    found = compare(reference, make_archive(ONE), atol=9.0)
    assert [(v.key, v.is_red) for v in found.value_differences] == [
        ("0/a/output.loss", True),
        ("0/a/input.n", False),
    ]
    assert found.exit_status == 1
    assert compare(reference, make_archive(ONE), require="0/a/output").exit_status == 0


@pytest.mark.spec("CMP-15")
@pytest.mark.parametrize(
    ("around", "held", "options", "status"),
    [
        pytest.param("0/a/output", [1, 2], {}, 0, id="what-is-around-agrees"),
        pytest.param("0/@root/output", [1, 2], {}, 0, id="the-model-agrees"),
        pytest.param("0/a/output", [1, 3], {}, 1, id="what-is-around-differs"),
        pytest.param("0/a/output", [1, 2], {"require": ["0/a*"]}, 1, id="asked-for"),
        pytest.param("0/a.list.0.b/output", [1, 2], {}, 1, id="its-own-tensors-alone-agree"),
    ],
)
def test_a_number_within_a_module_may_be_lacking_where_its_results_agree(
    make_archive: Any, around: str, held: list[int], options: dict[str, Any], status: int
) -> None:
    values = {"0/a.list.0.b/output.height": 8}
    reference = make_archive({around: np.array([1, 2], np.float32)}, values=values)
    found = compare(reference, make_archive({around: np.array(held, np.float32)}), **options)
    assert found.exit_status == status
    assert [v.key for v in found.value_differences] == ["0/a.list.0.b/output.height"]


@pytest.mark.spec("CMP-15")
@pytest.mark.parametrize(
    ("held", "status"),
    [
        pytest.param([1, 2], 0, id="all-within-agrees"),
        pytest.param([1, 3], 1, id="an-argument-within-differs"),
    ],
)
def test_a_number_may_be_lacking_in_an_injected_run_where_all_around_it_agrees(
    make_archive: Any, held: list[int], status: int
) -> None:
    tensors = {
        "0/a.next/input.x": np.array([1, 2], np.float32),  # what the number is multiplied by
        "0/a.next/output": np.array([3, 4], np.float32),  # of the argument in the place of the target's
        "0/a/output": np.array([5, 6], np.float32),
    }
    reference = make_archive(tensors, values={"0/a.b/output.height": 8})
    slot = {"site": "a.next", "slot": "input.x", "status": "injected", "calls": {"0": "0"}}
    target = make_archive(
        tensors | {"0/a.next/input.x": np.array(held, np.float32)},
        run={"injected": {"source": "ref.h5", "root": "", "mapping": "", "slots": [slot]}},
    )
    found = compare(reference, target)
    assert [(v.key, v.is_red) for v in found.value_differences] == [("0/a.b/output.height", status == 1)]
    assert found.exit_status == status


@pytest.mark.spec("CMP-15")
def test_a_number_of_a_shared_module_is_found_by_its_other_name(make_archive: Any) -> None:
    target = make_archive(ONE, values={"0/b/output.n": 3}, run={"aliases": {"a": "b"}})
    assert not compare(make_archive(ONE, values={"0/a/output.n": 3}), target).value_differences


@pytest.mark.spec("CMP-15")
@pytest.mark.parametrize(
    ("ours", "theirs"),
    [(3, 3.0), (math.nan, math.nan), (math.inf, math.inf), (10**400, 10**400), (0.0, -0.0)],
)
def test_numbers_are_equal_by_value(make_archive: Any, ours: float, theirs: float) -> None:
    archives = [make_archive(ONE, values={"0/a/output.n": value}) for value in (ours, theirs)]
    assert not compare(*archives).value_differences


@pytest.mark.spec("CMP-15")
@pytest.mark.parametrize(
    ("ours", "theirs", "rtol", "is_within"),
    [
        (10**400, 10**400 + 10**397, 1e-2, True),
        (10**400, 2 * 10**400, 1e-2, False),
        (10**400, 1.5, 1e-2, False),
        (math.inf, 1.0, 1.0, False),
        (1, True, 1.0, False),
    ],
)
def test_tolerances_of_numbers_are_exact(
    make_archive: Any, ours: float, theirs: float, rtol: float, is_within: bool
) -> None:
    archives = [make_archive(ONE, values={"0/a/output.n": value}) for value in (ours, theirs)]
    (value,) = compare(*archives, rtol=rtol).value_differences
    assert value.is_within is is_within


@pytest.mark.spec("CMP-17")
def test_a_fill_value_is_not_taken_for_a_value(make_archive: Any) -> None:
    target = make_archive(ONE, digests=False)
    target.remark = lambda record: "1 of 2 chunks are missing" if isinstance(record, Record) else ""
    found = compare(make_archive(ONE), target, atol=1.0)
    assert [(p.status, p.reason) for p in found.pairs] == [("unreadable", "1 of 2 chunks are missing")]
    assert found.exit_status == 3


@pytest.mark.spec("CMP-18")
def test_values_that_are_no_numbers_are_said(make_archive: Any) -> None:
    holed = {
        "0/a/output": np.array([np.nan, 1], np.float32),
        "0/b/output": np.array([-np.inf, 1], np.float32),
    }
    found = compare(make_archive(holed), make_archive(holed))
    assert list(found.warnings) == [
        "NaN in 1 of the reference tensors that were compared, first in 0/a/output.",
        "Infinities in 1 of the reference tensors that were compared, first in 0/b/output.",
    ]
    quiet, loud = (np.array([bits], "<u4").view("<f4") for bits in (0x7FC00000, 0x7FC00001))
    (pair,) = compare(make_archive({"0/a/output": quiet}), make_archive({"0/a/output": loud})).pairs
    assert (pair.status, pair.reason) == ("match", "no element is finite on both sides")


@pytest.mark.spec("CMP-18")
def test_what_is_no_tensor_and_what_did_not_return_is_said(make_archive: Any) -> None:
    reference = make_archive(
        ONE, run=run_with({"site": "c", "status": "captured", "calls": 2, "unfinished": 1})
    )
    target = make_archive(ONE, skipped={"names": "text"})
    assert list(compare(reference, target).warnings) == [
        "In the reference, calls of 1 module did not return: c.",
        "The target holds what was not read: names (text).",
    ]


@pytest.mark.spec("CMP-10")
def test_a_pattern_that_only_the_target_has_is_refused(make_archive: Any) -> None:
    target = make_archive({**ONE, "1/a/output": np.array([1], np.float32)})
    with pytest.raises(TensorNotFoundError, match=r"no tensor '1/\*' among 1"):
        compare(make_archive(ONE), target, only=["a", "1/*"])


def test_one_pattern_may_be_given_as_a_text(make_archive: Any) -> None:
    two = {**ONE, "0/b/output": np.array([1], np.float32)}
    assert compare(make_archive(two), make_archive(two), only="b").compared == 1


@pytest.mark.spec("CMP-1")
def test_a_shared_module_pairs_by_any_of_its_names(make_archive: Any) -> None:
    reference = make_archive({"0/head/output": np.array([1], np.float32)})
    target = make_archive({"0/embed/output": np.array([1], np.float32)}, run={"aliases": {"head": "embed"}})
    assert [(p.key, p.status) for p in compare(reference, target).pairs] == [("0/head/output", "identical")]


@pytest.mark.spec("CMP-42")
def test_what_a_run_was_given_is_an_input_of_the_run(make_archive: Any) -> None:
    one, other = ({"0/@root/given.ids": np.array([n])} for n in (1, 2))
    divergence = compare(make_archive(one), make_archive(other)).divergence
    assert divergence is not None
    assert divergence.is_run_input


def test_an_empty_key_is_refused() -> None:
    found = CliRunner().invoke(main, ["compare", "ref.h5::", "tgt.h5"])
    assert (found.exit_code, "'ref.h5::' names no key behind `::`." in found.output) == (2, True)


@pytest.mark.spec("CMP-53")
def test_unlike_numbers_of_steps_are_said(make_archive: Any) -> None:
    more = {**ONE, "1/a/output": ONE["0/a/output"]}
    warning = "The runs have unlike numbers of steps: 2 in the reference, 1 in the target."
    assert list(compare(make_archive(more), make_archive(ONE)).warnings) == [warning]
    assert not compare(make_archive(more), make_archive(more)).warnings
    assert not compare(make_archive(ONE), make_archive({"a": ONE["0/a/output"]})).warnings


X = np.linspace(-1, 1, 32, dtype=np.float32)
BLOCK = ("0/a.proj/output", "0/a/output", "0/b/input.x")


def block(*values: Any) -> dict[str, Any]:
    return dict(zip(BLOCK, values, strict=True))


def echoes(reference: Any, target: Any, **options: Any) -> list[tuple[str, str]]:
    return [
        (pair.key, finding.text)
        for pair in compare(reference, target, compute_dtype="bfloat16", **options).pairs
        for finding in pair.findings
        if finding.test == "pass_through"
    ]


@pytest.mark.spec("CMP-19")
@pytest.mark.parametrize("how", [{}, {"digests": False}, {"trusts_digests": False}])
def test_what_the_reference_hands_on_has_to_be_handed_on(make_archive: Any, how: dict[str, bool]) -> None:
    rounded, wrong = X * np.float32(1.001), X * np.float32(1.002)
    reference = make_archive(block(X, X, X))
    expected = [("0/a/output", "equal to 0/a.proj/output in the reference, not in the target")]
    assert echoes(reference, make_archive(block(rounded, wrong, wrong), **how)) == expected
    assert not echoes(reference, make_archive(block(rounded, rounded, rounded), **how))


@pytest.mark.spec("CMP-19")
def test_digests_alone_break_an_echo_only_of_a_tensor_that_they_prove_equal(make_archive: Any) -> None:
    rounded, wrong = X * np.float32(1.001), X * np.float32(1.002)
    reference = make_archive(block(X, X, X))
    proven = make_archive(block(X, wrong, wrong), stored=False)
    text = "equal to {} in the reference, not in the target"
    assert echoes(reference, proven) == [
        (key, text.format("0/a.proj/output")) for key in ("0/a/output", "0/b/input.x")
    ]
    unknown = make_archive(block(rounded, wrong, wrong), stored=False)
    found = compare(reference, unknown, compute_dtype="bfloat16")
    assert [pair.status for pair in found.pairs] == ["unjudged"] * 3
    assert found.exit_status == 1


@pytest.mark.spec("CMP-19")
def test_a_broken_echo_is_red_and_names_the_module(make_archive: Any) -> None:
    reference = make_archive(block(X, X, X))
    target = make_archive(block(X * np.float32(1.001), *[X * np.float32(1.002)] * 2))
    found = compare(reference, target, compute_dtype="bfloat16")
    assert [pair.status for pair in found.pairs] == ["within-rounding", "diverged", "within-rounding"]
    assert found.divergence is not None
    assert (found.divergence.module, found.exit_status) == ("a", 1)
    assert compare(reference, target, rtol=0.1).exit_status == 0
    assert not echoes(reference, target, rtol=1e-6)


MASK = np.where(np.arange(32) % 2, np.float32(0), np.float32(-1e9))


@pytest.mark.spec("CMP-19")
@pytest.mark.parametrize(
    ("keys", "value"),
    [
        pytest.param(("0/a/output", "0/b/output"), X[:15], id="few-elements"),
        pytest.param(("0/a/output", "0/b/output"), np.ones(32, np.float32), id="constant"),
        pytest.param(("0/a/output", "0/b/output"), MASK, id="mask-by-values"),
        pytest.param(("0/a/output", "0/b/input.attention_mask"), X, id="mask-by-name"),
        pytest.param(("0/m.experts.0.up/input.x", "0/m.experts.1.up/input.x"), X, id="experts"),
        pytest.param(("0/a/output", "1/a/output"), X, id="other-step"),
        pytest.param(("0/a/output", "rank1/0/a/output"), X, id="other-rank"),
        pytest.param(("0/a/output", "0/b/output"), np.arange(32), id="whole-numbers"),
    ],
)
def test_what_is_equal_by_chance_need_not_be_equal(
    make_archive: Any, keys: tuple[str, str], value: Any
) -> None:
    other = value * np.float32(1.001) if value.dtype.kind == "f" else value + 1
    reference = make_archive(dict.fromkeys(keys, value))
    assert not echoes(reference, make_archive(dict(zip(keys, (value, other), strict=True))))


@pytest.mark.spec("CMP-19")
@pytest.mark.parametrize(
    "target",
    [
        pytest.param(block(X, X.astype(np.float16), X * np.float32(1.001)), id="a-cast-between"),
        pytest.param({BLOCK[1]: X * np.float32(1.001)}, id="one-alone"),
        pytest.param({BLOCK[0]: X[:16], BLOCK[1]: X * np.float32(1.001)}, id="other-shape"),
        pytest.param(block(-np.abs(X) * 0, np.abs(X) * 0, X * 0), id="minus-zero"),
    ],
)
def test_what_cannot_be_told_is_no_broken_echo(make_archive: Any, target: dict[str, Any]) -> None:
    assert not echoes(make_archive(block(X, X, X)), make_archive(target))


@pytest.mark.spec("CMP-19")
@pytest.mark.parametrize("is_again", [True, False], ids=["of-the-same-argument", "of-another-one"])
def test_what_is_computed_twice_is_not_handed_on(make_archive: Any, *, is_again: bool) -> None:
    given, inner, made = (np.random.default_rng(n).standard_normal(32).astype(np.float32) for n in range(3))
    other = given if is_again else given + 1
    close = np.float32(1.001), np.float32(1.002)

    def archive(first: Any, second: Any) -> Any:
        return make_archive(
            {
                "0/head/input.x": given,
                "0/head.proj/input.x": inner * first,
                "0/head.proj/output": made * first,
                "0/head/output": made * first,
                "0/again/input.x": other,
                "0/again.proj/input.x": inner * second,
                "0/again.proj/output": made * second,
                "0/again/output": made * second,
                "0/after/input.x": made * first,
            }
        )

    reference = archive(np.float32(1), np.float32(1))
    broken = {key for key, _ in echoes(reference, archive(*close))}
    assert broken == (set() if is_again else {"0/again.proj/input.x"})  # of which the others are made
    handed = archive(*close)
    wrong = make_archive(
        {**{r.key.text: handed.load(r) for r in handed.records}, "0/after/input.x": made * 2}
    )
    assert "0/after/input.x" in {key for key, _ in echoes(reference, wrong)}


@pytest.mark.spec("CMP-19")
def test_what_modules_within_one_another_make_of_one_argument_is_handed_on(make_archive: Any) -> None:
    given, made = (np.random.default_rng(n).standard_normal(32).astype(np.float32) for n in range(2))
    sites = ("wrapper", "wrapper.inner", "wrapper.inner.core")  # each is given the same, and returns the same

    def archive(*factors: float) -> Any:
        results = {f"0/{s}/output": made * np.float32(f) for s, f in zip(sites[::-1], factors, strict=True)}
        return make_archive({**{f"0/{site}/input.x": given for site in sites}, **results})

    broken = [key for key, _ in echoes(archive(1, 1, 1), archive(1.001, 1.002, 1.002))]
    assert broken == ["0/wrapper.inner/output"]


@pytest.mark.spec("CMP-19")
def test_what_is_computed_twice_may_stand_beside_something_else_of_the_same_argument(
    make_archive: Any,
) -> None:
    given, queries, keys = (np.random.default_rng(n).standard_normal(32).astype(np.float32) for n in range(3))

    def archive(factor: float) -> Any:
        results = {"q": queries, "k": keys * np.float32(1.001), "again": keys * np.float32(factor)}
        if factor == 1:
            results["k"] = keys
        return make_archive(
            {
                f"0/{site}/{slot}": value
                for site, result in results.items()
                for slot, value in (("input.x", given), ("output", result))
            }
        )

    assert not echoes(archive(1), archive(1.002))


@pytest.mark.spec("CMP-19")
def test_an_unreadable_echo_is_left_to_its_pair(make_archive: Any) -> None:
    broken = make_archive(block(X, X * np.float32(1.001), X), digests=False, unreadable="0/a.proj/output")
    found = compare(make_archive(block(X, X, X)), broken, compute_dtype="bfloat16")
    assert [pair.status for pair in found.pairs] == ["unreadable", "within-rounding", "identical"]
    assert found.exit_status == 3
    assert not echoes(make_archive(block(X, X, X)), broken)
