"""Token ids as a text, and how many a model knows; without torch."""

from __future__ import annotations

import re
from typing import Any, Final

from tensorcap_formats.errors import UsageError, abbreviate

_ROW: Final = re.compile(r"\s*-?\d+(?:(?:\s*,\s*|\s+)-?\d+)*\s*")
_LARGEST: Final = 2**63 - 1  # of an int64


def parse_token_ids(text: str, vocabulary: int | None = None) -> list[list[int]]:
    """Read rows of token ids.

    Args:
        text: Numbers such as `1,2,3`; rows are separated by a semicolon.
        vocabulary: How many tokens the model knows; None if that is not known.

    Raises:
        UsageError: It is something else, or rows differ in length; a number is none of a token.

    Example:
        >>> parse_token_ids("1,2;3,4")
        [[1, 2], [3, 4]]
    """
    parts = text.split(";")
    is_list = all(_ROW.fullmatch(part) for part in parts)
    rows = [[int(number) for number in re.findall(r"-?\d+", part)] for part in parts]
    if not is_list or len({len(row) for row in rows}) != 1:
        raise UsageError(f"--input-ids {abbreviate(text)!r}: expected numbers such as 1,2,3 or 1,2;3,4")
    most = (vocabulary or _LARGEST + 1) - 1
    if not all(0 <= number <= most for row in rows for number in row):
        raise UsageError(f"--input-ids {abbreviate(text)!r}: expected numbers from 0 to {most}")
    return rows


def vocabulary_size(config: Any) -> int | None:
    """How many tokens a model knows; None if its configuration does not say so."""
    size = getattr(config.get_text_config(), "vocab_size", None)
    return size if isinstance(size, int) else None
