"""`tcap convert`: the same tensors in another container, compressed or not."""

from __future__ import annotations

import click

from tensorcap.wording import counted, one_line
from tensorcap_cli.options.archives import exclude_option, json_option, only_option
from tensorcap_cli.options.sections import Command
from tensorcap_cli.text.archive import skipped_line
from tensorcap_cli.text.output import print_json, size_text
from tensorcap_cli.text.progress import byte_bar


@click.command("convert", cls=Command, short_help="Write an archive in another container, compressed or not.")
@click.argument("source", metavar="ARCHIVE", type=click.Path())
@click.argument("destination", metavar="OUTPUT", type=click.Path())
@click.option("--compress", is_flag=True, help="Compress: with zstd, an .npz file with deflate.")
@click.option("--codec", type=click.Choice(["zstd", "blosc2"]), help="Compress with this one; .h5 has both.")
@only_option
@exclude_option
@json_option
def command(
    source: str,
    destination: str,
    *,
    compress: bool,
    codec: str | None,
    only: tuple[str, ...],
    exclude: tuple[str, ...],
    as_json: bool,
) -> None:
    """Write the tensors of ARCHIVE to OUTPUT; its suffix is the container: .h5, .zarr, .safetensors or .npz.

    ARCHIVE may be a file from elsewhere. Bits, statistics, order and the run's metadata are kept, but for
    .npz, which holds no more than names and values. What is at OUTPUT is replaced when all is written.

    \b
        tcap convert ref.h5 ref.zarr
        tcap convert ref.h5 small.h5 --compress
        tcap convert ref.h5 mlp.npz --only '*.mlp'

    Exit status: 0 written, 1 OUTPUT could not be written, 2 wrong usage or a glob that matches nothing,
    3 ARCHIVE cannot be read.
    """
    from tensorcap_formats.conversion import convert
    from tensorcap_formats.open import open_archive

    if compress and codec is None:
        codec = "deflate" if destination.lower().endswith(".npz") else "zstd"
    with open_archive(source) as opened:
        chosen = opened.select(only, exclude=exclude)
        with byte_bar("converting") as bar:
            path = convert(
                opened,
                destination,
                compress=codec,
                only=only,
                exclude=exclude,
                progress=bar,
            )
        for name, remark in [(record.key.text, opened.remark(record)) for record in chosen]:
            if remark:
                click.echo(f"warning: {name}: {one_line(remark)}", err=True)
        if opened.skipped:
            click.echo(f"warning: {skipped_line(opened)}", err=True)
    nbytes = sum(record.nbytes for record in chosen)
    if as_json:
        print_json({"path": str(path), "records": len(chosen), "bytes": nbytes})
    else:
        click.echo(f"{path}: {counted(len(chosen), 'tensor')}, {size_text(nbytes)}")
