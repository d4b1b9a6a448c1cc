"""Which keys the queries of a target see: solved from its values, and named by a rule."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np

from tensorcap.diagnosis.attention.core import Core, Parts
from tensorcap.diagnosis.values import Values, evenly_spaced, listed

_MOST_KEYS: Final = 512  # the cost of a query grows with their third power
_QUERIES: Final = 12  # that are solved
_MOST_QUERIES: Final = 64  # all of which are solved
_LEAST_EQUATIONS: Final = 2  # for each key
_SHARE: Final = 0.05  # by which what is solved may miss seen or not seen
_FAINT: Final = 1e-4  # of the weight of the strongest key: a fainter one may be seen or not
_STRIDES: Final = (2, 3, 4, 8)
_SHOWN: Final = 12  # keys that a text has


@dataclass(frozen=True, slots=True)
class Rule:
    """What a target sees.

    Attributes:
        text: In words.
        hidden: Which keys it does not see although the reference does, (query, key).
        shown: Which it sees whatever the reference does.
        choices: How many keys were chosen one by one, and not by a rule.
    """

    text: str
    hidden: Values
    shown: Values
    choices: int = 0

    def apply(self, visible: Values) -> Values:
        """Change what is visible, (batch, 1, query, key)."""
        return np.asarray((visible & ~self.hidden) | self.shown)


def find_rules(core: Core, parts: Parts, heads: Values, result: Values) -> Iterator[Rule]:
    """Find what the queries of a target see.

    1. For some queries, the keys that are seen are solved. If S are seen, with weights e before the softmax
       and values v, the result o is such that the sum over S of e (v - o) is 0 in every channel of every
       head: S is the null vector of these.
    2. A rule holds if it agrees with all of them, where keys are not too faint to tell.
    3. The keys of all queries are solved, if they are few: a rule may hold for some queries by chance.

    Args:
        core: The reference's.
        parts: The target's, of one sequence.
        heads: As many as are worked out.
        result: Of the target, (1, query, head, channel).
    """
    keys, count = parts.k.shape[2], parts.q.shape[2]
    if keys > _MOST_KEYS or len(heads) * parts.v.shape[3] < _LEAST_EQUATIONS * keys:
        return
    queries = evenly_spaced(count, _QUERIES)
    solved = _solve_queries(core, parts, heads, result, queries)
    if solved is None:
        return
    observed, is_known = solved
    usual = np.broadcast_to(parts.visible_keys(core), (1, 1, count, keys))[0, 0]
    for rule in _list_rules(usual.shape, parts.distances, queries, observed):
        seen = rule.apply(usual)
        if ((seen[queries] == observed) | ~is_known).all() and not np.array_equal(seen, usual):
            yield rule
    if count > _MOST_QUERIES:
        return
    solved = _solve_queries(core, parts, heads, result, np.arange(count))
    if solved is not None:
        seen = np.where(solved[1], solved[0], usual)
        odd = np.flatnonzero((seen != usual).any(axis=1))
        if len(odd):
            at = int(odd[-1])
            lost, gained = np.flatnonzero(usual[at] & ~seen[at]), np.flatnonzero(seen[at] & ~usual[at])
            parts_of_text = [f"does not see {listed(lost, _SHOWN)}"] if len(lost) else []
            parts_of_text += [f"sees {listed(gained, _SHOWN)} besides"] if len(gained) else []
            text = f"token {at} of the target {' and '.join(parts_of_text)}"
            yield Rule(text, usual & ~seen, seen & ~usual, seen.size)


def _solve_queries(
    core: Core, parts: Parts, heads: Values, result: Values, queries: Values
) -> tuple[Values, Values] | None:
    """Solve which keys some queries see, and of which that is known; None if no choice makes the values."""
    weights, values = parts.weigh_values(core, heads, queries)
    seen, is_known = [], []
    for at, query in enumerate(queries.tolist()):
        rest = values[0] - result[0, query, :, None]  # (head, key, channel)
        equations = (weights[0, :, at, :, None] * rest).transpose(0, 2, 1).reshape(-1, rest.shape[1])
        solution = _solve(equations)
        if solution is None:
            return None
        seen.append(solution)
        strongest = weights[0, :, at].max(axis=0)
        is_known.append(strongest > _FAINT * strongest.max())
    return np.stack(seen), np.stack(is_known)


def _solve(equations: Values) -> Values | None:
    """Find the keys that are seen; None if the values are not those of any choice of keys."""
    size = np.linalg.norm(equations, axis=0)
    size = np.where(size > 0, size, 1.0)
    _, vectors = np.linalg.eigh((equations / size).T @ (equations / size))
    shares = vectors[:, 0] / size
    largest = shares[np.abs(shares * size).argmax()]
    shares = shares / largest
    is_seen = shares > 1 / 2
    left = float(np.linalg.norm(equations @ is_seen))
    whole = float(np.linalg.norm(equations[:, is_seen]))
    return is_seen if whole and left <= _SHARE * whole else None if whole else is_seen


def _list_rules(shape: tuple[int, int], behind: Values, queries: Values, observed: Values) -> Iterator[Rule]:
    """List rules whose numbers are read off what is seen: beside what the reference hides, and alone.

    Args:
        shape: (query, key).
        behind: How far each key stands before each query.
        queries: Those of which it is known what they see.
        observed: What these see.
    """
    keys = np.arange(shape[1])
    is_seen = np.asarray(observed.any(axis=0))
    first, last = int(is_seen.argmax()), shape[1] - int(is_seen[::-1].argmax())
    distance = behind[queries]
    farthest = int(np.where(observed, distance, -1).max()) + 1
    nearest = int(np.where(observed, distance, shape[1]).min())
    position = behind[:, :1]  # of each query, among the keys
    seen: dict[str, Values] = {
        f"the first {last} keys only": keys < last,
        f"the last {shape[1] - first} keys only": keys >= first,
        f"a window of {farthest} tokens": behind < farthest,
        "keys up to its own number, both counted from the first": keys <= np.arange(shape[0])[:, None],
        f"no token nearer than {nearest}": behind >= nearest,
    }
    for chunk in np.unique(observed.argmax(axis=1)).tolist():
        if chunk > 1:
            seen[f"chunks of {chunk} tokens"] = position // chunk == keys // chunk
    seen |= {f"one of {stride} tokens only": behind % stride == 0 for stride in _STRIDES}
    for text, rule in seen.items():
        hidden = np.broadcast_to(~rule, shape)
        yield Rule(f"each token of the target sees {text}", hidden, np.zeros(shape, np.bool_))
    ahead = np.asarray((observed & (distance < 0)).any(axis=0))
    if ahead.any():
        prefix = shape[1] - int(ahead[::-1].argmax())
        text = f"each token of the target sees the first {prefix} ones, those behind it too"
        yield Rule(text, np.zeros(shape, np.bool_), np.broadcast_to(keys < prefix, shape))
    for text, rule in seen.items():
        shown = np.broadcast_to(rule, shape)
        yield Rule(f"each token of the target sees {text}, whatever the mask hides", ~shown, shown)
