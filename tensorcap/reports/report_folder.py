"""A folder of reports that is there whole or not at all."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tensorcap_formats.errors import UsageError, WriteError

MARK = "verify.json"  # a folder without it is none of ours, and is not replaced


@contextmanager
def replaced_folder(path: Path, *, force: bool) -> Iterator[Path]:
    """Make a folder under a temporary name beside its place, and put it there if the block ends well.

    Args:
        path: The place.
        force: Whether an earlier report may be replaced.

    Raises:
        UsageError: Something is there that may not be replaced, or there is no folder around it.
        WriteError: The folder cannot be made.
    """
    _require_free(path, force=force)
    try:
        made = Path(tempfile.mkdtemp(prefix=f".{path.name}-", dir=path.parent))
    except OSError as error:
        raise WriteError(f"{path}: {error}") from error
    try:
        yield made
        made.chmod(0o777 & ~_umask())
        _require_free(path, force=force)
        if path.exists():
            old = made.with_name(f"{made.name}-old")
            path.rename(old)
            try:
                made.rename(path)
            except OSError:
                old.rename(path)
                raise
            shutil.rmtree(old)
        else:
            made.rename(path)
    except BaseException:
        shutil.rmtree(made, ignore_errors=True)
        raise


def _require_free(path: Path, *, force: bool) -> None:
    if not path.parent.is_dir():
        raise UsageError(f"{path}: there is no folder {path.parent}")
    if not os.path.lexists(path):
        return
    if path.is_symlink() or not (path / MARK).is_file():
        raise UsageError(f"{path}: exists and is no report, expected a new folder")
    if not force:
        raise UsageError(f"{path}: exists", hint="--force replaces it.")


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
