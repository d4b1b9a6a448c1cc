"""Right quantised targets end with 0, planted mistakes with 1: a sample, and as entries others."""

from __future__ import annotations

from typing import Final

import pytest

from tests.quantised_zoo.catalogue import ENTRIES
from tests.quantised_zoo.run import blocks, outcomes_of

SAMPLE: Final = ("int8/rows", "fp8/blocks", "int8/scales-rolled", "mx/nibbles-swapped")
FAMILIES: Final = ("gptq", "awq", "mx", "fp8", "int8", "mixed")
WRONGLY_ACCUSED: Final = ("awq/clipped",)
OTHERS: Final = tuple(
    name for name in ENTRIES if name.partition("/")[0] in FAMILIES and name not in (*SAMPLE, *WRONGLY_ACCUSED)
)


def assert_judged(name: str) -> None:
    (outcome,) = outcomes_of(name, ("compare",))
    assert outcome.is_as_expected, outcome.report


@pytest.mark.parametrize("name", SAMPLE)
def test_sample_is_judged(name: str) -> None:
    assert_judged(name)


@pytest.mark.entries
@pytest.mark.parametrize("name", OTHERS)
def test_other_targets_are_judged(name: str) -> None:
    assert_judged(name)


def test_a_report_is_read_by_module() -> None:
    report = (
        "FIRST DIVERGENCE  0/a.b/output  (diverged)\n  module a.b (Linear)\n  too far\n\n"
        "WORST\n  0/c/param.weight  (diverged)  max abs 1\n    rolled\n\n"
        "1. a.d (Linear)\n   error: own 1\n   explained: transposed\n"
    )
    assert dict(blocks(report)) == {
        "a.d": "   error: own 1\n   explained: transposed",
        "a.b": "  module a.b (Linear)\n  too far",
        "c": "    rolled\n",
    }
