"""Is the error that a quantised layer makes itself the one that its rounding predicts? See POL-281.

Formula: `|y - (W x + b)| / |(W' - W) x|`, with x the input that the target's layer was given and W' its
weight; what rounding inputs and results adds stands beside it in quadrature.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from tensorcap.comparison.pair import Finding
from tensorcap.comparison.policy_tests.context import Context, PolicyTest

# Tests that hold a module's own error against what the bits of its weights let expect at most
_ESTIMATES: Final = frozenset(
    {"gain", "gain_tail", "input_dependence", "own_error_leaf", "own_error_composite"}
)


def without_estimates(findings: Sequence[Finding]) -> Sequence[Finding]:
    """Leave out findings of tests that know less of a layer's own error, if `quantisation` has judged it."""
    if all(finding.test != "quantisation" for finding in findings):
        return findings
    return [finding for finding in findings if finding.test not in _ESTIMATES]


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
