"""Pairs of tokens: which of the target is which of the reference, if sides padded or packed differently."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, Literal

import numpy as np

from tensorcap.alignment.tokens.sequences import ROLES, Tokens, TokenSequence
from tensorcap_formats.archive import Archive
from tensorcap_formats.dtypes import Array
from tensorcap_formats.errors import UsageError

How = Literal["valid_tokens", "match_tokens"]

VALID: Final = "valid_tokens"
MATCH: Final = "match_tokens"
LAST: Final = "last_token"
TOKEN_STEPS: Final = (VALID, MATCH, LAST)

_Found = list[tuple[TokenSequence, TokenSequence, int]]  # of both sides, and how many tokens in common


@dataclass(frozen=True, slots=True)
class TokenRule:
    """How tokens are to be matched, by a map file.

    Attributes:
        step: By what.
        dims: Axes of tensors whose token axes do not follow from shapes, `b s ...`.
        reference: `SITE/SLOT` of the reference's ids, mask, positions, starts, where their names are unusual.
        target: The same for the target.
    """

    step: How
    dims: str = ""
    reference: Mapping[str, str] = field(default_factory=dict)
    target: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.step not in (VALID, MATCH):
            raise UsageError(f"[tokens]: step {self.step!r}, expected '{VALID}' or '{MATCH}'")
        for name in (*self.reference, *self.target):
            if name not in ROLES:
                raise UsageError(f"[tokens]: {name!r} is unknown, expected one of {', '.join(ROLES)}")


@dataclass(frozen=True, slots=True)
class TokenAlignment:
    """Tokens of the reference and the tokens of the target that they are compared with.

    Attributes:
        reference: The reference's tokens.
        target: The target's.
        pairs: For each token that both have: the reference's step and cell, the target's step and cell;
            in the reference's order.
        unequal_ids: How many of them have other ids on the other side.
        unequal_given: How many of these were given: a step that goes on with one token of a sequence may be
            fed what the side itself made.
    """

    reference: Tokens
    target: Tokens
    pairs: Array
    unequal_ids: int
    unequal_given: int

    @classmethod
    def of(cls, reference: Archive, target: Archive, rule: TokenRule) -> TokenAlignment:
        """Match the tokens of two runs.

        `valid_tokens` takes the n-th valid token of each sequence for the n-th of the sequence of the same
        number. `match_tokens` finds, for each sequence, the one with the same ids, else the one with which it
        has the longest beginning in common, and takes that.

        Raises:
            UsageError: A side has no tokens, or no ids; or there is not one token that both have.
            ReadError: Ids or masks cannot be read.
        """
        tokens = Tokens.of(reference, rule.reference)
        target_tokens = Tokens.of(target, rule.target)
        sequences, target_sequences = _divided(tokens, target_tokens)
        pairs_of_sequences = (
            _by_ids(tokens, sequences, target_tokens, target_sequences)
            if rule.step == MATCH
            else _by_number(sequences, target_sequences)
        )
        rows, unequal, unequal_given = [], 0, 0
        for sequence, target_sequence, count in pairs_of_sequences:
            columns = (sequence.steps, sequence.cells, target_sequence.steps, target_sequence.cells)
            rows.append(np.stack([column[:count] for column in columns], axis=1))
            if sequence.ids is not None and target_sequence.ids is not None:
                is_unequal = sequence.ids[:count] != target_sequence.ids[:count]
                is_made = _is_alone(sequence)[:count] & _is_alone(target_sequence)[:count]
                unequal += int(is_unequal.sum())
                unequal_given += int((is_unequal & ~is_made).sum())
        pairs = np.concatenate([*rows, np.empty((0, 4), np.int64)]).astype(np.int64)
        if not len(pairs):
            raise UsageError(
                f"{rule.step}: {target_tokens.where} has none of the {tokens.count} tokens of {tokens.where}"
            )
        ordered = pairs[np.lexsort((pairs[:, 1], pairs[:, 0]))]
        return cls(tokens, target_tokens, ordered, unequal, unequal_given)

    @property
    def text(self) -> str:
        """What was matched and what was not, in one line."""
        count = len(self.pairs)
        parts = [f"{count} tokens are on both sides"]
        for name, side in (("reference", self.reference), ("target", self.target)):
            left = side.count - count
            padding = f" and {side.padding} of padding" if side.padding else ""
            if left or padding:
                parts.append(f"the {name} has {left} more{padding}")
        if self.unequal_ids:
            parts.append(f"{self.unequal_ids} of them have other ids in the target")
        return "; ".join(parts)

    def of_step(self, step: int) -> Array:
        """The pairs of one step of the reference."""
        pairs: Array = self.pairs[self.pairs[:, 0] == step]
        return pairs


def rule_of_other_padding(reference: Archive, target: Archive) -> TokenRule | None:
    """The rule for two runs that were fed the same tokens with padding at other places, as on the other side.

    Returns:
        None if nothing says so: ids and masks of both sides, of as many rows and positions, that can be read.
    """
    rule = TokenRule(VALID)
    try:
        tokens = TokenAlignment.of(reference, target, rule)
    except (UsageError, OSError):  # nothing says which tokens there are
        return None
    sides = tokens.reference, tokens.target
    is_known = all(side.padding and all(one.ids is not None for one in side.sequences) for side in sides)
    if not is_known or tokens.unequal_ids or {side.count for side in sides} != {len(tokens.pairs)}:
        return None
    is_moved = not np.array_equal(tokens.pairs[:, :2], tokens.pairs[:, 2:])
    return rule if is_moved and sides[0].grids == sides[1].grids else None


def _divided(
    reference: Tokens, target: Tokens
) -> tuple[tuple[TokenSequence, ...], tuple[TokenSequence, ...]]:
    """The sequences of both sides; a side without bounds is divided as the other one is.

    Raises:
        UsageError: It has not as many tokens as the other side, or other ids.
    """
    sides = [reference, target]
    for i, side in enumerate(sides):
        other = sides[1 - i]
        if side.has_bounds or len(other.sequences) == 1:
            continue
        whole = side.sequences[0]
        lengths = [len(sequence.cells) for sequence in other.sequences]
        known = [sequence.ids for sequence in other.sequences if sequence.ids is not None]
        is_other = (
            whole.ids is not None
            and len(known) == len(lengths)
            and not np.array_equal(np.concatenate(known), whole.ids)
        )
        if sum(lengths) != len(whole.cells) or is_other or len(side.grids) > 1:
            raise UsageError(
                f"{side.where}: {side.count} tokens follow each other, nothing says where sequences "
                f"begin, and {other.where} has {sum(lengths)} in {len(lengths)} sequences",
                hint="Capture position_ids, or cu_seqlens.",
            )
        ends = np.cumsum(lengths)[:-1]
        columns = [np.split(column, ends) for column in (whole.steps, whole.cells)]
        parts = [None] * len(lengths) if whole.ids is None else np.split(whole.ids, ends)
        sides[i] = replace(side, sequences=tuple(map(TokenSequence, parts, *columns)), has_bounds=True)
    return sides[0].sequences, sides[1].sequences


def _is_alone(sequence: TokenSequence) -> Array:
    """Which tokens were fed alone, in steps behind the first."""
    steps = sequence.steps
    is_alone: Array = (np.bincount(steps, minlength=1)[steps] == 1) & (steps != steps[:1])
    return is_alone


def _by_number(reference: Iterable[TokenSequence], target: Iterable[TokenSequence]) -> _Found:
    pairs = zip(reference, target, strict=False)  # what one side has more of is left over, and counted
    return [(mine, its, min(len(mine.cells), len(its.cells))) for mine, its in pairs]


def _by_ids(
    reference: Tokens, ours: Sequence[TokenSequence], target: Tokens, theirs: Sequence[TokenSequence]
) -> _Found:
    """Sequences with the same ids in their order; then those with the longest beginning in common."""
    ids: list[list[Array]] = []
    for side, sequences in ((reference, ours), (target, theirs)):
        known = [sequence.ids for sequence in sequences if sequence.ids is not None]
        if len(known) < len(sequences):
            raise UsageError(f"{MATCH}: {side.where} has no ids", hint=f"Use {VALID}, or capture the ids.")
        ids.append(known)
    common = np.array([[_beginning(mine, its) for its in ids[1]] for mine in ids[0]])
    lengths = [np.array([len(pairs) for pairs in side]) for side in ids]
    is_equal = (common == lengths[0][:, None]) & (common == lengths[1][None, :])
    pairs: _Found = []
    while common.size and common.max() > 0:
        candidates = np.where(is_equal, common, 0) if (is_equal & (common > 0)).any() else common
        row, column = np.unravel_index(int(candidates.argmax()), common.shape)
        count = int(common[row, column])
        rivals = (candidates[row] == count).sum() + (candidates[:, column] == count).sum() - 2
        rows, columns = np.array([row]), np.array([column])
        if rivals and not is_equal[row, column]:  # nothing decides between them: none is taken
            rows, columns = (np.flatnonzero(line == count) for line in (common[:, column], common[row]))
        else:
            pairs.append((ours[int(row)], theirs[int(column)], count))
        common[rows], common[:, columns] = 0, 0
    return pairs


def _beginning(one: Array, other: Array) -> int:
    """How many ids two sequences begin with in common."""
    count = min(len(one), len(other))
    unlike = np.flatnonzero(one[:count] != other[:count])
    return int(unlike[0]) if len(unlike) else count
