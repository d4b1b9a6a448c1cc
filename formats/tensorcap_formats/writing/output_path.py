"""Where an output lies, and the temporary files beside it: only ours are ever written over or removed."""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Final

from tensorcap_formats.errors import UsageError

_STEM_BYTES: Final = 150  # of the 255 that a name may have


def resolved(path: Path) -> Path:
    """Where an output goes: what the path links to, if it is a link; a link to nothing shows where too."""
    return Path(os.path.realpath(path)) if path.is_symlink() else path


def refuse_overlap(source: Path, path: Path) -> None:
    """Refuse to write over or into the source, or to put a file where the source's folder is.

    Raises:
        UsageError: The output is the source, in it, or around it.
    """
    there, here = Path(os.path.realpath(source)), Path(os.path.realpath(path))
    if there == here or there in here.parents or here in there.parents:
        raise UsageError(
            f"{path}: is the source or overlaps with it, expected another path", hint="Choose another path."
        )


def unique_beside(path: Path, purpose: str) -> Path:
    """A path in the same folder at which nobody has put anything: `NAME.tcap-HOST-PID-RANDOM.PURPOSE`."""
    return path.with_name(f"{_stem(path)}.tcap-{_host()}-{os.getpid()}-{secrets.token_hex(4)}.{purpose}")


def remove_stale(path: Path, purpose: str) -> None:
    """Remove what `unique_beside` named for processes of this host that have ended without removing it."""
    ours = re.compile(
        rf"{re.escape(_stem(path))}\.tcap-{_host()}-([1-9][0-9]{{0,9}})-[0-9a-f]{{8}}\.{purpose}"
    )
    with suppress(OSError):  # it is no harm if something stays
        for name in os.listdir(path.parent):
            found = ours.fullmatch(name)
            if found and not _is_alive(int(found[1])):
                remove(path.with_name(name))


def remove(path: Path) -> None:
    """Remove a file or a folder of ours, if it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _stem(path: Path) -> str:
    """The name, or as much of a long one as leaves room for what follows it."""
    return os.fsdecode(os.fsencode(path.name)[:_STEM_BYTES])


def _host() -> str:
    """Tells hosts and containers apart, whose processes are unlike though their numbers may be alike."""
    text = os.uname().nodename
    with suppress(OSError):
        text += os.readlink("/proc/self/ns/pid")
    return hashlib.blake2b(text.encode(), digest_size=4).hexdigest()


def _is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):  # it is somebody else's
        return True
    return True
