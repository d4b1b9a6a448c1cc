"""`tcap compare`: two archives, or two tensors, and where they part."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from tensorcap_cli.options.archives import (
    atol_option,
    compute_dtype_option,
    exclude_option,
    map_option,
    only_option,
    reference_repeat_option,
    rtol_option,
)
from tensorcap_cli.options.sections import Command
from tensorcap_cli.text.output import option_text, print_json, print_json_pieces, print_next, split_key
from tensorcap_cli.text.progress import byte_bar

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tensorcap.comparison import Comparison, Examination
    from tensorcap.reports.next_step import Sides
    from tensorcap_formats.archive import Archive

_ON_ARCHIVES: Final = (
    "mapping",
    "only",
    "exclude",
    "require",
    "baseline",
    "thresholds",
    "calibration",
    "reference_repeat",
)
_INPUT_FILES: Final = ("mapping", "baseline", "thresholds", "calibration", "reference_repeat")


@click.command("compare", cls=Command, short_help="Compare two archives and name where they part.")
@click.argument("reference", metavar="[REF[::KEY]", type=click.Path(), required=False)
@click.argument("target", metavar="TGT[::KEY]]", type=click.Path(), required=False)
@rtol_option
@atol_option
@click.option("--thresholds", metavar="FILE", type=click.Path(), help="Limits of metrics by glob, as TOML.")
@click.option("--calibration", metavar="FILE", type=click.Path(), help="Limits that `tcap calibrate` wrote.")
@click.option(
    "--baseline",
    metavar="ARCHIVE",
    type=click.Path(),
    help="The reference in the target's precision, for the ratio of errors.",
)
@map_option
@click.option(
    "--trust-digests",
    is_flag=True,
    help="Take tensors of equal recorded digests for identical without reading them: a quick look.",
)
@click.option(
    "--layout",
    metavar="STEP",
    multiple=True,
    help="With two single tensors: a step from the layout of TGT to that of REF, as 'squeeze(0)'; may be "
    "repeated.",
)
@reference_repeat_option
@compute_dtype_option
@only_option
@exclude_option
@click.option(
    "--require", metavar="GLOB", multiple=True, help="Only these may not be missing; all if none is given."
)
@click.option(
    "--sort",
    type=click.Choice(["order", "error"]),
    default="order",
    help="Execution order of the reference, or the largest relative error first; the worst by --metric if "
    "that is given.",
)
@click.option(
    "--status",
    "statuses",
    metavar="STATUS,…",
    help="Rows of pairs of these statuses alone, as diverged,suspect.",
)
@click.option(
    "--metric",
    "metrics",
    metavar="NAME",
    multiple=True,
    help="A column in place of the usual ones; `kl`, `overlap` and others are computed for all that can be.",
)
@click.option(
    "--where",
    is_flag=True,
    help="Find where the error lies for every pair that is not green, not for the worst alone.",
)
@click.option("--why", metavar="KEY", help="Instead of a report: how this tensor was judged, test by test.")
@click.option("--by-module", is_flag=True, help="Errors by class of module: count, min, median, max.")
@click.option("--all", "show_all", is_flag=True, help="A row for every pair, also for identical ones.")
@click.option("--save", metavar="FILE", type=click.Path(), help="Keep all results, to be judged again.")
@click.option(
    "--from", "saved", metavar="FILE", type=click.Path(), help="Report and judge saved results; no archives."
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object instead of text, with all pairs.")
@click.option("--junit", metavar="FILE", type=click.Path(), help="Write a test report, a case for each pair.")
@click.option("--csv", metavar="FILE", type=click.Path(), help="Write a table of all pairs and metrics.")
def command(
    reference: str | None,
    target: str | None,
    *,
    sort: str,
    statuses: str | None,
    metrics: tuple[str, ...],
    why: str | None,
    by_module: bool,
    show_all: bool,
    save: str | None,
    saved: str | None,
    as_json: bool,
    junit: str | None,
    csv: str | None,
    **options: Any,
) -> None:
    """Compare the tensors of TGT with those of REF, and name the first module where they part.

    REF and TGT are archives, or files and folders of other tools: .npz, .pt, .max, .gguf, .onnx, .keras,
    dumps of print hooks, of msprobe and of SGLang, JSON of Polygraphy, raw numbers as `x.bin:float32:2,3`.
    Names of layers, as other runtimes save results, pair with modules of a run. Two files of one tensor each
    are compared whatever their names.

    Tensors are paired as --map says. Without it, equal keys belong together, and if that leaves tensors of
    both sides over, a mapping is computed as by `tcap align`. Without --rtol and --atol the policy of
    specs/policy.md judges. Every tensor of REF is required, except those that --exclude leaves out or the
    mapping explains. Nothing is called identical whose bytes were not read, unless with --trust-digests.

    \b
        tcap compare ref.h5 tgt.h5
        tcap compare ref.h5 tgt.h5 --rtol 1e-3 --atol 1e-5 --exclude '*/input*'
        tcap compare ref.h5::0/model.norm/output tgt.npz::norm
        tcap compare a.pt b.max --layout 'squeeze(0)'
        tcap compare ref.h5 tgt.h5 --why 0/model.norm/output
        tcap compare ref.h5 tgt.h5 --save result.json
        tcap compare --from result.json --rtol 1e-2

    Exit status: 0 all required tensors are identical, within what is allowed, or within rounding; 1 they are
    not, or one is missing, or nothing was compared, or a run is incomplete; 2 wrong usage; 3 an archive or a
    tensor cannot be read.
    """
    from tensorcap_cli.text.rows import check_metrics, parse_statuses

    check_metrics(metrics)
    chosen = parse_statuses(statuses)
    if chosen and (as_json or why is not None):
        raise click.UsageError("--status is of the rows of the text, expected no --json and no --why.")
    archives = [split_key(text)[0] for text in (reference, target) if text is not None]
    files = [saved, *(options[name] for name in _INPUT_FILES)]
    _check_outputs([*archives, *filter(None, files)], save=save, junit=junit, csv=csv)
    if saved is not None and reference is not None:
        raise click.UsageError("--from reads saved results, expected no archives beside it.")
    if saved is None and (reference is None or target is None):
        raise click.UsageError("Missing argument: expected REF and TGT, or --from FILE.")
    from tensorcap_formats.garbage import paused_collection

    click.get_current_context().with_resource(paused_collection())
    if saved is not None:
        comparison, examination, sides = _judge_saved(saved, options)
    else:
        assert reference is not None
        assert target is not None
        comparison, examination, sides = _compare(reference, target, metrics, options)
    from tensorcap.reports.next_step import after_comparison

    _write(comparison, examination, save, junit, csv)
    if why is not None:
        _print_why(comparison, why, as_json=as_json)
        if not as_json:
            print_next(after_comparison(comparison, sides))
    elif as_json:
        from tensorcap.comparison import json_pieces

        print_json_pieces(json_pieces(comparison, examination))
    else:
        from tensorcap_cli.text.comparison import print_report

        print_report(
            comparison,
            examination,
            order=sort,
            show_all=show_all,
            by_module=by_module,
            metrics=metrics,
            statuses=chosen,
        )
        print_next(after_comparison(comparison, sides))
    click.get_current_context().exit(comparison.exit_status)


def _print_why(comparison: Comparison, key: str, *, as_json: bool) -> None:
    from tensorcap.comparison import explain

    explanation = explain(comparison, key)
    if as_json:
        print_json(explanation.to_json())
        return
    from tensorcap_cli.text.explanation import print_explanation

    print_explanation(explanation)


def _check_outputs(inputs: Sequence[str], *, save: str | None, junit: str | None, csv: str | None) -> None:
    """Refuse outputs that cannot be written, or would replace something else, before anything is compared."""
    outputs = {"save": save, "junit": junit, "csv": csv}
    if not any(outputs.values()):
        return
    from tensorcap.reports.exports import CSV_BEGINNING, JUNIT_BEGINNING
    from tensorcap.reports.results import RESULT_BEGINNING
    from tensorcap_formats.output_path import refuse_overlap, refuse_to_replace_unlike

    options: dict[Path, str] = {}
    beginnings = RESULT_BEGINNING, JUNIT_BEGINNING, CSV_BEGINNING
    for (option, path), beginning in zip(outputs.items(), beginnings, strict=True):
        if path is None:
            continue
        if not Path(path).parent.is_dir():
            raise click.UsageError(f"--{option} {path}: there is no folder {Path(path).parent}.")
        for source in inputs:
            refuse_overlap(Path(source), Path(path))
        refuse_to_replace_unlike(Path(path), beginning)
        other = options.setdefault(Path(path).resolve(), option)
        if other != option:
            raise click.UsageError(f"--{option} {path}: is the file of --{other}, expected another.")


def _compare(
    reference: str, target: str, metrics: tuple[str, ...], options: dict[str, Any]
) -> tuple[Comparison, Examination, Sides]:
    from tensorcap.alignment import in_reference_layout, sides
    from tensorcap.comparison import compare, compare_records
    from tensorcap.reports.next_step import Sides
    from tensorcap.reports.pair_examination import examine
    from tensorcap.rerun import is_compiled
    from tensorcap_cli.text.rows import LOGIT_COLUMNS, ROUTING_COLUMNS
    from tensorcap_formats.open import open_archive, opened_both

    (reference_path, reference_key), (target_path, target_key) = split_key(reference), split_key(target)
    named = reference_key or target_key
    unfit = [option_text(name) for name in _ON_ARCHIVES if options[name]]
    if named and unfit:
        raise click.UsageError(f"{' and '.join(unfit)} do not go with ::KEY.")
    where, repeat, mapping = (options.pop(name) for name in ("where", "reference_repeat", "mapping"))
    layout = [step for text in options.pop("layout") for step in text.split(";")]
    with (
        opened_both(reference_path, target_path) as (trusted, tested),
        open_archive(repeat) if repeat else nullcontext() as again,
    ):
        if not named and not unfit and _is_single(trusted) and _is_single(tested):
            reference_key, target_key = (archive.records[0].key.text for archive in (trusted, tested))
            named = reference_key
            layout = layout or _leading_axis(trusted.records[0].shape, tested.records[0].shape)
        if named:
            keys = reference_key or named, target_key or named
            if layout:
                tested, keys = (
                    in_reference_layout(trusted, keys[0], tested, keys[1], layout),
                    (keys[0], keys[0]),
                )
        elif layout:
            raise click.UsageError("--layout goes with two single tensors: files of one each, or ::KEY.")
        else:
            trusted, tested = sides(trusted, tested, mapping)
        with byte_bar("comparing") as bar:
            if named:
                limits = {name: options[name] for name in ("rtol", "atol", "compute_dtype", "trust_digests")}
                comparison = compare_records(trusted, keys[0], tested, keys[1], progress=bar, **limits)
            else:
                # Not mapped by `sides`, they are not mapped here either: `examine` reads these archives
                comparison = compare(trusted, tested, mapping="none", progress=bar, **options)
        examination = examine(
            comparison,
            trusted,
            tested,
            repeat=again,
            where="all" if where else "worst",
            logits=any(name in LOGIT_COLUMNS for name in metrics),
            routing=any(name in ROUTING_COLUMNS for name in metrics),
            compute_dtype=options["compute_dtype"],
        )
        step_sides = Sides(
            reference_path,
            target_path,
            mapping or "",
            {"compute_dtype": options["compute_dtype"]},
            is_compiled=not named and is_compiled(trusted, tested),
            has_recipe=bool(trusted.info.workload.path),
            target_recipe=tested.info.workload.path,
        )
    return comparison, examination, step_sides


def _is_single(archive: Archive) -> bool:
    """Whether it is a file of one tensor, which may have any name."""
    return (
        archive.is_foreign
        and len(archive) == 1
        and archive.records[0].key.is_bare
        and not archive.path.is_dir()
    )


def _leading_axis(reference: tuple[int, ...], target: tuple[int, ...]) -> list[str]:
    """The layout step from a target's shape to a reference's that has an axis of one row more or less."""
    if reference == (1, *target):
        return ["unsqueeze 0"]
    return ["squeeze 0"] if target == (1, *reference) else []


def _judge_saved(path: str, options: dict[str, Any]) -> tuple[Comparison, Examination, Sides]:
    from tensorcap.comparison import Thresholds
    from tensorcap.reports.next_step import Sides
    from tensorcap.reports.results import judge_again, load_result

    for name, value in options.items():
        if value and name not in ("rtol", "atol", "thresholds"):
            raise click.UsageError(f"{option_text(name)} needs the tensors, expected no --from.")
    result = load_result(path)
    thresholds = Thresholds.parse(rtol=options["rtol"], atol=options["atol"], path=options["thresholds"])
    comparison = judge_again(result, thresholds)
    mapping = comparison.mapping.path if comparison.mapping else ""
    sides = Sides(str(comparison.reference.path), str(comparison.target.path), mapping or "")
    return comparison, result.examination, sides


def _write(
    comparison: Comparison, examination: Examination, save: str | None, junit: str | None, csv: str | None
) -> None:
    if save is not None:
        from tensorcap.reports.results import save_result

        save_result(save, comparison, examination)
    if junit is not None:
        from tensorcap.reports.exports import write_junit

        write_junit(junit, comparison, examination)
    if csv is not None:
        from tensorcap.reports.exports import write_csv

        write_csv(csv, comparison, examination)
