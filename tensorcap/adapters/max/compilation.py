"""A compilation by MAX: reported while it goes on, ended by a signal, and what of it MAX keeps."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final, TypeVar

from tensorcap.adapters.max.engine import cache_folder, in_thread
from tensorcap.adapters.native_call import call_natively
from tensorcap.wording import counted

_Result = TypeVar("_Result")

_MEGABYTE: Final = 1e6
_LOG: Final = logging.getLogger(__name__)


def compile_reported(what: str, compile_: Callable[[], _Result]) -> tuple[_Result, bool]:
    """Have MAX compile, log every few seconds for how long it does, and let a signal end that.

    Args:
        what: What is compiled, for whoever waits.
        compile_: Makes the call of MAX.

    Returns:
        The result of the call, and whether MAX had it in its cache.
    """
    folder, began = cache_folder(), time.time()
    place = "" if folder is None else f" in {_shown(folder.parent)}"

    def log(seconds: float) -> None:
        _LOG.info("MAX compiles %s, for %.0f s by now; what it has compiled is kept%s", what, seconds, place)

    try:
        result = call_natively(in_thread(compile_), log)
    except KeyboardInterrupt as error:
        kept = [] if folder is None else list(_sizes_since(folder.parent, began))
        parts = f"{counted(len(kept), 'file')}, {sum(kept) / _MEGABYTE:.1f} MB" if kept else "nothing yet"
        error.add_note(
            f"MAX was compiling {what}, for {time.time() - began:.0f} s; kept of it{place}: {parts}; "
            "graphs that were compiled before are kept"
        )
        raise
    return result, folder is not None and not list(_sizes_since(folder, began))


def _sizes_since(folder: Path, began: float) -> Iterator[int]:
    """The sizes of the files in a folder that were written since a time."""
    for path in folder.rglob("*"):
        try:
            entry = path.lstat()
        except OSError:  # moved to its place meanwhile
            continue
        if path.is_file() and entry.st_mtime >= began:
            yield entry.st_size


def _shown(path: Path) -> str:
    home = Path.home()
    return f"~/{path.relative_to(home)}" if path.is_relative_to(home) else str(path)
