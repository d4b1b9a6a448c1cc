"""`tcap compare`: two archives, or two tensors, and where they part."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import click

from tensorcap_cli.output import (
    DASH,
    class_text,
    number_text,
    one_line,
    plural,
    print_json,
    print_table,
    progress,
    split_key,
    terminal_width,
)

if TYPE_CHECKING:
    from tensorcap.comparison import Comparison, Side
    from tensorcap.metrics import Difference
    from tensorcap.pairing import Pair

_ROWS: Final = 20
_NARROW: Final = 130  # columns: below, a terminal gets fewer measures
_COLORS: Final = {"identical": "green", "match": "green", "unjudged": "yellow", "excluded": None}


@click.command("compare", short_help="Compare two archives and name where they part.")
@click.argument("reference", metavar="REF[::KEY]", type=click.Path())
@click.argument("target", metavar="TGT[::KEY]", type=click.Path())
@click.option(
    "--rtol", type=float, metavar="R", help="Allowed error relative to |reference|; alone, atol is 0."
)
@click.option("--atol", type=float, metavar="A", help="Allowed absolute error; alone, rtol is 0.")
@click.option("--only", metavar="GLOB", multiple=True, help="Compare only keys that match; may be repeated.")
@click.option("--exclude", metavar="GLOB", multiple=True, help="Leave out keys that match; may be repeated.")
@click.option(
    "--sort",
    type=click.Choice(["order", "error"]),
    default="order",
    help="Execution order of the reference, or the largest relative error first.",
)
@click.option("--all", "show_all", is_flag=True, help="A row for every pair, also for identical ones.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object instead of text, with all pairs.")
def command(
    reference: str,
    target: str,
    *,
    rtol: float | None,
    atol: float | None,
    only: tuple[str, ...],
    exclude: tuple[str, ...],
    sort: str,
    show_all: bool,
    as_json: bool,
) -> None:
    """Compare the tensors of TGT with those of REF, and name the first module where they part.

    Tensors are paired by equal keys. Without --rtol and --atol, pairs that are not identical are measured
    and stay unjudged. Every tensor of REF is required, but for what --exclude leaves out.

    \b
        tcap compare ref.h5 tgt.h5
        tcap compare ref.h5 tgt.h5 --rtol 1e-3 --atol 1e-5 --exclude '*/input*'
        tcap compare ref.h5::0/model.norm/output tgt.npz::norm

    Exit status: 0 all required tensors are identical or within the tolerance; 1 they are not, or one is
    missing, or nothing was compared, or a run is incomplete; 2 wrong usage; 3 an archive or a tensor cannot
    be read.
    """
    from tensorcap.comparison import compare, compare_records
    from tensorcap_formats.opening import open_archive

    (reference_path, reference_key), (target_path, target_key) = split_key(reference), split_key(target)
    named = reference_key or target_key
    if named and (only or exclude):
        raise click.UsageError("--only and --exclude do not go with ::KEY.")
    with (
        open_archive(reference_path) as trusted,
        open_archive(target_path) as tested,
        progress("comparing") as tell,
    ):
        if named:
            keys = reference_key or named, target_key or named
            comparison = compare_records(
                trusted, keys[0], tested, keys[1], rtol=rtol, atol=atol, progress=tell
            )
        else:
            comparison = compare(
                trusted, tested, rtol=rtol, atol=atol, only=only, exclude=exclude, progress=tell
            )
    if as_json:
        from tensorcap.reporting import comparison_json

        print_json(comparison_json(comparison))
    else:
        _print_report(comparison, sort, show_all)
    click.get_current_context().exit(comparison.exit_status)


def _print_report(comparison: Comparison, order: str, show_all: bool) -> None:
    for warning in comparison.warnings:
        click.secho(f"WARNING: {one_line(warning)}", fg="red", bold=True)
    click.echo(f"reference  {_side_text(comparison.reference)}")
    click.echo(f"target     {_side_text(comparison.target)}")
    if not comparison.is_of_archives:
        for pair in comparison.pairs:
            _print_named(pair)
    if comparison.tolerance:
        click.echo(f"tolerance  rtol {comparison.tolerance.rtol:g}, atol {comparison.tolerance.atol:g}")
    _print_divergence(comparison)
    _print_pairs(comparison, order, show_all)
    _print_values(comparison)
    _print_outcome(comparison)


def _side_text(side: Side) -> str:
    parts = [side.container, plural(side.records, "tensor")]
    if side.model or side.dtype:
        parts.append(f"{class_text(side.model)} {one_line(side.dtype)}".strip())
    if side.compute_dtype and side.compute_dtype != side.dtype:
        parts.append(f"computed in {one_line(side.compute_dtype)}")
    return f"{side.path}: {', '.join(parts)}"


def _print_named(pair: Pair) -> None:
    """The two records that were named: their keys may differ."""
    for name, record in (("reference", pair.reference), ("target", pair.target)):
        if record is not None:
            click.echo(f"{name:<9}  {record.key.text}: {record.dtype.name} {list(record.shape)}")
    if pair.difference is not None:
        _print_difference(pair.difference)


def _print_divergence(comparison: Comparison) -> None:
    found = comparison.divergence
    if found is None:
        return
    click.echo()
    click.secho(f"FIRST DIVERGENCE  {found.pair.key}  ({found.pair.status})", fg="red", bold=True)
    if found.is_run_input:
        click.secho(f"  {found.explanation}", bold=True)
    else:
        class_name = f" ({class_text(found.class_name)})" if found.class_name else ""
        click.secho(f"  module {found.module}{class_name}", bold=True)
        if found.pair.reference is not None and found.module != found.pair.reference.key.site:
            click.echo(f"  {found.explanation}")
    if found.pair.reason:
        click.echo(f"  {one_line(found.pair.reason)}")
    difference = found.pair.difference
    if difference is not None:
        _print_difference(difference)


def _print_difference(d: Difference) -> None:
    if d.max_abs_index is not None:
        click.echo(
            f"  max abs {number_text(d.max_abs)} at {list(d.max_abs_index)} "
            f"(reference {number_text(d.max_abs_reference, 7)}, target {number_text(d.max_abs_target, 7)})"
        )
    click.echo(
        f"  mean abs {number_text(d.mean_abs)}, relative Frobenius {number_text(d.relative_frobenius)}, "
        f"cosine {_cosine(d)}, PSNR {number_text(d.psnr_db)} dB, "
        f"{d.unequal} of {d.elements} unequal"
    )
    if d.mask_mismatches and d.mask_index is not None:
        sides = (d.nonfinite_reference, d.nonfinite_target)
        counts = ", ".join(
            f"{name} {sum((n.nan, n.posinf, n.neginf))} (NaN {n.nan}, +inf {n.posinf}, -inf {n.neginf})"
            for name, n in zip(("reference", "target"), sides, strict=True)
        )
        click.echo(f"  not finite alike in {d.mask_mismatches}, first at {list(d.mask_index)}: {counts}")


def _print_pairs(comparison: Comparison, order: str, show_all: bool) -> None:
    shown = [pair for pair in comparison.pairs if show_all or _is_worth_a_row(pair)]
    if order == "error":
        shown.sort(key=_weight, reverse=True)
    rows = shown if show_all else _most_telling(shown, _ROWS)
    if not rows:
        return
    width = terminal_width()
    is_narrow = width is not None and width < _NARROW
    headers = ["status", "max abs", "rel frob", "cosine"]
    headers += [] if is_narrow else ["mean abs", "PSNR"]
    headers += ["outside"] if comparison.tolerance else []
    headers += ["key"] if is_narrow else ["key", "where"]
    cells = [_cells(pair, headers) for pair in rows]
    key = headers.index("key")
    click.echo()
    print_table(
        headers,
        cells,
        left=(0, key, key + 1),
        flexible=key,
        colors=[_COLORS.get(pair.status, "red") for pair in rows],
    )
    if len(rows) < len(shown):
        click.echo(f"… {len(shown) - len(rows)} more that are not identical; all with --all")


def _is_worth_a_row(pair: Pair) -> bool:
    return pair.status not in ("identical", "excluded")


def _most_telling(pairs: Sequence[Pair], limit: int) -> list[Pair]:
    """At most `limit` pairs in their order: those that are not green first, then what fits."""
    if len(pairs) <= limit:
        return list(pairs)
    ranked = sorted(range(len(pairs)), key=lambda i: (pairs[i].is_green, not pairs[i].is_required, i))
    return [pairs[i] for i in sorted(ranked[:limit])]


def _weight(pair: Pair) -> tuple[bool, float]:
    """What is required and cannot be measured first, then by relative error."""
    difference = pair.difference
    if difference is None or difference.mask_mismatches:
        return pair.is_required and not pair.is_green, math.inf
    return False, difference.relative_frobenius or 0.0


def _cells(pair: Pair, headers: Sequence[str]) -> list[str]:
    d = pair.difference
    is_same = pair.status == "identical"  # by digests: every error is zero, and nothing was measured
    measures = {
        "max abs": number_text(d.max_abs, 3) if d else "0" if is_same else DASH,
        "mean abs": number_text(d.mean_abs, 3) if d else "0" if is_same else DASH,
        "rel frob": number_text(d.relative_frobenius, 3) if d else "0" if is_same else DASH,
        "cosine": _cosine(d) if d else DASH,
        "PSNR": number_text(d.psnr_db, 3) if d else "inf" if is_same else DASH,
        "outside": number_text(d.mismatches) if d else DASH,
        "status": pair.status,
        "key": pair.key,
        "where": _where(pair),
    }
    return [measures[header] for header in headers]


def _cosine(difference: Difference) -> str:
    """Six places; 1 only where no more than the rounding of the sums is missing."""
    cosine = difference.cosine
    if cosine is None:
        return DASH
    return "1" if cosine > 1 - 1e-12 else f"{min(cosine, 0.999999):.6g}"


def _where(pair: Pair) -> str:
    d = pair.difference
    if pair.reason or d is None:
        return one_line(pair.reason)
    if d.mask_mismatches and d.mask_index is not None:
        return f"not finite alike at {list(d.mask_index)}"
    return f"at {list(d.max_abs_index)}" if d.max_abs_index is not None else ""


def _print_values(comparison: Comparison) -> None:
    differences = comparison.value_differences
    if not differences:
        return
    click.echo()
    click.echo(f"note: {len(differences)} arguments or results that are no tensors differ:")
    for value in differences[:5]:
        click.echo(f"  {value.key}: {value.reference!r} in the reference, {value.target!r} in the target")
    if len(differences) > 5:
        click.echo(f"  … {len(differences) - 5} more")


def _print_outcome(comparison: Comparison) -> None:
    counts = ", ".join(f"{count} {status}" for status, count in comparison.counts.items())
    click.echo()
    click.echo(
        f"{comparison.compared} of {comparison.records} reference tensors compared: {counts or 'none'}"
    )
    if comparison.exit_status == 0:
        click.secho("No divergence.", fg="green", bold=True)
    elif not comparison.compared:
        click.secho("Nothing was compared.", fg="red", bold=True)
    elif comparison.tolerance is None and comparison.counts.get("unjudged"):
        click.secho("Unjudged: give --rtol or --atol to say what error is allowed.", fg="yellow", bold=True)
