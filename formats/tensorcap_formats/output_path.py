"""The path of an output, and the files beside it while it is written.

Only files of ours are ever written over or removed.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import secrets
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Final

from tensorcap_formats.errors import UsageError, WriteError

OPEN_TO_READ: Final = (  # a pipe at the path does not block, and no link is followed
    os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW
)
_BUILDING: Final = "building"
_STEM_BYTES: Final = 150  # of the 255 that a name may have


def resolved(path: Path) -> Path:
    """The path that an output goes to: what the path links to, if it is a link, even one to nothing."""
    return Path(os.path.realpath(path)) if path.is_symlink() else path


def journal_path(path: Path) -> Path:
    """Path of the journal of the archive at `path` while it is written."""
    path = resolved(path)
    return path.with_name(path.name + ".journal")


def partial_path(path: Path) -> Path:
    """Path of the bytes of the archive at `path` while it is written."""
    path = resolved(path)
    return path.with_name(path.name + ".partial")


def recovery_command(path: Path) -> str:
    """The command that saves what a killed writer left: to another path, if an archive is at this one."""
    other = f" -o OTHER{path.suffix}" if os.path.lexists(resolved(path)) else ""
    return f"`tcap recover {path}{other}`"


def is_locked(path: Path) -> bool | None:
    """Whether a process is writing the archive at `path`; None if it has no journal."""
    try:
        fd = os.open(journal_path(path), OPEN_TO_READ)
    except (OSError, ValueError):
        return None
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            return None
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


def refuse_overlap(source: Path, path: Path) -> None:
    """Refuse to write over or into the source, or to put a file where the source's folder is.

    Raises:
        UsageError: The output is the source, in it, or around it.
    """
    source, output = Path(os.path.realpath(source)), Path(os.path.realpath(path))
    if source == output or source in output.parents or output in source.parents:
        raise UsageError(
            f"{path}: is the source or overlaps with it, expected another path", hint="Choose another path."
        )


def refuse_to_replace_unlike(path: Path, beginning: str) -> None:
    """Refuse the path of a text that is taken by anything but a file that begins as the text does.

    Args:
        path: Where the text is to go.
        beginning: How texts of its kind begin, without white space.

    Raises:
        WriteError: There is an archive, another file, a folder or a device; or no folder to write in.
    """
    path = resolved(path)
    if not os.path.lexists(path):
        if not path.parent.is_dir():
            raise WriteError(f"{path}: there is no folder {str(path.parent)!r}", hint="Create it first.")
        return
    if not path.is_file():
        kind = "a folder" if path.is_dir() else "no regular file"
        raise WriteError(f"{path}: is {kind} and is not overwritten", hint="Write to another path.")
    try:
        with path.open("rb") as file:
            first = file.read(4 * len(beginning) + 64)
    except OSError as error:
        raise WriteError(
            f"{path}: what is there cannot be read and is not overwritten: {error.strerror or error}",
            hint="Move it away first, or write to another path.",
        ) from error
    if first and not b"".join(first.split()).startswith(beginning.encode()):
        raise WriteError(
            f"{path}: begins with {first[:16]!r}, expected {beginning!r} or no file: it is not overwritten",
            hint="Move it away first, or write to another path.",
        )


@contextmanager
def publish_text(path: str | os.PathLike[str], *, beginning: str) -> Iterator[IO[str]]:
    """Write a text beside its place, and rename it when it is whole; what was there stays until then.

    Args:
        path: Where to put it; if it is a link, what it links to.
        beginning: As for `refuse_to_replace_unlike`.

    Raises:
        WriteError: Something of another kind is there, or it cannot be written.
    """
    place = resolved(Path(path))
    try:
        refuse_to_replace_unlike(place, beginning)
        with build_beside(place) as building:
            with building.open("x", encoding="utf-8", newline="") as file:
                yield file
            put_in_place(building, place)
    except WriteError:
        raise
    except OSError as error:
        raise WriteError(f"{path}: cannot be written: {error.strerror or error}") from error


@contextmanager
def build_beside(path: Path) -> Iterator[Path]:
    """A new path in the folder of `path`, to build something at; what is still there at the end is removed.

    What processes that were killed had begun to build for the same path is removed first.
    """
    remove_stale(path, _BUILDING)
    building = unique_beside(path, _BUILDING)
    try:
        yield building
    finally:
        remove(building)


def put_in_place(new: Path, path: Path) -> None:
    """Rename `new` to `path`; a folder there, which no rename replaces, is moved aside and removed after."""
    if not path.is_dir() and not (new.is_dir() and os.path.lexists(path)):
        new.replace(path)
        return
    aside = unique_beside(path, "replaced")
    path.rename(aside)
    try:
        new.replace(path)
    except BaseException:
        aside.rename(path)
        raise
    remove(aside)


def unique_beside(path: Path, purpose: str) -> Path:
    """An unused path in the same folder: `NAME.tcap-HOST-PID-RANDOM.PURPOSE`."""
    return path.with_name(f"{_stem(path)}.tcap-{_host()}-{os.getpid()}-{secrets.token_hex(4)}.{purpose}")


def remove_stale(path: Path, purpose: str) -> None:
    """Remove what `unique_beside` named for processes of this host that have ended without removing it."""
    ours = re.compile(
        rf"{re.escape(_stem(path))}\.tcap-{_host()}-([1-9][0-9]{{0,9}})-[0-9a-f]{{8}}\.{purpose}"
    )
    with suppress(OSError):  # if something stays, it does no harm
        for name in os.listdir(path.parent):
            match = ours.fullmatch(name)
            if match and not _is_alive(int(match[1])):
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
    """A name of this host and container: elsewhere, a process of the same number is another one."""
    text = os.uname().nodename
    with suppress(OSError):
        text += os.readlink("/proc/self/ns/pid")
    return hashlib.blake2b(text.encode(), digest_size=4).hexdigest()


def _is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):  # a process of another user
        return True
    return True
