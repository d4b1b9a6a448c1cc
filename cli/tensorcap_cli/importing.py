"""`tcap import`: a folder that another tool dumped tensors into, as an archive."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from tensorcap_cli.output import one_line, plural, print_json, progress, size_text

if TYPE_CHECKING:
    from tensorcap_formats.archive import Archive
    from tensorcap_formats.foreign import RawSpec

_UNREAD = 3


@click.command("import", short_help="Make an archive of a folder that another tool dumped tensors into.")
@click.argument("source", metavar="DIR", type=click.Path())
@click.option(
    "-o", "--output", metavar="FILE", type=click.Path(), required=True, help="The archive: .h5, .zarr, …"
)
@click.option(
    "--raw",
    metavar="GLOB:DTYPE:SIZES",
    multiple=True,
    help="What files of raw numbers hold, as '*-output:float32:1,5,32'; may be repeated, the first counts.",
)
@click.option(
    "--by-time", is_flag=True, help="Take the times of files for the order, where nothing tells it."
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object instead of text.")
def command(source: str, output: str, *, raw: tuple[str, ...], by_time: bool, as_json: bool) -> None:
    """Make an archive of the tensors in DIR, under the keys that the names of its files mean.

    \b
        DIR/model.layers.layers.0.mlp-output.max  prints of MAX (BINARY_MAX_CHECKPOINT)
        DIR/0/model.layers.0.mlp-output.pt        hooks of torch: a folder a step, with tensor_names.txt
        DIR/layers.0.mlp.up_proj_output.max       a side of a layer verification, with layer_metadata.json

    The first two become `0/layers.0.mlp/output`: the name of the whole model goes, what an object for lists
    doubles is said once, and `LAYER(2)` is the second call, `LAYER@1`. The order of execution is that of the
    lists of names. A folder of .max files has none: --by-time takes the times of its files, which is a hint
    and no more. A label that is no layer's becomes a probe.

    All commands open such folders as they are, too: `tcap compare DIR OTHER`.

    \b
        tcap import dump -o tgt.h5
        tcap import torch_dump -o ref.h5 && tcap compare ref.h5 tgt.h5

    Exit status: 0 all of it is in FILE; 1 so it is, but labels were no layers', or FILE could not be written;
    2 wrong usage; 3 DIR, or a file in it, could not be read or is one of two with one key: FILE is written
    all the same, without that, and says that it is incomplete.
    """
    from tensorcap_formats.conversion import convert

    with _opened(source, raw, by_time) as opened:
        with progress("importing") as bar:
            path = convert(opened, output, progress=bar)
        problems = getattr(opened, "problems", {})
        probes = getattr(opened, "probes", ())
        notes = list(opened.info.notes)
        others = {name: what for name, what in opened.skipped.items() if name not in problems}
        if as_json:
            print_json(
                {
                    "path": str(path),
                    "records": len(opened),
                    "bytes": sum(record.nbytes for record in opened.records),
                    "is_ordered": opened.is_ordered,
                    "problems": problems,
                    "others": others,
                    "probes": probes,
                    "notes": notes,
                }
            )
        else:
            _print(opened, path, others)
        for name, reason in problems.items():
            click.echo(f"not imported: {one_line(name)}: {one_line(reason)}", err=True)
    click.get_current_context().exit(_UNREAD if problems else int(bool(probes)))


def _opened(source: str, raw: tuple[str, ...], by_time: bool) -> Archive:
    """Open the folder; other kinds of files, which need no telling, as all commands do."""
    from tensorcap_formats.foreign import is_dump, open_dump
    from tensorcap_formats.open import open_archive

    path = Path(source)
    if path.is_dir() and (raw or is_dump(path, [file.name for file in path.iterdir()])):
        return open_dump(path, raw=[_spec(text) for text in raw], by_time=by_time)
    if raw or by_time:
        raise click.UsageError(f"--raw and --by-time are about dump folders, which {source} is none of.")
    return open_archive(source)


def _spec(text: str) -> RawSpec:
    from tensorcap_formats.foreign import RawSpec

    found = RawSpec.parse(text)
    if found is None:
        raise click.UsageError(f"--raw {text}: expected GLOB:DTYPE:SIZES, as '*-output:float32:1,5,32'.")
    return found


def _print(opened: Archive, path: Path, others: dict[str, str]) -> None:
    nbytes = sum(record.nbytes for record in opened.records)
    order = "in execution order" if opened.is_ordered else "execution order unknown"
    click.echo(f"{path}: {plural(len(opened), 'tensor')}, {size_text(nbytes)}, {order}")
    for note in opened.info.notes:
        click.echo(f"note: {one_line(note)}", err=True)
    if others:
        some = ", ".join(f"{one_line(name)} ({what})" for name, what in list(others.items())[:3])
        more = f", … {len(others)} in all" if len(others) > 3 else ""
        click.echo(f"note: left out, as it is no tensor: {some}{more}", err=True)
