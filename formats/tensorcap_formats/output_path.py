"""The path of an output, and the files beside it while it is written.

Only files of ours are ever written over or removed.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import hashlib
import itertools
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
_REPLACED: Final = "replaced"
_AT_FDCWD: Final = -100  # of fcntl.h: paths are as the process takes them
_RENAME_EXCHANGE: Final = 2  # of linux/fs.h
_STEM_BYTES: Final = 150  # of the 255 that a name may have


def resolved(path: Path) -> Path:
    """The path that an output goes to: what the path links to, if it is a link, even one to nothing."""
    return Path(os.path.realpath(path)) if os.path.islink(path) else path


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
    while not os.path.lexists(source) and ":" in str(source):  # a part of it, as in `FOLDER:RUNNER`
        source = Path(str(source).rpartition(":")[0])
    source, output = Path(os.path.realpath(source)), Path(os.path.realpath(path))
    if source == output or source in output.parents or output in source.parents:
        raise UsageError(
            f"{path}: is the source or overlaps with it, expected another path", hint="Choose another path."
        )


def refuse_to_replace_unlike(path: Path, beginning: str) -> None:
    """Refuse the path of a text that is taken by anything but a stream or a file that begins as it does.

    Args:
        path: Where the text is to go.
        beginning: How texts of its kind begin, without white space.

    Raises:
        WriteError: There is an archive, another file, a folder or a disk; or no folder to write in.
    """
    if is_stream(path):
        return
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


def is_stream(path: Path) -> bool:
    """Whether there is a pipe or a device of characters, which is written to and never replaced."""
    try:
        mode = path.stat().st_mode
    except (OSError, ValueError):
        return False
    return stat.S_ISFIFO(mode) or stat.S_ISCHR(mode)


@contextmanager
def publish_text(path: str | os.PathLike[str], *, beginning: str) -> Iterator[IO[str]]:
    """Write a text beside its place, and rename it when it is whole; what was there stays until then.

    What is a pipe or a device of characters (`/dev/stdout`, a terminal) is written to.

    Args:
        path: Where to put it; if it is a link, what it links to.
        beginning: As for `refuse_to_replace_unlike`.

    Raises:
        WriteError: Something of another kind is there, or it cannot be written.
    """
    place = resolved(Path(path))
    try:
        if is_stream(Path(path)):
            with open(path, "w", encoding="utf-8", newline="") as stream:
                yield stream
            return
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

    What processes that were killed have left of the same path is put in order first. Errors of writing name
    `path`.
    """
    clean_up(path)
    building = unique_beside(path, _BUILDING)
    try:
        yield building
    except WriteError as error:
        raise WriteError(str(error).replace(str(building), str(path)), hint=error.hint) from error
    finally:
        remove(building)


def open_log(path: Path) -> tuple[Path, int]:
    """Open a new file for a log: at `path`, or as `NAME.1.log`, `NAME.2.log` … if something is there.

    Returns:
        Its path, and a file descriptor to write to.

    Raises:
        OSError: The folder is not there, or cannot be written.
    """
    for number in itertools.count():
        place = path.with_name(f"{path.stem}.{number}{path.suffix}") if number else path
        with suppress(FileExistsError):
            return place, os.open(place, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    raise AssertionError("unreachable")


def put_in_place(new: Path, path: Path) -> None:
    """Rename `new` to `path`, and remove what was there.

    A folder, which no rename replaces, changes places with the new one in a single step where the system can.
    Elsewhere it is moved aside first; `clean_up` puts it back if the process is killed before the next step.
    """
    if not path.is_dir() and not (new.is_dir() and os.path.lexists(path)):
        new.replace(path)
    elif _exchange(new, path):
        remove(new)
    else:
        aside = unique_beside(path, _REPLACED)
        path.rename(aside)
        try:
            new.replace(path)
        except BaseException:
            aside.rename(path)
            raise
        remove(aside.replace(unique_beside(path, _BUILDING)))  # half of it is never put back


def clean_up(path: Path) -> bool:
    """Put in order what killed processes have left beside `path`.

    Args:
        path: Where they were about to put something.

    Returns:
        Whether what had been moved aside was put back, as nothing had taken its place.
    """
    moved = _stale(path, _REPLACED)
    is_put_back = bool(moved) and not os.path.lexists(path)
    if is_put_back:
        moved.pop().rename(path)
    for rest in [*moved, *_stale(path, _BUILDING)]:
        with suppress(OSError):  # if something stays, it does no harm
            remove(rest)
    return is_put_back


def is_moved_aside(path: Path) -> bool:
    """Whether a killed process has moved aside what was at `path`, and `clean_up` would put it back."""
    path = resolved(path)
    return not os.path.lexists(path) and bool(_stale(path, _REPLACED))


def _exchange(one: Path, other: Path) -> bool:
    """Exchange what is at two paths in one step; False if the system or the file system cannot."""
    try:
        rename = ctypes.CDLL(None, use_errno=True).renameat2
    except (AttributeError, OSError):  # no Linux, or a C library of before 2018
        return False
    if not rename(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE):
        return True
    number = ctypes.get_errno()
    if number in (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP, errno.EPERM):
        return False
    raise OSError(number, os.strerror(number), str(other))


def unique_beside(path: Path, purpose: str) -> Path:
    """An unused path in the same folder: `NAME.tcap-HOST-PID-RANDOM.PURPOSE`."""
    return path.with_name(f"{_stem(path)}.tcap-{_host()}-{os.getpid()}-{secrets.token_hex(4)}.{purpose}")


def _stale(path: Path, purpose: str) -> list[Path]:
    """What `unique_beside` named for processes of this host that have ended."""
    ours = re.compile(
        rf"{re.escape(_stem(path))}\.tcap-{_host()}-([1-9][0-9]{{0,9}})-[0-9a-f]{{8}}\.{purpose}"
    )
    try:
        names = os.listdir(path.parent)
    except OSError:
        return []
    matches = [match for match in map(ours.fullmatch, names) if match]
    return [path.with_name(match[0]) for match in matches if not _is_alive(int(match[1]))]


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
