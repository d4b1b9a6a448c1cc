"""One option name has one meaning in every command, and help texts are in sections."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import click
import pytest

from tensorcap_cli.main import main

if TYPE_CHECKING:
    from click.testing import Result

# Options of one meaning whose help says what they do for the command at hand.
SAID_BY_COMMAND = {
    "--all",
    "--by",
    "--dry-run",
    "--force",
    "--format",
    "--from",
    "--inputs",
    "--json",
    "--level",
    "--metric",
    "--output",
    "--params",
    "--slice",
    "--sort",
    "--state",
    "--steps",
}
GONE = ("--filter", "--include", "--input-file", "--into", "--outputs", "--reference", "--repeat", "--target")


def commands() -> Iterator[tuple[str, click.Command]]:
    context = click.Context(main)
    for name in main.list_commands(context):
        command = main.get_command(context, name)
        assert command is not None
        yield name, command
        if isinstance(command, click.Group):
            yield from ((f"{name} {below}", each) for below, each in command.commands.items())


def options() -> Iterator[tuple[str, str, click.Option]]:
    """The command, the longest name of the option, and the option."""
    for name, command in commands():
        for parameter in command.params:
            if isinstance(parameter, click.Option):
                yield name, max(parameter.opts, key=len), parameter


def test_an_option_has_one_kind_of_value_and_one_help_text() -> None:
    helps, metavars = defaultdict(set), defaultdict(set)
    for command, name, option in options():
        assert option.help, (command, name)
        kind = "flag" if option.is_flag else option.metavar or "choice"
        metavars[name].add(kind)
        helps[name].add(option.help)
    assert metavars.pop("--output") == {"ARCHIVE", "FILE", "DIR"}
    assert metavars.pop("--inputs") == {"FILE", "[NAME=]FILE"}
    assert metavars.pop("--slice") == {"SLICE", "[GLOB=]SLICE"}
    assert {name: kinds for name, kinds in metavars.items() if len(kinds) > 1} == {}
    assert {name for name, texts in helps.items() if len(texts) > 1} == SAID_BY_COMMAND


def test_a_kind_of_value_has_one_name() -> None:
    values = {
        option.metavar or type(option.type).__name__
        for _, _, option in options()
        if not option.is_flag and not isinstance(option.type, click.Choice)
    }
    assert not values & {"TEXT FILE", "PATH", "REF", "TGT", "TGT2", "WORKLOAD", "Path", "String", "Int"}


@pytest.mark.parametrize("name", GONE)
def test_old_names_have_no_aliases(name: str) -> None:
    allowed = {"merge"} if name == "--reference" else set()  # where it is an archive, as REF is elsewhere
    assert {command for command, _, option in options() if name in option.opts} == allowed


def test_options_of_a_run_stand_at_the_end(tcap: Callable[..., Result]) -> None:
    for name, command in commands():
        text = tcap(*name.split(), "--help").output
        has_run_options = any(getattr(each, "section", "") for each in command.params)
        titles = [line for line in text.splitlines() if line in ("Options:", "Run options:")]
        assert titles == ["Options:", "Run options:"][: 1 + has_run_options], name
        assert not has_run_options or "--num-hidden-layers" in text.partition("Run options:")[2]


def test_commands_that_refuse_to_repeat_a_run_do_not_offer_it() -> None:
    assert {command for command, name, _ in options() if name == "--like"} == {
        "capture coreai",
        "capture executorch",
        "capture jax",
        "capture max",
        "capture neuron",
        "capture onnx",
        "capture torch",
        "inject",
    }


def test_commands_are_listed_by_what_they_are_for(tcap: Callable[..., Result]) -> None:
    text = tcap("--help").output
    titles = ["Capture:", "Look:", "Compare:", "Find the culprit:", "Files:"]
    assert [line for line in text.splitlines() if line in titles] == titles
    look = text.partition("Look:")[2].partition("Compare:")[0]
    assert [line.split()[0] for line in look.splitlines() if line] == ["ls", "show", "tree", "view"]


def test_usage_says_that_compare_needs_no_archives_with_saved_results(tcap: Callable[..., Result]) -> None:
    assert "tcap compare [OPTIONS] [REF[::KEY] TGT[::KEY]]\n" in tcap("compare", "--help").output
