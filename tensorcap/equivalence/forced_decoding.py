"""Stages 5 and 6: logits of three models that are fed the same tokens, position by position.

The tokens are the source's greedy ones in the wide precision (teacher forcing), so that a token chosen
otherwise at a near tie changes nothing that follows. R sets the target's error against that of the source in
the target's precision.

R of one position scatters even if the port is right: two roundings of one size point in two directions, of
as many as the logits' errors have, a few dozen in a small model. The limit of R's 95th percentile allows for
that (`ForcedComparison.scatter`); in a wide model it is the method's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

import numpy as np

from tensorcap.comparison import POLICY
from tensorcap.comparison.baseline import label_of
from tensorcap.equivalence.gates import Gate
from tensorcap.equivalence.logit_rows import (
    RowMetrics,
    Spread,
    compare_rows,
    error_directions,
    shared_columns,
    spread,
)
from tensorcap.equivalence.smoke import THETA_COSINE, require_same_prompts, spread_members
from tensorcap.equivalence.token_runs import TokenRun
from tensorcap.wording import counted
from tensorcap_formats.dtypes import Array
from tensorcap_formats.errors import UsageError

TAU_R: Final = 1.2
TOP1: Final = 0.5  # share of positions

Components = Literal["passed", "failed", "not run"]
_TWO_TENSORS: Final = (
    "The source has no wider precision: R is relative to what a change of its inputs by the machine epsilon "
    "makes, which is more than rounding, so that small mistakes pass."
)
_FINITE: Final = "positions whose logits are not finite"
_R, _COSINE, _FIRST = "R p95", "cosine p5", "top-1 agreement"
_KL, _KL_MAX = "KL p95", "largest KL"
_P95: Final = 1.645  # of a normal distribution
_P95_ERROR: Final = 2.11  # standard error of that of one value: sqrt(0.95 * 0.05) over the density there
_PRECISE: Final = 0.95  # mean R below which the port rounds visibly less than the source does


@dataclass(frozen=True, slots=True)
class WayBack:
    """Which stage a failure leads back to.

    Attributes:
        failed: Gates of which one failed.
        passed: Gates that have to be passed.
        components: What stage 2 came to; None for any.
        only_behind_first: Whether it fails at later positions alone, and at no prompt's first one.
        meaning: What it means.
        stage: Where to go on.
        command: The command of that stage.
    """

    failed: tuple[str, ...]
    passed: tuple[str, ...]
    components: Components | None
    only_behind_first: bool
    meaning: str
    stage: int
    command: str

    @property
    def text(self) -> str:
        """What it means and where it leads, as a sentence."""
        meaning = self.meaning[:1].upper() + self.meaning[1:]
        return f"{meaning}: back to stage {self.stage}, `tcap equivalence {self.command}`."


WAYS_BACK: Final = (  # the first row that fits
    WayBack((_FINITE,), (), None, False, "NaN or infinity, which begins in a component", 2, "components"),
    WayBack(
        (_R, _COSINE, _FIRST),
        (),
        None,
        True,
        "the first token after each prompt is right and later ones are not, so that the steps with a cache "
        "are another computation than the prompt",
        0,
        "class-divergence",
    ),
    WayBack(
        (_COSINE, _FIRST),
        (_R,),
        None,
        False,
        "the source in this precision is as far off, so that the precision is not enough for this model, and "
        "the port is no worse",
        1,
        "smoke",
    ),
    WayBack(
        (_R, _COSINE, _FIRST),
        (),
        "failed",
        False,
        "a component failed, and its fault reaches the logits",
        3,
        "localize",
    ),
    WayBack(
        (_R, _COSINE, _FIRST),
        (),
        "passed",
        False,
        "all tested components are right alone, so that it is one without a test, another code path of the "
        "device, or the compiler",
        0,
        "class-divergence",
    ),
    WayBack(
        (_R, _COSINE, _FIRST),
        (),
        "not run",
        False,
        "the port as a whole is farther off than rounding makes it, and which component is not known yet",
        2,
        "components",
    ),
    WayBack(
        (_KL, _KL_MAX),
        (_R, _COSINE, _FIRST),
        None,
        False,
        "logits point the same way and probability is spread otherwise than in the ports of the calibration, "
        "as by a scale in the head",
        2,
        "components",
    ),
)


@dataclass(frozen=True, slots=True)
class ForcedLimits:
    """What gates decide by.

    Attributes:
        tau_r: The 95th percentile of R has to be below.
        theta_cosine: The 5th percentile of the cosine has to be at least.
        top1: The share of positions with the same first choice has to be more.
        delta_kl: The 95th percentile of KL has to be at most, nats; None if it decides nothing, as there is
            no limit that was measured.
        delta_kl_max: The largest KL, likewise.
    """

    tau_r: float = TAU_R
    theta_cosine: float = THETA_COSINE
    top1: float = TOP1
    delta_kl: float | None = None
    delta_kl_max: float | None = None


@dataclass(frozen=True, slots=True)
class ForcedPrompt:
    """The positions of one prompt.

    Attributes:
        prompt: As a person reads it.
        tokens: What was fed, or in a model that generates nothing, the source's first choices.
        rows: Metrics of each position.
    """

    prompt: str
    tokens: tuple[int, ...]
    rows: tuple[RowMetrics, ...]

    def to_json(self) -> dict[str, Any]:
        """An entry of `per_prompt`, in the method's members and further ones."""
        return {
            "prompt": self.prompt,
            "num_positions": len(self.rows),
            **_summary(self.rows),
            "tokens": list(self.tokens),
            "per_position_cosine": [row.cosine for row in self.rows],
            "per_position_kl": [row.kl for row in self.rows],
            "per_position_r_ratio": [row.r_ratio for row in self.rows],
        }


@dataclass(frozen=True, slots=True)
class ForcedComparison:
    """The result of stages 5 and 6.

    Attributes:
        prompts: The prompts.
        limits: What gates decide by.
        components: What stage 2 came to.
        generates: Whether tokens were fed after the prompts; else positions are the prompts' own.
        directions: In how many directions the twin's errors point, as `error_directions` has it.
        order: R that another order of sums makes alone, 0 in a low precision, whose roundings are more.
        is_perturbed: Whether the twin is the source on perturbed inputs, as there is no wider precision.
        remarks: What was left out and why, as sentences.
    """

    prompts: tuple[ForcedPrompt, ...]
    limits: ForcedLimits = ForcedLimits()
    components: Components = "not run"
    generates: bool = True
    directions: float = math.inf
    order: float = 0.0
    is_perturbed: bool = False
    remarks: tuple[str, ...] = ()

    @property
    def rows(self) -> tuple[RowMetrics, ...]:
        """Metrics of all positions."""
        return tuple(row for one in self.prompts for row in one.rows)

    @property
    def r_ratio(self) -> Spread:
        """R over positions."""
        return spread([row.r_ratio for row in self.rows])

    @property
    def scatter(self) -> float:
        """By which factor chance may put R's 95th percentile above its median, at least 1, no unit.

        1. Of two independent errors of n directions, the ratio of squared norms is distributed as F(n, n),
           whose logarithm has a variance of 4 / n (Fisher 1924): ln R has a deviation of 1 / sqrt(n).
        2. Errors that both sides have in common make it less, below the median as above, where no mistake
           shows: the smaller of both counts.
        3. The 95th percentile of a normal distribution lies 1.645 deviations above its median, and that of m
           positions is known to within 2.11 / sqrt(m), its standard error, of which two are allowed.
        """
        one = self.r_ratio
        if one.median is None or not one.best_tail or not math.isfinite(one.median):
            return 1.0
        deviation = min(math.log(one.median / one.best_tail) / _P95, 1 / math.sqrt(self.directions))
        return math.exp(deviation * (_P95 + 2 * _P95_ERROR / math.sqrt(len(self.rows))))

    @property
    def r_limit(self) -> float:
        """What the 95th percentile of R has to be below."""
        return math.hypot(self.limits.tau_r * self.scatter, self.order)

    @property
    def gates(self) -> tuple[Gate, ...]:
        """All that decides: that numbers are finite; R of stage 5; cosine, first choices, KL of stage 6."""
        rows, limits = self.rows, self.limits
        kl = spread([row.kl for row in rows])
        gates = [
            Gate(_FINITE, sum(not row.is_defined for row in rows), "at most", 0),
            Gate(_R, self.r_ratio.tail, "below", self.r_limit),
            Gate(
                _COSINE,
                spread([row.cosine for row in rows], is_better_if_higher=True).tail,
                "at least",
                limits.theta_cosine,
            ),
            Gate(_FIRST, _share(rows, "top1"), "more than", limits.top1),
        ]
        if limits.delta_kl is not None:
            gates.append(Gate(_KL, kl.tail, "at most", limits.delta_kl))
        if limits.delta_kl_max is not None:
            gates.append(Gate(_KL_MAX, kl.worst, "at most", limits.delta_kl_max))
        return tuple(gates)

    @property
    def passed(self) -> bool:
        """Whether all gates are passed."""
        return all(gate.passed for gate in self.gates)

    @property
    def exit_status(self) -> int:
        """0 if all gates are passed, else 1."""
        return 0 if self.passed else 1

    @property
    def way_back(self) -> WayBack | None:
        """Which stage the failure leads back to; None without one."""
        failed = {gate.name for gate in self.gates if not gate.passed}
        for way in WAYS_BACK:
            if (
                failed.intersection(way.failed)
                and not failed.intersection(way.passed)
                and way.components in (None, self.components)
                and (not way.only_behind_first or self._fails_behind_first)
            ):
                return way
        return None

    @property
    def _fails_behind_first(self) -> bool:
        """Whether all prompts are right at their first position, and most later positions are not.

        A single later position above the limit says nothing: one in twenty may be.
        """
        if not self.generates:
            return False
        later = [row for one in self.prompts for row in one.rows[1:]]
        return not any(self._is_bad(one.rows[0]) for one in self.prompts) and 2 * sum(
            self._is_bad(row) for row in later
        ) > len(later)

    def _is_bad(self, row: RowMetrics) -> bool:
        r_ratio, cosine = row.r_ratio, row.cosine
        return (
            r_ratio is None
            or cosine is None
            or not (r_ratio < self.r_limit and cosine >= self.limits.theta_cosine)
        )

    @property
    def words(self) -> tuple[str, ...]:
        """The result as sentences, the summary first."""
        rows = self.rows
        fed = "fed with the source's tokens" if self.generates else "of the prompts, as nothing is generated"
        words = [f"{'; '.join(gate.text for gate in self.gates[1:])}."]
        words.append(f"{counted(len(rows), 'position')} of {counted(len(self.prompts), 'prompt')}, {fed}.")
        tail, mean = self.r_ratio.tail, self.r_ratio.mean
        if tail is not None:
            median = self.r_ratio.median or 0.0
            order = (
                f", and {self.order:.3g}, which another order of sums makes alone (root of squares)"
                if self.order
                else ""
            )
            words.append(
                f"R: median {median:.3g}, which means: {label_of(median)}; the limit of R p95 is "
                f"{self.limits.tau_r:g} times {self.scatter:.3g}, by which chance may put it above the median"
                f"{order}."
            )
        if mean is not None and mean < _PRECISE and not self.is_perturbed:
            words.append(
                f"Mean R is {mean:.3g}: the port rounds less than the source in its precision, which is no "
                "failure."
            )
        undefined = [
            f"prompt {number}, position {at}"
            for number, one in enumerate(self.prompts, 1)
            for at, row in enumerate(one.rows)
            if not row.is_defined
        ]
        if undefined:
            words.insert(
                1,
                f"At {counted(len(undefined), 'position')} the target's logits are no finite numbers, first "
                f"at {undefined[0]}: no number stands for them, and they fail.",
            )
        kl = spread([row.kl for row in rows])
        if kl.tail is not None and kl.worst is not None:
            remark = (
                "" if self.limits.delta_kl is not None else ", which decides nothing without a calibration"
            )
            words.append(f"KL p95 is {kl.tail:.3g} nats, the largest {kl.worst:.3g}{remark}.")
        if self.is_perturbed:
            words.append(_TWO_TENSORS)
        return (*words, *self.remarks)

    def to_json(self) -> dict[str, Any]:
        """The content of `results/teacher_forced.json`, in the method's members and further ones."""
        rows, way = self.rows, self.way_back
        is_close = next(gate.passed for gate in self.gates if gate.name == _COSINE)
        kl_gates = [gate.passed for gate in self.gates if gate.name in (_KL, _KL_MAX)]
        below = [row.cosine is None or row.cosine < self.limits.theta_cosine for row in rows]
        return {
            "per_prompt": [one.to_json() for one in self.prompts],
            "aggregate": {
                "condition_b_passed": is_close,
                "condition_c_passed": all(kl_gates) if kl_gates else None,
                "r_scatter": self.scatter,
                **_summary(rows),
                "share_below_theta": sum(below) / len(below),
                "num_positions": len(rows),
                "num_undefined": sum(not row.is_defined for row in rows),
            },
            "gates": [gate.to_json() for gate in self.gates],
            "way_back": None if way is None else {"stage": way.stage, "meaning": way.meaning},
            "teacher_forced": self.generates,
            "passed": self.passed,
        }


def compare_forced(
    source: Sequence[TokenRun],
    twin: Sequence[TokenRun],
    target: Sequence[TokenRun],
    *,
    vocabularies: Sequence[int] = (),
    limits: ForcedLimits | None = None,
    components: Components = "not run",
    generates: bool = True,
    is_perturbed: bool = False,
    dtype: str = "",
) -> ForcedComparison:
    """Compare three models that were fed the same tokens.

    Args:
        source: The trusted model in the wide precision, one run of each prompt.
        twin: The trusted model in the target's precision, or on inputs perturbed by its machine epsilon.
        target: The port.
        vocabularies: The sizes of the vocabulary that configurations name.
        limits: What gates decide by; the method's if None.
        components: What stage 2 came to.
        generates: Whether tokens were fed after the prompts.
        is_perturbed: Whether the twin is the source itself on perturbed inputs.
        dtype: The precision under test; "" for a low one.

    Raises:
        UsageError: Prompts or tokens differ, numbers of logits do, or the twin is the source itself.
        CaptureError: The source's logits, or the twin's, are not finite.
    """
    require_same_prompts(source, twin, target)
    sides = {"source": source, "its twin": twin, "target": target}
    if generates and len({tuple(run.tokens for run in runs) for runs in sides.values()}) > 1:
        raise UsageError("source, its twin and target were fed unlike tokens, expected the source's")
    widths = {name: runs[0].logits.shape[1] for name, runs in sides.items()}
    columns = shared_columns(widths, vocabularies)
    prompts = []
    for number, runs in enumerate(zip(source, twin, target, strict=True), 1):
        positions = zip(*(run.logits[:, : columns.count] for run in runs), strict=True)
        rows = tuple(
            compare_rows(s, w, t, where=f"prompt {number}, position {at}")
            for at, (s, w, t) in enumerate(positions)
        )
        prompts.append(ForcedPrompt(runs[0].prompt.text, runs[0].tokens, rows))
    errors = [
        w.logits[:, : columns.count] - s.logits[:, : columns.count] for s, w in zip(source, twin, strict=True)
    ]
    ratios = [row.r_ratio for one in prompts for row in one.rows]
    defined = [ratio for ratio in ratios if ratio is not None]
    if defined and all(math.isinf(ratio) for ratio in defined):
        raise UsageError(
            "the source in the target's precision gives the source's own logits: R has no denominator",
            hint="Give the source a wider precision than the target: [run] reference_dtype.",
        )
    return ForcedComparison(
        tuple(prompts),
        limits or ForcedLimits(),
        components,
        generates,
        error_directions(np.concatenate(errors)),
        0.0 if is_perturbed else _order_of_sums(dtype, source, errors),
        is_perturbed,
        (columns.remark,) if columns.remark else (),
    )


def _order_of_sums(dtype: str, source: Sequence[TokenRun], errors: Sequence[Array]) -> float:
    """R that another order of sums makes alone in a wide precision, whose sums are rounded at each term.

    Args:
        dtype: The precision under test.
        source: The source's runs.
        errors: Of each, the twin's errors [positions, V].
    """
    precision = POLICY.precision(dtype) if dtype else None
    if precision is None or not precision.is_wide:
        return 0.0
    norms = np.concatenate(
        [np.linalg.norm(run.logits[:, : e.shape[1]], axis=1) for run, e in zip(source, errors, strict=True)]
    )
    own = np.median(np.linalg.norm(np.concatenate(errors), axis=1) / norms)
    return float(POLICY.noise(precision) / own) if own > 0 else 0.0


def _summary(rows: Sequence[RowMetrics]) -> dict[str, Any]:
    cosine = spread([row.cosine for row in rows], is_better_if_higher=True)
    return {
        "r_ratio": spread_members(spread([row.r_ratio for row in rows]), "max", "p95"),
        "cosine": spread_members(cosine, "min", "p5"),
        "kl": spread_members(spread([row.kl for row in rows]), "max", "p95"),
        **{f"{name}_agreement": _share(rows, name) for name in ("top1", "top5", "top10")},
    }


def _share(rows: Sequence[RowMetrics], name: str) -> float:
    """Mean agreement over positions, an undefined one agreeing in nothing."""
    return math.fsum(getattr(row, name) or 0.0 for row in rows) / len(rows)
