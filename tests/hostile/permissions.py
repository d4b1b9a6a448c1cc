"""Commands on folders of which something may not be entered or read, also by root.

`python -m tests.hostile.permissions FOLDER` prints the attempts as JSON; it has to be a process of its own,
since rights that one thread gives up stay with the others.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Final

import numpy as np

from tests.hostile.containers import CONTAINERS, available
from tests.support.archives import write_archive

FOLDERS: Final = [
    name
    for name in available()
    if Path(CONTAINERS[name].name).suffix in ("", ".zarr", ".aimodelintermediates")
    and "torch" not in CONTAINERS[name].packages
]
_CAPABILITIES: Final = 0b110  # CAP_DAC_OVERRIDE and CAP_DAC_READ_SEARCH: to ignore the permissions of files
_VERSION_3: Final = 0x20080522  # of the structures of capget(2)


@dataclass(frozen=True)
class Attempt:
    """One command on one container.

    Attributes:
        container: Its name; "" if it is the folder of the output that may not be written to.
        place: What may not be read, as a path in it.
        mode: Its permissions.
        command: The command and its arguments.
        status: What it ended with.
        output: What it printed.
        fault: The exception that ended it, which is a fault; "" if none did.
    """

    container: str
    place: str
    mode: int
    command: str
    status: int
    output: str
    fault: str


def give_up_rights() -> bool:
    """Make permissions of files count for this thread and those that it starts; whether they do."""
    if os.geteuid():
        return True
    if sys.platform != "linux":
        return False
    library, header, sets = ctypes.CDLL(None), (ctypes.c_uint32 * 2)(_VERSION_3, 0), (ctypes.c_uint32 * 6)()
    if library.capget(header, sets):
        return False
    for number in range(3):  # effective, permitted, inheritable
        sets[number] &= ~_CAPABILITIES
    return not library.capset(header, sets)


def attempts(folder: Path) -> Iterator[Attempt]:
    """Take the permissions of each folder and each file of each container away, and run commands on it."""
    for name in FOLDERS:
        whole, partial = folder / "whole", folder / "partial"
        whole.mkdir(parents=True)
        CONTAINERS[name].write(whole)
        shutil.copytree(whole, partial)
        paths = [str(side / CONTAINERS[name].name) for side in (whole, partial)]
        for place in sorted(partial.rglob("*")):
            before = place.stat().st_mode
            for mode in (0, 0o444) if place.is_dir() else (0,):
                place.chmod(mode)
                for command in (
                    ["ls", paths[1]],
                    ["check", paths[1]],
                    ["compare", *paths],
                    ["compare", *reversed(paths)],
                ):
                    yield _attempt(name, str(place.relative_to(partial)), mode, command)
                place.chmod(before)
        shutil.rmtree(folder)
    yield from _writing_attempts(folder)


def _writing_attempts(folder: Path) -> Iterator[Attempt]:
    """Run commands whose output is to go into a folder that may not be written to."""
    folder.mkdir(parents=True)
    for name in ("ref.h5", "tgt.h5"):
        write_archive(folder / name, {"0/fc/output": np.ones(2)})
    sides = [str(folder / name) for name in ("ref.h5", "tgt.h5")]
    closed = folder / "closed"
    closed.mkdir(mode=0o555)
    for command in (
        ["convert", sides[0], "o.h5"],
        ["convert", sides[0], "o.zarr"],
        ["convert", sides[0], "o.safetensors"],
        ["convert", sides[0], "o.npz"],
        ["export", sides[0], "--format", "max", "o"],
        ["compare", *sides, "--save", "o.json"],
        ["compare", *sides, "--csv", "o.csv"],
        ["compare", *sides, "--junit", "o.xml"],
        ["align", *sides, "-o", "o.toml"],
        ["report", *sides, "--markdown", "-o", "o.md"],
        ["verify", *sides, "-o", "o"],
        ["show", sides[0], "0/fc/output", "--npy", "o.npy"],
    ):
        attempt = _attempt("", "", 0o555, [*command[:-1], str(closed / command[-1])])
        left = "" if not any(closed.iterdir()) else "something is left"
        yield replace(attempt, fault=attempt.fault or left)


def _attempt(container: str, place: str, mode: int, command: list[str]) -> Attempt:
    from click.testing import CliRunner

    from tensorcap_cli.main import main

    result = CliRunner().invoke(main, command)
    is_fault = result.exception is not None and not isinstance(result.exception, SystemExit)
    fault = repr(result.exception) if is_fault else ""
    return Attempt(container, place, mode, " ".join(command), result.exit_code, result.output, fault)


if __name__ == "__main__":
    found = [asdict(one) for one in attempts(Path(sys.argv[1]))] if give_up_rights() else None
    json.dump(found, sys.stdout)
