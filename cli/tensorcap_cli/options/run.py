"""The options that say what is run: a model, its inputs, and what is changed of them."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from tensorcap_cli.options.sections import run_option, with_options
from tensorcap_cli.text.output import option_text

if TYPE_CHECKING:
    from tensorcap.session import Recipe
    from tensorcap.workload import StoredInput, Workload
    from tensorcap_formats.archive import Archive

_PREFIXES: Final = ("max:",)  # of paths of models, by framework
_MODELS: Final = (".onnx", ".pte")  # suffixes of files that are models
_ARCHIVES: Final = (".h5", ".hdf5", ".zarr", ".safetensors", ".npz", ".npy", ".pt")

layers_option: Final = run_option(
    "--num-hidden-layers",
    type=click.IntRange(min=1),
    metavar="N",
    help="Keep the first layers only; a function with that parameter is given it.",
)
config_option: Final = run_option(
    "--config", metavar="KEY=VALUE", multiple=True, help="Change the configuration."
)
tp_option: Final = click.option(
    "--tp",
    type=click.IntRange(min=1),
    default=1,
    metavar="N",
    help="Ranks that hold the model together, a process each; 1 by default, in this process.",
)
trust_option: Final = run_option(
    "--trust-remote-code", is_flag=True, help="Run Python code that comes with the model."
)
_SEED: Final = run_option(
    "--seed", type=int, metavar="SEED", help="Of the random generators before the run; 0 by default."
)
_OF_PIPELINES: Final = (
    run_option("--encoding", metavar="ENCODING", help="Of MAX's pipeline for a model, such as float32."),
    run_option("--devices", metavar="DEVICES", help="Of MAX's pipeline: cpu by default, or gpu, gpu:0,1."),
)
_PROMPT: Final = run_option("--prompt", metavar="TEXT", help="Text for the model's own tokenizer.")
_INPUT_IDS: Final = run_option(
    "--input-ids", metavar="1,2,3", help="Token ids; rows are separated by a semicolon."
)
_INPUTS: Final = run_option(
    "--inputs",
    metavar="FILE",
    type=click.Path(),
    help="A file of tensors named as the arguments: .npz, .h5, …",
)
_OF_FUNCTIONS: Final = (
    run_option(
        "--dtype",
        metavar="DTYPE",
        help="Precision of weights and inputs, such as bfloat16; buffers stay unrounded.",
    ),
    layers_option,
    _SEED,
)
_OF_PORTS: Final = ("dtype", "device", "seed", "num_hidden_layers")
OF_TARGET: Final = (  # the reference runs as it is
    "dtype",
    "device",
    "encoding",
    "devices",
    "perturb",
    "teacher_forced",
)
like_option: Final = run_option(
    "--like",
    metavar="ARCHIVE",
    type=click.Path(),
    help="Repeat the run of this archive, with the options given here.",
)
function_options: Final = with_options(*_OF_FUNCTIONS)  # how a function of the user's is run
pipeline_options: Final = with_options(  # how a function, or a pipeline of MAX, is run
    *_OF_FUNCTIONS, *_OF_PIPELINES, config_option, _PROMPT, _INPUT_IDS, _INPUTS, trust_option
)
run_options: Final = with_options(
    *_OF_FUNCTIONS,
    run_option("--device", metavar="DEVICE", help="Where to run, such as cuda; by default the CPU."),
    *_OF_PIPELINES,
    config_option,
    run_option("--random-weights", type=int, metavar="SEED", help="Draw weights; needs only config.json."),
    _PROMPT,
    _INPUT_IDS,
    _INPUTS,
    run_option(
        "--max-new-tokens",
        type=click.IntRange(min=1),
        metavar="N",
        help="Generate greedily, a step a token.",
    ),
    run_option(
        "--teacher-forced",
        type=click.Path(),
        metavar="ARCHIVE",
        help="Generate with the tokens of this archive, whatever the model would choose.",
    ),
    run_option(
        "--perturb",
        metavar="DTYPE",
        help="Change the inputs, or embedded tokens, by the epsilon of a dtype.",
    ),
    trust_option,
)
_INPUT_FILES: Final = run_option(
    "--inputs",
    metavar="[NAME=]FILE",
    multiple=True,
    help="zeros, ones, random or a file of tensors named as the inputs; with NAME= for that input alone.",
)
asset_options: Final = with_options(  # how an asset is run, and made
    _INPUT_FILES,
    run_option(
        "--precision", type=click.Choice(["fp32", "fp16"]), help="In which a torch module is converted."
    ),
    run_option(
        "--mode",
        type=click.Choice(["debug", "release"]),
        help="Of a conversion: release keeps no names, modules and lines of operations.",
    ),
    run_option("--function", metavar="NAME", help="The function of the asset that is run; by default main."),
    run_option(
        "--device-target", metavar="DEVICE", help="Where it runs; on Linux only host, which is this machine."
    ),
    run_option("--compute-units", metavar="UNITS", help="For macOS only; on Linux there is no choice."),
    layers_option,
    _SEED,
)
graph_file_options: Final = with_options(  # how a model in a file is run
    _INPUT_FILES,
    run_option(
        "--provider",
        "providers",
        metavar="NAME",
        multiple=True,
        help="Execution provider, such as CUDAExecutionProvider, in order of preference; by default the CPU.",
    ),
    run_option(
        "--optimization",
        type=click.Choice(["none", "basic", "extended", "all"]),
        help="Of the graph by the runtime; by default all.",
    ),
    layers_option,
    _SEED,
)
program_options: Final = with_options(  # how a program in a file is run
    _INPUT_FILES,
    run_option(
        "--etrecord",
        metavar="FILE",
        type=click.Path(),
        help="The ETRecord of the export; by default NAME.etrecord beside the program.",
    ),
    layers_option,
    _SEED,
)
reference_model_option: Final = click.option(
    "--reference-model",
    metavar="MODEL",
    help="The trusted model: FILE.py:FUNCTION, or a Hugging Face model; by default that of REF's own run.",
)
target_model_option: Final = click.option(
    "--target-model",
    metavar="MODEL",
    help="The target: FILE.py:FUNCTION, a Hugging Face model, NAME.onnx or NAME.pte.",
)


def is_workload(path: str) -> bool:
    """Whether a path is of a model: a function, a folder with a configuration, or an id that is no path."""
    if path.startswith(_PREFIXES) or path.endswith(_MODELS):
        return True
    file, _, function = path.rpartition(":")
    if file.endswith(".py") and function.isidentifier():
        return True
    if os.path.isdir(os.path.expanduser(path)):
        return os.path.isfile(os.path.join(os.path.expanduser(path), "config.json"))
    return not os.path.exists(path) and path.count("/") <= 1 and not path.endswith(_ARCHIVES)


def is_archive(path: str) -> bool:
    """Whether an argument is an archive, and no model."""
    return path.endswith(_ARCHIVES)


def is_given(value: Any) -> bool:
    """Whether an option was given: not left out, a flag that is not set, or a list of none; 0 is a number."""
    return value is not None and value is not False and value != ()


def port_options(options: dict[str, Any]) -> dict[str, Any]:
    """The options that a `Port` takes, of those that say what is run.

    Raises:
        click.UsageError: Another one was given.
    """
    for name, value in options.items():
        if name not in _OF_PORTS and is_given(value):
            raise click.UsageError(f"{option_text(name)} is not for a Port, which says what it runs.")
    return {name: options.get(name) for name in _OF_PORTS}


def make_recipe(
    model: str | None, before: Archive | None, options: dict[str, Any], *, framework: str | None = None
) -> tuple[Recipe, dict[str, StoredInput] | None]:
    """Say how to make the workload that options describe, and on which archived inputs it runs.

    Args:
        model: A path as `Recipe` takes it, or None for that of the archive.
        before: The archive whose run is repeated, or None.
        options: The workload options.
        framework: Whose model a path is of, as for `Recipe`.

    Returns:
        The recipe, and the archive's inputs if no others were given.

    Raises:
        UsageError: There is no model, or the archive does not say how its run was made.
    """
    from tensorcap.session import INPUT_OPTIONS, Recipe, parse_setting
    from tensorcap.workload import archived_inputs
    from tensorcap_formats.errors import UsageError

    changes = {name: value for name, value in options.items() if is_given(value)}
    if "config" in changes:
        changes["config"] = dict(map(parse_setting, changes["config"]))
    if model is not None:
        recipe = Recipe.named(model, {"seed": 0, **changes}, framework)
    elif before is not None:
        recipe = _recipe_like(before, changes)
    else:
        raise UsageError("no model, expected MODEL or --like ARCHIVE")
    has_inputs = before is not None and changes.keys().isdisjoint(INPUT_OPTIONS)
    return recipe, archived_inputs(before) if before is not None and has_inputs else None


def make_target_recipe(
    model: str | None, before: Archive, options: dict[str, Any]
) -> tuple[Recipe, dict[str, StoredInput] | None]:
    """Say how to make a target, and on which archived inputs it runs.

    1. Without a model the archive's own run is repeated, with changes.
    2. A Hugging Face model, or MAX's pipeline for one, runs on the archive's inputs, unless the options have
       others. A pipeline does so too if these are the options that the archive's token ids were made of.
    3. A function's workload has inputs of its own.
    """
    from tensorcap.session import INPUT_OPTIONS
    from tensorcap.workload import archived_inputs

    recipe, inputs = make_recipe(model, before if model is None else None, options)
    given = {name: options[name] for name in INPUT_OPTIONS if options.get(name)}
    is_archived = recipe.kind == "file" and given.items() <= before.info.workload.options.items()
    if model is not None and recipe.runs_archived_inputs and (not given or is_archived):
        inputs = archived_inputs(before)
    return recipe, inputs


def make_target(model: str | None, before: Archive, options: dict[str, Any]) -> Workload:
    """Make the workload of `make_target_recipe`."""
    recipe, inputs = make_target_recipe(model, before, options)
    return recipe.build(inputs)


def both_sides(path: str) -> tuple[str, str | None]:
    """The sides that one path names: of MAX's pipeline `max:PATH`, the model of transformers and itself.

    Returns:
        The reference, and the target; None if the path is of the reference alone.
    """
    from tensorcap.session import Recipe

    recipe = Recipe.named(path, {})
    is_pipeline = recipe.kind == "file" and recipe.runs_archived_inputs
    return (recipe.path, path) if is_pipeline else (path, None)


@contextmanager
def open_reference(
    path: str, target_model: str | None, options: dict[str, Any], keep: Path | None = None
) -> Iterator[tuple[Archive, str | None]]:
    """Open the reference of a run of the target; of `max:PATH` it is captured first, of transformers' model.

    Args:
        path: An archive, or `max:PATH`.
        target_model: The target as the command line names it; None for the pipeline, of `max:PATH`.
        options: The workload options.
        keep: Where to put a captured reference; None keeps none.

    Yields:
        The archive, and the target.
    """
    from tensorcap.session import capture_workload
    from tensorcap_formats.open import open_archive

    reference, pipeline = both_sides(path)
    with ExitStack() as stack:
        if pipeline is None:
            yield stack.enter_context(open_archive(path)), target_model
            return
        target_model = target_model or pipeline
        make_recipe(target_model, None, options)[0].check()  # before the reference is run
        own = {name: value for name, value in options.items() if name not in OF_TARGET}
        recipe, _ = make_recipe(reference, None, own)
        if keep is None:
            keep = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "reference.h5"
        capture_workload(recipe.build(), keep, run={"workload": recipe.describe()})
        yield stack.enter_context(open_archive(keep)), target_model


def _recipe_like(before: Archive, changes: dict[str, Any]) -> Recipe:
    """The recipe of an archive, with changes."""
    from tensorcap.session import Recipe

    recipe = Recipe.of(before)
    if "config" in changes:
        changes = {**changes, "config": {**dict(recipe.options.get("config") or {}), **changes["config"]}}
    if recipe.options.get("teacher_forced") is not None:
        changes = {"teacher_forced": str(before.path), **changes}  # which was fed those tokens itself
    return recipe.changed(**changes)
