"""What modules themselves made of archived values, judged: tests A, A', B and C of `specs/replay.md`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from tensorcap.comparison.divergence import Inputs, called_sites, caller_of, is_circumstance
from tensorcap.comparison.padding import Padding
from tensorcap.comparison.pair import JUDGED, Finding, Pair, Status, worst_status
from tensorcap.comparison.policy import POLICY, Precision
from tensorcap.runs.calls import Calls
from tensorcap_formats.archive import Archive
from tensorcap_formats.dtypes import decode
from tensorcap_formats.records import Record

Made = Literal["result", "argument"]


@dataclass(frozen=True, slots=True)
class OwnError:
    """What one module itself made of archived values, against what the archive holds.

    Attributes:
        key: Key text of the tensor, in the names of the model that was run.
        module: The module whose code made it: of an argument, the caller.
        made: Whether it is a result of `module` or an argument that it hands on.
        is_leaf: Whether a leaf of known kind made it.
        error: Row error, no unit; None where none is defined.
        ratio: R against the twin on the same values; None without one.
        status: `identical`, `within-rounding`, `suspect` or `diverged`, or `unjudged`.
        findings: What the tests said.
        is_precise: Whether it was rounded less than the model itself rounds it in that precision.
    """

    key: str
    module: str
    made: Made
    is_leaf: bool
    error: float | None
    ratio: float | None
    status: Status
    findings: tuple[Finding, ...]
    is_precise: bool

    @property
    def is_bad(self) -> bool:
        """Whether it is suspect or worse."""
        return self.status in ("suspect", "diverged")


class ReplayJudge:
    """Judges what modules made, by tests A, A', B, C and E.

    Args:
        reference: The trusted archive, which says who calls whom.
        exact: What the reference's modules made.
        target: What the target's made of the same, under the reference's keys.
        twin: What the reference's made in the target's precision; None without.
        precision: What errors are held against; None where no run says one.
        pairs: What was compared.
        is_forward: Whether the target was run on the reference's values, which were rounded on the way in.
    """

    def __init__(
        self,
        reference: Archive,
        *,
        exact: Archive,
        target: Archive,
        twin: Archive | None,
        precision: Precision | None,
        pairs: Sequence[Pair],
        is_forward: bool,
    ) -> None:
        self._calls = Calls(reference)
        self._called = called_sites(reference)
        self._target, self._exact, self._twin = target, exact, twin
        self._precision = precision
        self._padding = Padding(exact, target)
        self._given = Inputs(reference, pairs)
        self._is_forward = is_forward
        self._inputs = {call.place: call.inputs for call in self._calls.calls}

    def of(self, pair: Pair) -> OwnError:
        """What became of one tensor."""
        pair = self._padding.without(pair)
        assert pair.reference is not None
        assert pair.target is not None
        key = pair.reference.key
        is_result = key.slot.startswith("output")
        module = key.site if is_result else caller_of(key.site, self._called)
        is_leaf = is_result and self._calls.is_leaf(key.site) and self._calls.is_simple(key.site)
        ratio = None if pair.baseline is None else pair.baseline.r
        status, findings = self._judged(pair, ratio, is_leaf=is_leaf)
        made: Made = "result" if is_result else "argument"
        is_own_kind = is_leaf and not self._calls.is_linear(key.site)
        is_precise = is_own_kind and ratio is not None and POLICY.is_precise(ratio, pair.elements)
        return OwnError(pair.key, module, made, is_leaf, pair.row_error, ratio, status, findings, is_precise)

    def _judged(
        self, pair: Pair, ratio: float | None, *, is_leaf: bool
    ) -> tuple[Status, tuple[Finding, ...]]:
        if pair.status in ("identical", "match"):
            return pair.status, ()
        if is_circumstance(pair, self._given.of(pair)):
            said = pair.findings or (Finding(pair.status, 1, 0, "unjudged", mismatch_text(pair)),)
            return "unjudged", tuple(replace(finding, status="unjudged") for finding in said)
        if pair.status in ("nonfinite", "shape-mismatch"):
            return "diverged", (Finding(pair.status, 1, 0, "diverged", mismatch_text(pair)),)
        error = pair.row_error
        assert pair.reference is not None
        key = pair.reference.key
        assert pair.target is not None
        if error is None or pair.difference is None or not pair.reference.dtype.is_inexact:
            return (pair.status if pair.status in JUDGED else "unjudged"), pair.findings
        precision = POLICY.precision_of_pair(self._precision, pair.reference, pair.target)
        count = pair.elements
        found = list(
            POLICY.judge_replayed(
                error,
                pair.difference.row_error_p95,
                precision,
                is_leaf=is_leaf,
                elements=count,
                is_forward=self._is_forward,
            )
        )
        if ratio is not None and ratio <= POLICY.twin_ratio.green:  # the model itself rounds as much
            found = [replace(f, status="within-rounding") for f in found]
        elif ratio is not None and math.isfinite(ratio) and self._tells_by_twin(pair, is_leaf=is_leaf):
            found.append(POLICY.judge_twin(ratio, count))
        found += [finding for finding in pair.findings if finding.test == "outlier_element"]
        is_precise = ratio is not None and ratio < POLICY.twin_precise
        if not (is_precise and (self._is_forward or self._calls.has_parameters(key.site))):
            found += self._of_bits(pair)
        return worst_status(found), tuple(found)

    def _tells_by_twin(self, pair: Pair, *, is_leaf: bool) -> bool:
        """Whether R is judged: of leaves that are no products, and of weights that routers give."""
        assert pair.reference is not None
        assert pair.target is not None
        key, known, twin = pair.reference.key, pair.reference.statistics, self._twin
        if is_leaf or not self._calls.is_router(key.site) or twin is None or key.text not in twin:
            return is_leaf and not self._calls.is_linear(key.site)
        is_as_wide = twin.get(key.text).dtype == pair.target.dtype
        return is_as_wide and known is not None and known.minimum is not None and float(known.minimum) >= 0

    def _of_bits(self, pair: Pair) -> list[Finding]:
        """Test C, of leaves that compute a tensor of another of its shape: activations and norms."""
        assert pair.reference is not None
        assert pair.target is not None
        key, twin = pair.reference.key, self._twin
        if twin is None or key.text not in twin or not self._keeps_shape(pair.reference):
            return []
        other = twin.get(key.text)
        if other.dtype != pair.target.dtype or other.shape != pair.target.shape:
            return []
        ours = decode(twin.read(other), other.dtype).astype(np.float64)
        theirs = decode(self._target.read(pair.target), pair.target.dtype).astype(np.float64)
        exact = decode(self._exact.read(pair.reference), pair.reference.dtype).astype(np.float64)
        is_plain = not self._is_forward and not self._calls.has_parameters(key.site)
        unit = POLICY.units[other.dtype.name]
        off, other_values = shares_off(exact, ours, theirs, unit, rounds_once=is_plain)
        found = [POLICY.judge_bits(off, ours.size)]
        if is_plain:
            found.append(POLICY.judge_other_values(other_values, ours.size))
        return found

    def _keeps_shape(self, record: Record) -> bool:
        key = record.key
        is_result = key.slot.startswith("output")
        if not (is_result and self._calls.is_leaf(key.site) and self._calls.is_simple(key.site)):
            return False
        inputs = self._inputs.get((key.rank, key.step, key.site, key.call), ())
        is_alone = len(inputs) == 1 and inputs[0].shape == record.shape
        return is_alone and not self._calls.is_linear(key.site)


def mismatch_text(pair: Pair) -> str:
    """What is wrong with a pair that no test judged: elements that are not finite, or shapes."""
    if pair.status == "nonfinite" and pair.difference is not None:
        count, all_of = pair.difference.mask_mismatches, pair.difference.elements
        return f"{count} of {all_of} elements are finite on one side only"
    return pair.reason or "the shapes differ"


def shares_off(
    exact: Any, twin: Any, target: Any, unit: float, *, rounds_once: bool = True
) -> tuple[float, float]:
    """How many elements are neither the twin's nor the exact ones rounded once (test C).

    Args:
        exact: What the model makes in its own precision, float64.
        twin: What it makes in the target's.
        target: What the target made.
        unit: `u` of the target's dtype.
        rounds_once: Whether the exact ones rounded once are as good as the twin's, to the last place.

    Returns:
        The share of elements that are more than one unit in the last place off, and of those that are off
        both at all.
    """
    if not target.size:
        return 0.0, 0.0
    _, exponent = np.frexp(np.maximum(np.abs(exact), np.abs(target)))
    ulp = np.ldexp(2 * unit, exponent - 1)
    with np.errstate(invalid="ignore"):
        from_twin, from_exact = np.abs(target - twin), np.abs(target - exact)
        far = from_twin > 1.001 * ulp
        other = (from_twin > 0) & (from_exact > 0.501 * ulp)
        if rounds_once:
            far &= from_exact > 1.501 * ulp
    return float(far.mean()), float(other.mean())
