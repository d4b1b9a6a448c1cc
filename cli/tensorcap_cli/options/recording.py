"""The options that every command of `tcap capture` has: what is recorded, and where it goes."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from tensorcap_cli.options.archives import exclude_option, only_option, output_option
from tensorcap_cli.options.sections import with_options

if TYPE_CHECKING:
    from tensorcap_formats.run_info import ScopeInfo

# Each as `ScopeInfo` and `tensorcap.capture` name it
_LISTS: Final = ("exclude", "ops_in", "watch", "slices")
_FLAGS: Final = ("grads", "eager", "inner")
_LIMITS: Final = ("steps", "sample", "max_bytes")
_WHICH: Final = (
    output_option,
    only_option,
    exclude_option,
    click.option(
        "--no-inputs", is_flag=True, help="Record outputs only, and the inputs of the model itself."
    ),
)
_WITHIN: Final = (  # for code that is run as it is written, not compiled
    click.option(
        "--level",
        type=click.Choice(["module", "op", "export"]),
        help="Record every op too: as it is run, or as torch.export lists it.",
    ),
    click.option(
        "--ops-in", metavar="GLOB", multiple=True, help="Only ops of these modules, and of those below."
    ),
    click.option(
        "--watch",
        metavar="MODULE:FUNCTION:NAMES",
        multiple=True,
        help="Local variables: package.module:Class.method:name,name; * for all that hold tensors.",
    ),
    click.option("--grads", is_flag=True, help="Gradients of activations and of parameters."),
    click.option(
        "--eager", is_flag=True, help="Run compiled code and fused attention of torch.nn as plain code."
    ),
)
_WHAT_ELSE: Final = (
    click.option(
        "--params/--no-params",
        default=None,
        help="Parameters and buffers, once; by default digests and statistics of them alone.",
    ),
    click.option("--steps", metavar="0,1,5-9", help="Only these calls of the model; 5- is 5 and later ones."),
    click.option(
        "--sample", type=click.IntRange(min=1), metavar="N", help="Only the first N calls of each site."
    ),
    click.option(
        "--slice",
        "slices",
        metavar="[GLOB=]SLICE",
        multiple=True,
        help="Only a part of tensors: '[..., :64]', or '*.self_attn=[:, -1:]'.",
    ),
    click.option(
        "--max-bytes", metavar="SIZE", help="Stop recording before the archive holds more: 500MB, 2GiB."
    ),
    click.option("--stats-only", is_flag=True, help="Keep statistics and hashes, no values."),
    click.option(
        "--print",
        "log_form",
        type=click.Choice(["compact", "full"]),
        is_flag=False,
        flag_value="compact",
        help="Print each tensor in a line as it comes; full: with abbreviated values.",
    ),
    click.option("--print-only", "log_globs", metavar="GLOB", multiple=True, help="Print only what matches."),
    click.option(
        "--dry-run", is_flag=True, help="Run, list what would be recorded with its size, write nothing."
    ),
    click.option("--fsync", is_flag=True, help="Make each tensor durable against a power cut; slow."),
    click.option(
        "--json", "as_json", is_flag=True, help="One JSON object instead of text; not with --print."
    ),
)

coreai_option: Final = click.option(
    "--coreai",
    is_flag=True,
    help="At level export, in the operators that Core AI's converter takes; and a folder for its debugger.",
)
inner_option: Final = click.option(
    "--inner",
    is_flag=True,
    help="MAX: print into files, and keep, what lies within subgraphs, branches and loops.",
)


recording_options: Final = with_options(*_WHICH, *_WITHIN, *_WHAT_ELSE)
# What a compiled graph can follow, whose modules cannot be looked into
recording_options_of_graphs: Final = with_options(*_WHICH, inner_option, *_WHAT_ELSE)
recording_options_of_assets: Final = with_options(*_WHICH, *_WHAT_ELSE)


def intermediates_beside(options: Mapping[str, Any]) -> Path | None:
    """The folder that --coreai writes beside the archive; None if it writes none.

    Raises:
        WriteError: Something is there already.
    """
    if not options.get("coreai") or options["output"] is None:
        return None
    from tensorcap_formats.foreign import INTERMEDIATES_SUFFIX, refuse_intermediates

    folder = Path(options["output"]).with_suffix(INTERMEDIATES_SUFFIX)
    refuse_intermediates(folder)
    return folder


def recording_arguments(
    options: dict[str, Any], kept: ScopeInfo | None = None, *, as_json: bool
) -> dict[str, Any]:
    """Turn those options into keyword arguments of `tensorcap.capture`, the path among them.

    Args:
        options: What click has parsed; the recording options are taken out of it.
        kept: What an archive's run recorded; it holds for the options that are absent.
        as_json: Whether the outcome is printed as JSON.

    Raises:
        UsageError: Options contradict each other, or one cannot be read.
    """
    from tensorcap.recording import PlainLog
    from tensorcap_formats.errors import UsageError
    from tensorcap_formats.run_info import ScopeInfo

    path, is_dry_run = options.pop("output"), options.pop("dry_run")
    if path is None and not is_dry_run:
        raise UsageError("no output, expected -o ARCHIVE or --dry-run")
    if path is not None and is_dry_run:
        raise UsageError("--dry-run writes nothing, expected no -o")
    before = kept or ScopeInfo()
    if options.pop("coreai", False):
        before = _of_coreai(options, before)
    if options.get("level") == "module":
        before = replace(before, ops_in=())  # there are no ops any more that it could be of
    arguments: dict[str, Any] = {"path": path}
    arguments["only"] = list(options.pop("only", ()) or before.include)
    arguments |= {name: list(options.pop(name, ()) or getattr(before, name)) for name in _LISTS}
    arguments["inputs"] = not options.pop("no_inputs") and before.inputs
    arguments |= {name: True for name in _FLAGS if options.pop(name, False) or getattr(before, name)}
    params = options.pop("params", None)
    if params is not None or before.params:
        arguments["params"] = params is None or params
    for name in ("level", *_LIMITS):
        value = options.pop(name, None)
        value = (getattr(before, name) or None) if value is None else value
        if value is not None:
            arguments[name] = value
    arguments |= {name: options.pop(name) for name in ("stats_only", "fsync")}
    if before.decompositions and arguments.get("level") == "export":
        arguments["decompositions"] = before.decompositions
    form, globs = options.pop("log_form"), options.pop("log_globs")
    if form is None:
        if globs:
            raise UsageError("--print-only is for what --print prints, expected --print too")
        return arguments
    if as_json:
        raise UsageError("--print and --json exclude each other: both write to standard output")
    return {**arguments, "log": PlainLog(sys.stdout, form, globs)}


def _of_coreai(options: dict[str, Any], before: ScopeInfo) -> ScopeInfo:
    """What --coreai records, for the options that are absent: the exported graph, with its weights.

    Raises:
        UsageError: An option leaves the folder without values.
    """
    from tensorcap_formats.errors import UsageError

    if options["level"] not in (None, "export"):
        raise UsageError(f"--coreai is of exported graphs, expected no --level {options['level']}")
    for name, option in (("stats_only", "--stats-only"), ("slices", "--slice")):
        if options[name]:
            raise UsageError(f"--coreai writes a folder of whole tensors, expected no {option}")
    return replace(before, level="export", decompositions="coreai", params=True, slices=(), ops_in=())
