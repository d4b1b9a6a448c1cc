"""A comparison as text: first what explains it, then where it starts, then the worst, then rows."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Final

import click

from tensorcap.wording import conjugated, counted, one_line
from tensorcap_cli.text.absent import print_absent
from tensorcap_cli.text.output import class_text, cut, number_text, print_heading
from tensorcap_cli.text.pair import print_details, print_extras, print_location, print_origin
from tensorcap_cli.text.preflight import print_brief_preflight
from tensorcap_cli.text.rows import UNTOLD, print_modules, print_pairs
from tensorcap_formats.keys import ROOT_SITE, Key

if TYPE_CHECKING:
    from tensorcap.comparison import Comparison, Examination, Pair
    from tensorcap.reports.folded_pairs import FoldedPairs
    from tensorcap.runs import ArchiveSummary

_WORST: Final = 3
_MOVED: Final = 4
_ROOT: Final = "the model"
_LONGEST: Final = 60  # characters of a value
_UNJUDGED: Final = "Unjudged: give --rtol or --atol to say what error is allowed."


def print_report(
    comparison: Comparison,
    examination: Examination,
    *,
    order: str,
    show_all: bool,
    by_module: bool,
    metrics: Sequence[str],
    statuses: Collection[str] = (),
) -> None:
    """Print all of a comparison that a person wants to know.

    Args:
        comparison: What it came to.
        examination: What was looked at besides.
        order: Of the rows: `order` of execution, or `error`.
        show_all: A row for every pair, also for identical ones.
        by_module: A table of the errors by class of module, too.
        metrics: Columns in place of the usual ones.
        statuses: Rows of these alone; of all that are worth one if there are none.
    """
    from tensorcap.comparison import BY_VALUES
    from tensorcap.reports.folded_pairs import fold_pairs

    for warning in comparison.warnings:
        if comparison.exit_status == 0 and warning.startswith(BY_VALUES):
            click.echo(f"note: {one_line(warning)}")  # how it is right, not what may be wrong
        else:
            click.secho(f"WARNING: {one_line(warning)}", fg="red", bold=True)
    click.echo(f"reference  {side_text(comparison.reference)}")
    click.echo(f"target     {side_text(comparison.target)}")
    if not comparison.is_of_archives:
        for pair in comparison.pairs:
            _print_named(pair, examination)
    if comparison.baseline:
        click.echo(f"baseline   {side_text(comparison.baseline)}")
    _print_mapping(comparison)
    _print_limits(comparison)
    if examination.preflight is not None:
        print_brief_preflight(examination.preflight, is_green=comparison.exit_status == 0)
    _print_divergence(comparison, examination)
    folded = fold_pairs(p for p in comparison.pairs if p.status in statuses or p.status not in UNTOLD)
    _print_worst(comparison, examination, folded)
    if by_module:
        print_modules(comparison, examination)
    printed = frozenset[str]() if show_all else print_absent(comparison, examination)
    print_pairs(comparison, examination, folded, order, show_all, metrics, printed, statuses)
    print_extras(comparison, examination)
    _print_values(comparison)
    _print_outcome(comparison, examination)


def _print_mapping(comparison: Comparison) -> None:
    """Print which mapping paired the tensors, if it was not by equal keys."""
    mapping = comparison.mapping
    if mapping is None:
        return
    evidence = ", ".join(f"{count} by {name}" for name, count in mapping.evidence.items())
    mapped = f"{mapping.reference.mapped} of {mapping.reference.records} reference tensors"
    click.echo(f"mapping    {mapping.path or 'computed'}: {mapped} ({evidence or 'none'})")
    if mapping.reference.explained:
        have = conjugated(mapping.reference.explained, "have")
        click.echo(f"           {mapping.reference.explained} {have} no counterpart, which is explained")
    _print_moved(comparison)
    for tokens in mapping.tokens:
        click.echo(f"           {one_line(tokens)}")
    if mapping.path == "" and not mapping.tokens:
        click.echo("           tcap align tells it all, and writes a map to edit")


def _print_moved(comparison: Comparison) -> None:
    """Print which modules have another path in the target: layers together, and without equal ends."""
    moved: dict[str, None] = {}
    for pair in comparison.pairs:
        sources = pair.origin.target if pair.origin and pair.reference else ()
        if len(sources) != 1 or pair.reference is None or pair.reference.key.is_bare:
            continue
        sites = pair.reference.key.site, Key.parse(sources[0]).site
        place, other = ([_ROOT, *(s.split(".") if s != ROOT_SITE else [])] for s in sites)
        while len(place) > 1 and len(other) > 1 and place[-1] == other[-1]:
            place, other = place[:-1], other[:-1]
        if place != other:
            texts = (
                ".".join("{i}" if p.isdigit() else p for p in path[1:] or path) for path in (place, other)
            )
            moved[" is ".join(texts)] = None
    if moved:
        more = f"; {len(moved) - _MOVED} more" if len(moved) > _MOVED else ""
        click.echo(f"           {one_line('in the target ' + '; '.join(list(moved)[:_MOVED]))}{more}")


def _print_limits(comparison: Comparison) -> None:
    """What judged: only what can have had a say."""
    if comparison.tolerance:
        click.echo(f"tolerance  rtol {comparison.tolerance.rtol:g}, atol {comparison.tolerance.atol:g}")
    if comparison.thresholds:
        click.echo(f"thresholds {comparison.thresholds}")
    if comparison.calibration:
        click.echo(
            f"calibrated {comparison.calibration.path or ''} on {comparison.calibration.runs} runs in "
            f"{comparison.calibration.precision}"
        )
    elif comparison.account and comparison.account.precision and not comparison.tolerance:
        click.echo(f"policy     of specs/policy.md, errors in {comparison.account.precision}")


def side_text(side: ArchiveSummary) -> str:
    """One archive in a line."""
    parts = [side.container, counted(side.records, "tensor")]
    if side.model or side.dtype:
        parts.append(f"{class_text(side.model)} {one_line(side.dtype)}".strip())
    if side.compute_dtype and side.compute_dtype != side.dtype:
        parts.append(f"computed in {one_line(side.compute_dtype)}")
    return f"{side.path}: {', '.join(parts)}"


def _print_named(pair: Pair, examination: Examination) -> None:
    """The two records that were named: their keys may differ."""
    for name, record in (("reference", pair.reference), ("target", pair.target)):
        if record is not None:
            click.echo(f"{name:<9}  {record.key.text}: {record.dtype.name} {list(record.shape)}")
    print_details(pair, examination)


def _print_divergence(comparison: Comparison, examination: Examination) -> None:
    divergence = comparison.divergence
    if divergence is None:
        return
    print_heading(f"FIRST DIVERGENCE  {divergence.pair.key}  ({divergence.pair.status})", fg="red")
    if divergence.is_run_input or divergence.is_growth:
        click.secho(f"  {divergence.explanation}", bold=True)
    else:
        class_name = f" ({class_text(divergence.class_name)})" if divergence.class_name else ""
        click.secho(f"  module {divergence.module}{class_name}", bold=True)
        source = examination.sources.get(divergence.pair.key, "")
        if source:
            click.echo(f"  {one_line(f'{_point(divergence.pair)} at {source}')}")
        elif (
            divergence.pair.reference is not None and divergence.module != divergence.pair.reference.key.site
        ):
            click.echo(f"  {divergence.explanation}")
        for exchange in examination.exchanged[:_WORST]:
            click.secho(f"  {one_line(exchange.text)}", bold=True)
        _print_arguments(comparison, divergence.module, divergence.pair)
        _print_first_within(comparison, divergence.module, divergence.pair)
    print_details(divergence.pair, examination)


def _point(pair: Pair) -> str:
    """The op, or the argument of it, that a record is of."""
    assert pair.reference is not None
    key = pair.reference.key
    point = key.site.partition(":")[2]
    return f"argument {key.slot.partition('.')[2]} of {point}" if key.slot.startswith("input.") else point


def _print_arguments(comparison: Comparison, module: str, pair: Pair) -> None:
    """Print which arguments of ops in the module differ, in the same call: one may be the mistake."""
    assert pair.reference is not None
    key = pair.reference.key
    start = f"{key.text.partition(key.site)[0]}{module}:"
    differences = [value for value in comparison.value_differences if value.key.startswith(start)]
    for value in differences[:_WORST]:
        place, _, name = value.key.rpartition("/op.")
        if not place:
            continue
        ours, theirs = (one_line(cut(repr(side), _LONGEST)) for side in (value.reference, value.target))
        op = "its" if place == key.where else f"{place.removeprefix(start)}:"
        click.secho(f"  {op} argument {name} is {ours} in the reference, {theirs} in the target", bold=True)


def _print_first_within(comparison: Comparison, module: str, first: Pair) -> None:
    """Print the first place within the code of a module that is not green, if it is before the pair."""
    assert first.reference is not None
    start = f"{first.reference.key.text.partition(first.reference.key.site)[0]}{module}:"
    for pair in comparison.pairs:
        if pair.key == first.key:
            return
        if pair.key.startswith(start) and pair.is_compared and pair.is_required and not pair.is_green:
            text = f": {pair.findings[0].text}" if pair.findings else ""
            click.echo(f"  within it first {pair.key} ({pair.status}){one_line(text)}")
            return


def _print_worst(comparison: Comparison, examination: Examination, folded: Sequence[FoldedPairs]) -> None:
    from tensorcap.comparison import worst

    if not comparison.is_of_archives:
        return
    first = comparison.divergence.pair.key if comparison.divergence else None
    rows = {row.pair.key: row for row in folded}
    pairs = [pair for pair in worst((row.pair for row in folded), _WORST + 1) if pair.key != first][:_WORST]
    if not pairs:
        return
    print_heading("WORST")
    for pair in pairs:
        d = pair.difference
        measures = ""
        if d is not None and d.max_abs is not None:
            error = number_text(d.relative_frobenius, 3)
            measures = f"  max abs {number_text(d.max_abs, 3)}, relative Frobenius {error}"
        others = rows[pair.key].places - 1
        also = f", and {counted(others, 'place')} like it" if others else ""
        click.echo(f"  {pair.key}  ({pair.status}{also}){measures}")
        print_origin(pair, "    ")
        for finding in pair.findings[:1]:
            click.echo(f"    {one_line(finding.text)}")
        location = examination.locations.get(pair.key)
        if location is not None:
            print_location(location, "    ", difference=d)


def _print_values(comparison: Comparison) -> None:
    differences = comparison.value_differences
    if not differences:
        return
    click.echo()
    count = len(differences)
    what = (
        "1 argument or result that is no tensor differs"
        if count == 1
        else f"{count} arguments or results that are no tensors differ"
    )
    click.echo(f"note: {what}:")
    for value in differences[:5]:
        within = ", within the tolerance" if value.is_within else ""
        sides = (value.reference, value.target)  # None: it was, or was not given at all
        texts = ("none" if side is None else one_line(cut(repr(side), _LONGEST)) for side in sides)
        click.echo(f"  {value.key}: {' in the reference, '.join(texts)} in the target{within}")
    if len(differences) > 5:
        click.echo(f"  … {len(differences) - 5} more")


def _print_outcome(comparison: Comparison, examination: Examination) -> None:
    counts = ", ".join(f"{count} {status}" for status, count in comparison.counts.items())
    for note in examination.notes:
        click.echo(f"note: {one_line(note)}")
    click.echo()
    account = comparison.account
    for sentence in account.sentences if account else ():
        click.echo(one_line(sentence))
    if account and account.blind:
        click.echo("What this run cannot see:")
        for spot in account.blind:
            click.echo(f"  {one_line(spot)}")
    click.echo(
        f"{comparison.compared} of {comparison.records} reference tensors compared: {counts or 'none'}"
    )
    verdict, color = _verdict(comparison)
    click.secho(verdict, fg=color, bold=True)
    if account and account.commands and comparison.counts.keys() & {"suspect", "unjudged"}:
        click.echo("What would prove more:")
        for command in account.commands:
            click.echo(f"  {one_line(command)}")


def _verdict(comparison: Comparison) -> tuple[str, str]:
    """The whole in one sentence, and its color."""
    counts, divergence = comparison.counts, comparison.divergence
    if comparison.exit_status == 0:
        proven = "No divergence." if not counts.get("within-rounding") else "Within rounding (not proven)."
        return proven, "green"
    if not comparison.compared:
        return "Nothing was compared.", "red"
    if comparison.exit_status == 3:
        return f"Not all could be read: {counted(counts['unreadable'], 'tensor')} could not.", "red"
    if divergence is not None and divergence.pair.status == "unjudged":
        return _UNJUDGED, "yellow"
    if divergence is not None:
        is_suspect = divergence.pair.status == "suspect"
        where = "with other inputs" if divergence.is_run_input else f"first in {divergence.module}"
        return f"{'Suspect' if is_suspect else 'Not the same'}, {where}.", "yellow" if is_suspect else "red"
    if comparison.absent:
        return _without_counterpart(comparison), "red"
    bad = next((pair for pair in comparison.pairs if pair.is_required and not pair.is_green), None)
    if bad is not None and bad.status == "unjudged":
        return _UNJUDGED, "yellow"
    if bad is not None and bad.status == "unexpected":
        return f"The target's run has more steps than the reference's, first {bad.key}.", "red"
    if bad is not None and bad.status == "suspect":
        return f"Suspect: {bad.key}.", "yellow"
    if bad is not None:
        return f"Not the same: {bad.key} is {bad.status}.", "red"
    if any(value.is_red for value in comparison.value_differences):
        return "Not the same: a number that a module returned differs.", "red"
    return "Not green: a run is incomplete.", "red"


def _without_counterpart(comparison: Comparison) -> str:
    """That all values agree which both sides have, and how many have no counterpart."""
    compared = [pair for pair in comparison.pairs if pair.is_compared and pair.is_required]
    lacking = f"no counterpart of {counted(len(comparison.absent), 'tensor')}."
    if any(not pair.is_green for pair in compared):
        return f"Not everything agrees, and the target has {lacking}"
    is_equal = all(pair.status == "identical" for pair in compared)
    agreement = "identical" if is_equal else "in agreement"
    return f"All that both have is {agreement}, but the target has {lacking}"
