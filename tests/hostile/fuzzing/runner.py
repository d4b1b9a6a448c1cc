"""What a hostile input may not do: raise, run code, open what is elsewhere, take long, steer a terminal."""

from __future__ import annotations

import gc
import importlib
import os
import random
import re
import resource
import shutil
import signal
import sys
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from tensorcap_formats.errors import TensorcapError
from tensorcap_formats.open import open_archive
from tests.hostile.fuzzing.seeds import REFERENCE, SEEDS, Seed, command, write_archive

CPU_SECONDS: Final = 10.0  # an input of some kilobytes takes milliseconds
WALL_SECONDS: Final = 120.0  # at a pipe it would wait for ever
MEMORY_BYTES: Final = 2 << 30  # of addresses above those of the process at the start
_COMMANDS: Final = 0.1  # share of inputs that are given to a command too
_STYLE: Final = re.compile(r"\x1b\[[0-9;]*m")
_RUNS: Final = frozenset(
    {"os.system", "os.exec", "os.posix_spawn", "subprocess.Popen", "socket.connect", "os.fork"}
)
_READ_ALL_BYTES: Final = 1 << 28


class Forbidden(BaseException):
    """What no error handler may catch: an input that runs something, leads elsewhere or takes too long."""


@dataclass
class Outcomes:
    """What came of the inputs of one seed.

    Attributes:
        answers: How often it was read, or refused with which error.
        failures: What may not be, by the number of the input.
    """

    answers: Counter[str] = field(default_factory=Counter)
    failures: dict[int, str] = field(default_factory=dict)


class Guard:
    """An audit hook that lets a process open files of a folder only, and start nothing."""

    def __init__(self) -> None:
        self._folder: str | None = None
        self._is_busy = False

    @contextmanager
    def watching(self, folder: Path) -> Iterator[None]:
        """Watch what is opened for as long as a block lasts."""
        self._folder = os.path.realpath(folder)
        try:
            yield
        finally:
            self._folder = None

    def __call__(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self._folder is None or self._is_busy:
            return
        if event in _RUNS:
            raise Forbidden(f"{event} {arguments[:1]}")
        if event == "open" and isinstance(arguments[0], str | bytes):
            self._is_busy = True
            try:
                self._check(os.fsdecode(arguments[0]), arguments[2])
            finally:
                self._is_busy = False

    def _check(self, path: str, flags: int) -> None:
        assert self._folder is not None
        real = os.path.realpath(path)
        is_inside = real == self._folder or real.startswith(self._folder + os.sep)
        given = os.path.abspath(path)
        is_near = given.startswith(
            os.path.dirname(self._folder) + os.sep
        )  # of the input, or beside its folder
        leads_out = is_near and not is_inside
        writes = bool(flags & (os.O_WRONLY | os.O_RDWR))
        is_outside = real in ("/etc/hostname", "/dev/zero")
        if leads_out or is_outside or (writes and not is_inside and not real.startswith("/dev/null")):
            raise Forbidden(f"opens {path!r}")


def fuzz(name: str, numbers: range, folder: Path) -> Outcomes:
    """Try inputs of one seed, each drawn from its number alone.

    Args:
        name: Of the seed.
        numbers: Of the inputs.
        folder: A new folder to work in, on a file system with links and pipes.
    """
    seed = SEEDS[name]
    folder.mkdir(parents=True)
    (folder / "outside").write_text("secret")
    start = folder / "start"
    start.mkdir()
    write_archive(start / REFERENCE)
    write_archive(start / "other.h5", scale=2)
    seed.write(start / seed.name)
    for line in ("compare good.h5 other.h5", *seed.commands):  # all is imported before memory is measured
        shutil.copytree(start, folder / "case", symlinks=True)
        command_outcome(seed, folder / "case", line)
        shutil.rmtree(folder / "case")
    for library in ("h5py", "zarr"):  # which ask for the machine's name
        importlib.import_module(library)
    guard = Guard()
    sys.addaudithook(guard)
    outcomes = Outcomes()
    with _limits():
        for number in numbers:
            case = folder / "case"
            shutil.rmtree(case, ignore_errors=True)
            shutil.copytree(start, case, symlinks=True)
            draw = random.Random(f"{name} {number}")
            draw.choice(seed.mutations)(case / seed.name, draw)
            try:
                with guard.watching(case), _time_limit():
                    outcomes.answers[_outcome(seed, case, draw)] += 1
            except (Exception, Forbidden) as error:
                outcomes.failures[number] = "".join(traceback.format_exception(error)[-4:])
            if number % 500 == 0:
                gc.collect()
    return outcomes


def _outcome(seed: Seed, case: Path, draw: random.Random) -> str:
    answer = ""
    if seed.is_archive:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                read_all(case / seed.name)
            answer = "read"
        except TensorcapError as error:
            _require_plain(f"{error}\n{error.hint or ''}")
            answer = type(error).__name__
    if not seed.is_archive or draw.random() < _COMMANDS:
        answer += f" exit status {command_outcome(seed, case, draw.choice(seed.commands))}"
    return answer.strip()


def read_all(path: Path) -> None:
    """Read everything that an archive has."""
    with open_archive(path) as archive:
        _ = archive.info, dict(archive.values), archive.skipped if hasattr(archive, "skipped") else None
        rest = _READ_ALL_BYTES
        for record in archive.records:
            for block in archive.blocks(record):
                rest -= block.nbytes
                if rest < 0:
                    return
            if record.nbytes < 1 << 20:
                archive.read(record)


def command_outcome(seed: Seed, case: Path, line: str) -> int:
    """Run a command on the input; its exit status.

    Raises:
        AssertionError: It ended otherwise than a command may, or printed what steers a terminal.
    """
    result = command(case, line.format(seed.name))
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code in {0, 1, 2, 3}, f"{line}: exit status {result.exit_code}"
    _require_plain(result.output)
    return int(result.exit_code)


def _require_plain(text: str) -> None:
    """Refuse what a terminal would obey, and lines that flood it."""
    for line in _STYLE.sub("", text).split("\n"):
        bad = [c for c in line if not c.isprintable()]
        assert not bad, f"prints {bad[:3]!r} in {line[:200]!r}"


@contextmanager
def _time_limit() -> Iterator[None]:
    def end(*_: object) -> None:
        raise Forbidden(f"takes more than {CPU_SECONDS} s of a CPU, or than {WALL_SECONDS} s")

    timers = (
        (signal.SIGPROF, signal.ITIMER_PROF, CPU_SECONDS),
        (signal.SIGALRM, signal.ITIMER_REAL, WALL_SECONDS),
    )
    before = [signal.signal(number, end) for number, _, _ in timers]
    for _, timer, seconds in timers:
        signal.setitimer(timer, seconds)
    try:
        yield
    finally:
        for (number, timer, _), handler in zip(timers, before, strict=True):
            signal.setitimer(timer, 0)
            signal.signal(number, handler)


@contextmanager
def _limits() -> Iterator[None]:
    with open("/proc/self/statm") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY_BYTES, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
