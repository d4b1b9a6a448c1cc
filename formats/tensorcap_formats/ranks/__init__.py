"""Ranks: archives of the processes of one run, opened as one.

In come the archives of all ranks (`members`); out comes a `MergedArchive`, whose tensors are put together by
rules (`rule`): those that the ranks recorded or the caller gave (`recorded`), and those that shapes of a
reference and values prove (`rule_search`). `plan` decides for each tensor, and says what is wrong.
Normative: `specs/ranks.md`. Read in that order.
"""

from tensorcap_formats.ranks.members import rank_of
from tensorcap_formats.ranks.merged_archive import MergedArchive, merge_ranks
from tensorcap_formats.ranks.rank_paths import (
    is_rank_pattern,
    rank_archives,
    rank_path,
    rank_pattern,
    written_ranks,
)
from tensorcap_formats.ranks.recorded import RuleBook
from tensorcap_formats.ranks.rule import MeshRule, Rule

__all__ = [
    "MergedArchive",
    "MeshRule",
    "Rule",
    "RuleBook",
    "is_rank_pattern",
    "merge_ranks",
    "rank_archives",
    "rank_of",
    "rank_path",
    "rank_pattern",
    "written_ranks",
]
