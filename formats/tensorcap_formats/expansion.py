"""How far compressed data may expand: 100 kB that claim to hold 4 GiB are refused before they are read."""

from __future__ import annotations

from typing import Final

from tensorcap_formats.errors import UnsafeFileError

FREE_BYTES: Final = 256 * 1024 * 1024
MAX_RATIO: Final = 200


def check_expansion(stored_bytes: int, declared_bytes: int, where: str) -> None:
    """Refuse what expands to more than 256 MiB and more than 200 times its stored size.

    Raises:
        UnsafeFileError: It does.
    """
    if declared_bytes > max(FREE_BYTES, MAX_RATIO * stored_bytes):
        raise UnsafeFileError(
            f"{where}: {stored_bytes} stored bytes claim to expand to {declared_bytes}, "
            f"expected at most {MAX_RATIO} times as many",
            hint="If it is what you mean to read, store it without compression first.",
        )
