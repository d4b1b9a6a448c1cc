"""`tcap equivalence`: the eight stages of the Equivalence method, on the folder of an experiment."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final

import click

from tensorcap_cli.commands.equivalence_files import archives_command, localize_files
from tensorcap_cli.options.archives import json_option
from tensorcap_cli.options.run import tp_option
from tensorcap_cli.options.sections import Command, Group, with_options
from tensorcap_cli.text.output import print_json
from tensorcap_cli.text.progress import StageLines

if TYPE_CHECKING:
    from tensorcap.equivalence import Experiment

_folder_argument: Final = click.argument("folder", metavar="[DIR]", default=".", type=click.Path())
_again_option: Final = click.option("--again", is_flag=True, help="Run it even if it is done.")
_set_option: Final = click.option(
    "--set",
    "changes",
    metavar="TABLE.NAME=VALUE",
    multiple=True,
    help="Change a setting in equivalence.toml, as run.dtype=float16; may be repeated.",
)
tau_r_option: Final = click.option(
    "--tau-r", type=float, metavar="R", help="The same as --set limits.tau_r=R; 1.2 by default."
)
num_tokens_option: Final = click.option(
    "--num-tokens",
    type=click.IntRange(min=1),
    metavar="N",
    help="The same as --set run.num_tokens=N; 32 by default.",
)
_SHORTHANDS: Final = {"tau_r": "limits.tau_r", "num_tokens": "run.num_tokens"}  # options of settings
_PARAMETERS: Final = (  # of `init`: option, metavar, help
    (
        "--source-model-path",
        "MODEL",
        "The trusted model: a Hugging Face model by folder or id, or FILE.py:FUNCTION.",
    ),
    ("--target-modeling-file", "FILE", "The code of the port; or a Hugging Face model by folder or id."),
    (
        "--target-causal-class",
        "NAME",
        "What in that file makes the port: a function that returns tensorcap.Workload.",
    ),
    ("--target-inner-class", "NAME", "The class of the port's inner model, for the record."),
    ("--target-config-class", "NAME", "The class of the port's configuration, for the record."),
    ("--compiled-model-path", "FILE", "The port compiled for a device, if there is one."),
    ("--venv", "DIR", "The Python environment of the port's processes, if it is another one."),
    ("--vllm-neuron-dir", "DIR", "A folder that the port's code is imported from."),
)


class _StageGroup(Group):
    """Lists the stages in their order, apart from what is beside them."""

    sections: ClassVar[Mapping[str, Sequence[str]]] = {
        "Experiment": ("init", "status", "run"),
        "Stages": (
            "capture",
            "tree",
            "map",
            "class-divergence",
            "smoke",
            "component-tests",
            "components",
            "localize",
            "patch",
            "forced",
            "downstream",
        ),
        "Limits": ("calibrate",),
        "Without an experiment": ("archives",),
    }


@click.group("equivalence", cls=_StageGroup, short_help="Validate a port in the stages of Equivalence.")
def command() -> None:
    """Validate a port by the Equivalence method: its stages, on the folder of one experiment.

    \b
        tcap equivalence init exp --source-model-path llama/ \\
            --target-modeling-file port.py --target-causal-class target
        tcap equivalence run exp
        tcap equivalence status exp

    DIR is the folder, by default the working one. Its equivalence.toml names the source (the trusted model),
    the target (the port), how both run, and the limits of the gates. Each stage writes the method's own
    files, can be run alone, and is run again only if something that it depends on has changed.

    Exit status: 0 done, and no gate failed; else as the help of each command says.
    """


@command.command("init", cls=Command, short_help="Write equivalence.toml.")
@_folder_argument
@with_options(*(click.option(name, metavar=kind, help=text) for name, kind, text in _PARAMETERS))
@tp_option
@click.option(
    "--target-framework",
    type=click.Choice(["torch", "neuron"]),
    help="neuron for a port of parallel layers, as NxD Inference has them; torch by default.",
)
@_set_option
@json_option
def init_command(
    folder: str,
    *,
    tp: int,
    target_framework: str | None,
    changes: tuple[str, ...],
    as_json: bool,
    **parameters: str | None,
) -> None:
    """Write equivalence.toml into DIR, and ask for those of the method's parameters that are not given.

    Without a terminal nothing is asked: what is needed has to be given. Paths of files are kept relative to
    DIR.

    Exit status: 0 written; 1 something else is there; 2 wrong usage.
    """
    from tensorcap.equivalence import FILE, changed_settings, new_settings, write_settings

    if sys.stdin.isatty():
        for name, _, text in _PARAMETERS:
            member = name[2:].replace("-", "_")
            if parameters[member] is None:
                click.echo(text, err=True)
                parameters[member] = click.prompt(name[2:], default="", show_default=False, err=True)
    path = Path(folder)
    named = {name: value or "" for name, value in parameters.items()}
    framework = target_framework or ("neuron" if tp > 1 else "torch")
    run = {"tp": tp, "target_framework": framework}
    settings = changed_settings(new_settings(path, named, run), _changes(changes))
    path.mkdir(parents=True, exist_ok=True)
    write_settings(path / FILE, settings)
    if as_json:
        print_json({"path": str(path / FILE)})
    else:
        click.echo(f"{path / FILE}: written; next: tcap equivalence run {folder}")


@command.command("status", cls=Command, short_help="Show how far each stage is.")
@_folder_argument
@json_option
def status_command(folder: str, *, as_json: bool) -> None:
    """Show each stage of DIR in a table: whether it is done, what it came to, and what to do next.

    Exit status: 0 all gates so far are passed; 1 one failed; 2 wrong usage; 3 equivalence.toml cannot be
    read.
    """
    from tensorcap.equivalence import Experiment, states
    from tensorcap_cli.text.equivalence import print_states

    listed = states(Experiment.open(folder))
    if as_json:
        print_json({"stages": [state.to_json() for state in listed]})
    else:
        print_states(listed)
    click.get_current_context().exit(max((state.exit_status for state in listed), default=0))


@command.command("run", cls=Command, short_help="Run the stages until a gate fails.")
@_folder_argument
@_set_option
@json_option
def run_command(folder: str, *, changes: tuple[str, ...], as_json: bool) -> None:
    """Run stages 0 to 6 in DIR, one after the other, until a gate fails, and say what to do then.

    What is done already is not done again.

    Exit status: 0 all gates are passed; 1 one failed, or a model could not be run; 2 wrong usage; 3 an input
    cannot be read.
    """
    from tensorcap.equivalence import run_stages
    from tensorcap_cli.text.equivalence import print_state

    experiment = _changed(folder, changes, {})
    status, listed = 0, []
    for state in run_stages(experiment, progress=StageLines()):
        status = max(status, state.exit_status)
        listed.append(state)
        if not as_json:
            print_state(state)
    if as_json:
        print_json({"stages": [state.to_json() for state in listed]})
    click.get_current_context().exit(status)


def run_stage_command(
    name: str, folder: str, *, changes: Sequence[str], again: bool, as_json: bool, **settings: Any
) -> None:
    """Run a stage, print what came of it, and end with its exit status.

    Args:
        name: Of the stage.
        folder: Of the experiment.
        changes: Settings to change first, as `--set` takes them.
        again: Whether it is run even if it is done.
        as_json: Whether to print JSON.
        **settings: Values of options that are short for a setting, None if they are not given.
    """
    from tensorcap.equivalence import run_stage, stage_named
    from tensorcap_cli.text.equivalence import print_state

    experiment = _changed(folder, changes, settings)
    state = run_stage(experiment, stage_named(name), again=again, progress=StageLines())
    if as_json:
        print_json(state.to_json())
    else:
        print_state(state)
    click.get_current_context().exit(state.exit_status)


stage_options: Final = with_options(_folder_argument, _set_option, _again_option, json_option)


@command.command("tree", cls=Command, short_help="0: the trees of modules of both sides.")
@stage_options
def tree_command(folder: str, **options: Any) -> None:
    """Write the trees of modules of both sides: full, compressed, and as flat paths.

    Compressed, modules below one parent that are of one type and built alike are one entry with all names.

    Exit status: 0 written; 1 a model could not be built; 2 wrong usage; 3 an input cannot be read.
    """
    run_stage_command("tree", folder, **options)


@command.command("capture", cls=Command, short_help="0: a run of each side, which the rest is made of.")
@stage_options
def capture_command(folder: str, **options: Any) -> None:
    """Capture a run of the source in the wide precision, and one of the target in that under test.

    Exit status: 0 captured; 1 a model could not be built or run; 2 wrong usage; 3 an input cannot be read.
    """
    run_stage_command("capture", folder, **options)


@command.command("map", cls=Command, short_help="0: which modules belong together.")
@stage_options
def map_command(folder: str, **options: Any) -> None:
    """Align both sides, and write component_mapping.json, with variables and reasons.

    The file is yours to edit: an edited one is never written over, and the later stages go by it.

    Exit status: 0 written; 1 a model could not be run; 2 wrong usage; 3 an input cannot be read.
    """
    run_stage_command("map", folder, **options)


@command.command("class-divergence", cls=Command, short_help="0: code that only a device runs.")
@stage_options
def class_divergence_command(folder: str, **options: Any) -> None:
    """Find the classes and the code of the port that a CPU runs and the device does not, or several ranks.

    The report has no gate: what it lists calls for a second test, on the device.

    Exit status: 0 written; 1 a model could not be run; 2 wrong usage; 3 an input cannot be read.
    """
    run_stage_command("class-divergence", folder, **options)


@command.command("smoke", cls=Command, short_help="1: greedy tokens of both sides.")
@_folder_argument
@num_tokens_option
@_set_option
@_again_option
@json_option
def smoke_command(folder: str, **options: Any) -> None:
    """Let both sides generate, and hold their tokens and logits against each other: a sign of life, no proof.

    Prompts are texts of run.prompts or the method's own, if the source is a Hugging Face model with a
    tokenizer; else the token ids of the source's workload. Of a model that reads what follows a token, such
    as an encoder, the logits of the prompts themselves are compared.

    Exit status: 0 at least 30 % of tokens match (limits.token_match); 1 fewer do, logits are no numbers, or a
    model could not be run; 2 wrong usage; 3 an input cannot be read.
    """
    run_stage_command("smoke", folder, **options)


@command.command("component-tests", cls=Command, short_help="2: write a test of each component.")
@stage_options
def component_tests_command(folder: str, **options: Any) -> None:
    """Run the source on the arguments that the port's modules were given, and write a test of each component.

    The tests are files for pytest, the simplest components first, and yours to edit: an edited one is never
    written over.

    Exit status: 0 written; 1 a model could not be run; 2 wrong usage; 3 an input cannot be read.
    """
    run_stage_command("component-tests", folder, **options)


@command.command("components", cls=Command, short_help="2: R of each component.")
@tau_r_option
@stage_options
def components_command(folder: str, **options: Any) -> None:
    """Run the tests of all components, and write R of each into results/stage2.json.

    R is the port's distance from the source in the wide precision, over that of the source in the precision
    under test, both on the arguments that the port's module was given. It has to be below 1.2; below 1 it is
    reported, and no failure. Each component has a picture in results/plots, of quantiles and distributions.
    If the source cannot run in a wide precision, set run.reference_dtype to an empty text: its own arguments
    are then put off by the machine epsilon, for a baseline.

    Exit status: 0 all passed; 1 one failed, or a model could not be run; 2 wrong usage; 3 an input cannot be
    read.
    """
    run_stage_command("components", folder, **options)


@command.command("patch", cls=Command, short_help="4: patch the port, and show R before and after.")
@stage_options
def patch_command(folder: str, **options: Any) -> None:
    """Write the skeleton of a patch for the first fault; once it is filled in, test the components again.

    A patch is a file of yours in patches/, with functions apply_…, which are called before the port is built,
    in each of its processes. The port's own files stay as they are.

    Exit status: 0 all components pass with the patches; 1 not so, or nothing is filled in yet; 2 wrong usage;
    3 an input cannot be read.
    """
    run_stage_command("patch", folder, **options)


@command.command("localize", cls=Command, short_help="3: where faults begin, and their root causes.")
@_folder_argument
@click.option(
    "--from", "source", metavar="FILE", type=click.Path(), help="Read a stage 2 or 3 JSON; no experiment."
)
@click.option("--stage3", metavar="FILE", type=click.Path(), help="Write the faults, as JSON.")
@_set_option
@_again_option
@json_option
def localize_command(
    folder: str, *, source: str | None, stage3: str | None, as_json: bool, **options: Any
) -> None:
    """List the faults among the components of stage 2: the earliest step first, with root cause and hint.

    With --from such a file is read, of this or the original tool, and its faults are printed:

    \b
        tcap equivalence localize --from stage2.json --stage3 stage3.json

    Exit status: 0 no component failed; 1 one did; 2 wrong usage; 3 an input cannot be read.
    """
    if source is not None:
        localize_files(source, stage3, as_json=as_json)
    if stage3 is not None:
        raise click.UsageError("--stage3 is for --from FILE; an experiment has its own.")
    run_stage_command("localize", folder, as_json=as_json, **options)


def _changed(folder: str, changes: Sequence[str], settings: Mapping[str, Any]) -> Experiment:
    """Open an experiment after changing its settings."""
    from tensorcap.equivalence import Experiment

    named = {_SHORTHANDS[name]: value for name, value in settings.items() if value is not None}
    return Experiment.open(folder).changed({**_changes(changes), **named})


def _changes(texts: Sequence[str]) -> dict[str, Any]:
    return dict(_parsed(texts))


def _parsed(texts: Sequence[str]) -> Iterator[tuple[str, Any]]:
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals:
            raise click.UsageError(f"--set {text!r}: expected TABLE.NAME=VALUE, as run.dtype=float16.")
        try:
            yield name, json.loads(value)
        except (ValueError, RecursionError):
            yield name, value


@command.command("forced", cls=Command, short_help="5, 6: logits of models that are fed the same tokens.")
@_folder_argument
@num_tokens_option
@tau_r_option
@_set_option
@_again_option
@json_option
def forced_command(folder: str, **options: Any) -> None:
    """Feed the source's greedy tokens to the source, to its twin in the target's precision, to the target.

    All gates are decided, over all positions of all prompts: no logit is NaN or infinite; R p95 is below
    limits.tau_r; cosine p5 at least limits.theta_cosine; the first choice the same at more than limits.top1
    of the positions; and KL, once `tcap equivalence calibrate` has measured its limits. A failure says which
    stage to go back to. The target runs with the patches of the folder. specs/equivalence-knowledge.md says
    what the numbers mean.

    Exit status: 0 all gates are passed; 1 one failed, or a model could not be run; 2 wrong usage; 3 an input
    cannot be read.
    """
    run_stage_command("forced", folder, **options)


@command.command("downstream", cls=Command, short_help="7: scores of tasks, by lm-eval.")
@_folder_argument
@click.option(
    "--tolerance",
    type=float,
    metavar="LOSS",
    help="The same as --set limits.tolerance=LOSS; 0.02 by default.",
)
@_set_option
@_again_option
@json_option
def downstream_command(folder: str, **options: Any) -> None:
    """Run the tasks of DIR/bench_config.yaml on both sides, and hold the scores against each other.

    Tasks are lm-eval's, in YAML files of yours with data in local files: nothing is downloaded.

    \b
        benchmarks:
          lm_eval:
            accuracy: {tasks: [arithmetic], limit: 200, use_chat: false}
        task_path: tasks            # YAML files of tasks, and their data
        run_hf_baseline: true       # false: take the source's scores of before

    Needs lm-eval: pip install 'tensorcap[downstream]'.

    Exit status: 0 no score is worse by more than 2 points (limits.tolerance), or there is no baseline; 1 one
    is, logits are no numbers, or a task could not be run; 2 wrong usage; 3 an input cannot be read.
    """
    run_stage_command("downstream", folder, **options)


@command.command("calibrate", cls=Command, short_help="Set limits by ports that pass.")
@_folder_argument
@click.option(
    "--passing",
    "folders",
    metavar="DIR",
    type=click.Path(),
    multiple=True,
    required=True,
    help="An experiment of a port that is known to be good; at least two.",
)
@json_option
def calibrate_command(folder: str, *, folders: tuple[str, ...], as_json: bool) -> None:
    """Set limits.tau_r, limits.delta_kl and limits.delta_kl_max of DIR by ports that pass.

    tau_r is the 0.99 quantile of R of all components, at least 1.2; delta_kl the 0.95 quantile of KL of all
    positions, and delta_kl_max the 0.99 quantile of the largest KL of each prompt, both times 1.1. All else
    is constant. Ports that fail are left out; the port under test is refused. DIR/equiv_config.json says what
    the limits are of; KL is a gate from then on.

    Exit status: 0 set; 2 wrong usage, or too few ports pass; 3 an experiment cannot be read.
    """
    from tensorcap.equivalence import CONFIG, Experiment, calibrate

    limits = calibrate(folders, under_test=folder)
    experiment = Experiment.open(folder).changed(limits.settings)
    experiment.write_json(CONFIG, limits.to_json())
    if as_json:
        print_json({**limits.to_json(), "path": str(experiment.folder / CONFIG)})
        return
    for words in limits.words:
        click.echo(words)


command.add_command(archives_command)
