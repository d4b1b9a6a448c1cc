"""One pair as text: why it is what it is, how large the error is and where it lies, logits, routing."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Final

import click

from tensorcap.wording import counted, one_line
from tensorcap_cli.text.histogram import error_line
from tensorcap_cli.text.output import cosine_text, number_text, percent_text, print_heading, upper_text

if TYPE_CHECKING:
    from tensorcap.comparison import Comparison, Examination, Pair
    from tensorcap.metrics import Difference, Location, LogitDifference, RoutingDifference

_FEW: Final = 5
_EVEN: Final = 2.0  # times what an index would hold if all held the same: below, none stands out


def print_details(pair: Pair, examination: Examination) -> None:
    """Print all that is known of a pair, indented."""
    print_origin(pair)
    if pair.reason:
        click.echo(f"  {one_line(pair.reason)}")
    for finding in pair.findings:
        if finding.status != "within-rounding" or pair.status == "within-rounding":
            click.echo(f"  {one_line(finding.text)}")
    if pair.difference is not None:
        _print_difference(pair.difference)
    location = examination.locations.get(pair.key)
    if location is not None:
        print_location(location, difference=pair.difference)


def print_origin(pair: Pair, indent: str = "  ") -> None:
    """Print what of the target a mapping compares, if the key or the layout differs."""
    origin = pair.origin
    if origin is None or (origin.target == (pair.key,) and not origin.steps):
        return
    keys = " + ".join(origin.target[:_FEW])
    more = f" and {len(origin.target) - _FEW} more" if len(origin.target) > _FEW else ""
    steps = f" after {', '.join(origin.steps)}" if origin.steps else ""
    reason = origin.reason.removeprefix(f"{origin.evidence}: ")
    why = f": {reason}" if reason else ""
    click.echo(f"{indent}{one_line(f'target {keys}{more}{steps} (by {origin.evidence}{why})')}")


def _print_difference(d: Difference) -> None:
    if d.max_abs_index is not None:
        click.echo(
            f"  max abs {number_text(d.max_abs)} at {list(d.max_abs_index)} "
            f"(reference {number_text(d.max_abs_reference, 7)}, target {number_text(d.max_abs_target, 7)})"
        )
    if d.max_rel_index is not None:
        click.echo(f"  max rel {number_text(d.max_rel)} at {list(d.max_rel_index)}")
    if d.mismatch_index not in (None, d.max_abs_index):
        click.echo(
            f"  within the tolerance there; the first element outside it is at {list(d.mismatch_index)}"
        )
    click.echo(
        f"  mean abs {number_text(d.mean_abs)}, relative Frobenius {number_text(d.relative_frobenius)}, "
        f"cosine {cosine_text(d.cosine)}, PSNR {number_text(d.psnr_db)} dB, "
        f"{d.unequal} of {d.elements} unequal"
    )
    if d.mask_mismatches and d.mask_index is not None:
        sides = (d.nonfinite_reference, d.nonfinite_target)
        counts = ", ".join(
            f"{name} {sum((n.nan, n.posinf, n.neginf))} (NaN {n.nan}, +inf {n.posinf}, -inf {n.neginf})"
            for name, n in zip(("reference", "target"), sides, strict=True)
        )
        click.echo(f"  not finite alike in {d.mask_mismatches}, first at {list(d.mask_index)}: {counts}")
    elif d.unequal:
        rtol, atol = upper_text(d.needed_rtol), upper_text(d.needed_atol)
        click.echo(f"  would pass with rtol {rtol} alone, or with atol {atol} alone")


def print_location(location: Location, indent: str = "  ", *, difference: Difference | None = None) -> None:
    """Print which indices of each axis hold the most of the error, and how large errors are."""
    errors = "" if difference is None else error_line(difference)
    if errors:
        click.echo(f"{indent}{errors}")
    parts = []
    looked_at = [axis for axis in location.axes if axis.size > 1 and axis.top]
    for axis in looked_at:
        if axis.top[0].share * axis.size < _EVEN * axis.step:
            continue  # which says nothing
        named = ", ".join(
            f"[{share.index}{'' if axis.step == 1 else ':'}] {percent_text(share.share)}"
            for share in axis.top[:3]
        )
        parts.append(f"axis {axis.axis} of {axis.size}: {named}")
    if looked_at:
        parts = parts or ["even over all axes"]
        what = "where the squared error lies" if location.of == "squared error" else "where masks differ"
        click.echo(f"{indent}{what}: {'; '.join(parts)}")


def print_extras(comparison: Comparison, examination: Examination) -> None:
    """Print the pairs that are logits or choices of experts."""
    from tensorcap.metrics import are_logits

    is_named = not comparison.is_of_archives
    keys = {p.key for p in comparison.pairs if p.reference and (is_named or are_logits(p.reference.key))}
    for key, logits in _first({key: d for key, d in examination.logits.items() if key in keys}):
        print_heading(f"LOGITS  {key}")
        _print_logits(logits)
    for key, routing in _first(examination.routing):
        print_heading(f"ROUTING  {key}")
        _print_routing(routing)


def _first(results: Mapping[str, Any]) -> Iterable[tuple[str, Any]]:
    """Those of unlike contents: the output of a head is that of the model too."""
    distinct = {value: (key, value) for key, value in results.items()}
    return list(distinct.values())[:_FEW]


def _print_logits(d: LogitDifference) -> None:
    at = f" at {list(d.kl_max_row)}" if d.kl_max_row else ""
    click.echo(
        f"  KL {number_text(d.kl_mean)} nats mean, {number_text(d.kl_max)} worst{at}; "
        f"JS {number_text(d.js_mean)} mean, {number_text(d.js_max)} worst"
    )
    click.echo(
        f"  top-1 {percent_text(d.top1)}, top-5 {percent_text(d.top5)}, top-10 {percent_text(d.top10)} agree "
        f"in {counted(d.rows - d.undefined_rows, 'row')} of {d.vocabulary}; rank of the reference's token "
        f"{number_text(d.rank_mean)} mean, {number_text(d.rank_max)} worst"
    )
    if d.flips:
        first = (
            f", the first that is none at {list(d.first_flip_row)}" if d.first_flip_row is not None else ""
        )
        click.echo(
            f"  {counted(d.flips, 'flip')} of the first choice, {counted(d.ties, 'tie')} among them{first}; "
            f"largest margin {number_text(d.flip_margin)}"
        )
    if d.undefined_rows:
        click.echo(f"  {counted(d.undefined_rows, 'row')} with NaN, +inf or nothing but -inf left out")


def _print_routing(d: RoutingDifference) -> None:
    first = f"; first other set at {list(d.first_unequal)}" if d.first_unequal is not None else ""
    click.echo(
        f"  {percent_text(d.share)} of {counted(d.rows, 'row')} chose the same set, mean overlap "
        f"{percent_text(d.mean_overlap)}, least {percent_text(d.least_overlap)}{first}"
    )
