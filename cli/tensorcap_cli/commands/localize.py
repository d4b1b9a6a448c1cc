"""`tcap localize`: which module is guilty."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import click

from tensorcap_cli.options.archives import (
    compute_dtype_option,
    json_option,
    map_option,
    target_repeat_option,
)
from tensorcap_cli.options.neuron_sources import neuron_sources_option
from tensorcap_cli.options.run import (
    make_target,
    reference_model_option,
    run_options,
    target_model_option,
)
from tensorcap_cli.options.sections import Command, with_options
from tensorcap_cli.text.progress import StageLines

if TYPE_CHECKING:
    from tensorcap.localization import Localization
    from tensorcap.reports.next_step import Sides
    from tensorcap.workload import Workload
    from tensorcap_formats.archive import Archive

localize_options: Final = with_options(  # of `localize_sides`
    reference_model_option,
    target_model_option,
    target_repeat_option,
    map_option,
    compute_dtype_option,
    run_options,
    neuron_sources_option,
)


@click.command("localize", cls=Command, short_help="Rank the modules that may be guilty, with reasons.")
@click.argument("reference", metavar="REF", type=click.Path())
@click.argument("target", metavar="[TGT]", type=click.Path(), required=False)
@localize_options
@click.option(
    "--sort",
    "order",
    type=click.Choice(["evidence", "own"]),
    default="evidence",
    show_default=True,
    help="Order of suspects: what speaks most against one first, or the largest own error.",
)
@click.option(
    "--exhaustive",
    is_flag=True,
    help="Try every possible cause of a suspect by calls of its module, however long that takes.",
)
@click.option("--all", "show_all", is_flag=True, help="Every suspect, and each of its layers.")
@json_option
def command(
    reference: str, target: str | None, *, order: str, show_all: bool, as_json: bool, **options: Any
) -> None:
    """Name the module that is guilty of the difference between TGT and REF.

    The trusted model is run on the target's values (see `tcap replay`), which tells each module's own error
    from what it inherited. Each suspect is listed with both, and with the usual mistake that explains its
    values; besides, where errors begin in the order of execution, and where values stop being finite.

    \b
        tcap localize ref.h5 tgt.h5
        tcap localize ref.h5 tgt.h5 --target-repeat tgt2.h5 \\
            --reference-model model.py:reference

    Of a target that is compiled from an exported graph (Core AI), and a reference captured as that graph
    (`--level export --coreai`), operations are accused in the place of modules.

    Do both run here, in PyTorch or as an ONNX graph? Name both: the operations that one side alone runs on
    equal values are told, with the lines of both sources:

    \b
        tcap localize ref.h5 tgt.h5 --reference-model model.py:reference \\
            --target-model port.py:target

    Only the target's model at hand? Use --target-model: it is run on the reference's values (see
    `tcap inject`). TGT may be left out then, and the run options are the target's:

    \b
        tcap localize ref.h5 --target-model port.py:target

    If no model can be run, `--reference-model none` localizes by the two archives alone, and says that this
    is weaker:

    \b
        tcap localize ref.h5 tgt.h5 --reference-model none

    Exit status: 0 nobody is accused, and nothing is wrong or missing; 1 somebody is, or something is; 2 wrong
    usage; 3 an input file cannot be read.
    """
    from tensorcap_cli.text.localization import print_localization

    localization, note, sides = localize_sides(reference, target, options)
    if order == "own":
        localization = localization.by_own_error()
    print_localization(localization, note, sides, as_json=as_json, show_all=show_all)
    click.get_current_context().exit(localization.exit_status)


def localize_sides(
    reference: str, target: str | None, options: dict[str, Any]
) -> tuple[Localization, str, Sides]:
    """Localize with the models that the options name.

    Args:
        reference: Path of the trusted archive.
        target: Path of the archive under test; None if the target's model is run.
        options: Those of `localize_options`, and `exhaustive` as `localize` takes it.

    Returns:
        The localization, a note for the user, which may be empty, and both sides as the next command names
        them.
    """
    from tensorcap.localization import localize
    from tensorcap.reports.next_step import Sides
    from tensorcap_formats.open import open_archive, opened

    names = {name: options[name] for name in ("reference_model", "target_model", "compute_dtype")}
    model, target_model = options.pop("reference_model"), options.pop("target_model")
    if target is None and target_model is None:
        raise click.UsageError("Missing argument: expected REF TGT, or REF --target-model MODEL.")
    mapping, compute_dtype = options.pop("mapping"), options.pop("compute_dtype")
    repeat, exhaustive = options.pop("target_repeat"), options.pop("exhaustive", False)
    with ExitStack() as stack:
        trusted = stack.enter_context(open_archive(reference))
        tested = None if target is None else stack.enter_context(opened(target, reference=trusted))
        tested_model = None if target_model is None else make_target(target_model, trusted, options)
        if target_model is not None:
            options = dict.fromkeys(options)  # they were the target's
        is_replayed = model != "none" and (model is not None or target_model is None)
        trusted_model, note = _make_replayed(model, trusted, options) if is_replayed else (None, "")
        localization = localize(
            trusted,
            tested,
            reference_model=trusted_model,
            target_model=tested_model,
            target_repeat=repeat,
            mapping=mapping,
            compute_dtype=compute_dtype,
            exhaustive=exhaustive,
            progress=StageLines(),
        )
        recipe = trusted.info.workload.path
        sides = Sides(reference, target or "", mapping or "", names, has_recipe=bool(recipe))
        if tested is not None and trusted.info.framework == tested.info.framework == "torch":
            sides = replace(sides, reference_recipe=recipe, target_recipe=tested.info.workload.path)
    return localization, note, sides


def _make_replayed(
    model: str | None, trusted: Archive, options: dict[str, Any]
) -> tuple[Workload | None, str]:
    """Make the reference's workload; if it was not asked for by name, none and why."""
    from tensorcap_formats.errors import UsageError

    try:
        return make_target(model, trusted, options), ""
    except UsageError as error:
        if model is not None or trusted.info.workload.path:
            raise
        return None, f"{error}; name the model by --reference-model to have more than archives say."
