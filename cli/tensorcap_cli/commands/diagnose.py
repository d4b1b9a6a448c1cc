"""`tcap diagnose`: which mistake turns a tensor of the reference into that of the target."""

from __future__ import annotations

from functools import partial

import click

from tensorcap_cli.options.archives import compute_dtype_option, json_option, map_option
from tensorcap_cli.options.sections import Command
from tensorcap_cli.text.output import print_result, split_key
from tensorcap_cli.text.progress import spinner


@click.command("diagnose", cls=Command, short_help="Test what mistake explains the values of one pair.")
@click.argument("reference", metavar="REF", type=click.Path())
@click.argument("target", metavar="TGT[::KEY]", type=click.Path())
@click.argument("key", metavar="KEY")
@map_option
@compute_dtype_option
@click.option("--all", "show_all", is_flag=True, help="All that was tried, with what it left.")
@json_option
def command(
    reference: str,
    target: str,
    key: str,
    *,
    mapping: str | None,
    compute_dtype: str | None,
    show_all: bool,
    as_json: bool,
) -> None:
    """Test hypotheses on the values of tensor KEY in REF and TGT, and name those that explain the difference.

    A factor, an offset, another order, another activation or norm, a clamp, another tensor in its place, and
    more: each that holds is printed with the error that it leaves. Nothing is guessed: what does not leave
    next to nothing is not printed. TGT::KEY names the tensor of TGT if it has another key.

    \b
        tcap diagnose ref.h5 tgt.h5 0/model.norm/output
        tcap diagnose ref.h5 tgt.h5::0/norm/output 0/model.norm/output

    Exit status: 0 a hypothesis explains the difference, or there is none; 1 none does; 2 wrong usage; 3 an
    archive or a tensor cannot be read.
    """
    from tensorcap import diagnose
    from tensorcap.reports.next_step import Sides, after_diagnosis
    from tensorcap_cli.text.diagnosis import print_diagnosis

    target, target_key = split_key(target)
    with spinner("diagnosing"):
        diagnosis = diagnose(
            reference, target, key, target_key=target_key, mapping=mapping, compute_dtype=compute_dtype
        )
    sides = Sides(reference, target, mapping or "", {"compute_dtype": compute_dtype})
    print_result(
        diagnosis,
        partial(print_diagnosis, show_all=show_all),
        as_json=as_json,
        next_step=lambda done: after_diagnosis(done, sides),
    )
