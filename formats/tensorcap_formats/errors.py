"""Every error that tensorcap raises on purpose, each with the exit status that `tcap` ends with.

TensorcapError
├── UsageError (2)            the request cannot be met
│   └── TensorNotFoundError   an archive has no such tensor
├── ReadError (3)             an input cannot be read
│   ├── NotAnArchiveError     not a file that we can open
│   ├── CorruptArchiveError   it contradicts itself, is cut short, or fails a checksum
│   ├── NewerVersionError     written by a newer major version of the format
│   ├── UnfinishedArchiveError  a writer is at work on it, or died
│   └── UnsafeFileError       reading it would run code or follow a path out of it
├── WriteError (1)            an output could not be written
├── CaptureError (1)          nothing, or not what was asked for, was captured
└── MissingPackageError (2)   an optional package is needed
"""

from __future__ import annotations

import difflib
from collections.abc import Collection
from typing import ClassVar, Final

_WIDEST_MESSAGE: Final = 4000  # characters: a name in a hostile file may have 65,536


class TensorcapError(Exception):
    """Base class: catch this to catch all of ours.

    The message is one line: place, what is there, what was expected. `hint` says what to do. What a terminal
    obeys, of names in files, stands there as escapes.
    """

    exit_status: ClassVar[int] = 1

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.hint = None if hint is None else escaped(hint)

    def __str__(self) -> str:  # OSError would format its own arguments
        return escaped(str(self.args[0]))

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild, (type(self), str(self), self.hint)


def _rebuild(cls: type[TensorcapError], message: str, hint: str | None) -> TensorcapError:
    return cls(message, hint=hint)


class UsageError(TensorcapError, ValueError):
    """The request cannot be met: an unknown name, options that exclude each other."""

    exit_status = 2


class TensorNotFoundError(UsageError, LookupError):
    """An archive has no tensor of the name that was asked for, or the name fits several."""


class ReadError(TensorcapError, OSError):
    """An input cannot be read."""

    exit_status = 3


class NotAnArchiveError(ReadError):
    """The file is of no kind that can be opened."""


class CorruptArchiveError(ReadError):
    """The file contradicts itself, is cut short, or fails a checksum."""


class NewerVersionError(ReadError):
    """The archive was written by a newer major version of the format."""


class UnfinishedArchiveError(ReadError):
    """Another process is writing the archive, or one died while writing it."""


class UnsafeFileError(ReadError):
    """Reading the file would run code, or follow a path that leads out of it."""


class WriteError(TensorcapError, OSError):
    """An output could not be written; what was there before is still there."""


class CaptureError(TensorcapError, RuntimeError):
    """Nothing was captured, or something that was asked for could not be."""


class MissingPackageError(TensorcapError, ImportError):
    """An optional package is needed; the hint is the command that installs it."""

    exit_status = 2


def missing_package(purpose: str, package: str, *, extra: str) -> MissingPackageError:
    """Build the one message for an optional package that is not installed.

    Args:
        purpose: What was asked for, as the beginning of a sentence.
        package: The package that is missing.
        extra: The extra of tensorcap that brings it.
    """
    return MissingPackageError(
        f"{purpose} needs the package {package!r}, which is not installed",
        hint=f"Install it with: pip install 'tensorcap[{extra}]'",
    )


def missing_reader(path: object, kind: str, package: str, *, extra: str) -> NotAnArchiveError:
    """Build the one message for a file whose format is read by a package that is not installed.

    Args:
        path: Of the file.
        kind: Name of the format.
        package: The package that is missing.
        extra: The extra of tensorcap that brings it.
    """
    return NotAnArchiveError(
        f"{path}: is {kind}, which is read by the package {package!r}, and that is not installed",
        hint=f"Install it with: pip install 'tensorcap[{extra}]'",
    )


def no_such_tensor(source: str, name: str, known: Collection[str]) -> TensorNotFoundError:
    """Build the one message that every layer uses for a name that is not there."""
    return TensorNotFoundError(
        f"{source}: no tensor {abbreviate(name)!r} among {len(known)}", hint=did_you_mean(name, known)
    )


def did_you_mean(name: str, known: Collection[str]) -> str | None:
    """Build the hint that names what is closest to an unknown name; None if nothing is close.

    Example:
        >>> did_you_mean("lm_haed", ["lm_head", "norm"]), did_you_mean("x", ["norm"])
        ("Did you mean 'lm_head'?", None)
    """
    close = difflib.get_close_matches(name, known, n=3)
    return f"Did you mean {' or '.join(map(repr, close))}?" if close else None


def abbreviate(text: str, limit: int = 120) -> str:
    """Shorten `text` for a message: hostile names may be 64 KiB long."""
    return text if len(text) <= limit else f"{text[:limit]}… ({len(text)} characters)"


def escaped(text: str, limit: int = _WIDEST_MESSAGE) -> str:
    r"""Text from anywhere as one line of a bounded length, in which a terminal finds nothing to obey.

    Example:
        >>> print(escaped("a name\n\x1b[2J"))
        a name\n\x1b[2J
    """
    line = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
    return line if len(line) <= limit else f"{line[: limit // 2]} … {line[-limit // 2 :]}"
