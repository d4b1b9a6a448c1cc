"""Paths of the archives of ranks: `NAME.rankN.h5`, and a pattern that names all of them."""

from __future__ import annotations

import glob
import os
import re
from pathlib import Path
from typing import Final

from tensorcap_formats.errors import NotAnArchiveError

_BESIDE: Final = (".journal", ".partial")  # files that a writer has beside its archive


def rank_path(path: Path, rank: int) -> Path:
    """The path of one rank's archive, where `path` is that of the run's.

    A path whose name ends with this rank stays as it is.

    Example:
        >>> str(rank_path(Path("out/tgt.h5"), 3)), str(rank_path(Path("tgt.rank3.h5"), 3))
        ('out/tgt.rank3.h5', 'tgt.rank3.h5')
    """
    if re.search(rf"(?<![A-Za-z])rank{rank}$", path.stem):
        return path
    return path.with_name(f"{path.stem}.rank{rank}{path.suffix}")


def rank_pattern(path: Path) -> Path:
    """The pattern that the path of one rank's archive fits.

    Example:
        >>> str(rank_pattern(Path("out/tgt.rank3.h5")))
        'out/tgt.rank*.h5'
    """
    return path.with_name(re.sub(r"(?<![A-Za-z])(rank[_-]?)[0-9]+", r"\1*", path.name))


def is_rank_pattern(path: str | os.PathLike[str]) -> bool:
    """Whether a path is a pattern for the archives of all ranks, as `tgt.rank*.h5`, and no file."""
    return "*" in os.path.basename(os.fspath(path)) and not os.path.exists(path)


def rank_archives(pattern: str | os.PathLike[str]) -> list[Path]:
    """The archives that a pattern names.

    Raises:
        NotAnArchiveError: There is none.
    """
    text = os.fspath(pattern)
    folder, name = os.path.split(text)
    paths = sorted(glob.glob(os.path.join(glob.escape(folder), name)))
    archives = [Path(path) for path in paths if not path.endswith(_BESIDE)]
    if not archives:
        raise NotAnArchiveError(f"{text}: no file fits the pattern")
    return archives


def written_ranks(path: Path) -> list[Path]:
    """The archives of ranks that lie where the archive `path` of the whole run would."""
    ours = re.compile(rf"{re.escape(path.stem)}\.rank[0-9]+{re.escape(path.suffix)}")
    try:
        names = os.listdir(path.parent)
    except OSError:
        return []
    return sorted(path.with_name(name) for name in names if ours.fullmatch(name))
