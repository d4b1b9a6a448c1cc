"""Is the error that a quantised layer makes itself the one that its rounding predicts? See POL-281.

Formula: `|y - (W x + b)| / |(W' - W) x|`, with x the input that the target's layer was given and W' its
weight; what rounding inputs and results adds stands beside it in quadrature.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Final

from tensorcap.comparison.pair import Finding
from tensorcap.comparison.policy_tests.context import Context, PolicyTest

_OWN: Final = ("gain", "gain_tail", "input_dependence", "own_error_leaf", "own_error_composite")
# Tests that know less of a tensor's error than one that knows how it comes about, by that one's name
_ESTIMATES: Final[Mapping[str, Collection[str]]] = {
    "quantisation": _OWN,
    "recomputed": (*_OWN, "attention_gain", "attention_gain_tail", "code_gain"),
    "angles": (
        *_OWN,
        "attention_gain",
        "attention_gain_tail",
        "code_gain",
        "outlier_element",
        "growth",
        "row_gain",
        "run_gain",
    ),
}


def without_estimates(findings: Sequence[Finding]) -> Sequence[Finding]:
    """Leave out findings of tests that know less of an error, if another test knows more."""
    less = {test for finding in findings for test in _ESTIMATES.get(finding.test, ())}
    return [finding for finding in findings if finding.test not in less] if less else findings


class QuantisationTest(PolicyTest):
    """Tests `quantisation`."""

    names = ("quantisation",)
    is_local = True
    is_evidence = True

    def judge(self, context: Context) -> Iterator[tuple[str, Finding]]:
        """Judge the results of quantised layers."""
        for pair in context.open_floats():
            for finding in context.layers.findings(pair.key):
                yield pair.key, finding
