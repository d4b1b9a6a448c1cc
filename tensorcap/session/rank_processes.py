"""A command on several ranks: a process for each, which end together."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Final

from tensorcap_formats.errors import CaptureError, abbreviate
from tensorcap_formats.output_path import open_log

_POLL_SECONDS: Final = 0.05
_NO_ERRORS: Final = ("Hint:", "tensorcap:", "capturing ")
_CLOCK_SECONDS: Final = 2.0  # by which the times of files may be coarse
_PREFIX: Final = re.compile(r"(?:\[rank\d+\]: ?)?(?:Error: )?")  # torch's, of each line, and ours
_GRACE_SECONDS: Final = 5.0  # for the others to end in order


def run_on_ranks(command: Sequence[str], logs: Sequence[Path], outputs: Sequence[Path] = ()) -> None:
    """Run a command once for each log, as ranks that know of each other as those of `torchrun` do.

    What a process prints goes to its log. Logs are removed, but for those of ranks that failed.

    Args:
        command: The program and its arguments, the same on each rank.
        logs: Where each rank's log lies, by rank; beside that if something is there.
        outputs: What each rank writes, by rank; () if that is not known.

    Raises:
        CaptureError: A process did not end with 0, or did not write what it should; the others were ended.
    """
    start = time.time()
    environment = {
        "OMP_NUM_THREADS": "1",
        **os.environ,
        "WORLD_SIZE": str(len(logs)),
        "LOCAL_WORLD_SIZE": str(len(logs)),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(_free_port()),
    }
    processes: list[subprocess.Popen[bytes]] = []
    opened: list[Path] = []
    failed: dict[int, int] = {}
    try:
        with ExitStack() as files:
            for rank, path in enumerate(logs):
                own = {**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)}
                log, descriptor = open_log(path)
                opened.append(log)
                file = files.enter_context(os.fdopen(descriptor, "wb"))
                processes.append(
                    subprocess.Popen(
                        command, env=own, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT
                    )
                )
        failed = _first_failure(processes, opened, lambda rank: _is_written(outputs, rank, start))
    finally:
        _end(processes)
        for rank, log in enumerate(opened):
            if rank not in failed:
                log.unlink(missing_ok=True)
    if failed:
        rank, status = next(iter(failed.items()))
        raise CaptureError(
            f"rank {rank} of {len(logs)} {_ended(status)}: {_last_line(opened[rank])}",
            hint=f"The other ranks were ended; its log is {opened[rank]}.",
        )


def _first_failure(
    processes: Sequence[subprocess.Popen[bytes]], logs: Sequence[Path], is_written: Callable[[int], bool]
) -> dict[int, int]:
    """Wait until all processes are over, or one has failed.

    Returns:
        The exit statuses of those that failed, the cause first: a rank that dies takes others with it, which
        lose their connection to it. So it is the one that printed nothing any more for the longest time.
    """
    while True:
        statuses = {rank: process.poll() for rank, process in enumerate(processes)}
        failed = {
            rank: status
            for rank, status in statuses.items()
            if status is not None and (status or not is_written(rank))
        }
        if failed or None not in statuses.values():
            return dict(sorted(failed.items(), key=lambda item: logs[item[0]].stat().st_mtime_ns))
        time.sleep(_POLL_SECONDS)


def _is_written(outputs: Sequence[Path], rank: int, start: float) -> bool:
    """Whether a rank wrote its output, as far as that is known, and not an earlier run."""
    if not outputs:
        return True
    try:
        return outputs[rank].stat().st_mtime >= start - _CLOCK_SECONDS
    except OSError:
        return False


def _end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        if process.poll() is None:
            process.terminate()
    last = time.monotonic() + _GRACE_SECONDS
    for process in processes:
        with suppress(subprocess.TimeoutExpired):
            process.wait(max(0.0, last - time.monotonic()))
            continue
        process.kill()
        process.wait()


def _ended(status: int) -> str:
    if not status:
        return "ended before its archive was written"
    return f"ended with status {status}" if status > 0 else f"died of {signal.Signals(-status).name}"


def _last_line(log: Path) -> str:
    """What a process said last of an error: the last line that is none of a hint, or of what is under way."""
    text = log.read_text("utf-8", "replace")
    lines = [_PREFIX.sub("", line.strip(), count=1) for line in text.splitlines()]
    said = [line for line in lines if line and not line.startswith(_NO_ERRORS)]
    return abbreviate(said[-1]) if said else "it printed nothing"


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port
