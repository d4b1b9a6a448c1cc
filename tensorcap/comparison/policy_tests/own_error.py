"""Does a module of an injected run make a larger error than its own rounding? See POL-80, POL-81.

In an injected run the arguments of a call are the reference's own values, so that the error of its result can
have come from nowhere else. Formula: row error / rho, against `Policy.leaf_own` for leaves of known kind and
`Policy.composite_own` for all else; in float32 the error itself against `Policy.wide_own`. The limits were
measured by injection into clean models (`specs/policy.md` section 7): at most 2.30 and 5.65 roundings.
"""

from __future__ import annotations

from collections.abc import Iterator

from tensorcap.comparison.pair import Finding
from tensorcap.comparison.policy_tests.context import Context


class OwnErrorTest:
    """Tests `own_error_leaf` and `own_error_composite`, which take the place of `growth`."""

    names = ("own_error_leaf", "own_error_composite")
    is_local = True

    def judge(self, context: Context) -> Iterator[tuple[str, Finding]]:
        """Judge results whose arguments were all replaced, and arguments that such a call's code made."""
        for pair, error in context.open_results():
            own = context.own_kind(context.pairs[pair.key])
            if own is None:
                continue
            site = pair.reference.key.site
            is_leaf = own == "result" and context.calls.is_leaf(site) and context.calls.is_simple(site)
            finding = context.policy.judge_own_error(
                error, pair.precision, is_leaf=is_leaf, elements=pair.elements
            )
            yield pair.key, finding
