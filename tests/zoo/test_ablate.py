"""What is left out is left out, and what it decides alone is counted."""

from __future__ import annotations

import pytest

from tests.zoo import ablate
from tests.zoo.ablation_of_matching import ALL, PASS_NAMES, SITUATIONS, Matched, Tally, pass_rows
from tests.zoo.ablation_of_tests import (
    Naming,
    Trial,
    Verdict,
    family_rows,
    mechanism_rows,
    policy_rows,
    try_apart,
)
from tests.zoo.entry import DTYPES

GAIN = ("GainTest", "gain")


def test_nothing_chosen_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert ablate.main(["--only", "no_such_entry"]) == 2
    assert "no_such_entry" in capsys.readouterr().err


def test_a_test_counts_alone_if_nothing_else_is_red_or_names_the_module() -> None:
    trials = [
        Trial(
            "seen by it alone",
            "bfloat16",
            frozenset({"a"}),
            {"module": Verdict(True, "a")},
            {("module", GAIN): Verdict(False, None)},
        ),
        Trial(
            "named by it alone",
            "bfloat16",
            frozenset({"a"}),
            {"module": Verdict(True, "a")},
            {("module", GAIN): Verdict(True, "b")},
        ),
        Trial(
            "misnamed by it",
            "bfloat16",
            frozenset({"a"}),
            {"module": Verdict(True, "b")},
            {("module", GAIN): Verdict(True, "a")},
        ),
        Trial(
            "a correct port",
            "bfloat16",
            frozenset(),
            {"module": Verdict(True, "b")},
            {("module", GAIN): Verdict(False, None)},
        ),
    ]
    rows = {row[:2]: row[2:] for row in policy_rows(trials)}
    assert rows["module", "gain"] == (3, 1, 2, 1, 1, 1)
    assert rows["module", "growth"] == (0, 0, 0, 0, 0, 0)


def test_a_mechanism_protects_the_ports_that_are_red_without_it() -> None:
    port = Trial(
        "port",
        "bfloat16",
        frozenset(),
        {"module": Verdict(False, None)},
        {("module", "padding"): Verdict(True, "a")},
    )
    rows = {row[:2]: row[2:] for row in mechanism_rows([port])}
    assert rows["module", "padding"] == (0, 0, 0, 1, 0)


@pytest.mark.slow
def test_each_mechanism_can_be_left_out_of_a_run() -> None:
    trials = try_apart(["llama_eager"], ["policy"])
    assert [trial.dtype for trial in trials] == list(DTYPES)


def test_a_family_counts_alone_if_no_other_one_names_the_mistake() -> None:
    trials = [
        Trial("one", "float32", frozenset({"a"}), named={"replay": Naming("x", True, {"norms": False})}),
        Trial("two", "float32", frozenset({"a"}), named={"replay": Naming("y", True, {"norms": True})}),
        Trial("three", "float32", frozenset({"a"}), named={"replay": Naming("z", False, {"norms": True})}),
    ]
    rows = {row[0]: row[1:] for row in family_rows(trials)}
    assert rows["norms"] == (3, 1, 1, 0, 0, 0, "x")


def test_a_pass_counts_what_is_right_only_with_it() -> None:
    matched = Matched("port")
    whole = Tally(frozenset("ab"), frozenset("c"), frozenset())
    matched.add("port", ALL, whole)
    for name in PASS_NAMES:
        matched.add("port", name, whole)
    matched.tallies["port", "sums"] = Tally(frozenset("b"), frozenset("d"), frozenset("a"))
    rows = {row[0]: row[1:] for row in pass_rows([matched])}
    assert rows["sums"][SITUATIONS.index("port")] == "1, +1 wrong, -1 wrong"
    assert rows["sums"][-1] == 1
    assert rows["names"][-1] == 0


@pytest.mark.slow
def test_a_rope_mistake_is_named_by_rotary_embeddings_alone() -> None:
    wide, _ = try_apart(["llama_rope_theta"], ["hypotheses"])
    assert wide.named["replay"] == Naming("rope", True, {"other records": True, "rotary embeddings": False})
