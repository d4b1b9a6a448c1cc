"""Code that a run on a CPU does not run, as text."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

import click

from tensorcap.wording import counted, one_line, some
from tensorcap_cli.text.output import print_heading

if TYPE_CHECKING:
    from tensorcap.source_analysis import ClassDifference, ReferenceDifferences, SourceDivergence


def print_divergence(result: SourceDivergence) -> None:
    """Print the classes first, then other code, kernels, and the reference's code."""
    if result.exit_status == 0:
        click.secho(
            f"{counted(len(result.files), 'file')}: nothing depends on the device.", fg="green", bold=True
        )
    _print_classes(result)
    _print_paths(result)
    _print_kernels(result)
    if result.reference is not None:
        _print_reference(result.reference)


def _print_classes(result: SourceDivergence) -> None:
    from tensorcap.source_analysis import SIDES

    if not result.classes:
        return
    print_heading("TWO CLASSES  what agrees with one says nothing of the other", fg="red")
    for each in result.classes:
        here, there = SIDES[each.switch]
        click.echo(
            f"  {one_line(each.place)}: {one_line(each.component)}: {each.here} {here}, {each.there} {there}"
        )
        click.echo(f"    if {one_line(each.test)}")
        click.echo(f"    dual test: {one_line(each.dual_test)}")
        for pair in result.between:
            if (pair.reference, pair.target) == (each.here, each.there):
                _print_difference(pair, each.here, each.there)


def _print_paths(result: SourceDivergence) -> None:
    from tensorcap.source_analysis import SIDES

    if not result.paths:
        return
    print_heading("TWO WAYS  of one class")
    for each in result.paths:
        here, there = SIDES[each.switch]
        scope = f": {one_line(each.scope)}" if each.scope else ""
        click.echo(f"  {one_line(each.place)}{scope}: if {one_line(each.test)}")
        click.echo(f"    {here}: {one_line(each.here)}")
        click.echo(f"    {there}: {one_line(each.there)}")


def _print_kernels(result: SourceDivergence) -> None:
    if result.kernel_flags:
        print_heading(
            "FLAGS OF KERNELS  capture with each off and on: what a kernel computes calls no submodule"
        )
        for flag in result.kernel_flags:
            lines = some([str(line) for line in flag.lines], 6)
            click.echo(f"  {one_line(flag.file)}: {flag.name} decides at {lines} ({some(flag.functions)})")
    if result.kernel_imports:
        print_heading(
            "IMPORTS OF KERNELS  no CPU runs them: compare what their users give, captured on the device"
        )
        for one in result.kernel_imports:
            users = f", used by {some(one.users)}" if one.users else ""
            click.echo(f"  {one_line(one.file)}:{one.line}: {some(one.names)} of {one.module}{users}")
            if one.is_optional:
                click.echo(f"    dual test: {one_line(one.dual_test)}")


def _print_reference(reference: ReferenceDifferences) -> None:
    print_heading("THE REFERENCE'S CODE")
    click.echo(f"  {counted(reference.paired, 'pair')} of classes compared")
    if reference.unpaired:
        click.echo(f"  no class of the port for {some(reference.unpaired, 8)}")
    if reference.absent_bases:
        bases = some(reference.absent_bases, 8)
        click.echo(f"  in no source, so that what they read and compute is unknown: {bases}")
    for setting in reference.unread:
        click.echo(f"  config.{setting.name} is read by the reference alone: {some(setting.places)}")
    for pair in reference.classes:
        click.echo(f"  {pair.reference} and {pair.target}:")
        _print_difference(pair, "the reference", "the port")


def _print_difference(pair: ClassDifference, reference: str, target: str) -> None:
    _print_side(f"{reference} alone", pair.lost_operations, "operations")
    _print_side(f"{target} alone", pair.new_operations, "operations")
    _print_side(f"{reference} alone", pair.lost_casts, "casts to")
    _print_side(f"{target} alone", pair.new_casts, "casts to")


def _print_side(side: str, places: Mapping[str, str], what: str) -> None:
    if places:
        listed = ", ".join(f"{name} ({os.path.basename(place)})" for name, place in sorted(places.items()))
        click.echo(
            f"    {what} of {side}: {one_line(listed)}"
            if what == "operations"
            else f"    {side} {what} {one_line(listed)}"
        )
