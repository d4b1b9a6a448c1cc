"""Does a module of an injected run make a larger error than its own rounding? See POL-80, POL-81.

In an injected run the arguments of a call are the reference's own values, so that the error of its result can
have come from nowhere else. Formula: row error / rho, against `Policy.leaf_own` for leaves of known kind and
`Policy.composite_own` for all else; in float32 the error itself against `Policy.wide_own`. The limits were
measured by injection into clean models (`specs/policy.md` section 7): at most 2.30 and 5.65 roundings.
"""

from __future__ import annotations

from collections.abc import Iterator

from tensorcap.comparison.pair import Finding
from tensorcap.comparison.policy import POLICY, Limits, Precision
from tensorcap.comparison.policy_tests.context import Context, PolicyTest
from tensorcap.wording import number_and_limit


class OwnErrorTest(PolicyTest):
    """Tests `own_error_leaf` and `own_error_composite`, which take the place of `growth`."""

    names = ("own_error_leaf", "own_error_composite")
    is_local = True

    def judge(self, context: Context) -> Iterator[tuple[str, Finding]]:
        """Judge results whose arguments were all replaced, and arguments that such a call's code made."""
        for pair, error in context.open_results():
            own = context.injected.own(pair)
            if own is None:
                continue
            site = pair.reference.key.site
            is_alone = own == "result" and context.calls.is_leaf(site)
            precision = pair.precision.of_module(site) if is_alone else pair.precision
            is_leaf = is_alone and context.calls.is_simple(site)
            yield pair.key, judge_own_error(error, precision, is_leaf=is_leaf, elements=pair.elements)


def judge_own_error(
    error: float,
    precision: Precision,
    *,
    is_leaf: bool,
    elements: int,
    limits: Limits | None = None,
    where: str = "",
) -> Finding:
    """Judge the error of what was computed from the reference's own values.

    Args:
        error: Row error, no unit.
        precision: The precision of the pair.
        is_leaf: Whether a leaf of known kind computed it.
        elements: Count of elements that the error is taken over.
        limits: In roundings; those of an injected run if None. Float32 and wider have limits of their own.
        where: Which rows the error is of, for the text.
    """
    test = "own_error_leaf" if is_leaf else "own_error_composite"
    if precision.is_wide:
        limits = POLICY.in_proportion(POLICY.wide_own, precision)
        shown, limit = number_and_limit(error, limits.green)
        return limits.finding(test, error, f"error {shown} of its own{where}, at most {limit}")
    limits = POLICY.sampled(limits or (POLICY.leaf_own if is_leaf else POLICY.composite_own), elements)
    own = error / precision.rounding
    shown, limit = number_and_limit(own, limits.green, 3)
    text = f"error {error:.2g} of its own{where}: {shown} roundings, at most {limit}"
    return limits.finding(test, own, text)
