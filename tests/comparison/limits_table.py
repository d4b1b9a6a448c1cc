"""The table of limits in `specs/policy.md`; `python -m tests.comparison.limits_table` writes it."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from tensorcap.comparison import LETTERS, POLICY, Limits

SPEC: Final = Path(__file__).parents[2] / "specs/policy.md"
BEGIN: Final = "<!-- made by python -m tests.comparison.limits_table -->\n"
END: Final = "<!-- end -->\n"


def limits_table() -> str:
    """Make the table: a test and what it is of, and up to which value it is green and suspect."""
    e0, e1, e2 = POLICY.envelope
    tail = POLICY.replayed_tail
    rows = [
        _row("gain", "a leaf", "gain", POLICY.leaf_gain),
        _row("attention_gain", "the core of an attention, a leaf of unknown kind", "gain", POLICY.core_gain),
        _row("gain_tail", "a leaf, the 95th percentile of rows", "gain", POLICY.leaf_tail),
        _row(
            "attention_gain_tail",
            "as `attention_gain`, the 95th percentile of rows",
            "gain",
            POLICY.core_tail,
        ),
        _row("attention_gain_tail", "the worst row of an expert", "gain", POLICY.expert_row),
        _row(
            "code_gain",
            "what a module's code makes between the modules that it calls",
            "gain",
            POLICY.code_gain,
        ),
        _row(
            "row_gain",
            f"one row that is off by > {POLICY.row_spread:g} times the median one, and by > "
            f"{POLICY.row_excess:g} times what is expected at its depth",
            "gain",
            POLICY.row_gain,
        ),
        _row(
            "run_gain",
            f"a result that is off by > {POLICY.run_excess:g} times what is expected at its depth",
            "gain",
            POLICY.run_gain,
        ),
        _words("outlier_element", "any pair", f"κ ≤ {POLICY.outlier:g} times the usual row error", "–"),
        _words(
            "angles",
            "a table of sines and cosines",
            "off by ≤ u({:g} + {:g}θ) of an angle θ".format(*POLICY.angle),
            "–",
        ),
        _words("range", "any floating pair", "no value beyond the range", "–"),
        _words("growth", "any pair", f"ε ≤ {e0:g}ρ√({e1:g} + {e2:g}n) at depth n", "more", "never"),
        _words(
            "input_dependence",
            "an elementwise leaf",
            f"≤ {100 * POLICY.explained:g} % of the squared error explained",
            "more",
            "never",
        ),
        _row("wide_error", "any pair of float32 runs", "ε", POLICY.wide_total),
        _row("own", "`gain` and `attention_gain` of float32 runs", "own error", POLICY.wide_own),
        _row(
            "own_error_leaf",
            "a leaf of an injected run, or of a forward replay",
            "own error / ρ",
            POLICY.leaf_own,
        ),
        _row(
            "own_error_composite", "as `own_error_leaf`, anything else", "own error / ρ", POLICY.composite_own
        ),
        _row("own_error_leaf", "a leaf of known kind in a replay", "own error / ρ", POLICY.replayed_leaf),
        _row("own_error_composite", "anything else in a replay", "own error / ρ", POLICY.replayed_composite),
        _words(
            "own_error_leaf",
            "both of a replay, the 95th percentile of rows",
            f"≤ {tail:g} times these limits",
            f"≤ {tail:g} times",
        ),
        _row("weight_rounding", "a quantised weight", "errors / those of rounding", POLICY.quantised),
        _row(
            "quantisation",
            "the result of a quantised layer",
            "own error / predicted error",
            POLICY.quantised,
        ),
        _row(
            "recomputed",
            "a module in floats of a target with weights in few bits",
            "own error / ρ",
            POLICY.leaf_own,
        ),
        _row(
            "recomputed", "the core of an attention of such a target", "own error / ρ", POLICY.composite_own
        ),
        _row("twin_ratio", "a leaf of a replay, no product with a weight", "R", POLICY.twin_ratio),
        _row("ulp_share", "elements of a replay more than 1 ulp off", "share", POLICY.twin_bits),
        _words("ulp_share", "elements of another value", f"share ≤ {POLICY.twin_values:g}", "more", "never"),
    ]
    head = "| test | of | green | suspect | diverged |\n|---|---|---|---|---|\n"
    return head + "".join(rows)


def _row(test: str, of: str, quantity: str, limits: Limits) -> str:
    return _words(test, of, f"{quantity} ≤ {limits.green:g}", f"≤ {limits.suspect:g}")


def _words(test: str, of: str, green: str, suspect: str, diverged: str = "more") -> str:
    letter = LETTERS.get(test)
    name = f"`{test}` ({letter})" if letter not in (None, test) else f"`{test}`"
    return f"| {name} | {of} | {green} | {suspect} | {diverged} |\n"


def written_table() -> str:
    """The table as it stands in the document."""
    return SPEC.read_text(encoding="utf-8").partition(BEGIN)[2].partition(END)[0]


if __name__ == "__main__":
    text = SPEC.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    SPEC.write_text(f"{before}{BEGIN}{limits_table()}{END}{rest.partition(END)[2]}", encoding="utf-8")
