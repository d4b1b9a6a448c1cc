"""`tcap import`: a folder that another tool dumped tensors into, as an archive."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from tensorcap.wording import counted, one_line, some
from tensorcap_cli.options.archives import json_option
from tensorcap_cli.options.sections import Command
from tensorcap_cli.text.output import print_json, size_text
from tensorcap_cli.text.progress import byte_bar

if TYPE_CHECKING:
    from tensorcap_formats.archive import Archive
    from tensorcap_formats.foreign.raw_file import RawSpec
    from tensorcap_formats.progress import Progress

_UNREAD = 3


@click.command(
    "import", cls=Command, short_help="Make an archive of a folder that another tool dumped tensors into."
)
@click.argument("source", metavar="DIR", type=click.Path())
@click.option(
    "-o", "--output", metavar="ARCHIVE", type=click.Path(), required=True, help="The archive: .h5, .zarr, …"
)
@click.option(
    "--raw",
    metavar="GLOB:DTYPE:SIZES",
    multiple=True,
    help="What files of raw numbers hold, as '*-output:float32:1,5,32'; may be repeated, the first counts.",
)
@click.option(
    "--by-time", is_flag=True, help="Take the times of files for the order, if nothing else says it."
)
@json_option
def command(source: str, output: str, *, raw: tuple[str, ...], by_time: bool, as_json: bool) -> None:
    """Make an archive of the tensors in DIR, under the keys that the names of its files mean.

    \b
        DIR/model.layers.layers.0.mlp-output.max  prints of MAX
        DIR/0/model.layers.0.mlp-output.pt        hooks of torch
        DIR/layers.0.mlp.up_proj_output.max       a layer verification

    MAX writes them with BINARY_MAX_CHECKPOINT; hooks of torch write a folder a step, with tensor_names.txt; a
    side of a layer verification has a layer_metadata.json.

    The first two become `0/layers.0.mlp/output`: the name of the whole model is dropped, `layers.layers` is
    written once, and `LAYER(2)` is the second call, `LAYER@1`. The order of execution is that of the
    lists of names. A folder of .max files has none: --by-time takes the times of its files, which is a hint
    and no more. A label that is no layer's becomes a probe.

    Folders of AWS Neuron are read by their documented layouts, which was not tried with files of a device:

    \b
        DIR/captured_tensors_cte_step_1_module_a_output.pt   NxDI, its HF runs
        DIR/saved_inputs_tkg_with_kv_cache_output_1.pt       inputs of NxDI
        DIR/context_encoding_model/_tp0_bk0/request0/rank0/  its snapshots
        DIR/dp0/decode_b1_0/model.norm/rank3.pt              vllm-neuron
        DIR/HASH/rank3/call0/tensor0.npy                     its snapshots

    Context encoding is prefill, token generation decode. If there are several ranks, each has an archive of
    its own, NAME.rankN.h5, for `tcap merge`. Zeros of shape [1] that stand for a module that was not
    captured are left out and reported.

    A log of what MAX printed, in the styles COMPACT or FULL, is read in the place of DIR, as far as it shows
    values.

    All commands open such folders and logs as they are, too: `tcap compare DIR OTHER`.

    \b
        tcap import dump -o tgt.h5
        tcap import torch_dump -o ref.h5 && tcap compare ref.h5 tgt.h5

    Exit status: 0 all of it is in ARCHIVE; 1 it is, but some labels were no layers', some points were not
    captured, or ARCHIVE could not be written; 2 wrong usage; 3 DIR, or a file in it, could not be read or is
    one of two with one key: ARCHIVE is written without it, and says that it is incomplete.
    """
    with _open_folder(source, raw, by_time) as opened:
        with byte_bar("importing") as bar:
            paths = _convert(opened, output, bar)
        path = ", ".join(map(str, paths))
        probes = getattr(opened, "probes", ())
        uncaptured = getattr(opened, "uncaptured", {})
        notes = list(opened.info.notes)
        others = {name: what for name, what in opened.skipped.items() if name not in opened.problems}
        if as_json:
            print_json(
                {
                    "path": path,
                    "records": len(opened),
                    "bytes": sum(record.nbytes for record in opened.records),
                    "is_ordered": opened.is_ordered,
                    "problems": opened.problems,
                    "others": others,
                    "probes": probes,
                    "uncaptured": uncaptured,
                    "notes": notes,
                }
            )
        else:
            _print(opened, path, others)
        for name, reason in opened.problems.items():
            click.echo(f"not imported: {one_line(name)}: {one_line(reason)}", err=True)
        if uncaptured:
            keys = some([one_line(key) for key in uncaptured])
            click.echo(f"not captured: {keys}: {one_line(next(iter(uncaptured.values())))}", err=True)
    click.get_current_context().exit(_UNREAD if opened.problems else int(bool(probes or uncaptured)))


def _convert(opened: Archive, output: str, progress: Progress | None) -> list[Path]:
    """Write the archive, or those of all ranks if there are several."""
    from tensorcap_formats.conversion import convert
    from tensorcap_formats.foreign import NeuronArchive
    from tensorcap_formats.ranks import rank_path

    if not isinstance(opened, NeuronArchive) or opened.ranks in ((), (0,)):
        return [convert(opened, output, progress=progress)]
    return [
        convert(opened.of_rank(rank), rank_path(Path(output), rank), progress=progress)
        for rank in opened.ranks
    ]


def _open_folder(source: str, raw: tuple[str, ...], by_time: bool) -> Archive:
    """Open the folder as the options say; other kinds of files as all commands do."""
    from tensorcap_formats.folder import list_folder
    from tensorcap_formats.foreign.dump_folder import is_dump, open_dump
    from tensorcap_formats.open import open_archive

    path = Path(source)
    if path.is_dir() and (raw or is_dump(path, list_folder(path))):
        return open_dump(path, raw=[_parse_spec(text) for text in raw], by_time=by_time)
    if raw or by_time:
        raise click.UsageError(f"--raw and --by-time are about dump folders, and {source} is none.")
    return open_archive(source)


def _parse_spec(text: str) -> RawSpec:
    from tensorcap_formats.foreign.raw_file import RawSpec

    spec = RawSpec.parse(text)
    if spec is None:
        raise click.UsageError(f"--raw {text}: expected GLOB:DTYPE:SIZES, as '*-output:float32:1,5,32'.")
    return spec


def _print(opened: Archive, path: str, others: dict[str, str]) -> None:
    nbytes = sum(record.nbytes for record in opened.records)
    order = "in execution order" if opened.is_ordered else "execution order unknown"
    click.echo(f"{path}: {counted(len(opened), 'tensor')}, {size_text(nbytes)}, {order}")
    for note in opened.info.notes:
        click.echo(f"note: {one_line(note)}", err=True)
    if others:
        some = ", ".join(f"{one_line(name)} ({what})" for name, what in list(others.items())[:3])
        more = f", … {len(others)} in all" if len(others) > 3 else ""
        click.echo(f"note: left out, as it is no tensor: {some}{more}", err=True)
