"""The options that say what is run: a model, its inputs, and what is changed of them."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, TypeVar

import click

if TYPE_CHECKING:
    from tensorcap.session.recipe import Recipe
    from tensorcap.workload.workload import StoredInput
    from tensorcap_formats.archive import Archive

_ARCHIVES: Final = (".h5", ".hdf5", ".zarr", ".safetensors", ".npz", ".npy", ".pt")
_Function = TypeVar("_Function", bound=Callable[..., Any])

_INPUTS: Final = click.option(
    "--inputs", type=click.Path(), help="A file of tensors named as the arguments: .npz, .h5, …"
)
_OF_FUNCTIONS: Final = (
    click.option(
        "--like", type=click.Path(), help="Repeat the run of this archive, with the options given here."
    ),
    click.option(
        "--dtype", help="Precision of weights and inputs, such as bfloat16; buffers stay unrounded."
    ),
    click.option(
        "--num-hidden-layers",
        type=click.IntRange(min=1),
        help="Keep the first layers only; a function with that parameter is given it.",
    ),
    click.option("--seed", type=int, help="Of the random generators before the run; 0 by default."),
)
_OPTIONS: Final = (
    *_OF_FUNCTIONS,
    click.option("--device", help="Where to run, such as cuda; by default the CPU."),
    click.option("--config", "config", metavar="KEY=VALUE", multiple=True, help="Change the configuration."),
    click.option("--random-weights", type=int, metavar="SEED", help="Draw weights; needs only config.json."),
    click.option("--prompt", help="Text for the model's own tokenizer."),
    click.option("--input-ids", metavar="1,2,3", help="Token ids; rows are separated by a semicolon."),
    _INPUTS,
    click.option("--max-new-tokens", type=click.IntRange(min=1), help="Generate greedily, a step a token."),
    click.option(
        "--teacher-forced",
        type=click.Path(),
        metavar="REF",
        help="Generate with the tokens of this archive, whatever the model would choose.",
    ),
    click.option(
        "--perturb", metavar="DTYPE", help="Change the inputs, or embedded tokens, by the epsilon of a dtype."
    ),
    click.option("--trust-remote-code", is_flag=True, help="Run Python code that comes with the model."),
)


def is_workload(path: str) -> bool:
    """Whether a path is of a model: a function, a folder with a configuration, or an id that is no path."""
    file, _, function = path.rpartition(":")
    if file.endswith(".py") and function.isidentifier():
        return True
    if os.path.isdir(os.path.expanduser(path)):
        return os.path.isfile(os.path.join(os.path.expanduser(path), "config.json"))
    return not os.path.exists(path) and path.count("/") <= 1 and not path.endswith(_ARCHIVES)


def function_options(function: _Function) -> _Function:
    """Give a command the options that say what is run, where that is a function of the user's."""
    for option in reversed(_OF_FUNCTIONS):
        function = option(function)
    return function


def workload_options(function: _Function) -> _Function:
    """Give a command the options that say what is run."""
    for option in reversed(_OPTIONS):
        function = option(function)
    return function


def target_options(function: _Function) -> _Function:
    """The same for a command whose `--inputs` means something else: the file is `--input-file`."""
    renamed = click.option(
        "--input-file", type=click.Path(), help="A file of tensors named as the arguments: .npz, .h5, …"
    )
    for option in reversed(_OPTIONS):
        function = renamed(function) if option is _INPUTS else option(function)
    return function


def made_recipe(
    model: str | None, before: Archive | None, options: dict[str, Any], *, framework: str | None = None
) -> tuple[Recipe, dict[str, StoredInput] | None]:
    """How to make the workload that options describe, and archived inputs for it.

    Args:
        model: A path as `Recipe` takes it, or None for that of the archive.
        before: The archive whose run is repeated, or None.
        options: The workload options.
        framework: Whose model a path is of, as for `Recipe`.

    Returns:
        The recipe, and the archive's inputs where no others were given.

    Raises:
        UsageError: There is no model, or the archive does not say how its run was made.
    """
    from tensorcap.session.recipe import INPUT_OPTIONS, parse_setting
    from tensorcap.workload.workload import archived_inputs

    given = {
        name: value
        for name, value in options.items()
        if value is not None and value is not False and value != ()
    }
    if "config" in given:
        given["config"] = dict(map(parse_setting, given["config"]))
    if before is None or model is not None:
        recipe = _recipe(model, given, framework)
    else:
        recipe = _recipe_like(before, given)
    has_inputs = before is not None and given.keys().isdisjoint(INPUT_OPTIONS)
    return recipe, archived_inputs(before) if before is not None and has_inputs else None


def made_target(
    into: str | None, before: Archive, options: dict[str, Any]
) -> tuple[Recipe, dict[str, StoredInput] | None]:
    """How to make a target; a model of its own is run on the archive's inputs unless others are given.

    A function's workload has inputs of its own. Without a target it is the archive's own run, with changes.
    """
    from tensorcap.session.recipe import INPUT_OPTIONS
    from tensorcap.workload.workload import archived_inputs

    recipe, inputs = made_recipe(into, before if into is None else None, options)
    if into is not None and recipe.kind == "huggingface" and not any(options.get(n) for n in INPUT_OPTIONS):
        inputs = archived_inputs(before)
    return recipe, inputs


def _recipe(model: str | None, given: dict[str, Any], framework: str | None) -> Recipe:
    from tensorcap.session.recipe import Recipe
    from tensorcap_formats.errors import UsageError

    if model is None:
        raise UsageError("no model, expected MODEL or --like ARCHIVE")
    return Recipe(model, {"seed": 0, **given}, framework)


def _recipe_like(before: Archive, given: dict[str, Any]) -> Recipe:
    """The recipe of an archive, with changes."""
    from tensorcap.session.recipe import Recipe

    recipe = Recipe.of(before)
    if "config" in given:
        given = {**given, "config": {**dict(recipe.options.get("config") or {}), **given["config"]}}
    if recipe.options.get("teacher_forced") is not None:
        given = {"teacher_forced": str(before.path), **given}  # which was fed those tokens itself
    return recipe.changed(**given)
