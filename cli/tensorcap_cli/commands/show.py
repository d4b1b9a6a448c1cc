"""`tcap show`: what an archive says of its run, or one tensor with its statistics and values."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import click

from tensorcap.wording import one_line
from tensorcap_cli.options.archives import json_option
from tensorcap_cli.options.sections import Command
from tensorcap_cli.text.archive import headline, record_json, skipped_line
from tensorcap_cli.text.asset import show_asset
from tensorcap_cli.text.histogram import value_line
from tensorcap_cli.text.op import place_lines
from tensorcap_cli.text.output import DASH, number_text, print_json, size_text, split_key
from tensorcap_cli.text.ranks import RankTexts

if TYPE_CHECKING:
    from tensorcap.runs import ValueHistogram
    from tensorcap_formats.archive import Archive
    from tensorcap_formats.records import Record
    from tensorcap_formats.run_info import PointInfo

_LINES: Final = (
    "framework",
    "model",
    "workload",
    "dtype",
    "compute_dtype",
    "device",
    "seed",
    "inputs",
    "steps",
    "command",
    "environment",
    "packages",
    "python",
    "platform",
    "started",
    "finished",
    "error",
    "notes",
)


class _Request(NamedTuple):
    """How to show a tensor.

    Attributes:
        part: The slice of it, or None.
        npy: A file to write, or None.
        force: Whether that may replace one.
        as_json: JSON instead of text.
        digits: Significant digits of values that are printed; None for the usual count.
    """

    part: str | None
    npy: str | None
    force: bool
    as_json: bool
    digits: int | None = None


@click.command("show", cls=Command, short_help="Show a run, or one tensor: statistics, values, a slice.")
@click.argument("archive", metavar="ARCHIVE[::KEY]", type=click.Path())
@click.argument("key", required=False)
@click.option("--slice", "index", metavar="SLICE", help="Show only this part, e.g. '[0, :, 5:8]' or '0,...'.")
@click.option(
    "--npy", metavar="FILE", type=click.Path(), help="Write the tensor, or the part, to a .npy file."
)
@click.option("--force", is_flag=True, help="With --npy, replace a file that is there.")
@click.option(
    "--significant-digits",
    "--precision",
    "digits",
    type=click.IntRange(1, 17),
    metavar="N",
    help="Of each value that is printed; 6 by default.",
)
@json_option
def command(
    archive: str,
    key: str | None,
    *,
    index: str | None,
    npy: str | None,
    force: bool,
    digits: int | None,
    as_json: bool,
) -> None:
    """Show the run that ARCHIVE holds, or the tensor KEY in it: statistics, first and last values.

    A key may leave out the step or the slot if only one tensor fits. Of an op it may be a view that is not
    stored, or `…/input.ARGUMENT`, what the op was given; the op's place in the code is told. A tensor of
    any size is shown without reading it all; statistics that a file lacks are computed, which reads it. If
    not all values are printed, a slice, or a tensor of up to 4,194,304 elements, has a histogram.

    \b
        tcap show ref.h5
        tcap show ref.h5 model.layers.0.mlp --slice '[0, :, 5:8]'
        tcap show ref.h5::0/model.norm/output --npy norm.npy
        tcap show model.aimodel

    Values that numpy has no type for (bfloat16, float8, float4) are written as float32. A slice of a tensor
    with two values a byte counts bytes.

    Exit status: 0 shown, 1 FILE could not be written, 2 wrong usage or no such tensor, 3 ARCHIVE cannot be
    read.
    """
    from tensorcap_formats.foreign import is_asset
    from tensorcap_formats.open import open_archive

    path, named_key = split_key(archive)
    key = key or named_key
    request = _Request(index, npy, force, as_json, digits)
    if key is None and (index is not None or npy is not None):
        raise click.UsageError("--slice and --npy need a KEY.")
    if key is None and is_asset(path):
        show_asset(path, as_json=as_json)
        return
    with open_archive(path) as opened:
        if key is None:
            _show_run(opened, as_json)
        else:
            from tensorcap.runs import find_tensor

            holder = find_tensor(opened, key)
            _show_tensor(opened, holder, holder.get(key) if holder is opened else holder.records[0], request)


def _show_run(archive: Archive, as_json: bool) -> None:
    if as_json:
        names = ("container", "is_foreign", "is_complete", "is_ordered", "skipped", "run", "values")
        members = {name: getattr(archive, name) for name in names}
        print_json({"path": str(archive.path), "records": len(archive), **members})
        return
    click.echo(headline(archive))
    for name, text in _describe_run(archive):
        click.echo(f"  {name:<14}{text}")
    if archive.info.points:
        _show_points(archive.info.points)
    if archive.values:
        click.echo(f"  {'values':<14}{len(archive.values)} arguments and results that are no tensors")
    if archive.skipped:
        click.echo(f"  {'skipped':<14}{skipped_line(archive)}")


def _describe_run(archive: Archive) -> list[tuple[str, str]]:
    """The parts of the run's metadata that fit a line each, as they are."""
    run, info = archive.run, archive.info
    lines = [(name, _join(run[name])) for name in _LINES if run.get(name) not in (None, "", {}, [])]
    if "function" in info.settings:  # of a compiled program: they say what was run, and on what
        lines.insert(1, ("settings", _join({k: _by_input(v) for k, v in info.settings.items()})))
    if info.duration_seconds is not None:
        lines.append(("duration", f"{info.duration_seconds:.3g} s"))
    if info.injected is not None:
        from tensorcap.comparison import injection_text

        lines.append(("injected", injection_text(info.injected)))
    lines += RankTexts(archive).run_lines()
    if info.modules:
        lines.append(("modules", f"{len(info.modules)} in the tree"))
    return lines


def _by_input(value: Any) -> Any:
    """A setting; of one for each input, a text: `x:zeros,mask:ones`."""
    return ",".join(f"{name}:{how}" for name, how in value.items()) if isinstance(value, Mapping) else value


def _join(value: Any, limit: int = 300) -> str:
    """Names and values of the metadata in one line; of nested ones the names only."""
    if isinstance(value, Mapping):
        value = [
            f"{name}={item}" if isinstance(item, str | int | float) else str(name)
            for name, item in value.items()
            if item is not None
        ]
    text = " ".join(map(str, value)) if isinstance(value, list) else str(value)
    text = one_line(text)
    return text if len(text) <= limit else f"{text[:limit]}…"


def _show_points(points: Sequence[PointInfo]) -> None:
    counts = Counter(one_line(point.status or "unknown") for point in points)
    click.echo(f"  {'points':<14}{', '.join(f'{count} {status}' for status, count in counts.items())}")
    for point in points:
        if point.status == "not-capturable":
            text = f"{point.site}: not capturable: {point.reason or 'no reason kept'}"
            click.echo(f"  {'':<14}{one_line(text)}")


def _show_tensor(archive: Archive, holder: Archive, record: Record, request: _Request) -> None:
    """Show a tensor as asked; a view has a holder of its own."""
    from tensorcap.runs import parse_window, read_window

    index = request.part
    window = parse_window(index, record.shape) if index is not None else None
    if request.npy is not None:
        _write(holder, record, request.npy, window, request.force)
        return
    if request.as_json:
        values = read_window(holder, record, window).tolist() if window is not None else None
        facts = archive.values.get(f"{record.key.where}/op")
        print_json({**_as_json(holder, record, index, values), **({"op": facts} if facts else {})})
        return
    _print_tensor(archive, holder, record, request, window)


def _write(archive: Archive, record: Record, path: str, window: Any, force: bool) -> None:
    from tensorcap.runs import write_npy

    written = write_npy(archive, record, path, window=window, replace=force)
    note = "" if written.name == record.dtype.name else f", widened from {record.dtype.name}"
    click.echo(f"{path}: {record.key.text} as {written.name}{note}", err=True)


def _as_json(archive: Archive, record: Record, index: str | None, values: Any) -> dict[str, Any]:
    from tensorcap_formats.json_values import json_value

    described = record_json(archive, record, archive.statistics(record), RankTexts(archive))
    members = {"path": str(archive.path), **described}
    return members if index is None else {**members, "slice": index, "values": json_value(values)}


def _histogram(holder: Archive, record: Record, window: Any) -> ValueHistogram | None:
    """Of what is shown, unless all its values are printed, or it is too large to be read whole."""
    from tensorcap.runs import PRINTED_WHOLE, ValueHistogram, read_window

    if window is None:
        return ValueHistogram.of(holder, record) if record.size > PRINTED_WHOLE else None
    values = read_window(holder, record, window)
    return ValueHistogram.of_values(values) if values.size > PRINTED_WHOLE else None


def _print_tensor(archive: Archive, holder: Archive, record: Record, request: _Request, window: Any) -> None:
    from tensorcap.runs import DIGITS, array_summary, read_window, summary

    index, digits = request.part, request.digits or DIGITS
    part = array_summary(read_window(holder, record, window), digits) if window is not None else None
    place = f"number {record.order} in execution order" if archive.is_ordered else "execution order unknown"
    click.echo(record.key.text)
    click.echo(f"  {record.dtype.name} {list(record.shape)}, {size_text(record.nbytes)}, {place}")
    if record.dtype.packed > 1 and record.shape:
        shape = [*record.shape[:-1], record.shape[-1] * record.dtype.packed]
        click.echo(f"  {record.dtype.packed} values in an element: {shape} values")
    for line in (*place_lines(archive, record), *RankTexts(archive).lines(record)):
        click.echo(f"  {line}")
    statistics = holder.statistics(record)
    names = ("minimum", "maximum", "mean", "l2", "nan", "posinf", "neginf", "zeros")
    click.echo("  " + ", ".join(f"{name} {number_text(getattr(statistics, name), 7)}" for name in names))
    click.echo(f"  digest {record.digest or DASH}")
    if remark := archive.remark(record):
        click.echo(f"  {one_line(remark)}")
    histogram = _histogram(holder, record, window)
    if histogram is not None:
        click.echo(f"  {value_line(histogram)}")
    if part is not None:
        click.echo(f"{index}:\n{part}")
    elif record.stored:
        click.echo(summary(holder, record, digits))
    else:
        click.echo("  only its statistics were kept")
