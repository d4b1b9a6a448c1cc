"""What a policy's test found in a comparison."""

from __future__ import annotations

from tensorcap.comparison import Comparison


def findings_of(comparison: Comparison, test: str) -> dict[str, tuple[float, str]]:
    """Values and statuses of the findings of a test, by key text."""
    return {
        pair.key: (finding.value, finding.status)
        for pair in comparison.pairs
        for finding in pair.findings
        if finding.test == test
    }
