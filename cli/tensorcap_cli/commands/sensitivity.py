"""`tcap sensitivity`: which layers of a target cost how much, and which have to stay as they were."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from tensorcap_cli.options.archives import json_option
from tensorcap_cli.options.run import is_archive, make_recipe, run_options
from tensorcap_cli.options.sections import Command
from tensorcap_cli.text.output import print_result
from tensorcap_cli.text.progress import Bar, spinner

if TYPE_CHECKING:
    from tensorcap.workload import Workload


@click.command(
    "sensitivity",
    cls=Command,
    short_help="Which layers cost how much of the output, and which have to stay in higher precision.",
)
@click.argument("reference_model", metavar="REFERENCE_MODEL")
@click.argument("target_model", metavar="TARGET_MODEL")
@click.option(
    "--by",
    type=click.Choice(["layer", "block", "class"]),
    default="layer",
    help="What is exchanged together; class: layers whose paths differ in numbers alone.",
)
@click.option("--metric", metavar="NAME", help="kl (by default), top1, or FILE.py:FUNCTION; see below.")
@click.option("--goal", metavar="NAME=VALUE", help="Choose the layers that stay, such as kl=0.01.")
@click.option("--state", metavar="FILE", type=click.Path(), help="Keeps runs, to go on after a break.")
@click.option(
    "--list",
    "form",
    type=click.Choice(["torchao", "onnxruntime", "tensorrt"]),
    help="Print only the layers that stay, as this quantiser takes them.",
)
@run_options
@json_option
def command(
    reference_model: str,
    target_model: str,
    *,
    by: str,
    metric: str | None,
    goal: str | None,
    state: str | None,
    form: str | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Measure what each quantised layer costs of the output, by runs in which it alone is exchanged.

    A layer is a module of the same path in both models that holds other tensors. Of each there are two
    numbers: the loss of the output if that layer alone is the target's, in the reference's model, and if it
    alone is kept in the reference's precision, in the target. Blocks are measured first, and layers within
    bad ones alone.

    \b
        tcap sensitivity model.py:reference model.py:int8
        tcap sensitivity model.py:reference model.py:int8 --goal kl=0.01
        tcap sensitivity model.py:reference model.py:int8 --goal kl=0.01 \\
            --list torchao

    Of two archives, captured with --params, layers are ranked by the error that each makes itself. How much
    of that reaches the output only runs tell.

    \b
        tcap sensitivity ref.h5 int8.h5

    With --goal the layers are chosen that have to stay in the reference's precision: top1=0.99 is a share of
    first choices that are at least the same. A function of --metric is given the reference's output and
    another one, as numpy arrays of float64, and returns a number; less is better.

    Exit status: 0 measured, the goal reached; 1 the goal is not reached with all layers kept; 2 wrong usage,
    a target that cannot be grafted, or a metric that fails; 3 a file cannot be read.
    """
    from tensorcap.sensitivities import archive_sensitivity, precision_list, sensitivity
    from tensorcap_cli.text.sensitivity import print_own_errors, print_sensitivity

    if form is not None and as_json:
        raise click.UsageError(
            "--list prints a line for a quantiser, expected no --json, which has all lists."
        )
    are_archives = [is_archive(path) for path in (reference_model, target_model)]
    if any(are_archives):
        if not all(are_archives) or any(value is not None for value in (metric, goal, state, form)):
            raise click.UsageError(
                "Archives are ranked without a run, expected two of them and no --metric, --goal, --state or "
                "--list."
            )
        with spinner("measuring own errors"):
            ranked = archive_sensitivity(reference_model, target_model)
        print_result(ranked, print_own_errors, as_json=as_json)
    reference, target = (_workload(model, options) for model in (reference_model, target_model))
    with spinner("measuring sensitivities") as bar:
        result = sensitivity(
            reference,
            target,
            by=by,  # type: ignore[arg-type]  # one of its choices
            metric=metric,
            goal=goal,
            state=state,
            progress=bar and _Counted(bar),
        )
    if form is None:
        print_result(result, print_sensitivity, as_json=as_json)
        return
    click.echo(precision_list(result.keep, form))
    raise SystemExit(result.exit_status)


def _workload(model: str, options: dict[str, Any]) -> Workload:
    recipe, inputs = make_recipe(model, None, dict(options))
    return recipe.build(inputs)


class _Counted:
    """Shows how often a model was run, and how, in one line."""

    def __init__(self, bar: Bar) -> None:
        self._bar = bar
        self._stage = ""

    def stage(self, text: str) -> None:
        """Keep what is being done."""
        self._stage = text
        self._bar.stage(text)

    def advance(self, done: int, total: int | None) -> None:
        """Show how often."""
        self._bar.stage(f"run {done}: {self._stage}")
