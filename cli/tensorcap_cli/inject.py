"""`tcap inject`: run a target on a reference's tensors."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import click

from tensorcap_cli.output import StageLines
from tensorcap_cli.time_limit import time_limit_option
from tensorcap_cli.workload_options import made_target, target_options


@click.command("inject")
@click.argument("reference", type=click.Path())
@click.option("--into", metavar="WORKLOAD", help="The target: FILE.py:FUNCTION, or a Hugging Face model.")
@click.option("-o", "--output", type=click.Path(), help="The archive: .h5, .zarr or .safetensors.")
@click.option("--inputs", metavar="GLOB", multiple=True, help="Replace these arguments; all by default.")
@click.option("--outputs", metavar="GLOB", multiple=True, help="Replace these results (graft).")
@click.option("--steps", metavar="0,1,5-9", help="Only in these calls of the model.")
@click.option("--calls", metavar="0,1,5-9", help="Only in these calls of a module in a step.")
@click.option(
    "--map", "mapping", type=click.Path(), help="A map file (see tcap align); none: equal keys only."
)
@click.option("--target", type=click.Path(), help="The target captured without injection, for the mapping.")
@click.option("--include", metavar="GLOB", multiple=True, help="Record only these sites or keys.")
@click.option("--exclude", metavar="GLOB", multiple=True, help="Do not record these sites or keys.")
@target_options
@time_limit_option
@click.option("--eager", is_flag=True, help="Run compiled code and fused layers as plain code.")
@click.option("--dry-run", is_flag=True, help="Run, list what would be replaced, write nothing.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object instead of text.")
def command(
    reference: str,
    *,
    into: str | None,
    output: str | None,
    like: str | None,
    input_file: str | None,
    mapping: str | None,
    target: str | None,
    dry_run: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Run a target with the tensors of REFERENCE in the place of its own.

    Each module is given what the reference's was given, so that its result shows its own error and no
    inherited one. What it would have been given is recorded before it is replaced: what goes wrong between
    modules shows there. Globs are for the target's names. The result is an archive that says what was
    replaced; compare it with the reference as any other.

    \b
        tcap inject ref.h5 --into port.py:target -o own.h5
        tcap compare ref.h5 own.h5

    Without --into the reference's own run is repeated, with what is changed of it. Results are replaced
    where a graft is wanted, and then no arguments unless --inputs names some:

    \b
        tcap inject ref.h5 --dtype bfloat16 -o own.h5
        tcap inject ref.h5 --into port.py:target --outputs '*layers.7' -o graft.h5

    Where the target has other names or layouts a mapping is used, backwards: --map, or a computed one. The
    target is run once more for it, without injection, unless --target has that run.

    Exit status: 0 all that was asked for was replaced wherever it was called; 1 something was not, or the
    run failed; 2 wrong usage, or a tensor that does not fit; 3 an input file cannot be read.
    """
    from tensorcap.rerun.injection import inject
    from tensorcap_cli.inject_text import print_injection
    from tensorcap_formats.errors import UsageError
    from tensorcap_formats.open import open_archive

    if (output is None) is not dry_run:
        raise UsageError("expected -o ARCHIVE or --dry-run, and not both")
    chosen: dict[str, Any] = {name: options.pop(name) or () for name in ("outputs", "steps", "calls")}
    chosen["inputs"] = options.pop("inputs") or None
    recording = {"only": options.pop("include"), **{n: options.pop(n) for n in ("exclude", "eager")}}
    with ExitStack() as files:
        trusted = files.enter_context(open_archive(reference))
        before = trusted if like is None else files.enter_context(open_archive(like))
        recipe, inputs = made_target(into, before, {**options, "inputs": input_file})
        done = inject(
            trusted,
            recipe.build(inputs),
            output,
            **chosen,
            mapping=mapping,
            target=target,
            run={"workload": recipe.describe()},
            progress=StageLines(),
            **recording,
        )
        status = print_injection(done, as_json=as_json)
    if status:
        click.get_current_context().exit(status)
