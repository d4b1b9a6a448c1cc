"""Merge the archives of all ranks of a run into one."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tensorcap_formats.archive import Archive
from tensorcap_formats.conversion import convert
from tensorcap_formats.errors import UsageError
from tensorcap_formats.json_values import json_value
from tensorcap_formats.open import Source, open_ranks, opened
from tensorcap_formats.output_path import refuse_overlap
from tensorcap_formats.progress import Progress
from tensorcap_formats.ranks import is_rank_pattern, rank_archives, rank_pattern
from tensorcap_formats.run_info import RankProblem


@dataclass(frozen=True, slots=True)
class Merged:
    """The result of a merge.

    Attributes:
        path: The archive that was written.
        ranks: Count of ranks.
        records: Count of its records.
        nbytes: Sum of their sizes, in bytes.
        rules: How many tensors each rule has put together, by rule and how it was known.
        problems: What is wrong with some tensors, in execution order.
    """

    path: Path
    ranks: int
    records: int
    nbytes: int
    rules: Mapping[tuple[str, str], int]
    problems: tuple[RankProblem, ...]

    @property
    def exit_status(self) -> int:
        """The exit status of `tcap merge`: 1 if there is a problem, else 0."""
        return 1 if self.problems else 0

    def to_json(self) -> dict[str, Any]:
        """The result as a JSON object."""
        return {
            "path": str(self.path),
            "ranks": self.ranks,
            "records": self.records,
            "bytes": self.nbytes,
            "rules": [{"rule": r, "known": k, "tensors": count} for (r, k), count in self.rules.items()],
            "problems": json_value(list(self.problems)),
        }


def merge(
    paths: Iterable[str | os.PathLike[str]],
    output: str | os.PathLike[str],
    *,
    reference: Source | None = None,
    rules: Mapping[str, str] | None = None,
    progress: Progress | None = None,
) -> Merged:
    """Put the archives of all ranks of a run together (`specs/ranks.md`).

    Args:
        paths: The archives, in any order: one of each rank; or a pattern for them.
        output: Of the new one; its suffix says which container.
        reference: An archive of the whole model, open or a path: its shapes show how tensors belong together
            that no rule was recorded of. Its values are not looked at.
        rules: Rules by glob for keys, such as `{"*.gate_up_proj": "concat -1 parts=2"}`, before all others.
        progress: Receives the bytes read so far, and how many there will be.

    Returns:
        What was written, by which rules, and what is wrong.

    Raises:
        UsageError: The archives are not those of all ranks of one run, a rule is none or fits nothing, or the
            output is one of them.
        ReadError: One cannot be read.
        WriteError: The output cannot be written.
    """
    named = [each for p in paths for each in (rank_archives(p) if is_rank_pattern(p) else [Path(p)])]
    for path in named:
        refuse_overlap(path, Path(output))
    if reference is None:
        return _merge(named, Path(output), None, rules, progress)
    with opened(reference) as whole:
        return _merge(named, Path(output), whole, rules, progress)


def _merge(
    paths: Sequence[Path],
    output: Path,
    reference: Archive | None,
    rules: Mapping[str, str] | None,
    progress: Progress | None,
) -> Merged:
    if not paths:
        raise UsageError("no archives were named, expected one of each rank")
    with open_ranks(paths, rank_pattern(paths[0]), rules=rules, reference=reference) as archive:
        path = convert(archive, output, progress=progress)
        tensors = archive.plan.merged
        return Merged(
            path,
            len(paths),
            len(archive),
            sum(record.nbytes for record in archive.records),
            Counter((tensor.rule.text, tensor.known.kind) for tensor in tensors),
            tuple(archive.plan.problems),
        )
