"""What a localisation found besides suspects, as sentences."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tensorcap.localization.curves import Change
from tensorcap.localization.origin import Origin
from tensorcap.localization.suspect import Localization
from tensorcap.wording import FEW, counted, some


def around_texts(found: Localization) -> Iterator[str]:
    """What stands around the suspects: composites, where values stop being finite, where errors begin."""
    if found.explained:
        modules = [f"{module} by {child}" for module, child in found.explained]
        yield f"Explained by what is within: {some(modules)}."
    if found.nonfinite is not None:
        yield _nonfinite_text(found.nonfinite)
    yield from _change_texts(found.changes)


def _nonfinite_text(found: Origin) -> str:
    """Where values stop being finite, and what went in, as a sentence."""
    what = found.tensor
    bad = [one.key for one in found.operands if not one.is_finite]
    largest = max((one.largest or 0.0 for one in found.operands), default=0.0)
    if not found.operands:
        given = "what went into it was not captured"
    elif bad:
        given = f"of {counted(len(found.operands), 'operand')} not finite: {some(bad)}"
    else:
        operands = counted(len(found.operands), "operand")
        given = f"its {operands} all finite, up to {largest:.3g}: {some([one.key for one in found.operands])}"
    return (
        f"Values stop being finite at {found.key}, made by {found.module}: of {what.elements} elements "
        f"{what.nan} are NaN and {what.inf} infinite; {given}."
    )


def _change_texts(changes: Sequence[Change]) -> Iterator[str]:
    """Where each curve changes, the earliest step first, a sentence for each of the first few."""
    for curve in dict.fromkeys(change.curve for change in changes):
        mine = [change for change in changes if change.curve == curve]
        told = "; ".join(map(_change_text, mine[:FEW]))
        more = f"; and {len(mine) - FEW} more" if len(mine) > FEW else ""
        yield f"{curve.capitalize()} error in execution order: {told}{more}."


def _change_text(change: Change) -> str:
    before = f" on top of {change.before:.2g}" if change.before else ""
    results = counted(change.length, "result")
    is_all = change.curve == "total" and change.kind == "step"
    how = f"{results} wrong from there on" if is_all else f"{results} long"
    return f"a {change.kind} at {change.key} to {change.value:.2g}{before}, {how}"
