"""`tcap plan`: which modules of a port to capture on a device."""

from __future__ import annotations

import json

import click

from tensorcap_cli.options.archives import json_option, map_option, only_option
from tensorcap_cli.options.sections import Command
from tensorcap_cli.text.output import print_result


@click.command("plan", cls=Command, short_help="Plan what a Neuron device is to capture, before compiling.")
@click.argument("modules", metavar="MODULES", type=click.Path())
@map_option
@only_option
@click.option(
    "--points",
    metavar="FILE",
    type=click.Path(),
    help="Points to capture, a module path, key or glob in each line.",
)
@click.option(
    "--neuron-config",
    metavar="FILE",
    type=click.Path(),
    help="Settings of the device run, JSON: its kernels, its ranks, and the modules it names.",
)
@click.option(
    "-o", "--output", metavar="FILE", type=click.Path(), help="Write the configuration there, as JSON."
)
@json_option
def command(
    modules: str,
    *,
    mapping: str | None,
    only: tuple[str, ...],
    points: str | None,
    neuron_config: str | None,
    output: str | None,
    as_json: bool,
) -> None:
    """Plan the tensor capture of NxD Inference for the points of a comparison.

    MODULES is an archive of the port's run on a CPU, or a file of its module paths: one in each line, with
    `: CLASS` or without, or JSON, as `list_capturable_modules_in_application` gives it.

    Hooks do not fire in a compiled graph, so that all points are chosen before it is compiled. Of each is
    said under which module it can be had (`o_proj` for an attention, whose first field is a table of
    cosines), what it will hold (shards, zeros of shape [1] for what a kernel computes) and what cannot be
    had. Without points, all modules are taken that every rank has whole.

    Not run on a device: rules are read in NxDI's sources.

    \b
        tcap plan port.h5 --map map.toml --neuron-config neuron_config.json
        tcap plan modules.txt --only 'layers.*.mlp' -o capture.json

    Exit status: 0 every point can be captured; 1 one cannot, or there is none; 2 wrong usage; 3 a file cannot
    be read.
    """
    from tensorcap import plan
    from tensorcap.capture_plan import read_points
    from tensorcap_cli.text.plan import print_plan
    from tensorcap_formats.output_path import publish_text

    wanted = [*only, *(read_points(points) if points else ())]
    result = plan(modules, points=wanted, mapping=mapping, neuron_config=neuron_config)
    if output is not None:
        with publish_text(output, beginning='{"tensor_capture_config":') as file:
            file.write(json.dumps(result.config(), indent=2) + "\n")
    print_result(result, print_plan, as_json=as_json)
