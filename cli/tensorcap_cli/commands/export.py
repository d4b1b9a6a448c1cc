"""`tcap export`: an archive as the folder that another tool would have dumped."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

import click

from tensorcap.wording import counted
from tensorcap_cli.options.archives import exclude_option, json_option, map_option, only_option
from tensorcap_cli.options.sections import Command
from tensorcap_cli.text.graph_dump import graph_dump_lines
from tensorcap_cli.text.output import print_json, print_next, size_text
from tensorcap_cli.text.progress import byte_bar, spinner

if TYPE_CHECKING:
    from tensorcap_formats.records import Record


@click.command("export", cls=Command, short_help="Write an archive as a folder of MAX, torch or Neuron.")
@click.argument("source", metavar="ARCHIVE", type=click.Path())
@click.argument("folder", metavar="DIR", type=click.Path())
@click.option(
    "--format",
    "form",
    type=click.Choice(["max", "torch", "coreai", "neuron", "model-explorer"]),
    help="Files of MAX's prints; of torch hooks, with a folder a step and tensor_names.txt; the folder of "
    "Core AI's debugger, as if DIR ends in .aimodelintermediates; of NxDI's tensor replacement; or graphs "
    "for Model Explorer.",
)
@click.option(
    "--with",
    "target",
    metavar="ARCHIVE",
    type=click.Path(),
    help="For Model Explorer: a run to compare, for a second graph, errors and what belongs together.",
)
@only_option
@exclude_option
@map_option
@json_option
def command(
    source: str,
    folder: str,
    *,
    form: Literal["max", "torch", "coreai", "neuron", "model-explorer"] | None,
    target: str | None,
    only: tuple[str, ...],
    exclude: tuple[str, ...],
    mapping: str | None,
    as_json: bool,
) -> None:
    """Write the tensors of ARCHIVE into the new folder DIR, a file for each, for tools that read such dumps.

    `0/layers.0.mlp@1/input.x` is the file `model.layers.0.mlp(2)-input_x`: the label that a print hook gives
    it. `tcap import` reads it back. Values that are no tensors, statistics and the run's metadata have no
    place there.

    For Core AI's debugger, ARCHIVE is one of `tcap capture torch --coreai`, or of level export. DIR then has
    the value of every node of the graph, also of those that ARCHIVE keeps as views of others.

    `neuron` is the reference folder of NxD Inference's tensor replacement: results of modules as rows of
    channels, with --map under the port's names, of what the map names. What its configuration needs is
    printed. It was not run on a device.

    `model-explorer` writes graphs for Google's Model Explorer: ops, or results of modules, with their data
    flow; with a second run also node data (status, relative error, PSNR) and the mapping of its synchronised
    navigation, which is loaded on the page. The command that shows it is printed.

    \b
        tcap export ref.h5 dump --format max
        tcap export ref.h5 torch_dump --format torch --only '0/*/output*'
        tcap export ref.h5 ref.aimodelintermediates
        tcap export ref.h5 refs --format neuron --only '*.gate/output'
        tcap export ref.h5 graphs --format model-explorer --with tgt.h5

    Exit status: 0 written; 1 DIR is not empty, or could not be written; 2 wrong usage, a glob that matches
    nothing, or a tensor that the format has no place for; 3 ARCHIVE cannot be read.
    """
    from tensorcap.adapters import export
    from tensorcap_formats.foreign import INTERMEDIATES_SUFFIX
    from tensorcap_formats.open import open_archive

    if form is None and not folder.endswith(INTERMEDIATES_SUFFIX):
        raise click.UsageError(
            f"Missing option '--format', or a DIR that ends in {INTERMEDIATES_SUFFIX}: "
            "max, torch, coreai, neuron or model-explorer."
        )
    if form == "model-explorer":
        if only or exclude:
            raise click.UsageError("--only and --exclude are not for model-explorer, whose graphs are whole.")
        _export_explorer(source, folder, target, mapping, as_json=as_json)
        return
    if target is not None:
        raise click.UsageError("--with is for --format model-explorer.")
    modules = _modules(mapping, form)
    if form is None or form == "coreai":
        _export_graph(source, folder, only, exclude, as_json=as_json)
        return
    with open_archive(source) as opened, byte_bar("exporting") as bar:
        written = export(
            opened, folder, layout=form, only=only, exclude=exclude, modules=modules, progress=bar
        )
        values = len(opened.values)
    nbytes = sum(record.nbytes for record in written)
    if as_json:
        content = {"path": folder, "records": len(written), "bytes": nbytes, "values_left_out": values}
        print_json(content | ({"tf_map": _replaced(written, modules)} if form == "neuron" else {}))
        return
    click.echo(f"{folder}: {counted(len(written), 'tensor')}, {size_text(nbytes)}")
    if values:
        click.echo(f"note: {counted(values, 'value')} that are no tensors have no place there", err=True)
    if form == "neuron":
        tf_map = _replaced(written, modules)
        click.echo(
            f"TensorReplacementConfig(ref_dir={folder!r}, neuron_dir=…, tf_map={tf_map}, neuron_config=…)"
        )


def _export_explorer(
    source: str, folder: str, target: str | None, mapping: str | None, *, as_json: bool
) -> None:
    from tensorcap.reports.model_explorer import SYNC, export_model_explorer
    from tensorcap.reports.next_step import NextStep

    if mapping is not None and target is None:
        raise click.UsageError("--map says what belongs together, expected --with ARCHIVE.")
    with spinner("exporting"):
        files = export_model_explorer(source, folder, target=target, mapping=mapping)
    if as_json:
        members = {"files": list(files.files), "nodes": dict(files.nodes), "paired": files.paired}
        print_json({"path": folder, **members, "command": shlex.join(files.command)})
        return
    nodes = ", ".join(f"{counted(count, 'node')} in {name}" for name, count in files.nodes.items())
    click.echo(f"{folder}: {nodes}")
    if target is not None:
        click.echo(f"{counted(files.paired, 'place')} on both sides: load {SYNC} on the page to walk both")
    print_next(NextStep("to look at it", shlex.join(files.command)))


def _modules(mapping: str | None, form: str | None) -> dict[str, str] | None:
    """The port's site of each of the archive's, by a map file."""
    if mapping is None:
        return None
    if form != "neuron":
        raise click.UsageError("--map is for --format neuron, which names the port's modules.")
    from tensorcap.alignment import paired_modules, read_mapping

    return paired_modules(read_mapping(mapping))


def _replaced(records: Sequence[Record], modules: dict[str, str] | None) -> dict[int, list[str]]:
    """The modules of each step, counted from 1, as NxDI's `tf_map` has them."""
    replaced: dict[int, list[str]] = {}
    for record in records:
        site = record.key.site
        replaced.setdefault(record.key.step + 1, []).append(modules[site] if modules else site)
    return replaced


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
