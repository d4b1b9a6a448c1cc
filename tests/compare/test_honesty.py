"""What must not be forgotten in a comparison whose tensors all agree."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from tensorcap.comparing import compare
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
    ],
)
def test_a_number_that_a_module_returns_counts(
    make_archive: Any, key: str, target: object, atol: float | None, status: int
) -> None:
    found = compare(make_archive(ONE, values={key: 4.0}), make_archive(ONE, values={key: target}), atol=atol)
    assert found.exit_status == status
    assert len(found.value_differences) == (0 if target == 4.001 else 1)


@pytest.mark.spec("CMP-17")
def test_a_fill_value_is_not_taken_for_a_value(make_archive: Any) -> None:
    target = make_archive(ONE, digests=False)
    target.remark = lambda record: "1 of 2 chunks are missing" if isinstance(record, Record) else ""
    found = compare(make_archive(ONE), target, atol=1.0)
    assert [(p.status, p.reason) for p in found.pairs] == [("suspect", "1 of 2 chunks are missing")]
    assert found.exit_status == 1


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
        "In the reference, calls of 1 modules did not return: c.",
        "The target holds what is no tensor and was not compared: names (text).",
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
