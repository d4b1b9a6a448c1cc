"""`tcap max`: what is of Modular MAX alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from tensorcap_cli.options.archives import json_option
from tensorcap_cli.options.run import make_recipe, pipeline_options, port_options
from tensorcap_cli.options.sections import Command
from tensorcap_cli.options.time_limit import time_limit_option
from tensorcap_cli.text.output import print_json

if TYPE_CHECKING:
    from tensorcap.workload import Workload


@click.group("max", short_help="Compile models of Modular MAX ahead.")
def command() -> None:
    """What is of Modular MAX alone; models of it are captured by `tcap capture max`.

    \b
        tcap max warm port.py:target

    Exit status: 0 done; else that of the command.
    """


@command.command("warm", cls=Command, short_help="Compile what verify, inject and bisect will need.")
@click.argument("model", metavar="MODEL")
@pipeline_options
@time_limit_option
@json_option
def warm(model: str, *, as_json: bool, **options: Any) -> None:
    """Compile what verify, inject and bisect of MODEL will need, so that they start in seconds.

    MODEL is FILE.py:FUNCTION, which returns tensorcap.Workload; or FILE.py:NAME of a tensorcap.Port, whose
    target is compiled; or a folder or an id of a Hugging Face model, for which MAX has a pipeline. Two graphs
    are compiled: one that returns every tensor and takes any in the place of its own, and the model as it is.
    MAX keeps both, for other weights of the same shapes too. Options as for the command that follows: another
    dtype, or count of layers, is another graph. tcap capture max takes the same ones, unless it is of some
    modules only.

    \b
        tcap max warm port.py:target
        tcap max warm examples/max_decoder.py:llama --num-hidden-layers 1 --timeout 3600
        tcap max warm google/gemma-3-1b-it --encoding bfloat16 --devices gpu

    While MAX compiles, a line every few seconds says for how long. Ctrl-C ends it; what it has compiled by
    then is kept.

    Exit status: 0 compiled; 1 the compiler failed, or took too long; 2 wrong usage.
    """
    from tensorcap.adapters import adapter_for

    workload = _workload(model, options)
    graphs = adapter_for(workload.model).compile_ahead(workload)
    if as_json:
        print_json(
            {"graphs": [{"text": g.text, "seconds": g.seconds, "is_cached": g.is_cached} for g in graphs]}
        )
        return
    for graph in graphs:
        how = "was in MAX's cache" if graph.is_cached else "compiled"
        click.echo(f"{graph.text}: {how}, {graph.seconds:.1f} s")


def _workload(path: str, options: dict[str, Any]) -> Workload:
    from tensorcap.session import INPUT_OPTIONS, make_side
    from tensorcap.workload import load_port

    port = load_port(path)
    if port is not None:
        own = port_options(options)
        port.allow(own["dtype"], None)
        return make_side(port, "target", **own)
    recipe, _ = make_recipe(path, None, options, framework="max")
    if recipe.runs_archived_inputs and recipe.options.keys().isdisjoint(INPUT_OPTIONS):
        recipe = recipe.changed(input_ids="0")  # the graph is for any count of tokens
    return recipe.build()
