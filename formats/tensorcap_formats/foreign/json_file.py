"""Files of JSON from other tools: which tool wrote one, and what it holds."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any, Final, Literal

from tensorcap_formats.errors import CorruptArchiveError
from tensorcap_formats.folder import read_side_file
from tensorcap_formats.input_file import InputFile

JsonKind = Literal["polygraphy", "debug-tree", "msprobe"]

MAX_JSON_BYTES: Final = 1 << 30
_SNIFFED_BYTES: Final = 4096
_SIGNS: Final[dict[JsonKind, re.Pattern[bytes]]] = {  # near the beginning of a file
    "polygraphy": re.compile(
        rb'\s*(?:\{\s*"lst"\s*:|\[\s*\{\s*"[^"]{0,999}"\s*:\s*\{\s*"(?:array|tensor)"\s*:)'
    ),
    "debug-tree": re.compile(rb'\s*\{\s*"module_path"\s*:'),
    "msprobe": re.compile(rb'\s*\{\s*"task"\s*:\s*"[a-z_]*",\s*"level"\s*:'),
}


def json_kind(first: bytes) -> JsonKind | None:
    """Which tool wrote a file of JSON, by its first bytes; None if none that is known."""
    return next((kind for kind, sign in _SIGNS.items() if sign.match(first[:_SNIFFED_BYTES])), None)


def read_json(path: Path, *, folder: Path | None = None, hint: str | None = None) -> Any:
    """What a file of JSON holds.

    Args:
        path: Of the file.
        folder: That was opened, out of which the file may not lead; None if the file itself was given.
        hint: What to do if it is too large.

    Raises:
        CorruptArchiveError: It is no JSON, or too large.
        UnsafeFileError: It is a link out of the folder.
        ReadError: The system cannot read it.
    """
    if folder is not None:
        data = read_side_file(path, folder, MAX_JSON_BYTES)
    else:
        with closing(InputFile(path)) as file:
            if file.size > MAX_JSON_BYTES:
                raise CorruptArchiveError(
                    f"{path}: has {file.size} bytes of JSON, expected at most {MAX_JSON_BYTES}", hint=hint
                )
            data = file.read_all(MAX_JSON_BYTES)
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise CorruptArchiveError(f"{path}: is not JSON: {error}") from None


def json_object(value: Any, where: str) -> Mapping[str, Any]:
    """Return a value of JSON that has to be an object.

    Args:
        value: Any value.
        where: The file, and the place in it, for the error.

    Raises:
        CorruptArchiveError: It is something else.
    """
    if not isinstance(value, dict):
        raise CorruptArchiveError(f"{where}: is a JSON {type(value).__name__}, expected an object")
    return value


def plain_value(value: Any) -> Any:
    """A number, a text, a bool or None as an archive has it, which has no infinite numbers."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def is_plain(value: Any) -> bool:
    """Whether a value of JSON is no object and no list."""
    return value is None or isinstance(value, bool | int | float | str)
