"""`tcap verify`: a port verified in one command."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from tensorcap.wording import one_line
from tensorcap_cli.options.archives import map_option, rules_option
from tensorcap_cli.options.neuron_sources import neuron_sources_option
from tensorcap_cli.options.run import (
    OF_TARGET,
    both_sides,
    is_given,
    is_workload,
    make_recipe,
    make_target_recipe,
    port_options,
    run_options,
)
from tensorcap_cli.options.sections import Command
from tensorcap_cli.options.time_limit import time_limit_option
from tensorcap_cli.text.output import print_json_pieces, print_next
from tensorcap_cli.text.progress import StageLines

if TYPE_CHECKING:
    from tensorcap.port_verification import Runnable
    from tensorcap.workload import Port, Workload
    from tensorcap_formats.archive import Archive

_OF_FUNCTIONS: Final = ("dtype", "device", "num_hidden_layers", "perturb", "seed")


@click.command(
    "verify", cls=Command, short_help="Capture, match, compare, inject and diagnose, in one command."
)
@click.argument("reference", metavar="REF", type=click.Path())
@click.argument("target", metavar="[TGT]", type=click.Path(), required=False)
@click.option(
    "-o", "--output", metavar="DIR", type=click.Path(), required=True, help="The folder of reports."
)
@click.option("--force", is_flag=True, help="Replace a folder that an earlier `tcap verify` wrote.")
@map_option
@rules_option
@click.option("--layers", is_flag=True, help="A file for each tensor too.")
@run_options
@neuron_sources_option
@time_limit_option
@click.option("--json", "as_json", is_flag=True, help="Print verify.json instead of the summary.")
def command(
    reference: str,
    target: str | None,
    *,
    output: str,
    force: bool,
    mapping: str | None,
    rules: str | None,
    layers: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Verify that TGT computes what REF does, and write a folder that says where it does not.

    Both are FILE.py:FUNCTION, Hugging Face models, or archives; or REF alone is FILE.py:NAME of a
    tensorcap.Port. Both are captured and matched, and compared twice: as they run, and with each module of
    the target given the reference's tensors, so that it shows its own error alone. A target that is an
    archive cannot be run again, and is compared once. The reference's model is also run on the target's
    values (see `tcap replay`), unless the reference is an archive.

    max:ID, of a Hugging Face model, is MAX's own pipeline for it; without TGT the reference is the model of
    transformers in the same folder or of the same id.

    \b
        tcap verify models.py:reference models.py:port -o report/
        tcap verify max:google/gemma-3-1b-it --prompt Hi -o report/
        tcap verify meta-llama/Llama-3.2-1B port.py:target --prompt Hi -o out/
        tcap verify ports.py:llama --dtype bfloat16 -o report/

    A target that is compiled from an exported graph (Core AI) is held against the reference's run of that
    graph: its operations are accused, with their lines, and nothing is injected.

    If the sides are of two frameworks (a torch model, and its port to MAX), the weights are compared first,
    through a mapping of their own. --timeout is for a target that has to be compiled; tcap max warm compiles
    it ahead, and --num-hidden-layers 1 is a first look.

    Of the run options --dtype, --device, --encoding, --devices, --perturb and --teacher-forced are for the
    target alone; the others are for both sides if these are Hugging Face models, --num-hidden-layers and
    --seed for functions too. Without TGT the reference's own run is repeated with them.

    Exit status: 0 `tcap compare` would give both comparisons a 0, and no module is accused; 1 not so; 2 wrong
    usage; 3 an archive or a tensor cannot be read.
    """
    from tensorcap.port_verification import verify
    from tensorcap.reports.next_step import after_verification
    from tensorcap.reports.verification_text import summary_lines
    from tensorcap.workload import load_port

    port = load_port(reference) if target is None else None
    if port is not None:
        ours, theirs = _of_port(port, options)
        mapping = mapping or _text(port.mapping)
        rules = rules or _text(port.rules)
    else:
        if target is None:
            reference, target = both_sides(reference)
        ours, theirs = _sides(reference, target, Path(output), options)
    verification = verify(
        ours,
        theirs,
        output,
        mapping=mapping,
        rules=rules,
        layers=layers,
        force=force,
        progress=StageLines(),
    )
    if as_json:
        print_json_pieces([(verification.path / "verify.json").read_text(encoding="utf-8")])
    else:
        for line in summary_lines(verification.summary):
            click.echo(line)
        click.echo(f"\n{one_line(str(verification.path))}: reports; look at report.html", err=True)
        print_next(after_verification(verification))
    click.get_current_context().exit(verification.exit_status)


def _of_port(port: Port, options: dict[str, Any]) -> tuple[Runnable, Runnable]:
    from tensorcap.port_verification import Runnable
    from tensorcap.session import make_side

    own = port_options(options)
    port.allow(own["dtype"], own["device"])
    common = {name: own[name] for name in ("num_hidden_layers", "seed")}

    def make_reference(_: Archive | None) -> tuple[Workload, Mapping[str, Any]]:
        return make_side(port, "reference", **common), {}

    def make_target(_: Archive | None) -> tuple[Workload, Mapping[str, Any]]:
        return make_side(port, "target", **own), {}

    return Runnable(make_reference), Runnable(make_target)


def _sides(reference: str, target: str | None, output: Path, options: dict[str, Any]) -> tuple[Any, Any]:
    """What each side is: a path of an archive, or how to make a workload."""
    from tensorcap.port_verification import Runnable

    changes = {name: value for name, value in options.items() if is_given(value)}
    if target is None and not changes:
        raise click.UsageError("Missing argument: expected TGT, or what to change of the reference's run.")

    if target is not None and is_workload(target):  # before the reference is run
        make_recipe(target, None, _for(target, options))[0].check()

    def make_reference(_: Archive | None) -> tuple[Workload, Mapping[str, Any]]:
        own = {name: value for name, value in options.items() if name not in OF_TARGET}
        recipe, inputs = make_recipe(reference, None, _for(reference, own))
        return recipe.build(inputs), {"workload": recipe.describe()}

    def make_target(before: Archive | None) -> tuple[Workload, Mapping[str, Any]]:
        assert before is not None
        run_options = options if target is None else _for(target, options)
        recipe, inputs = make_target_recipe(target, before, run_options)
        generates = recipe.kind == "huggingface" and _generates(before, recipe.options)
        if generates:
            recipe = recipe.changed(teacher_forced=str(before.path))
        workload = recipe.build(inputs)
        if generates and is_workload(reference):  # its archive is going to be in the folder
            recipe = recipe.changed(teacher_forced=str(output.absolute() / "reference.h5"))
        return workload, {"workload": recipe.describe()}

    ours = Runnable(make_reference) if is_workload(reference) else reference
    theirs = Runnable(make_target) if target is None or is_workload(target) else target
    return ours, theirs


def _generates(reference: Archive, options: Mapping[str, Any]) -> bool:
    """Whether a run has to follow the reference's tokens."""
    before = reference.info.workload.options
    return not options.get("teacher_forced") and bool(
        options.get("max_new_tokens") or before.get("max_new_tokens")
    )


def _for(path: str, options: dict[str, Any]) -> dict[str, Any]:
    """The options that a workload takes: a function of the user's makes its own inputs."""
    from tensorcap.session import Recipe

    if Recipe.named(path, {}).runs_archived_inputs:
        return options
    return {name: value for name, value in options.items() if name in _OF_FUNCTIONS}


def _text(path: Any) -> str | None:
    return None if path is None else str(path)
