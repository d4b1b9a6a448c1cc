"""The layout of all members of a pair: a rule of all layers, by majority.

A layer that alone is laid out otherwise may be the mistake itself. It does not set the layout: it is compared
after the steps of the others, and the reason says what its own values ask for.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from tensorcap.alignment.layout import CLOSE
from tensorcap.alignment.match.candidates import Placed
from tensorcap.alignment.match.pairs import RecordPair
from tensorcap.alignment.match.slots import Slots, Steps
from tensorcap.wording import some

_NAMED: Final = 4  # members in one sentence
_SAME: Final = 2.5  # times smaller: what a layout leaves of a tensor that another one does not fit


@dataclass(frozen=True, slots=True)
class MemberLayouts:
    """The layout of all members, and those that have one of their own.

    Attributes:
        number: The member on whose tensors the layout was found.
        layout: The layout; None if there is none.
        residuals: What it leaves of each member; None of one that was not read.
        voters: The members that agree after it.
        others: The layouts after which other members agree, by their numbers.
    """

    number: int
    layout: Placed | None
    residuals: Sequence[float | None]
    voters: Sequence[int] = ()
    others: Mapping[int, Placed] = field(default_factory=dict)

    def describe_others(self, names: Sequence[str]) -> str:
        """What a reason adds of members with a layout of their own; nothing if there are none.

        Args:
            names: Of all members.
        """
        by_steps: dict[Steps, list[str]] = defaultdict(list)
        for number, layout in self.others.items():
            by_steps[layout.fit.steps].append(names[number])
        return "".join(
            f"; but {some(alone, _NAMED)} would agree {_condition(steps)}"
            for steps, alone in by_steps.items()
        )


def fit_members(
    slots: Slots,
    pairs: Sequence[RecordPair],
    search: Callable[[RecordPair], Placed | None],
    *,
    first: Iterable[int],
    is_usual: Callable[[Placed], bool],
    is_borne_out: Callable[[int], bool] = lambda _: False,
) -> MemberLayouts:
    """Find the layout that most members of a pair have, or those of which what is computed agrees.

    1. A layout is found on the members that agree best: the first that is proven, or else the last tried.
    2. It is measured on all members. One that holds the same values in another order, by its statistics, and
       does not agree after these steps, has a layout of its own if one is proven for it.
    3. Each member that agrees after a layout votes for it. If what is computed of voters for one of several
       agrees, it alone counts, as others may be the mistake. The layout with the most votes is taken; of
       several the usual one, else the first.

    Args:
        slots: Finds layouts.
        pairs: The tensors of all members.
        search: Finds the best layout of one member.
        first: The members that it is found on.
        is_usual: Whether a layout is the one that names, or other modules, lead one to expect.
        is_borne_out: Whether what is computed of a member's tensors agrees.
    """
    for number in first:
        layout = search(pairs[number])
        if layout is None or layout.fit.is_proven:
            break
    if layout is None:
        return MemberLayouts(number, None, [None] * len(pairs))
    residuals = _residuals(slots, layout, pairs)
    if not layout.fit.is_proven:
        return MemberLayouts(number, layout, residuals, _agreeing(residuals))
    known: dict[object, Placed] = {layout.key: layout}
    votes: dict[object, list[int]] = {layout.key: _agreeing(residuals)}
    for i, residual in enumerate(residuals):
        if residual is None or residual <= CLOSE or not slots.hold_the_same(*pairs[i]):
            continue
        own = _own_layout(slots, pairs[i], residual, [known[key] for key in votes], search)
        if own is not None:
            known.setdefault(own.key, own)
            votes.setdefault(own.key, []).append(i)
    borne_out = [key for key, numbers in votes.items() if len(votes) > 1 and any(map(is_borne_out, numbers))]
    most = max(len(votes[key]) for key in borne_out or votes)
    best = [key for key in borne_out or votes if len(votes[key]) == most]
    chosen = next((key for key in best if is_usual(known[key])), best[0])
    if known[chosen] is not layout:
        number, residuals = votes[chosen][0], _residuals(slots, known[chosen], pairs)
    others = {i: known[key] for key, numbers in votes.items() if key != chosen for i in numbers}
    voters = [i for i in votes[chosen] if i not in others]
    return MemberLayouts(number, known[chosen], residuals, voters, others)


def _own_layout(
    slots: Slots,
    pair: RecordPair,
    residual: float,
    known: Sequence[Placed],
    search: Callable[[RecordPair], Placed | None],
) -> Placed | None:
    """The layout of one member: one that others have, or else its own; None if none is proven."""
    for layout in known:
        left = _residuals(slots, layout, [pair])[0]
        if left is not None and left <= CLOSE and left * _SAME <= residual:
            return layout
    own = search(pair)
    return own if own is not None and own.fit.is_proven else None


def _residuals(slots: Slots, layout: Placed, pairs: Sequence[RecordPair]) -> list[float | None]:
    return slots.residuals(layout.fit, [layout.of(pair) for pair in pairs])


def _condition(steps: Steps) -> str:
    return f"after {', '.join(steps)}" if steps else "without steps"


def _agreeing(residuals: Sequence[float | None]) -> list[int]:
    return [i for i, residual in enumerate(residuals) if residual is not None and residual <= CLOSE]
