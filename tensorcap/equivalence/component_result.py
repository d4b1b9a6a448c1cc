"""Results of component tests: R, the limit, and what both say; and the stage 2 file that holds them.

In the method's file `results` have `component`, `r_ratio`, `passed`, `bc` and `sigma_ratio`, and `error`;
ours further `kind`, `place` (in the order of execution), `limit`, `verdict`, `elements` and `metrics`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from tensorcap.comparison import POLICY
from tensorcap.metrics import ThreeTensors

PRECISE: Final = 0.85  # R below which a port is more precise by more than chance


@dataclass(frozen=True, slots=True)
class ComponentResult:
    """What the test of a component came to.

    Attributes:
        component: Its site in the source.
        kind: One of `component_kinds.KINDS`, "" if unknown.
        place: Its place in the order of execution, None if unknown.
        ratio: The largest R of its results; None if there is none.
        limit: What R has to be below.
        passed: Whether it passed.
        verdict: What R says, in words.
        bc: The overlap of the distributions of errors of the result with the largest R; None if unknown.
        sigma_ratio: Root mean squares of these errors, over each other; None if unknown.
        elements: Elements of that result.
        error: What went wrong in the test, "" if nothing did.
        metrics: The method's twelve distances of that result.
    """

    component: str
    kind: str = ""
    place: int | None = None
    ratio: float | None = None
    limit: float | None = None
    passed: bool = False
    verdict: str = ""
    bc: float | None = None
    sigma_ratio: float | None = None
    elements: int = 0
    error: str = ""
    metrics: Mapping[str, float] = field(default_factory=dict)


def judge(three: ThreeTensors, tau_r: float, dtype: str, roundings: float = 0.0) -> tuple[bool, float, str]:
    """Judge the comparison of three tensors.

    1. A port that is not finite where the reference is has failed.
    2. Without an error of the baseline R says nothing: a port within one rounding passes.
    3. Else R has to be below its limit: `tau_r`, widened by how far so few elements may put a ratio off by
       chance (POL-30), and by what adds up with it as squares do: the roundings that the port's layers have
       to make beyond the source's; in a wide precision, whose sums are rounded as often as they have terms,
       what another order of these makes (`wide_noise` of the policy). Below 1 it is told, and no failure.

    Args:
        three: The comparison.
        tau_r: The limit of R of many elements that are rounded as often.
        dtype: The precision under test.
        roundings: How many roundings more than the source the port makes.

    Returns:
        Whether it passed, the limit of R, and what it says in words.
    """
    precision = POLICY.precision(dtype)
    limit = tau_r * POLICY.widened_by(three.elements)
    if three.nonfinite:
        return False, limit, f"{three.nonfinite} of {three.elements} elements are finite on one side only"
    if three.is_baseline_exact:
        passed = three.relative_error <= precision.unit * math.sqrt(1 + roundings)
        how = "and so is the port" if three.ratio == 0 else f"the port is off by {three.relative_error:.2g}"
        return passed, limit, f"the source is exact here, {how}"
    own = three.relative_error / three.ratio if three.ratio else math.inf  # the baseline's relative error
    order = POLICY.noise(precision) if precision.is_wide else 0.0
    limit = math.hypot(limit, math.sqrt(roundings) * precision.rounding / own, order / own)
    passed = three.ratio < limit
    if three.ratio < PRECISE:
        return passed, limit, "rounds less than the source does in that precision: by itself no mistake"
    if not passed:
        return passed, limit, f"R is not below {limit:.3g}"
    if three.ratio < tau_r:
        return passed, limit, "as the precision alone makes it"
    if order:
        return passed, limit, f"above {tau_r:g} as another order of sums makes it in {dtype}"
    if roundings:
        return (
            passed,
            limit,
            f"above {tau_r:g} by the roundings of its sum over ranks, and of the bias after it",
        )
    return passed, limit, f"above {tau_r:g} within chance, of {three.elements} elements"


def stage2_content(results: Sequence[ComponentResult]) -> dict[str, Any]:
    """The content of a stage 2 file, in the order of the tests."""
    passed = sum(one.passed for one in results)
    return {
        "results": [_entry(one) for one in results],
        "passed": passed,
        "failed": len(results) - passed,
        "total": len(results),
    }


def read_results(content: Mapping[str, Any], where: str) -> tuple[ComponentResult, ...]:
    """Results of a stage 2 file, of this or of the original tool.

    Raises:
        UsageError: It is none.
    """
    from tensorcap.reports.equivalence import parse_components

    plain = parse_components(where, content)
    return tuple(
        ComponentResult(
            one.name,
            str(entry.get("kind") or ""),
            entry.get("place") if isinstance(entry.get("place"), int) else None,
            one.ratio,
            _number(entry.get("limit")),
            one.passed,
            str(entry.get("verdict") or ""),
            _number(entry.get("bc")),
            _number(entry.get("sigma_ratio")),
            entry["elements"] if isinstance(entry.get("elements"), int) else 0,
            one.error,
        )
        for one, entry in zip(plain, content["results"], strict=True)
    )


def _entry(one: ComponentResult) -> dict[str, Any]:
    return {
        "component": one.component,
        "r_ratio": one.ratio,
        "passed": one.passed,
        "bc": one.bc,
        "sigma_ratio": one.sigma_ratio,
        **({"error": one.error} if one.error else {}),
        "kind": one.kind,
        "place": one.place,
        "limit": one.limit,
        "verdict": one.verdict,
        "elements": one.elements,
        "metrics": dict(one.metrics),
    }


def _number(value: object) -> float | None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and not math.isnan(float(value)) else None  # type: ignore[arg-type]
