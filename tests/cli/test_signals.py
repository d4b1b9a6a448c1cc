"""A signal that ends a command leaves nothing behind: no process, no folder, no half of a file."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.cli.conftest import ROOT

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="signals of a POSIX system")

# A command of `tcap` in all but what it does: it writes a folder, and is ended in the middle of that.
COMMAND = """
import os, sys, time
from pathlib import Path
import click
import tensorcap_cli.main as main
from tensorcap.adapters.native_call import call_natively
from tensorcap.reports.verification_files import replace_folder
from tensorcap.session import run_on_ranks
from tensorcap_cli.options.time_limit import time_limit_option


RANK = "import os, time; print(os.getpid(), flush=True); time.sleep(600)"


def sleep():
    time.sleep(600)


def compile_for_long():  # in native code, which no signal ends
    import ctypes
    ctypes.PyDLL(None).usleep(100_000)  # holds Python up, too
    ctypes.CDLL(None).sleep(600)


@click.command()
@click.argument("what")
@click.option("-o", "--output")
@time_limit_option
def command(what, output):
    with replace_folder(Path(output), force=False) as folder:
        (folder / "half.h5").write_bytes(b"half")
        print(os.getpid(), flush=True)
        if what == "sleeps":
            sleep()
        if what == "ranks":
            run_on_ranks([sys.executable, "-c", RANK], [Path(f"{number}.log") for number in range(2)])
        call_natively(compile_for_long, lambda seconds: None)


main.main.add_command(command, "run")
main._Tcap.get_command = lambda self, ctx, name: command
main.main(prog_name="tcap")
"""
STATUS = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGHUP: 129}


def run_until(folder: Path, *arguments: str) -> tuple[subprocess.Popen[str], int]:
    """Start the command, and wait until it is at work; returns it, and the process that works."""
    paths = os.pathsep.join(str(ROOT / part) for part in (".", "formats", "cli"))
    process = subprocess.Popen(
        [sys.executable, "-c", COMMAND, "run", *arguments, "-o", "report"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": paths},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        # A shell has what it runs in the background ignore the one, and nohup the other.
        preexec_fn=lambda: [
            signal.signal(number, signal.SIG_DFL) for number in (signal.SIGINT, signal.SIGHUP)
        ],
    )
    assert process.stdout is not None
    return process, int(process.stdout.readline())


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.spec("MAX-110")
@pytest.mark.parametrize(
    ("number", "arguments"),
    [
        pytest.param(signal.SIGTERM, ("sleeps",), id="term"),
        pytest.param(signal.SIGTERM, ("compiles",), id="term in native code"),
        pytest.param(signal.SIGTERM, ("compiles", "--timeout", "600"), id="term of the parent"),
        pytest.param(signal.SIGHUP, ("compiles", "--timeout", "600"), id="hangup of the parent"),
        pytest.param(signal.SIGINT, ("compiles", "--timeout", "600"), id="interrupt of the parent alone"),
    ],
)
def test_a_signal_ends_the_command_and_its_child_and_leaves_no_folder(
    tmp_path: Path, number: signal.Signals, arguments: tuple[str, ...]
) -> None:
    process, worker = run_until(tmp_path, *arguments)
    process.send_signal(number)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == STATUS[number], errors
    assert not is_alive(worker)
    assert [path.name for path in tmp_path.iterdir() if path.suffix != ".log"] == []
    assert errors.startswith("Ended by SIG" if number != signal.SIGINT or worker != process.pid else "Inter")


@pytest.mark.spec("MAX-110")
def test_a_closed_terminal_signals_both_processes_and_each_ends_once(tmp_path: Path) -> None:
    process, worker = run_until(tmp_path, "compiles", "--timeout", "600")
    os.killpg(process.pid, signal.SIGHUP)
    _, errors = process.communicate(timeout=120)
    assert (process.returncode, errors.count("Ended by")) == (129, 1)
    assert not is_alive(worker)
    assert [path.name for path in tmp_path.iterdir() if path.suffix != ".log"] == []


@pytest.mark.spec("MAX-110", "NRN-154")
def test_a_signal_ends_the_ranks_that_a_command_started(tmp_path: Path) -> None:
    process, _ = run_until(tmp_path, "ranks")
    logs = [tmp_path / f"{number}.log" for number in range(2)]
    last = time.monotonic() + 120
    while not all(log.exists() and log.read_text().endswith("\n") for log in logs):
        assert time.monotonic() < last
        time.sleep(0.05)
    ranks = [int(log.read_text()) for log in logs]
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 143, errors
    assert not any(map(is_alive, ranks))
    assert list(tmp_path.iterdir()) == []
