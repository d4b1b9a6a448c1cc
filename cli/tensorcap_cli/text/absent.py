"""Many tensors that one side lacks as a few lines: ops by class of module, others by the reason."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Final

import click

from tensorcap.runs import is_inner
from tensorcap.wording import counted, one_line, some
from tensorcap_cli.text.output import class_text, print_heading
from tensorcap_formats.keys import module_of

if TYPE_CHECKING:
    from tensorcap.comparison import Comparison, Examination, Pair

_NAMES: Final = 6
_GROUPS: Final = 8
_IT: Final = re.compile("^it(?= )")  # which a reason begins with that speaks of one tensor
_NUMBER: Final = re.compile(r"(?<=[.])(\d+|\{\d+\})(?=[.@/ ,]|$)")  # of a layer


def print_absent(comparison: Comparison, examination: Examination) -> frozenset[str]:
    """Print what one side lacks, in groups: what is missing, what is explained, and places within modules.

    Returns:
        The keys of the pairs that were printed.
    """
    absent = comparison.absent
    explained = [pair for pair in comparison.pairs if pair.status == "explained"]
    optional = [pair for pair in comparison.pairs if pair.is_absent and not pair.is_required]
    places = [pair for pair in comparison.pairs if pair.status == "missing-in-reference" and _is_place(pair)]
    if absent:
        _print_head("MISSING", f"{counted(len(absent), 'tensor')} of the reference, without a counterpart")
        _print_groups([pair for pair in absent if not _is_place(pair)], has_status=True)
        within = sum(map(_is_place, absent))
        if within:
            click.echo(f"  {counted(within, 'tensor')} of places within modules: see below, by class")
        click.echo(
            "  What may be missing is left out with --exclude GLOB; --require GLOB names what may not."
        )
    if explained:
        what = (
            f"{counted(len(explained), 'tensor')} of the reference, which the target lacks or has otherwise, "
            "with results that agree"
        )
        _print_head("EXPLAINED", what)
        _print_groups([pair for pair in explained if not _is_place(pair)], has_status=False)
    _print_places([*filter(_is_place, (*absent, *explained)), *places], examination)
    return frozenset(pair.key for pair in (*absent, *explained, *optional, *places))


def _is_place(pair: Pair) -> bool:
    """Whether it is of a place within a module's code."""
    from tensorcap.alignment import is_elsewhere

    record = pair.reference or pair.target
    return record is not None and is_inner(record.key) and not is_elsewhere(record.key)


def _print_head(title: str, text: str) -> None:
    click.echo()
    click.echo(f"{click.style(title, bold=True)}  {text}")


def _print_groups(pairs: Sequence[Pair], *, has_status: bool) -> None:
    """A line for all pairs of one status, and of one reason whatever the number of the layer."""
    groups: dict[tuple[str, str], list[Pair]] = {}
    for pair in pairs:
        status = str(pair.status) if has_status else ""
        groups.setdefault((status, _NUMBER.sub("{i}", one_line(pair.reason))), []).append(pair)
    for (status, reason), members in groups.items():
        if len(members) > 1:
            reason = _IT.sub("each", reason)
        what = ": ".join(filter(None, (status, reason)))
        keys = some([pair.key for pair in members])
        click.echo(f"  {counted(len(members), 'tensor')}, {what}: {keys}")


def _print_places(pairs: Sequence[Pair], examination: Examination) -> None:
    """Ops and other places within modules that one side lacks, by class of module."""
    groups: dict[str, list[Pair]] = {}
    for pair in pairs:
        record = pair.reference or pair.target
        assert record is not None
        module = module_of(record.key.site)
        groups.setdefault(examination.classes.get(module, "") or module, []).append(pair)
    if not groups:
        return
    print_heading("PLACES WITHIN MODULES ON ONE SIDE ONLY")
    for name, members in list(groups.items())[:_GROUPS]:
        _print_ops(name, members)
    if len(groups) > _GROUPS:
        click.echo(f"  … {len(groups) - _GROUPS} more classes; all with --all")
    if any(pair.is_required for pair in pairs):
        click.echo("  What computes the same in other ops is compared without them: --exclude '*:*'")


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
