"""What all commands share: help, errors, interruption, pipes."""

from __future__ import annotations

import importlib.metadata
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import numpy as np
import pytest
from click.testing import CliRunner

from tensorcap_cli.main import main

COMMANDS = main.list_commands(click.Context(main))


def test_help_lists_every_command(tcap: Callable[..., Any]) -> None:
    output = tcap("-h").output
    for name in COMMANDS:
        assert f"\n  {name} " in output


@pytest.mark.parametrize("name", [name for name in COMMANDS if name != "capture"])
def test_every_help_has_an_example_and_the_exit_status(tcap: Callable[..., Any], name: str) -> None:
    output = tcap(name, "-h").output
    assert f"\n      tcap {name} " in output
    assert "Exit status: 0 " in output
    assert max(map(len, output.splitlines())) <= 80


def test_version_is_that_of_the_package(tcap: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: {"tensorcap": "1.2.3"}[name])
    assert tcap("--version").output == "tcap, version 1.2.3\n"


def test_unknown_command_is_wrong_usage(tcap: Callable[..., Any]) -> None:
    assert "No such command 'lst'" in tcap("lst", status=2).stderr


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        pytest.param(["ls", "no.h5"], 3, "Error: no.h5: there is no such file or folder", id="no-file"),
        pytest.param(["show", "no.h5", "k"], 3, "Error: no.h5: there is no such file or folder", id="show"),
        pytest.param(["compare", "a.h5", "no.h5"], 3, "Error: no.h5: there is no such", id="compare"),
        pytest.param(
            ["ls", "text.h5"], 3, "Error: text.h5: begins with b'not an archive', expected", id="text"
        ),
        pytest.param(["ls", "a.h5", "zz"], 2, "Error: a.h5: no tensor 'zz' among 1", id="no-match"),
        pytest.param(["compare", "a.h5", "a.h5", "--rtol", "-1"], 2, "Error: rtol: is -1.0", id="tolerance"),
        pytest.param(["compare", "a.h5", "a.h5", "--rtol", "nan"], 2, "Error: rtol: is nan", id="nan"),
    ],
)
def test_an_error_is_one_line_on_stderr(
    tcap: Callable[..., Any],
    write: Callable[..., Path],
    folder: Path,
    arguments: list[str],
    status: int,
    message: str,
) -> None:
    write("a.h5", {"0/mlp/output": np.ones(1, np.float32)})
    (folder / "text.h5").write_text("not an archive")
    result = tcap(*arguments, status=status)
    assert result.stdout == ""
    lines = result.stderr.splitlines()
    assert message in lines[0].replace(f"{folder}/", "")
    assert len(lines) == 1 or (len(lines) == 2 and lines[1].startswith("Hint: "))


def test_a_bug_shows_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_: str) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("tensorcap_formats.open.open_archive", broken)
    assert isinstance(CliRunner().invoke(main, ["ls", "a.h5"]).exception, ZeroDivisionError)


def test_interruption_is_one_line_and_status_130(
    tcap: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(_: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("tensorcap_formats.open.open_archive", interrupted)
    result = tcap("ls", "a.h5", status=130)
    assert (result.stdout, result.stderr) == ("", "Interrupted.\n")


def test_a_reader_that_goes_away_is_no_error(
    write: Callable[..., Path], shell: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    write("a.h5", {f"0/layers.{i}/output": np.ones(1, np.float32) for i in range(3000)})
    found = shell("tcap ls a.h5 | head -3")
    assert len(found.stdout.splitlines()) == 3
    assert found.stderr == ""
