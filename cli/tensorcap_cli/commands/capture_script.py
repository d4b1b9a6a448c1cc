"""`tcap capture script`: run anybody's script, and keep what happens in the first model that it calls."""

from __future__ import annotations

import sys
import warnings
from contextlib import redirect_stdout
from typing import TYPE_CHECKING, Any

import click

from tensorcap_cli.options.recording import inner_option, recording_arguments, recording_options
from tensorcap_cli.options.sections import Command
from tensorcap_cli.text.capture import print_outcome
from tensorcap_cli.text.progress import StageLines
from tensorcap_cli.text.terminal import whole_stdout

if TYPE_CHECKING:
    from tensorcap.session import ScriptRun


@click.command("script", cls=Command, context_settings={"allow_interspersed_args": False})
@click.argument(
    "arguments", metavar="[--] SCRIPT.py|-m MODULE [ARGUMENTS]...", nargs=-1, type=click.UNPROCESSED
)
@click.option(
    "--root", metavar="GLOB", help="The class of the model to capture, if it is not the first; @N: the N-th."
)
@click.option(
    "--framework",
    type=click.Choice(["max", "torch"]),
    help="Capture only models of this framework; of any by default.",
)
@inner_option
@recording_options
def script_command(
    arguments: tuple[str, ...], *, root: str | None, framework: str | None, as_json: bool, **options: Any
) -> None:
    """Run a Python script unchanged, and capture the first model that it calls.

    Everything behind -- belongs to the script, as it would behind `python`.

    \b
        tcap capture script -o ref.h5 -- generate.py --model ./llama --prompt "The sky is"
        tcap capture script -o ref.h5 --only '*.mlp' -- -m bench.run --steps 2
        tcap capture script -o unet.h5 --root UNet2DConditionModel -- pipeline.py
        tcap capture script -o second.h5 --root LlamaForCausalLM@1 -- two_llamas.py
        tcap capture script -o tgt.h5 --framework max -- serve_once.py
        tcap capture script -o tgt.h5 -- "$(which max)" generate --model-path ./llama --devices cpu \\
            --prompt "Hello" --max-new-tokens 3

    The model is the outermost module with parameters that is called, or the larger one that it is a part
    of; its calls are the steps, those of its `forward` included. Other models that were called are listed at
    the end: --root chooses one of them, or a module within, by the class's name, qualified or not. Models in
    processes that the script starts are not seen. Of MAX, the model is the first module with weights that a
    graph is made of; runs of its compiled graph are the steps, and the script receives its own outputs only.

    Under torchrun each process writes its own archive, ref.rank0.h5 and so on, with what each tensor is a
    part of as far as DTensors say it; tcap merge puts them together:

    \b
        torchrun --nproc-per-node 2 -m tensorcap_cli capture script -o tgt.h5 \\
            -- serve.py --tp 2

    The archive is written when the script ends. If it ends by an error, by an exit status that is not 0,
    or by Ctrl-C, what was recorded until then is kept as an incomplete archive, and never in the place of
    a complete one.

    Exit status: that of the script if it is not 0. Else 0 captured; 1 nothing was, or not all that was
    asked for; 2 wrong usage, before the script runs or as soon as the model is known; 130 interrupted.
    """
    from tensorcap.session import ScriptRun
    from tensorcap.workload import Script
    from tensorcap_formats.errors import UsageError

    recording = recording_arguments(options, None, as_json=as_json)
    path = recording.pop("path")
    if recording.get("level") == "export":
        raise UsageError("--level export is for one call, expected module or op", hint="tcap capture torch")
    outcome, own = 0, sys.stdout

    def ended(run: ScriptRun) -> None:
        nonlocal outcome
        with redirect_stdout(sys.stdout if own.closed else own):  # the script may have closed it
            outcome = _print_end(run, as_json=as_json)

    script = Script.parse(arguments)
    with warnings.catch_warnings():
        warnings.showwarning = getattr(
            warnings, "_showwarning_orig", warnings.showwarning
        )  # as Python has it
        with redirect_stdout(whole_stdout()):  # what the script prints is its own affair
            done = ScriptRun(
                script, path, root=root, framework=framework, ended=ended, progress=StageLines(), **recording
            ).run()
    if isinstance(done.error, KeyboardInterrupt):
        raise done.error
    if done.trouble is not None and done.error is None:
        raise done.trouble
    click.get_current_context().exit(done.status or outcome)


def _print_end(run: ScriptRun, *, as_json: bool) -> int:
    """Print the outcome of a run, except an error that ends the command."""
    from tensorcap.session import calls_text
    from tensorcap_formats.errors import TensorcapError

    if isinstance(run.error, TensorcapError) and run.error.hint:
        click.echo(f"Hint: {run.error.hint}", err=True)
    cap, status = run.capture, 0
    if cap is not None and cap.summary is not None:
        status = print_outcome(cap, as_json=as_json)
        if run.error is not None:
            is_exit = isinstance(run.error, SystemExit)
            what = f"exit status {run.status}" if is_exit else type(run.error).__name__
            click.echo(f"incomplete: the script ended by {what}", err=True)
    elif run.error is not None:
        click.echo("nothing was captured before the script ended; no archive was written", err=True)
    if run.others and cap is not None:
        click.echo(f"also called, not captured: {calls_text(run.others)}; see --root", err=True)
    if run.trouble is not None and run.error is not None:
        click.echo(f"Error: {run.trouble}", err=True)
    return status
