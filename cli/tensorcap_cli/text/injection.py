"""What came of an injection, as text or JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

import click

from tensorcap.wording import counted, some
from tensorcap_cli.text.output import print_json, print_table

if TYPE_CHECKING:
    from tensorcap.recording import Slot, Substitution
    from tensorcap.session import Capture

_FEW: Final = 8  # slots of a kind that are named


def print_injection(done: Capture, *, as_json: bool) -> int:
    """Print what was replaced, and what was not.

    Returns:
        The exit status: 1 if something that was asked for was not replaced.
    """
    summary, substitution = done.summary, done.substitution
    assert summary is not None
    assert substitution is not None
    if as_json:
        path = None if summary.path is None else str(summary.path)
        print_json({"path": path, "tensors": summary.tensors, "injected": substitution.describe()})
    elif summary.path is None:
        cells = [
            (slot.site, slot.slot, slot.status, str(slot.count), "; ".join(slot.casts) or slot.reason)
            for slot in substitution.slots
        ]
        print_table(("site", "slot", "status", "times", "how"), cells, left=(0, 1, 2, 4))
    click.echo("\n".join(_lines(done, substitution)), err=True)
    return 0 if summary.is_whole and _is_done(substitution) else 1


def _is_done(substitution: Substitution) -> bool:
    """Whether no tensor was met that was asked for and not replaced, what objects hold aside."""
    from tensorcap.recording import HELD

    return not any(
        slot.absent or (slot.status == "left" and slot.reason != HELD) for slot in substitution.slots
    )


def _lines(done: Capture, substitution: Substitution) -> Iterator[str]:
    summary = done.summary
    assert summary is not None
    yield f"{summary.path or 'dry run'}: {counted(summary.tensors, 'tensor')}"
    slots = substitution.slots
    injected = [slot for slot in slots if slot.status == "injected"]
    times = sum(slot.count for slot in injected)
    by = f", by a mapping ({substitution.map_path})" if substitution.map_path else ""
    yield (
        f"injected: {counted(times, 'tensor')} in {counted(len(injected), 'slot')} of "
        f"{counted(len({slot.site for slot in injected}), 'module')}{by}"
    )
    casts: Counter[str] = Counter()
    for slot in injected:
        casts.update(slot.casts)
    yield from (f"cast: {count} {cast}" for cast, count in casts.items())
    yield from _named("never called", [slot for slot in slots if slot.status == "never-called"])
    yield from _named("not in the archive", [slot for slot in slots if slot.absent])
    if explained := [slot for slot in slots if slot.explained]:
        names = some([f"{slot.site}/{slot.slot}" for slot in explained], _FEW)
        yield f"without a counterpart, which is explained: {names}"
    yield from _named("left as it is", [slot for slot in slots if slot.status == "left"])


def _named(what: str, slots: list[Slot]) -> Iterator[str]:
    if slots:
        names = [f"{slot.site}/{slot.slot}" for slot in slots]
        reasons = "; ".join(dict.fromkeys(slot.reason for slot in slots if slot.reason))
        yield f"{what}: {some(names, _FEW)}" + (f" ({reasons})" if reasons else "")
