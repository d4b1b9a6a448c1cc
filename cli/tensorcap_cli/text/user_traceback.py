"""The traceback of an error in a user's file: their own frames, without those that called it."""

from __future__ import annotations

import sysconfig
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Final

import click

import tensorcap
import tensorcap_cli
import tensorcap_formats

_OURS: Final = tuple(
    f"{Path(package.__file__ or '').parent}/" for package in (tensorcap, tensorcap_cli, tensorcap_formats)
)
_INSTALLED: Final = tuple(
    f"{sysconfig.get_path(name)}/" for name in ("stdlib", "platstdlib", "purelib", "platlib", "scripts")
)
_CALLS: Final = ("torch/nn/modules/module.py", "torch/utils/_contextlib.py")  # machinery around each call


def print_user_traceback(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    """Print an error as Python does; if a user's file made it, without the frames around theirs.

    An exception hook. Frames begin with the first one of the user; ours and those by which torch calls a
    module are left out. An error that our own code raised keeps all.
    """
    report = traceback.TracebackException(kind, error, trace)
    _prune(report)
    click.echo("".join(report.format()), err=True, nl=False)


def _prune(report: traceback.TracebackException) -> None:
    report.stack[:] = _frames_of_user(report.stack, is_syntax=issubclass(_kind(report), SyntaxError))
    for around in (report.__cause__, report.__context__):
        if around is not None:
            _prune(around)


def _kind(report: traceback.TracebackException) -> type[BaseException]:
    return report.exc_type or BaseException


def _frames_of_user(
    frames: Sequence[traceback.FrameSummary], *, is_syntax: bool
) -> Sequence[traceback.FrameSummary]:
    first = next((i for i, frame in enumerate(frames) if _is_of_user(frame.filename)), None)
    if first is None:
        is_importing = bool(frames) and frames[-1].filename.startswith("<frozen importlib")
        return [] if is_syntax and is_importing else frames
    if frames[-1].filename.startswith(_OURS):
        return frames
    return [f for f in frames[first:] if not f.filename.startswith(_OURS) and not f.filename.endswith(_CALLS)]


def _is_of_user(file: str) -> bool:
    return not file.startswith(("<", *_OURS, *_INSTALLED))
