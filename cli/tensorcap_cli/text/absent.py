"""Many tensors that one side lacks as a few lines: ops by class of module, others by the reason."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING, Final

import click

from tensorcap.wording import counted, one_line
from tensorcap_cli.text.output import class_text, print_heading

if TYPE_CHECKING:
    from tensorcap.comparison import Comparison, Examination, Pair

_FEW: Final = 3  # of one reason have a row each
_NAMES: Final = 6
_GROUPS: Final = 8


def is_absent_place(pair: Pair) -> bool:
    """Whether the target lacks a place within a module, of which there may be hundreds."""
    from tensorcap.comparison import ABSENT

    return pair.reference is not None and ":" in pair.reference.key.site and pair.status in ABSENT


def print_absent(comparison: Comparison, examination: Examination) -> frozenset[str]:
    """Print what one side lacks and no row is worth, in groups.

    Returns:
        The keys of the pairs that were printed.
    """
    from tensorcap.comparison import ABSENT

    ops: dict[str, list[Pair]] = {}
    reasons: dict[str, list[Pair]] = {}
    for pair in comparison.pairs:
        record = pair.reference or pair.target
        if record is None:
            continue
        if pair.status in ABSENT and pair.reason and not pair.is_optional:
            reasons.setdefault(f"{pair.status}: {pair.reason}", []).append(pair)
        elif pair.status in (*ABSENT, "missing-in-reference") and ":" in record.key.site:
            module = record.key.site.partition(":")[0]
            ops.setdefault(examination.classes.get(module, "") or module, []).append(pair)
    many = {reason: pairs for reason, pairs in reasons.items() if len(pairs) > _FEW}
    if many:
        print_heading("MISSING")
        for reason, pairs in many.items():
            click.echo(f"  {counted(len(pairs), 'tensor')}, {one_line(reason)}; the first is {pairs[0].key}")
    if ops:
        print_heading("PLACES WITHIN MODULES ON ONE SIDE ONLY")
        for name, pairs in list(ops.items())[:_GROUPS]:
            _print_ops(name, pairs)
        if len(ops) > _GROUPS:
            click.echo(f"  … {len(ops) - _GROUPS} more classes; all with --all")
        if any(pair.is_required for pairs in ops.values() for pair in pairs):
            click.echo("  What computes the same in other ops is compared without them: --exclude '*:*'")
    return frozenset(pair.key for groups in (many, ops) for pairs in groups.values() for pair in pairs)


def _print_ops(name: str, pairs: list[Pair]) -> None:
    """One class of modules: how many of which ops only one side has."""
    sites = {record.key.site.partition(":")[0]: None for p in pairs if (record := p.reference or p.target)}
    where = (
        f"{counted(len(sites), 'module')}, the first {next(iter(sites))}"
        if len(sites) > 1
        else next(iter(sites))
    )
    click.echo(f"  {class_text(name) or one_line(name)} ({where})")
    for side, records in (
        ("reference", [p.reference for p in pairs]),
        ("target", [p.target for p in pairs]),
    ):
        names = _counts(record.key.site.partition(":")[2] for record in records if record is not None)
        if names:
            click.echo(f"    only in the {side}: {names}")


def _counts(names: Iterable[str]) -> str:
    counts = Counter(names).most_common()
    some = ", ".join(f"{count} {name}" for name, count in counts[:_NAMES])
    return some + (f", … {len(counts) - _NAMES} more" if len(counts) > _NAMES else "")
