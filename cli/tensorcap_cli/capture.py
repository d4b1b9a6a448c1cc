"""`tcap capture`: run a model and keep what happens in it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

import click

from tensorcap_cli.output import plural, print_json, print_table, size_text

if TYPE_CHECKING:
    from tensorcap.capturing import Capture
    from tensorcap.summary import Summary
    from tensorcap.workload import Recipe

_FEW: Final = 8  # as many names are printed, more are counted


@click.group("capture")
def command() -> None:
    """Run a model and keep the inputs and outputs of every module in an archive.

    \b
        tcap capture torch MODEL --prompt "Hello" -o ref.h5

    Exit status: see the help of each framework.
    """


@command.command("torch")
@click.argument("model", required=False)
@click.option("-o", "--output", type=click.Path(), help="The archive: .h5, .zarr or .safetensors.")
@click.option(
    "--like", type=click.Path(), help="Repeat the run of this archive, with the options given here."
)
@click.option("--dtype", help="Precision of weights and inputs, such as bfloat16; buffers stay unrounded.")
@click.option("--device", help="Where to run, such as cuda; by default the CPU.")
@click.option("--num-hidden-layers", type=click.IntRange(min=1), help="Keep the first layers only.")
@click.option("--config", "config", metavar="KEY=VALUE", multiple=True, help="Change the configuration.")
@click.option("--random-weights", type=int, metavar="SEED", help="Draw weights; needs only config.json.")
@click.option("--seed", type=int, help="Of the random generators before the run; 0 by default.")
@click.option("--prompt", help="Text for the model's own tokenizer.")
@click.option("--input-ids", metavar="1,2,3", help="Token ids; rows are separated by a semicolon.")
@click.option("--inputs", type=click.Path(), help="A file of tensors named as the arguments: .npz, .h5, …")
@click.option("--max-new-tokens", type=click.IntRange(min=1), help="Generate greedily, a step a token.")
@click.option(
    "--perturb", metavar="DTYPE", help="Change the inputs, or embedded tokens, by the epsilon of a dtype."
)
@click.option("--include", metavar="GLOB", multiple=True, help="Record only these sites or keys.")
@click.option("--exclude", metavar="GLOB", multiple=True, help="Do not record these sites or keys.")
@click.option("--no-inputs", is_flag=True, help="Record outputs only, and the inputs of the model itself.")
@click.option("--stats-only", is_flag=True, help="Keep statistics and hashes, no values.")
@click.option(
    "--dry-run", is_flag=True, help="Run, list what would be recorded with its size, write nothing."
)
@click.option("--trust-remote-code", is_flag=True, help="Run Python code that comes with the model.")
@click.option("--fsync", is_flag=True, help="Make each tensor durable against a power cut; slow.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object instead of text.")
def torch_command(
    model: str | None,
    *,
    output: str | None,
    like: str | None,
    include: tuple[str, ...],
    exclude: tuple[str, ...],
    no_inputs: bool,
    stats_only: bool,
    dry_run: bool,
    fsync: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Capture one run of MODEL: a Hugging Face model by folder or id, or FILE.py:FUNCTION.

    The function returns tensorcap.Workload(model, inputs). A glob without a slash is for sites (modules),
    any other for whole keys STEP/SITE/SLOT.

    \b
        tcap capture torch meta-llama/Llama-3.2-1B --prompt "The sky is" -o ref.h5
        tcap capture torch ./config-only --random-weights 0 --input-ids 1,2,3 -o ref.h5
        tcap capture torch bench.py:small --include '*.mlp' --no-inputs -o mlp.h5
        tcap capture torch --like ref.h5 --dtype bfloat16 -o tgt.h5

    Weights have the precision of the checkpoint unless --dtype says another; random ones are float32. An
    error or Ctrl-C keeps what was recorded until then as an incomplete archive, and never in the place of
    a complete one.

    Exit status: 0 captured; 1 the run failed, or something that was asked for could not be captured, or a
    call did not return; 2 wrong usage; 3 an input file cannot be read; 130 interrupted.
    """
    from tensorcap.capturing import capture_workload
    from tensorcap.workload import archived_inputs, parse_setting
    from tensorcap_formats.errors import UsageError
    from tensorcap_formats.opening import open_archive

    if output is None and not dry_run:
        raise UsageError("no output, expected -o ARCHIVE or --dry-run")
    if output is not None and dry_run:
        raise UsageError("--dry-run writes nothing, expected no -o")
    given = {
        name: value
        for name, value in options.items()
        if value is not None and value is not False and value != ()
    }
    if "config" in given:
        given["config"] = dict(map(parse_setting, given["config"]))
    scope: dict[str, Any] = {"include": list(include), "exclude": list(exclude), "inputs": not no_inputs}
    inputs = None
    if like is None:
        recipe = _recipe(model, given)
    else:
        with open_archive(like) as before:
            recipe = _recipe_like(before, model, given)
            scope = _scope_like(before, scope)
            if not {"prompt", "input_ids", "inputs"} & given.keys():
                inputs = archived_inputs(before)
    done = capture_workload(
        recipe.build(inputs),
        output,
        run={"workload": recipe.describe()},
        watch=_watch,
        stats_only=stats_only,
        fsync=fsync,
        **scope,
    )
    assert done.summary is not None
    if dry_run:
        _print_tally(done, as_json=as_json)
    elif as_json:
        print_json(_as_json(done.summary))
    _print_summary(done.summary)
    if done.summary.not_capturable or done.summary.unmatched or done.summary.unfinished:
        click.get_current_context().exit(1)


def _recipe(model: str | None, given: dict[str, Any]) -> Recipe:
    from tensorcap.workload import Recipe
    from tensorcap_formats.errors import UsageError

    if model is None:
        raise UsageError("no model, expected MODEL or --like ARCHIVE")
    return Recipe(model, {"seed": 0, **given})


def _recipe_like(before: Any, model: str | None, given: dict[str, Any]) -> Recipe:
    """The recipe of an archive, with changes; of the archive's inputs alone if a model is named."""
    from tensorcap.workload import Recipe

    if model is not None:
        return _recipe(model, given)
    recipe = Recipe.of(before)
    if "config" in given:
        given = {**given, "config": {**dict(recipe.options.get("config") or {}), **given["config"]}}
    return recipe.changed(**given)


def _scope_like(before: Any, scope: dict[str, Any]) -> dict[str, Any]:
    """The globs that the archive was captured with, where none are given."""
    kept = before.run.get("scope")
    if not isinstance(kept, dict):
        return scope
    merged = {name: scope[name] or kept.get(name, []) for name in ("include", "exclude")}
    return {**merged, "inputs": scope["inputs"] and kept.get("inputs", True)}


@contextmanager
def _watch(capture: Capture) -> Iterator[None]:
    """Say what runs; on a terminal, how far it is."""
    run = capture.run
    model = run["model"]
    file = f", {model['file']}" if model["file"] else ""
    click.echo(f"model: {model['class']}{file}", err=True)
    click.echo(f"runs in {run['dtype']} on {run['device']}", err=True)
    if not sys.stderr.isatty():
        yield
        return
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    with Live(
        get_renderable=lambda: Text(f"capturing: {capture.progress}"),
        console=Console(stderr=True),
        refresh_per_second=4,
        transient=True,
        redirect_stdout=False,
        redirect_stderr=False,
    ):
        yield


def _print_summary(summary: Summary) -> None:
    lines = [
        f"{summary.path or 'dry run'}: {plural(summary.tensors, 'tensor')}, {size_text(summary.tensor_bytes)}"
        + (f" ({size_text(summary.stored_bytes)} of distinct ones stored)" if summary.path else "")
        + f", {plural(summary.steps, 'step')}",
        f"modules: {len(summary.captured)} captured, {len(summary.never_called)} never called, "
        f"{len(summary.not_capturable)} not capturable, {len(summary.excluded)} excluded",
    ]
    if 0 < len(summary.never_called) <= _FEW:
        lines.append(f"never called: {', '.join(summary.never_called)}")
    reasons: dict[str, list[str]] = {}
    for place, reason in summary.not_capturable.items():
        reasons.setdefault(reason, []).append(place)
    for reason, places in reasons.items():
        more = f" and {len(places) - _FEW} more" if len(places) > _FEW else ""
        lines.append(f"not capturable, {reason}: {', '.join(places[:_FEW])}{more}")
    if summary.unfinished:
        counts = [f"{site} ({count})" for site, count in summary.unfinished.items()]
        more = f" and {len(counts) - _FEW} more" if len(counts) > _FEW else ""
        lines.append(f"calls that were not seen to return: {', '.join(counts[:_FEW])}{more}")
    lines += [f"nothing was captured of {glob!r}" for glob in summary.unmatched]
    click.echo("\n".join(lines), err=True)


def _print_tally(done: Capture, *, as_json: bool) -> None:
    records = done.tally.records
    if as_json:
        rows = [
            {"key": r.key.text, "dtype": r.dtype.name, "shape": list(r.shape), "bytes": r.nbytes}
            for r in records
        ]
        print_json({"records": rows, "bytes": done.tally.tensor_bytes})
        return
    cells = [
        (r.key.text, r.dtype.name, "x".join(map(str, r.shape)) or "()", size_text(r.nbytes)) for r in records
    ]
    print_table(("key", "dtype", "shape", "size"), cells, left=(0, 1, 2))
    click.echo(f"{plural(len(records), 'tensor')}, {size_text(done.tally.tensor_bytes)}")


def _as_json(summary: Summary) -> dict[str, Any]:
    return {
        "path": str(summary.path),
        "is_complete": summary.is_complete,
        "tensors": summary.tensors,
        "tensor_bytes": summary.tensor_bytes,
        "stored_bytes": summary.stored_bytes,
        "steps": summary.steps,
        "captured": list(summary.captured),
        "never_called": list(summary.never_called),
        "not_capturable": dict(summary.not_capturable),
        "unfinished": dict(summary.unfinished),
        "excluded": list(summary.excluded),
        "unmatched": list(summary.unmatched),
    }
