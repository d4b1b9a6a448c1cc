"""What the runs of a search came to, kept in a file, so that an interrupted search goes on."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from tensorcap_formats.errors import UsageError, WriteError

T = TypeVar("T")


class RunLog:
    """A file of a line for each run, behind one that says what is searched.

    Args:
        path: The file; None keeps nothing.
        search: What kind of search it is, as `bisection`.
        about: What is searched: a file of another search is refused.
    """

    def __init__(self, path: Path | None, search: str, about: Mapping[str, Any]) -> None:
        self._path = path
        self._search = search
        self._first = json.dumps(about) + "\n"

    def load(self, parse: Callable[[Any], T]) -> list[T]:
        """Read what an earlier search left; a last line that was not written whole is cut off.

        Args:
            parse: Makes a run of its JSON object; what is none raises KeyError, TypeError or ValueError.

        Raises:
            UsageError: It is of another search, cannot be read, or could not be written.
        """
        if self._path is None:
            return []
        if not self._path.parent.is_dir():
            raise UsageError(f"{self._path}: there is no folder {self._path.parent}")
        try:
            text = self._path.read_bytes()
            whole = text[: text.rfind(b"\n") + 1]
            about, *lines = map(json.loads, whole.splitlines()) if whole else [json.loads(self._first)]
            runs = [parse(line) for line in lines]
            if not whole and not self._first.encode().startswith(text):
                raise ValueError
        except FileNotFoundError:
            return []
        except OSError as error:
            raise UsageError(f"{self._path}: cannot be read: {error.strerror}") from error
        except (ValueError, KeyError, TypeError, RecursionError):
            raise UsageError(
                f"{self._path}: is no state of a {self._search}", hint="Name another file."
            ) from None
        if about != json.loads(self._first):
            raise UsageError(f"{self._path}: is of another search", hint="Name another file, or delete it.")
        if whole != text:
            with self._path.open("r+b") as file:
                file.truncate(len(whole))
        return runs

    def add(self, run: Mapping[str, Any]) -> None:
        """Keep what a run came to.

        Raises:
            WriteError: The file cannot be written.
        """
        if self._path is None:
            return
        try:
            with self._path.open("a", encoding="utf-8") as file:
                if not file.tell():
                    file.write(self._first)
                file.write(json.dumps(run) + "\n")
        except OSError as error:
            raise WriteError(f"{self._path}: cannot be written: {error.strerror}") from error
