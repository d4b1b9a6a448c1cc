"""Functions that a rule file names, for names that no pattern can tell: `names.py:canonical`.

The contract is `def canonical(site: str) -> str`: a name as it was captured, and the name that it shares with
the other side's. It is called for names of both sides. Numbers that count (layers, experts) come as numbers
that stand for all of them, 1000000 for the first, 2000000 for the second; they are to be put in the result,
plus or minus what they are off by.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import FunctionType, ModuleType

from tensorcap_formats.errors import ReadError, UsageError, abbreviate


def load_function(text: str, folder: Path, where: str) -> Callable[[str], str]:
    """Load a function, running the file that it is in.

    Args:
        text: `FILE.py:FUNCTION`, the file beside the rule file.
        folder: Where that is.
        where: Place of the text, for messages.

    Returns:
        The function; it raises a UsageError of one line if the user's fails, or gives no name.

    Raises:
        ReadError: The file cannot be read.
        UsageError: The text names no function of it, or the file fails.
    """
    file, _, name = text.rpartition(":")
    if not file.endswith(".py") or not name.isidentifier():
        raise UsageError(f"{where}: function {abbreviate(text)!r}, expected 'FILE.py:FUNCTION'")
    path = folder / file
    try:
        source = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ReadError(f"{where}: function {text!r}: {path} cannot be read: {error.strerror}") from error
    module = ModuleType(path.stem)
    module.__file__ = str(path)
    try:
        exec(compile(source, str(path), "exec"), module.__dict__)
    except Exception as error:
        raise UsageError(f"{where}: {_told(error, path)}, expected a file that runs") from error
    found = getattr(module, name, None)
    if not callable(found):
        known = ", ".join(n for n, value in vars(module).items() if isinstance(value, FunctionType))
        raise UsageError(f"{where}: {path} has no function {name!r}", hint=f"It has {known or 'none'}.")

    def canonical(site: str) -> str:
        try:
            made = found(site)
        except Exception as error:
            called = f"{name}({abbreviate(site)!r})"
            raise UsageError(f"{where}: {called}: {_told(error, path)}, expected a name") from error
        if not isinstance(made, str) or not made:
            called = f"{name}({abbreviate(site)!r})"
            raise UsageError(f"{where}: {called} gave {abbreviate(repr(made))}, expected a name")
        return made

    return canonical


def _told(error: Exception, path: Path) -> str:
    """An exception in one line, with the line of the user's file that it comes from."""
    traceback, line = error.__traceback__, getattr(error, "lineno", None)
    while traceback is not None:
        if traceback.tb_frame.f_code.co_filename == str(path):
            line = traceback.tb_lineno
        traceback = traceback.tb_next
    said = abbreviate(" ".join(str(error).split()))
    return f"{path}:{line or 1}: {type(error).__name__}: {said}".rstrip(": ")
