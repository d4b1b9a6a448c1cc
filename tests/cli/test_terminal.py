"""Lines on a terminal, what to type next, rows that are folded, statuses, histograms."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from tensorcap_cli.main import main
from tensorcap_cli.text.output import print_table
from tensorcap_cli.text.terminal import Output, linked, shows_links, visible_width

Tcap = Callable[..., Any]
Write = Callable[..., Path]
README = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
GENERATOR = np.random.default_rng(3)
X = GENERATOR.standard_normal((4, 8)).astype(np.float32)


def rows_of(output: str) -> list[str]:
    """The rows of the table: those after its head, up to an empty line."""
    lines = output.splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith("status "))
    return [line for line in lines[at + 1 : lines.index("", at)] if not line.startswith("(+")]


def chain(*wrong: int, count: int = 4) -> dict[str, Any]:
    """Layers whose result is also the next one's argument; of wrong ones it is doubled."""
    tensors: dict[str, Any] = {}
    for number in range(count):
        result = X * (number + 2) * (2 if number in wrong else 1)
        tensors |= {f"0/layers.{number}.fc/output": result, f"0/layers.{number}.act/input.x": result}
    return tensors


def model_run(path: str, **options: Any) -> dict[str, Any]:
    return {"workload": {"kind": "function", "path": path, "options": options}}


@pytest.mark.spec("RPT-90")
@pytest.mark.parametrize(
    ("ours", "theirs", "command"),
    [
        pytest.param("", "", "localize ref.h5 tgt.h5", id="no-model"),
        pytest.param("m.py:ref", "", "localize ref.h5 tgt.h5", id="reference"),
        pytest.param("m.py:ref", "m.py:port", "localize ref.h5 tgt.h5", id="both"),
        pytest.param("", "m.py:port", "localize ref.h5 tgt.h5 --target-model m.py:port", id="target"),
    ],
)
def test_the_last_line_of_a_red_compare_localizes_by_the_model_that_is_known(
    tcap: Tcap, write: Write, ours: str, theirs: str, command: str
) -> None:
    write("ref.h5", chain(), run=model_run(ours))
    write("tgt.h5", chain(1), run=model_run(theirs))
    last = tcap("compare", "ref.h5", "tgt.h5", status=1).stdout.splitlines()[-1]
    assert last == f"Next, which module is wrong: tcap {command}"


@pytest.mark.spec("RPT-90")
def test_other_inputs_lead_to_preflight_and_a_run_that_broke_off_to_its_error(
    tcap: Tcap, write: Write
) -> None:
    write("ref.h5", {"0/@root/input.x": X, "0/fc/output": X})
    write("tgt.h5", {"0/@root/input.x": X + 1, "0/fc/output": X + 1})
    last = tcap("compare", "ref.h5", "tgt.h5", status=1).stdout.splitlines()[-1]
    assert last == "Next, all that differs before any tensor does: tcap preflight ref.h5 tgt.h5"
    write("end.h5", {"0/@root/input.x": X, "0/fc/output": X}, complete=False)
    last = tcap("compare", "ref.h5", "end.h5", status=1).stdout.splitlines()[-1]
    assert last == "Next, why the run ended early: tcap show end.h5"


@pytest.mark.spec("RPT-90")
def test_what_made_the_target_is_not_what_to_type_next(tcap: Tcap, write: Write) -> None:
    low = {key: value.astype(np.float16) for key, value in chain().items()}
    run = {"dtype": "float16", "compute_dtype": "float16"}
    write("ref.h5", chain(), run=model_run("m.py:ref"))
    write("tgt.h5", low, run={**run, **model_run("m.py:ref", dtype="float16")})
    lines = tcap("compare", "ref.h5", "tgt.h5").stdout.splitlines()
    assert lines[-1] == "Next: nothing has to be done."
    write("port.h5", low, run={**run, **model_run("m.py:port")})
    last = tcap("compare", "ref.h5", "port.h5").stdout.splitlines()[-1]
    assert last == (
        "Next, what would prove more: tcap capture torch --like ref.h5 --dtype float16 -o twin.h5 && "
        "tcap compare ref.h5 port.h5 --baseline twin.h5"
    )


@pytest.mark.spec("RPT-90")
def test_a_name_that_a_shell_would_obey_is_quoted(tcap: Tcap, write: Write) -> None:
    write("ref.h5", chain())
    write("my $(tgt).h5", chain(1))
    last = tcap("compare", "ref.h5", "my $(tgt).h5", status=1).stdout.splitlines()[-1]
    assert last.endswith("tcap localize ref.h5 'my $(tgt).h5'")


@pytest.mark.spec("RPT-91")
def test_a_tensor_and_a_fault_have_one_row_each(tcap: Tcap, write: Write) -> None:
    write("ref.h5", chain())
    write("tgt.h5", chain(1, 2, 3))
    output = tcap("compare", "ref.h5", "tgt.h5", status=1).stdout
    (row,) = rows_of(output)
    assert "0/layers.{1-3}.fc/output (+ 3)" in row
    assert row.startswith("diverged")
    every = rows_of(tcap("compare", "ref.h5", "tgt.h5", "--all", status=1).stdout)
    assert len(every) == 8


@pytest.mark.spec("RPT-91")
def test_layers_of_unlike_faults_are_not_folded(tcap: Tcap, write: Write) -> None:
    target = chain(1)
    target["0/layers.2.fc/output"] = np.full_like(X, np.nan)
    write("ref.h5", chain())
    write("tgt.h5", target)
    rows = rows_of(tcap("compare", "ref.h5", "tgt.h5", status=1).stdout)
    assert [row.split()[0] for row in rows] == ["diverged", "nonfinite"]


@pytest.mark.spec("RPT-92")
def test_rows_of_some_statuses_alone(tcap: Tcap, write: Write) -> None:
    write("ref.h5", chain())
    write("tgt.h5", chain(1))
    rows = rows_of(tcap("compare", "ref.h5", "tgt.h5", "--status", "identical", status=1).stdout)
    assert len(rows) == 1
    assert "0/layers.{0,2-3}.fc/output (+ 3)" in rows[0]
    rows = rows_of(tcap("compare", "ref.h5", "tgt.h5", "--status", "diverged, suspect", status=1).stdout)
    assert [row.split()[0] for row in rows] == ["diverged"]
    error = tcap("compare", "ref.h5", "tgt.h5", "--status", "diverge", status=2).stderr
    assert "--status 'diverge': there is no such status" in error
    assert "Did you mean diverged" in error
    assert (
        "expected no --json"
        in tcap("compare", "ref.h5", "tgt.h5", "--status", "match", "--json", status=2).stderr
    )


@pytest.mark.spec("RPT-93")
def test_lines_fit_the_terminal_and_words_stay_whole() -> None:
    screen = io.StringIO()
    terminal = Output(screen, width=40, has_links=False)
    text = "  \x1b[31ma finding\x1b[0m: " + "one two three four five " * 4
    terminal.write(f"{text}\nshort\n")
    lines = screen.getvalue().splitlines()
    assert all(visible_width(line) <= 40 for line in lines)
    assert lines[-1] == "short"
    assert " ".join("".join(lines[:-1]).split()) == " ".join(text.split())
    assert all(line.startswith("    ") for line in lines[1:-1])
    terminal.write("no end of line, as a progress bar writes it, however long it is")
    assert screen.getvalue().endswith("\nno end of line, as a progress bar writes it, however long it is")


@pytest.mark.spec("RPT-93")
def test_places_in_files_are_links_where_the_terminal_has_them(
    tmp_path: Path, tcap: Tcap, write: Write
) -> None:
    (tmp_path / "my model.py").touch()
    path = tmp_path / "model.py"
    path.touch()
    text = linked(f"at {path}:12 in forward, not {tmp_path}/absent.py:3")
    assert "file://" in text
    assert f"{path}#12\x1b\\{path}:12\x1b]8;;\x1b\\ in forward" in text
    assert text.count("\x1b]8;;file") == 1
    assert visible_width(text) == len(f"at {path}:12 in forward, not {tmp_path}/absent.py:3")
    assert [shows_links({"TERM_PROGRAM": name}) for name in ("WezTerm", "Apple_Terminal")] == [True, False]
    assert not shows_links({"KITTY_WINDOW_ID": "1", "TMUX": "/tmp/tmux"})
    assert shows_links({"FORCE_HYPERLINK": "1", "TERM": "dumb"})
    write("ref.h5", chain())
    assert "\x1b" not in tcap("show", "ref.h5").stdout  # which is no terminal


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_completion_of_the_readme_is_that_of_each_shell(shell: str) -> None:
    line = next(line for line in README.splitlines() if f"_TCAP_COMPLETE={shell}_source tcap" in line)
    assert line.startswith("eval" if shell != "fish" else "_TCAP_COMPLETE")
    environment = {"_TCAP_COMPLETE": f"{shell}_source"}
    result = CliRunner().invoke(main, [], prog_name="tcap", env=environment)
    assert result.exit_code == 0
    assert f"_TCAP_COMPLETE={shell}_complete" in result.stdout
    words = {"COMP_WORDS": "tcap compa", "COMP_CWORD": "1" if shell != "fish" else "compa"}
    environment = {"_TCAP_COMPLETE": f"{shell}_complete", **words}
    assert "compare" in CliRunner().invoke(main, [], prog_name="tcap", env=environment).stdout


@pytest.mark.spec("RPT-94")
def test_values_and_errors_have_histograms(tcap: Tcap, write: Write) -> None:
    values = np.repeat(np.arange(32.0), [1] * 31 + [400])
    write("ref.h5", {"0/fc/output": values, "0/small/output": X})
    lines = tcap("show", "ref.h5", "0/fc/output").stdout.splitlines()
    assert f"  values 0 {'▁' * 31}█ 31" in lines
    assert "values" not in tcap("show", "ref.h5", "0/small/output").stdout
    errors = np.repeat([1.0, 4.0], [4, values.size - 4])  # two powers of two apart: 8 bins, 9 with both
    write("tgt.h5", {"0/fc/output": values + errors, "0/small/output": X})
    output = tcap("compare", "ref.h5", "tgt.h5", "--where", status=1).stdout
    assert f"  errors 1 ▁{' ' * 7}█ 4 (log scale)\n" in output


@pytest.mark.parametrize("width", [None, 40], ids=["pipe", "terminal"])
def test_nothing_that_is_printed_steers_the_terminal(width: int | None) -> None:
    screen = io.StringIO()
    Output(screen, width=width).write("a\x1b[2J \u202eb\x00\x7f \x1b[31mred\x1b[0m\tä … ≤ 名\n")
    assert screen.getvalue() == r"a\x1b[2J \u202eb\x00\x7f " + "\x1b[31mred\x1b[0m\tä … ≤ 名\n"


def test_names_in_errors_are_escaped_and_cut(tcap: Tcap, folder: Path) -> None:
    for name, shown in (
        ("a\nb\x1b[2J.h5", r"a\nb\x1b[2J.h5"),
        ("\u202etxt.h5", r"\u202etxt.h5"),
        ("\udcff.h5", r"\udcff.h5"),
    ):
        stderr = tcap("show", name, status=3).stderr
        assert stderr == f"Error: {shown}: there is no such file or folder\n"
    stderr = tcap("show", "x" * 9000, status=3).stderr
    assert len(stderr) < 4100


def test_what_an_encoding_has_not_is_replaced(write: Write, folder: Path) -> None:
    write("r.h5", {"0/名/output": X})
    environment = {**os.environ, "PYTHONIOENCODING": "latin-1", "PYTHONUTF8": "0"}
    command = [sys.executable, "-m", "tensorcap_cli", "ls", "r.h5"]
    done = subprocess.run(command, capture_output=True, check=True, cwd=folder, env=environment)
    assert rb"\u540d" in done.stdout


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no full device")
@pytest.mark.parametrize("command", ["ls r.h5", "ls r.h5 --json", "--help"])
def test_a_full_standard_output_is_one_line(command: str, write: Write, folder: Path) -> None:
    write("r.h5", {f"0/layers.{i}.{'fc' * 200}/output": X for i in range(60)})
    line = f'"$0" -m tensorcap_cli {command} >/dev/full'
    done = subprocess.run(
        ["sh", "-c", line, sys.executable], capture_output=True, text=True, check=False, cwd=folder
    )
    assert (done.returncode, done.stderr) == (
        1,
        "Error: standard output: [Errno 28] No space left on device\n",
    )


@pytest.mark.skipif(os.name != "posix", reason="needs a shell that closes a stream")
def test_a_closed_standard_output_is_no_error(write: Write, folder: Path) -> None:
    write("r.h5", {"0/m/output": X})
    line = '"$0" -m tensorcap_cli ls r.h5 --json >&-'
    done = subprocess.run(
        ["sh", "-c", line, sys.executable], capture_output=True, text=True, check=False, cwd=folder
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_json_has_escapes_for_what_a_terminal_obeys(tcap: Tcap, write: Write) -> None:
    write("r.h5", {"0/m/output": X}, run={"notes": "\x7f\u202e\U000e0001"})
    text = tcap("show", "r.h5", "--json").stdout
    assert all(c.isprintable() for c in text.rstrip("\n"))
    assert json.loads(text)["run"]["notes"] == "\x7f\u202e\U000e0001"


def test_columns_of_a_long_table_are_as_wide_as_their_cells(capsys: pytest.CaptureFixture[str]) -> None:
    print_table(("key", "n"), [("abcdef", "1"), *[("a", "1")] * 2500, ("b", "12345")])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2503
    assert (lines[0], lines[1], lines[-1]) == ("key         n", "abcdef      1", "b       12345")
