"""`--timeout`: a command in a process of its own, which is ended if it takes too long or dies."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.conftest import ROOT

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are forked")

# A command of `tcap` in all but what it does: the code that it is given is run.
COMMAND = """
import os, signal, sys, time
import click
import tensorcap_cli.main as main
from tensorcap_cli.options.time_limit import time_limit_option


@click.command()
@click.argument("code")
@click.option("-o", "--output")
@time_limit_option
def command(code, output):
    print("pid", os.getpid(), flush=True)
    exec(code)


main.main.add_command(command, "run")
main._Tcap.get_command = lambda self, ctx, name: command
main.main(prog_name="tcap")
"""


def run(folder: Path, code: str, *options: str, status: int = 0) -> subprocess.CompletedProcess[str]:
    paths = os.pathsep.join(str(ROOT / part) for part in (".", "formats", "cli"))
    done = subprocess.run(
        [sys.executable, "-c", COMMAND, "run", code, *options],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == status, done.stdout + done.stderr
    return done


def is_alive(done: subprocess.CompletedProcess[str]) -> bool:
    pid = int(done.stdout.split()[1])
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_what_ends_in_time_is_as_without_a_limit(tmp_path: Path) -> None:
    code = "print('done'); click.echo('told', err=True); os.write(2, b'chatter of a compiler')"
    done = run(tmp_path, code, "-o", "x.h5", "--timeout", "600")
    assert done.stdout.splitlines()[1] == "done"
    assert done.stderr == "told\n"
    assert list(tmp_path.iterdir()) == []


def test_the_exit_status_is_handed_on_and_what_a_compiler_wrote_is_kept(tmp_path: Path) -> None:
    code = "os.write(2, b'no such op'); sys.exit(3)"
    done = run(tmp_path, code, "-o", "x.h5", "--timeout", "600", status=3)
    assert (tmp_path / "x.h5.log").read_text() == "no such op"
    assert done.stderr == "log: x.h5.log\n"
    run(tmp_path, "sys.exit(3)", "-o", "y.h5", "--timeout", "600", status=3)
    assert [path.name for path in tmp_path.iterdir()] == ["x.h5.log"]


def test_the_log_of_a_folder_lies_beside_it(tmp_path: Path) -> None:
    run(tmp_path, "os.write(2, b'no such op'); sys.exit(1)", "-o", "report/", "--timeout", "600", status=1)
    assert [path.name for path in tmp_path.iterdir()] == ["report.log"]


def test_what_has_the_name_of_the_log_is_kept(tmp_path: Path) -> None:
    (tmp_path / "report.log").write_text("precious")
    run(tmp_path, "pass", "-o", "report", "--timeout", "600")
    assert [path.name for path in tmp_path.iterdir()] == ["report.log"]
    done = run(
        tmp_path, "os.write(2, b'no such op'); sys.exit(1)", "-o", "report", "--timeout", "600", status=1
    )
    assert done.stderr == "log: report.1.log\n"
    assert (tmp_path / "report.log").read_text() == "precious"
    assert (tmp_path / "report.1.log").read_text() == "no such op"


def test_what_takes_too_long_is_ended_and_its_log_says_where_it_was(tmp_path: Path) -> None:
    code = "def compiling():\n    time.sleep(600)\ncompiling()"
    done = run(tmp_path, code, "-o", "x.h5", "--timeout", "5", status=1)
    assert "Error: the run took more than 5 s; its log is x.h5.log\n" in done.stderr
    assert "in compiling" in (tmp_path / "x.h5.log").read_text()
    assert not is_alive(done)


def test_it_is_given_the_chance_to_keep_what_it_has(tmp_path: Path) -> None:
    heed = "signal.signal(signal.SIGINT, signal.default_int_handler)"  # which a job in the background ignores
    code = f"{heed}\ntry:\n    time.sleep(600)\nfinally:\n    open('kept', 'w').close()"
    run(tmp_path, code, "-o", "x.h5", "--timeout", "15", status=1)
    assert (tmp_path / "kept").exists()


def test_what_does_not_heed_an_interrupt_is_killed(tmp_path: Path) -> None:
    code = "signal.signal(signal.SIGINT, signal.SIG_IGN)\ntime.sleep(600)"
    done = run(tmp_path, code, "-o", "x.h5", "--timeout", "5", status=1)
    assert "took more than 5 s" in done.stderr
    assert not is_alive(done)


def test_a_process_that_dies_is_reported_with_where_it_died(tmp_path: Path) -> None:
    code = "def compiling():\n    os.kill(os.getpid(), signal.SIGSEGV)\ncompiling()"
    done = run(tmp_path, code, "-o", "x.h5", "--timeout", "600", status=1)
    assert "Error: the run died of SIGSEGV; its log is x.h5.log\n" in done.stderr
    assert "in compiling" in (tmp_path / "x.h5.log").read_text()


def test_without_an_output_the_log_has_a_temporary_place(tmp_path: Path) -> None:
    done = run(tmp_path, "os.kill(os.getpid(), signal.SIGKILL)", "--timeout", "600", status=1)
    line = next(line for line in done.stderr.splitlines() if line.startswith("Error"))
    log = Path(line.partition("its log is ")[2])
    assert log.is_absolute()
    log.unlink()


def test_a_place_that_cannot_be_written_is_refused_before_the_run(tmp_path: Path) -> None:
    done = run(tmp_path, "print('ran')", "-o", "no/x.h5", "--timeout", "600", status=2)
    assert "no/x.h5.log: No such file or directory" in done.stderr
    assert "ran" not in done.stdout


def test_an_interrupt_ends_both(tmp_path: Path) -> None:
    paths = os.pathsep.join(str(ROOT / part) for part in (".", "formats", "cli"))
    process = subprocess.Popen(
        [sys.executable, "-c", COMMAND, "run", "time.sleep(600)", "-o", "x.h5", "--timeout", "600"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": paths},
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,  # a group of its own, which a terminal would interrupt as a whole
        # A shell has what it runs in the background ignore the signal.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    with process:
        assert process.stdout is not None
        pid = int(process.stdout.readline().split()[1])
        os.killpg(process.pid, signal.SIGINT)
        assert process.wait(300) == 130
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
