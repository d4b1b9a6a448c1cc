"""`tcap divergence`: code of a port that a run on a CPU does not run."""

from __future__ import annotations

import click

from tensorcap_cli.options.archives import json_option
from tensorcap_cli.options.sections import Command
from tensorcap_cli.text.output import print_result


@click.command(
    "divergence", cls=Command, short_help="Where a port's code goes another way on the device than on a CPU."
)
@click.argument("sources", metavar="SOURCES...", nargs=-1, required=True, type=click.Path())
@click.option(
    "--reference-source",
    "reference_sources",
    metavar="FILE",
    multiple=True,
    type=click.Path(),
    help="Source of the reference, a file or a folder, to compare its code with; may be repeated.",
)
@json_option
def command(sources: tuple[str, ...], *, reference_sources: tuple[str, ...], as_json: bool) -> None:
    """Find the classes and the code that SOURCES of a port take on a CPU and not on the device.

    SOURCES are .py files, or folders of them. They are parsed, and neither imported nor run. Found are
    conditions on the device (`cpu_mode()`, `on_cpu`, …), on the number of tensor-parallel ranks and on flags
    of kernels, and imports of kernels; with each, the second test that it calls for: what agrees on a CPU
    says nothing of a class that a CPU never runs.

    With --reference-source, also what the reference's code has and the port's has not: values of the
    configuration, operations and casts of each class. Give the files of the port's base classes too, or what
    these do is missing.

    \b
        tcap divergence models/llama
        tcap divergence port.py base.py --reference-source modeling_llama.py

    Exit status: 0 none; 1 there is some; 2 wrong usage; 3 a source cannot be read.
    """
    from tensorcap import divergence
    from tensorcap_cli.text.divergence import print_divergence

    result = divergence(sources, reference_sources=reference_sources)
    print_result(result, print_divergence, as_json=as_json)
