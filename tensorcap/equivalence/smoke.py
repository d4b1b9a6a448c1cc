"""Stage 1, the smoke test: does the port live, and do its greedy tokens agree with the source's?

Both generate freely. Tokens behind the first that differs follow another text, so that only their count
means something: logits are compared up to that token, where both sides were given the same.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from tensorcap.equivalence.gates import Gate
from tensorcap.equivalence.logit_rows import RowMetrics, Spread, compare_rows, shared_columns, spread
from tensorcap.equivalence.token_runs import TokenRun
from tensorcap.wording import counted
from tensorcap_formats.errors import UsageError

TOKEN_MATCH: Final = 0.30  # share of greedy tokens: a sign of life, and no proof
THETA_COSINE: Final = 0.95

_TOPS: Final = ("top1", "top5", "top10")
_COMPONENTS: Final = "Test the components: `tcap equivalence components`, then `tcap equivalence localize`."
_MEANINGS: Final = {  # (tokens match, logits agree): what it means, what to do next
    (True, True): (
        "Tokens match and logits agree: the port lives. This proves no equivalence.",
        "",
    ),
    (False, True): (
        "Logits agree and tokens do not match: decisions with small margins. Where the source hardly prefers "
        "its token, rounding or a small mistake is enough for another one, and all that follows is another "
        "text.",
        "Which of both it is, `tcap equivalence forced` decides: it feeds the source's tokens, so that an "
        "early parting counts once.",
    ),
    (True, False): (
        "Tokens match although logits do not agree: an error that leaves the order of the first choices as "
        "it is.",
        _COMPONENTS,
    ),
    (False, False): (
        "Neither tokens match nor logits agree: the port computes something else.",
        _COMPONENTS,
    ),
}


@dataclass(frozen=True, slots=True)
class PromptMatch:
    """Both sides' tokens after one prompt.

    Attributes:
        prompt: As a person reads it.
        source: The source's tokens.
        target: The target's tokens.
        rows: Metrics of each position up to the first whose tokens differ, that one included.
    """

    prompt: str
    source: tuple[int, ...]
    target: tuple[int, ...]
    rows: tuple[RowMetrics, ...]

    @property
    def compared(self) -> int:
        """Positions that count: as many as the longer side has, since one that ends early differs."""
        return max(len(self.source), len(self.target))

    @property
    def matching(self) -> int:
        """Positions with the same token."""
        return sum(one == other for one, other in zip(self.source, self.target, strict=False))

    @property
    def first_divergence(self) -> int | None:
        """The first position whose tokens differ, from 0; None if none do."""
        pairs = enumerate(zip(self.source, self.target, strict=False))
        different = (at for at, (one, other) in pairs if one != other)
        length = min(len(self.source), len(self.target))
        return next(different, None if len(self.source) == len(self.target) else length)


@dataclass(frozen=True, slots=True)
class SmokeTest:
    """The result of stage 1.

    Attributes:
        prompts: The prompts.
        device: What the target ran on.
        token_match: Least share of tokens that match.
        theta_cosine: From which 5th percentile of the cosine on logits agree.
        remarks: What was left out and why, as sentences.
    """

    prompts: tuple[PromptMatch, ...]
    device: str
    token_match: float = TOKEN_MATCH
    theta_cosine: float = THETA_COSINE
    remarks: tuple[str, ...] = ()

    @property
    def match_rate(self) -> float:
        """Share of positions with the same token, over all prompts."""
        return sum(one.matching for one in self.prompts) / sum(one.compared for one in self.prompts)

    @property
    def rows(self) -> tuple[RowMetrics, ...]:
        """Metrics of all positions at which both sides were given the same."""
        return tuple(row for one in self.prompts for row in one.rows)

    @property
    def undefined(self) -> int:
        """Positions of these at which the target gives no numbers."""
        return sum(not row.is_defined for row in self.rows)

    @property
    def gates(self) -> tuple[Gate, ...]:
        """What decides."""
        return (
            Gate("positions whose logits are not finite", self.undefined, "at most", 0),
            Gate("share of greedy tokens that match", self.match_rate, "at least", self.token_match),
        )

    @property
    def passed(self) -> bool:
        """Whether all gates are passed."""
        return all(gate.passed for gate in self.gates)

    @property
    def cosine(self) -> Spread:
        """Cosine of logits over positions."""
        return spread([row.cosine for row in self.rows], is_better_if_higher=True)

    @property
    def meaning(self) -> tuple[str, str]:
        """What matches and cosines mean together, and what to do next, "" if nothing."""
        if self.undefined:
            at = next(
                f"prompt {number}, position {position}"
                for number, one in enumerate(self.prompts, 1)
                for position, row in enumerate(one.rows)
                if not row.is_defined
            )
            return (
                f"The target gives logits that are no finite numbers, first at {at}: what follows counts for "
                "nothing.",
                "Find where they begin: `tcap equivalence components`, then `tcap equivalence localize`.",
            )
        tail = self.cosine.tail
        is_close = tail is not None and tail >= self.theta_cosine
        return _MEANINGS[self.match_rate >= self.token_match, is_close]

    @property
    def words(self) -> tuple[str, ...]:
        """The result as sentences, the gates first."""
        matching, compared = (
            sum(getattr(one, name) for one in self.prompts) for name in ("matching", "compared")
        )
        summary = (
            f"{matching} of {counted(compared, 'greedy token')} after {counted(len(self.prompts), 'prompt')} "
            f"match ({self.match_rate:.0%}, expected at least {self.token_match:.0%}); the target ran on "
            f"{self.device}."
        )
        words = [summary, self.meaning[0], *self.remarks]
        cosine, kl = self.cosine, spread([row.kl for row in self.rows])
        if cosine.tail is not None and cosine.worst is not None and kl.tail is not None:
            first = [statistics.fmean(getattr(row, name) or 0.0 for row in self.rows) for name in _TOPS]
            error = spread([row.relative_l2 for row in self.rows])
            words.append(
                f"Logits of {counted(len(self.rows), 'position')} with the same text before: cosine p5 "
                f"{cosine.tail:.6f}, least {cosine.worst:.6f}; KL p95 {kl.tail:.3g} nats; relative L2 mean "
                f"{error.mean:.3g}; first choices in common {first[0]:.0%}, of five {first[1]:.0%}, of ten "
                f"{first[2]:.0%}."
            )
        return tuple(words + self._partings())

    def _partings(self) -> list[str]:
        """How clear the source's choices were where tokens first part, and elsewhere."""
        parted = [one.rows[-1] for one in self.prompts if one.first_divergence is not None]
        errors = [row.error for row in parted if row.error is not None]
        if not errors:
            return []
        margins = statistics.median(row.margin for row in parted)
        usual = statistics.median(row.margin for row in self.rows)
        return [
            f"Where tokens first part ({counted(len(parted), 'prompt')}), the source prefers its own by "
            f"{margins:.3g} logits (median; {usual:.3g} at all positions), and logits differ by "
            f"{statistics.median(errors):.3g} (RMS)."
        ]

    def to_json(self) -> dict[str, Any]:
        """The content of `results/stage1.json`, in the method's members and further ones."""
        rows = self.rows
        return {
            "token_matching": {
                "match_rate": self.match_rate,
                "matching_tokens": sum(one.matching for one in self.prompts),
                "total_tokens_compared": sum(one.compared for one in self.prompts),
                "per_prompt_results": [
                    {
                        "prompt": one.prompt,
                        "match_rate": one.matching / one.compared,
                        "first_divergence_idx": one.first_divergence,
                        "source_tokens": list(one.source),
                        "target_tokens": list(one.target),
                    }
                    for one in self.prompts
                ],
            },
            "enhanced_metrics": {
                "num_positions": len(rows),
                "num_undefined": self.undefined,
                "cosine": spread_members(self.cosine, "min", "p5"),
                "kl": spread_members(spread([row.kl for row in rows]), "max", "p95"),
                "relative_l2": spread_members(spread([row.relative_l2 for row in rows]), "max", "p95"),
                **{f"{name}_agreement": _mean([getattr(row, name) for row in rows]) for name in _TOPS},
                "per_position_cosine": [[row.cosine for row in one.rows] for one in self.prompts],
                "per_position_kl": [[row.kl for row in one.rows] for one in self.prompts],
                "per_position_relative_l2": [[row.relative_l2 for row in one.rows] for one in self.prompts],
            },
            "device": self.device,
            "meaning": self.meaning[0],
            "gates": [gate.to_json() for gate in self.gates],
            "passed": self.passed,
        }


def compare_generations(
    source: Sequence[TokenRun],
    target: Sequence[TokenRun],
    *,
    vocabularies: Sequence[int] = (),
    device: str = "cpu",
    token_match: float = TOKEN_MATCH,
    theta_cosine: float = THETA_COSINE,
) -> SmokeTest:
    """Compare what both sides generated of the same prompts.

    Args:
        source: The trusted model's, one of each prompt.
        target: The port's, in the same order.
        vocabularies: The sizes of the vocabulary that configurations name.
        device: What the target ran on, in words.
        token_match: Least share of tokens that match, 0 to 1.
        theta_cosine: From which 5th percentile of the cosine on logits agree.

    Raises:
        UsageError: Prompts differ, or numbers of logits do.
        CaptureError: The source's logits are not finite.
    """
    require_same_prompts(source, target)
    widths = {"source": source[0].logits.shape[1], "target": target[0].logits.shape[1]}
    columns = shared_columns(widths, vocabularies)
    prompts = []
    for number, (ours, theirs) in enumerate(zip(source, target, strict=True), 1):
        match = PromptMatch(ours.prompt.text, ours.tokens, theirs.tokens, ())
        parting = match.first_divergence
        last = match.compared if parting is None else parting + 1
        rows = tuple(
            compare_rows(
                one[: columns.count], None, other[: columns.count], where=f"prompt {number}, position {at}"
            )
            for at, (one, other) in enumerate(zip(ours.logits[:last], theirs.logits[:last], strict=False))
        )
        prompts.append(PromptMatch(match.prompt, match.source, match.target, rows))
    remarks = (columns.remark,) if columns.remark else ()
    return SmokeTest(tuple(prompts), device, token_match, theta_cosine, remarks)


def require_same_prompts(*sides: Sequence[TokenRun]) -> None:
    """Refuse runs of unlike prompts.

    Raises:
        UsageError: They are, or there are none.
    """
    if not sides[0]:
        raise UsageError("no runs of prompts, expected at least one")
    for side in sides[1:]:
        if [run.prompt.tokens for run in side] != [run.prompt.tokens for run in sides[0]]:
            raise UsageError("source and target were given unlike prompts, expected the same tokens")


def spread_members(one: Spread, worst: str, tail: str) -> dict[str, float | None]:
    """A spread as an object of JSON, under the method's names."""
    return {"mean": one.mean, worst: one.worst, tail: one.tail}


def _mean(values: Sequence[float | None]) -> float:
    """The mean of agreements, of which an undefined one is none."""
    return math.fsum(value or 0.0 for value in values) / len(values)
