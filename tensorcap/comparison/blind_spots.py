"""A summary of two runs, and their blind spots: errors too small to see, features that no input reached.

Clauses POL-50 to POL-54 of `specs/policy.md`.
"""

from __future__ import annotations

import math
import shlex
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from tensorcap.comparison.pair import Pair
from tensorcap.comparison.policy import POLICY, Policy, Precision
from tensorcap.comparison.policy_tests import Gain, GainLog
from tensorcap.comparison.quantised_weights import holds_packed_weights
from tensorcap.comparison.routing import Flips
from tensorcap.metrics import is_routing
from tensorcap.runs import Calls, is_gradient, is_parameter
from tensorcap.wording import conjugated
from tensorcap_formats.archive import Archive
from tensorcap_formats.errors import ReadError
from tensorcap_formats.keys import ROOT_SITE
from tensorcap_formats.records import Record

_GELU_ERROR: Final = 2e-4  # of the tanh form against the erf form, relative, at the activation


@dataclass(frozen=True, slots=True)
class DepthError:
    """The error at one depth.

    Attributes:
        depth: Number of the block, from 1; 0 before the first.
        error: Row error at the end of the block.
        limit: What the policy expects at most.
        visible: The smallest own error of a leaf in that block that the tests would show.
    """

    depth: int
    error: float
    limit: float
    visible: float


@dataclass(frozen=True, slots=True)
class RunSummary:
    """What can be said of two runs beside the status of each pair.

    Attributes:
        policy: The limits.
        precision: Name of the precision that errors were held against, "" if no pair needed one.
        growth: The error at each depth.
        worst_gain: The largest gain of a leaf or an attention core in proportion to its limit; None if
            there is none.
        gains: Count of gains.
        untested: Sites of leaves whose inputs were not captured, or not compared.
        flips: Routers that chose other experts, and how often.
        blind: What this run cannot see, a sentence each.
        commands: Commands that would prove more.
        has_estimates: Whether what weights in few bits make of results is an estimate, without their values.
    """

    policy: Policy
    precision: str = ""
    growth: tuple[DepthError, ...] = ()
    worst_gain: Gain | None = None
    gains: int = 0
    untested: tuple[str, ...] = ()
    flips: tuple[Flips, ...] = ()
    blind: tuple[str, ...] = ()
    commands: tuple[str, ...] = ()
    has_estimates: bool = False

    @property
    def sentences(self) -> tuple[str, ...]:
        """The summary in words, a sentence each, without the blind spots and the commands."""
        sentences = []
        if self.growth:
            first, last = self.growth[0], self.growth[-1]
            sentences.append(
                f"Error {first.error:.2g} at depth {first.depth}, {last.error:.2g} at depth {last.depth} "
                f"(at most {last.limit:.2g} expected in {self.precision})."
            )
        if self.worst_gain is not None:
            worst = self.worst_gain
            sentences.append(f"Worst of {self.gains} gains: {worst.site}: {worst.finding.text}.")
        flipped = [flip for flip in self.flips if flip.flipped]
        if flipped:
            rows = sum(flip.flipped for flip in flipped)
            sentences.append(
                f"Experts flipped in {rows} rows of {len(flipped)} routers, "
                f"{sum(flip.unexplained for flip in flipped)} of them not by a near tie."
            )
        return tuple(sentences)


def summarize_runs(
    reference: Archive,
    target: Archive,
    *,
    calls: Calls,
    pairs: Sequence[Pair],
    gain_log: GainLog,
    left_out: int,
    flips: Sequence[Flips],
    precision: Callable[[Pair], Precision],
    is_injected: bool,
) -> RunSummary:
    """Summarize what the tests found; the arguments are what they worked on."""
    measured = [
        pair
        for pair in pairs
        if pair.reference and pair.difference is not None and pair.row_error is not None
    ]
    coarsest = max((precision(p) for p in measured if p.is_inexact), key=lambda p: p.unit, default=None)
    gains, untested, has_inputs = gain_log.gains, tuple(gain_log.untested), gain_log.has_inputs
    growth = () if is_injected else _growth(measured, calls, precision, has_inputs=has_inputs)
    worst = max(gains, key=lambda gain: gain.finding.value / gain.finding.limit, default=None)
    if is_injected:  # what went into modules is known without having been compared
        untested, has_inputs = (), True
    blind = _blind_spots(
        reference, untested, growth, flips, coarsest, has_inputs=has_inputs, left_out=left_out
    )
    if is_injected and coarsest is not None:
        least = POLICY.leaf_own.green * coarsest.rounding
        if coarsest.is_wide:
            least = POLICY.in_proportion(POLICY.wide_own, coarsest).green
        blind.append(f"An own error of a leaf below {least:.2g} cannot be seen.")
    most = _largest_growth(measured) if coarsest is not None and coarsest.weights else 0.0
    has_estimates = most > 0 and not is_injected and not holds_packed_weights(target)
    if has_estimates:
        blind.append(
            "Weights in few bits were not compared, since the target's capture has no values of them: what "
            f"their rounding makes is an estimate, and results may be off by up to {most:.2g} within it."
        )
    blind += unexercised(reference)
    return RunSummary(
        policy=POLICY,
        precision=coarsest.text if coarsest else "",
        growth=growth,
        worst_gain=worst,
        gains=len(gains),
        untested=untested,
        flips=tuple(flips),
        blind=tuple(blind) if measured else (),
        commands=_commands(reference, target, coarsest) if measured else (),
        has_estimates=has_estimates,
    )


def _largest_growth(pairs: Sequence[Pair]) -> float:
    """The largest row error that is allowed of a result."""
    limits = [f.limit for pair in pairs for f in pair.findings if f.test == "growth" and f.limit is not None]
    return max(limits, default=0.0)


def _growth(
    measured: Sequence[Pair],
    calls: Calls,
    precision: Callable[[Pair], Precision],
    *,
    has_inputs: bool,
) -> tuple[DepthError, ...]:
    by_depth: dict[int, list[Pair]] = {}
    for pair in measured:
        record = pair.reference
        if record is None or not pair.is_inexact or is_gradient(record.key) or is_parameter(record.key):
            continue  # no part of the forward pass
        if pair.target is not None and "bool" in (record.dtype.kind, pair.target.dtype.kind):
            continue  # masks of two kinds, which have no error in numbers
        by_depth.setdefault(calls.depth(record), []).append(pair)
    growth: list[DepthError] = []
    inputs = 0.0
    for depth in sorted(by_depth):
        errors = [error for pair in by_depth[depth] if (error := pair.row_error) is not None]
        block = [pair for pair in by_depth[depth] if _ends_block(pair)]
        error = block[-1].row_error if block else statistics.median(errors)
        assert error is not None
        used = precision(by_depth[depth][-1])
        limit = (
            POLICY.in_proportion(POLICY.wide_total, used).green
            if used.is_wide
            else POLICY.envelope_at(depth, used)
        )
        if used.weights:
            limit = min(limit, _largest_growth(by_depth[depth]) or limit)
        hidden = (limit**2 - error**2) ** 0.5 if error < limit else limit
        visible = _visible_error(inputs, used) if has_inputs else hidden
        growth.append(DepthError(depth, error, limit, visible))
        inputs = error
    return tuple(growth)


def _visible_error(inputs: float, precision: Precision) -> float:
    """Return the smallest own error of a leaf that its gain shows if its inputs are that far off."""
    if precision.is_wide:
        limit = POLICY.in_proportion(POLICY.wide_own, precision).green
        return math.hypot(limit, POLICY.leaf_gain.green * inputs)
    allowed = POLICY.leaf_gain.green * math.hypot(inputs, 2 * precision.rounding)
    return math.sqrt(allowed**2 - inputs**2)


def _ends_block(pair: Pair) -> bool:
    assert pair.reference is not None
    key = pair.reference.key
    return key.slot.startswith("output") and key.site.rpartition(".")[2].isdigit()


def _blind_spots(
    reference: Archive,
    untested: tuple[str, ...],
    growth: Sequence[DepthError],
    flips: Sequence[Flips],
    precision: Precision | None,
    *,
    has_inputs: bool,
    left_out: int,
) -> list[str]:
    sentences = []
    if not has_inputs:
        sentences.append(
            "Inputs of modules were not captured, or there are no modules: only outliers and the growth of "
            "the error were tested."
        )
    elif untested:
        leaves = (
            "1 leaf is unknown: its" if len(untested) == 1 else f"{len(untested)} leaves is unknown: their"
        )
        sentences.append(f"The gain of {leaves} inputs were not compared.")
    if growth and precision is not None:
        first, last = growth[0], growth[-1]
        deeper = f", below {last.visible:.2g} at depth {last.depth}" if len(growth) > 1 else ""
        below = f"below {first.visible:.2g} at depth {first.depth}{deeper}"
        sentences.append(f"An own error of a leaf {below} cannot be seen.")
        if _has_gelu(reference) and max(depth.visible for depth in growth) > _GELU_ERROR:
            sentences.append(
                f"GELU by tanh in the place of erf, or the other way round, errs by {_GELU_ERROR:g}: "
                "it cannot be excluded."
            )
    if any(flip.flipped for flip in flips):
        sentences.append("Outliers were not looked for behind routers that chose other experts.")
    if left_out:
        sentences.append(f"{left_out} tensors of ops were left out, since experts flipped before them.")
    return sentences


def _has_gelu(reference: Archive) -> bool:
    config = reference.info.config
    classes = [module.class_name for module in reference.info.modules.values()]
    names = [*classes, *(config.get(n) for n in ("hidden_act", "hidden_activation", "activation_function"))]
    return any("gelu" in str(name).lower() for name in names)


def _commands(reference: Archive, target: Archive, precision: Precision | None) -> tuple[str, ...]:
    """Return the commands that compare the target's error with that of a twin in its precision.

    There is none of a target that is that twin itself: a compiled program, or the reference's own model.
    """
    is_program = bool(reference.info.operation_map)
    if is_program or reference.is_foreign or precision is None or precision.is_wide or precision.weights:
        return ()
    model, options = reference.info.workload.path, reference.info.workload.options
    other = target.info.workload
    if model and other.path == model and {**options, "dtype": None} == {**other.options, "dtype": None}:
        return ()
    ours, theirs = shlex.quote(str(reference.path)), shlex.quote(str(target.path))
    return (
        f"tcap capture torch --like {ours} --dtype {precision.name} -o twin.h5",
        f"tcap compare {ours} {theirs} --baseline twin.h5",
    )


_TOKENS: Final = ("input_ids", "decoder_input_ids", "inputs_embeds")
_EXPERTS: Final = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


def unexercised(reference: Archive) -> list[str]:
    """List what a reference's inputs did not exercise, a sentence each."""
    config = reference.info.config
    inner = config.get("text_config")
    config = {**config, **inner} if isinstance(inner, Mapping) else config
    inputs = {
        record.key.slot.partition(".")[2]: record
        for record in reference.records
        if record.key.site == ROOT_SITE and record.key.step == 0 and record.key.slot.startswith("input.")
    }
    tokens = next((inputs[name] for name in _TOKENS if name in inputs), None)
    if tokens is None or len(tokens.shape) < 2:
        return []
    length = _length(reference, tokens)
    return [
        *_by_length(config, length),
        *_softcaps(reference, config),
        *_padding(reference, inputs.get("attention_mask"), tokens),
        *_experts(reference, config),
    ]


def _length(reference: Archive, tokens: Record) -> int:
    """Return the length of the run's longest sequence: prompt and generated tokens."""
    steps = 1 + max(record.key.step for record in reference.records)
    return tokens.shape[1] + steps - 1


def _by_length(config: Mapping[str, Any], length: int) -> Iterator[str]:
    window = config.get("sliding_window")
    is_used = config.get("use_sliding_window", True) is not False
    if isinstance(window, int) and is_used and length <= window:
        yield f"The sliding window of {window} tokens was not reached by {length}."
    scaling = config.get("rope_scaling") or config.get("rope_parameters")
    if isinstance(scaling, Mapping):
        kind = scaling.get("rope_type") or scaling.get("type") or "default"
        start = scaling.get("original_max_position_embeddings") or config.get(
            "original_max_position_embeddings"
        )
        if kind in ("dynamic", "longrope") and isinstance(start, int) and length <= start:
            yield f"Rotary scaling ({kind}) acts beyond {start} tokens; there were {length}."


def _softcaps(reference: Archive, config: Mapping[str, Any]) -> Iterator[str]:
    cap = config.get("final_logit_softcapping")
    logits = next((r for r in reference.records if r.key.slot == "output.logits"), None)
    if isinstance(cap, (int, float)) and cap and logits is not None and logits.statistics is not None:
        low, high = logits.statistics.minimum, logits.statistics.maximum
        if low is not None and high is not None and max(abs(low), abs(high)) < cap / 10:
            yield f"The cap of {cap:g} on logits was idle: the largest is {max(abs(low), abs(high)):.2g}."
    if config.get("attn_logit_softcapping"):
        yield "Whether the cap on attention scores acted is not known: the scores were not captured."


def _padding(reference: Archive, mask: Record | None, tokens: Record) -> Iterator[str]:
    if mask is None or mask.statistics is None or mask.statistics.zeros == 0:
        batch = f" in {tokens.shape[0]} sequences" if tokens.shape[0] > 1 else ""
        yield f"There was no padding{batch}."


def _experts(reference: Archive, config: Mapping[str, Any]) -> Iterator[str]:
    count = next((config[name] for name in _EXPERTS if isinstance(config.get(name), int)), None)
    chosen: dict[str, set[int]] = {}
    for record in reference.records:
        if record.key.slot.startswith("output") and is_routing(record) and record.stored:
            try:
                experts = np.unique(reference.read(record))
            except ReadError:  # the pair is unreadable
                continue
            chosen.setdefault(record.key.site, set()).update(map(int, experts))
    if count and chosen:
        idle = sum(count - len(numbers) for numbers in chosen.values())
        if idle > 0:
            yield f"{idle} of {count * len(chosen)} experts {conjugated(idle, 'were')} never chosen."
