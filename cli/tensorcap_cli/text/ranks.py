"""What an archive says of the ranks of its run: archives that were merged, and the rule of each tensor."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

from tensorcap.wording import counted, one_line

if TYPE_CHECKING:
    from tensorcap_formats.archive import Archive
    from tensorcap_formats.records import Record

_FEW: Final = 8  # archives, or problems, that are named


class RankTexts:
    """Says how tensors of one archive are put together, or were."""

    def __init__(self, archive: Archive) -> None:
        from tensorcap_formats.ranks import RuleBook

        self._ranks = archive.info.ranks
        self._book = RuleBook(self._ranks)

    def __bool__(self) -> bool:
        return self._ranks is not None

    def rule(self, record: Record) -> str:
        """The rule of a record; for one that was left apart, the rank that it is of; "" if none is known."""
        if entry := self._book.find(record.key):
            return one_line(entry.rule)
        is_apart = self._ranks is not None and self._ranks.is_merged
        return f"rank {record.key.rank} alone, not merged" if is_apart else ""

    def as_json(self, record: Record) -> dict[str, Any] | None:
        """The rule of a record, and how it is known; None if none is."""
        entry = self._book.find(record.key)
        return None if entry is None else {"rule": entry.rule, "known": entry.known}

    def lines(self, record: Record) -> Iterator[str]:
        """What is known of the ranks of a record, a line each."""
        if self._ranks is None:
            return
        entry = self._book.find(record.key)
        if entry is not None:
            what = "put together by" if self._ranks.is_merged else "a part of the whole:"
            shape = "" if entry.shape is None else f", the whole is {list(entry.shape)}"
            sizes = "".join(
                f", {' + '.join(map(str, parts))} of axis {axis}" for axis, parts in entry.sizes.items()
            )
            yield one_line(f"{what} {entry.rule} ({entry.known}){shape}{sizes}")
        elif self._ranks.is_merged:
            yield self.rule(record)
        text = record.key.text.partition("/")[2] if record.key.rank else record.key.text
        for problem in self._ranks.problems:
            if problem.key == text:
                yield one_line(problem.text)

    def run_lines(self) -> Iterator[tuple[str, str]]:
        """What is known of the run's ranks, by name."""
        ranks = self._ranks
        if ranks is None:
            return
        if not ranks.is_merged:
            if ranks.rank is not None:
                yield "ranks", f"rank {ranks.rank} of {ranks.count or 'an unknown count'}"
            return
        more = f", and {len(ranks.archives) - _FEW} more" if len(ranks.archives) > _FEW else ""
        yield "ranks", one_line(f"{ranks.count} merged: {', '.join(ranks.archives[:_FEW])}{more}")
        rules: Counter[str] = Counter()
        for entry in ranks.tensors:
            rules[entry.rule] += len(entry.keys)
        yield "rules", one_line(", ".join(f"{count} {rule}" for rule, count in rules.most_common(_FEW)))
        for problem in ranks.problems[:_FEW]:
            yield "problem", one_line(f"{problem.key}: {problem.text}")
        if len(ranks.problems) > _FEW:
            yield "", f"{counted(len(ranks.problems) - _FEW, 'more problem')}"
