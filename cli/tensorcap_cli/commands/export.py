"""`tcap export`: an archive as the folder that another tool would have dumped."""

from __future__ import annotations

from typing import Literal

import click

from tensorcap.wording import counted
from tensorcap_cli.options.archives import exclude_option, json_option, only_option
from tensorcap_cli.options.sections import Command
from tensorcap_cli.text.graph_dump import graph_dump_lines
from tensorcap_cli.text.output import print_json, size_text
from tensorcap_cli.text.progress import byte_bar


@click.command("export", cls=Command, short_help="Write an archive as a dump folder of MAX or torch.")
@click.argument("source", metavar="ARCHIVE", type=click.Path())
@click.argument("folder", metavar="DIR", type=click.Path())
@click.option(
    "--format",
    "form",
    type=click.Choice(["max", "torch", "coreai"]),
    help="Files of MAX's prints; of torch hooks, with a folder a step and tensor_names.txt; or the folder of "
    "Core AI's debugger, as if DIR ends in .aimodelintermediates.",
)
@only_option
@exclude_option
@json_option
def command(
    source: str,
    folder: str,
    *,
    form: Literal["max", "torch", "coreai"] | None,
    only: tuple[str, ...],
    exclude: tuple[str, ...],
    as_json: bool,
) -> None:
    """Write the tensors of ARCHIVE into the new folder DIR, a file for each, for tools that read such dumps.

    `0/layers.0.mlp@1/input.x` is the file `model.layers.0.mlp(2)-input_x`: the label that a print hook gives
    it. `tcap import` reads it back. Values that are no tensors, statistics and the run's metadata have no
    place there.

    For Core AI's debugger, ARCHIVE is one of `tcap capture torch --coreai`, or of level export. DIR then has
    the value of every node of the graph, also of those that ARCHIVE keeps as views of others.

    \b
        tcap export ref.h5 dump --format max
        tcap export ref.h5 torch_dump --format torch --only '0/*/output*'
        tcap export ref.h5 ref.aimodelintermediates

    Exit status: 0 written; 1 DIR is not empty, or could not be written; 2 wrong usage, a glob that matches
    nothing, or a tensor that the format has no place for; 3 ARCHIVE cannot be read.
    """
    from tensorcap.adapters import export
    from tensorcap_formats.foreign import INTERMEDIATES_SUFFIX
    from tensorcap_formats.open import open_archive

    if form is None and not folder.endswith(INTERMEDIATES_SUFFIX):
        raise click.UsageError(
            f"Missing option '--format', or a DIR that ends in {INTERMEDIATES_SUFFIX}: max, torch or coreai."
        )
    if form is None or form == "coreai":
        _export_graph(source, folder, only, exclude, as_json=as_json)
        return
    with open_archive(source) as opened, byte_bar("exporting") as bar:
        written = export(opened, folder, layout=form, only=only, exclude=exclude, progress=bar)
        values = len(opened.values)
    nbytes = sum(record.nbytes for record in written)
    if as_json:
        print_json({"path": folder, "records": len(written), "bytes": nbytes, "values_left_out": values})
        return
    click.echo(f"{folder}: {counted(len(written), 'tensor')}, {size_text(nbytes)}")
    if values:
        click.echo(f"note: {counted(values, 'value')} that are no tensors have no place there", err=True)


def _export_graph(
    source: str, folder: str, only: tuple[str, ...], exclude: tuple[str, ...], *, as_json: bool
) -> None:
    from tensorcap.adapters import export_graph
    from tensorcap_formats.open import open_archive

    with open_archive(source) as opened, byte_bar("exporting") as bar:
        dump = export_graph(opened, folder, only=only, exclude=exclude, progress=bar)
    if as_json:
        members = {"values": dump.values, "bytes": dump.nbytes, "left_out": dict(dump.left_out)}
        print_json({"path": folder, **members})
        return
    first, *notes = graph_dump_lines(dump)
    click.echo(first)
    for note in notes:
        click.echo(note, err=True)
