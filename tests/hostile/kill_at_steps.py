"""Run a command once for each step that it takes in the file system, and kill it before that step.

    python -m tests.hostile.kill_at_steps [--writes] FOLDER ARGUMENT...

FOLDER/start is what the command finds; FOLDER/kill-N is what the N-th kill leaves, and FOLDER/end what the
command leaves when it is let alone. The steps are those that Python audits: files opened to be written,
renamed, removed, linked, locked and cut, folders made and removed, and the call that exchanges two paths;
with --writes also each write of a journal and of an unfinished archive.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

_STEPS: Final = frozenset(
    {
        "fcntl.flock",
        "os.link",
        "os.mkdir",
        "os.remove",
        "os.rename",
        "os.rmdir",
        "os.symlink",
        "os.truncate",
    }
)
_WRITES: Final = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC


class StepCounter:
    """An audit hook that ends the process before its step `last`."""

    def __init__(self, folder: Path, last: int) -> None:
        self._folder = str(folder)
        self._last = last
        self._count = 0

    def __call__(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self._is_step(event, arguments):
            self.count()

    def count(self) -> None:
        """Count a step, or end."""
        self._count += 1
        if self._count == self._last:
            os.kill(os.getpid(), signal.SIGKILL)

    def count_writes(self) -> None:
        """Count writes too, which Python does not audit."""
        for name in ("write", "pwrite", "writev", "pwritev"):
            setattr(os, name, self._counted(getattr(os, name)))

    def _counted(self, write: Callable[..., int]) -> Callable[..., int]:
        def counted(*arguments: Any) -> int:
            self.count()
            return write(*arguments)

        return counted

    def _is_step(self, event: str, arguments: tuple[Any, ...]) -> bool:
        if event == "ctypes.dlsym":
            return str(arguments[1]) == "renameat2"
        if event == "fcntl.flock":
            return True
        is_write = event == "open" and isinstance(arguments[2], int) and bool(arguments[2] & _WRITES)
        if event not in _STEPS and not is_write:
            return False
        if not isinstance(arguments[0], str | bytes | os.PathLike):
            return event == "os.truncate"
        return os.path.abspath(os.fsdecode(arguments[0])).startswith(self._folder)


def run_until(folder: Path, arguments: list[str], last: int, *, counts_writes: bool) -> int:
    """Run the command in a process of its own; its exit status, negative if it was killed."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    try:
        os.chdir(folder)
        sys.stdout.flush()
        null = os.open(os.devnull, os.O_RDWR)
        os.dup2(null, 1)
        from tensorcap_cli.main import main

        counter = StepCounter(folder, last)
        sys.addaudithook(counter)
        if counts_writes:
            counter.count_writes()
        main(arguments, prog_name="tcap")
    except SystemExit as end:
        os._exit(end.code if isinstance(end.code, int) else 0)
    except BaseException:
        sys.excepthook(*sys.exc_info())  # else this would go on as a second parent
        os._exit(99)
    os._exit(0)


def kill_at_every_step(folder: Path, arguments: list[str], *, counts_writes: bool) -> None:
    """Leave a folder for each step, and one for the whole run."""
    step = 0
    while True:
        step += 1
        place = folder / f"kill-{step:03}"
        shutil.copytree(folder / "start", place, symlinks=True)
        status = run_until(place, arguments, step, counts_writes=counts_writes)
        if status != -signal.SIGKILL:
            place.rename(folder / "end")
            print(f"{step - 1} kills, then exit status {status}", flush=True)
            if status not in (0, 1):
                raise SystemExit(f"exit status {status}, expected 0 or 1")
            return


if __name__ == "__main__":
    import numpy  # noqa: F401 - once, not in each of the processes

    import tensorcap_cli.commands  # noqa: F401
    import tensorcap_formats.writing  # noqa: F401

    given = sys.argv[1:]
    if is_all := given[0] == "--writes":
        given = given[1:]
    if given[1] == "capture":
        import torch  # noqa: F401

        import tensorcap.adapters.torch  # noqa: F401
    kill_at_every_step(Path(given[0]).resolve(), given[1:], counts_writes=is_all)
