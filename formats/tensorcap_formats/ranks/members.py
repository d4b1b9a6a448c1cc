"""The archives of a run's ranks: which rank each is of, and whether they are all of one run."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from tensorcap_formats.archive import Archive
from tensorcap_formats.dtypes import Array, DType
from tensorcap_formats.errors import UsageError
from tensorcap_formats.keys import Key
from tensorcap_formats.records import Record

_RANK: Final = re.compile(r"(?<![A-Za-z])rank[_-]?(\d{1,9})(?!\d)", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Shards:
    """One tensor as the ranks have it.

    Attributes:
        key: Its key, which names no rank.
        ranks: The ranks that have it, ascending.
        records: Its record in the archive of each of them.
    """

    key: Key
    ranks: tuple[int, ...]
    records: tuple[Record, ...]

    @property
    def text(self) -> str:
        """The text of the key."""
        return self.key.text

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """The shape on each rank."""
        return tuple(record.shape for record in self.records)

    @property
    def dtype(self) -> DType:
        """The dtype of the first of them."""
        return self.records[0].dtype

    @property
    def is_stored(self) -> bool:
        """Whether all ranks kept its values."""
        return all(record.stored for record in self.records)

    @property
    def content(self) -> tuple[str, ...]:
        """The digest on each rank."""
        return tuple(record.digest for record in self.records)

    def of_ranks(self, ranks: Sequence[int]) -> Shards:
        """The same tensor on these ranks, in this order."""
        by_rank = dict(zip(self.ranks, self.records, strict=True))
        return replace(self, ranks=tuple(ranks), records=tuple(by_rank[rank] for rank in ranks))


class Members:
    """The archives of all ranks of one run.

    Attributes:
        archives: In the order of their ranks.
        shards: Every tensor, in execution order.
    """

    def __init__(self, archives: Iterable[Archive]) -> None:
        """Put the archives in order.

        Raises:
            UsageError: One does not say its rank; a rank is missing or there twice; runs are unlike.
        """
        by_rank: dict[int, Archive] = {}
        counts: dict[int, Archive] = {}
        for archive in archives:
            rank = rank_of(archive)
            if rank in by_rank:
                raise UsageError(
                    f"{archive.path}: is of rank {rank}, as {by_rank[rank].path} is; expected one of each",
                    hint="Name only the archives of one run.",
                )
            by_rank[rank] = archive
            if archive.info.ranks is not None and archive.info.ranks.count is not None:
                counts.setdefault(archive.info.ranks.count, archive)
        if not by_rank:
            raise UsageError("there are no archives of ranks to put together")
        if len(counts) > 1:
            (one, first), (other, second) = list(counts.items())[:2]
            raise UsageError(
                f"{second.path}: is of a run of {other} ranks, {first.path} is of {one}; expected one run"
            )
        expected = range(next(iter(counts), max(by_rank) + 1))
        missing = [str(rank) for rank in expected if rank not in by_rank]
        if missing or len(by_rank) > len(expected):
            names = f"rank {missing[0]}" if len(missing) == 1 else f"ranks {', '.join(missing)}"
            present = ", ".join(map(str, sorted(by_rank)))
            what = f"{names} of {len(expected)} missing" if missing else f"more than {len(expected)} ranks"
            raise UsageError(
                f"{by_rank[min(by_rank)].path}: {what}: there are archives of {present}",
                hint="Did that process end before its archive was written?" if missing else None,
            )
        self.archives: Sequence[Archive] = [by_rank[rank] for rank in expected]
        self._require_one_run()
        self.shards = self._gather()

    def __len__(self) -> int:
        return len(self.archives)

    def read(self, shards: Shards) -> list[Array]:
        """The stored elements on each rank."""
        pairs = zip(shards.ranks, shards.records, strict=True)
        return [self.archives[rank].read(record) for rank, record in pairs]

    def labels(self, shards: Shards) -> list[int]:
        """A number for each rank: of equal tensors the same, by their order."""
        records = shards.records
        algorithms = {self.archives[rank].algorithm for rank in shards.ranks}
        if len(algorithms) == 1 and all(record.digest for record in records):
            contents = [(r.digest, r.dtype.name, r.shape) for r in records]
            numbers = {content: i for i, content in enumerate(dict.fromkeys(contents))}
            return [numbers[content] for content in contents]
        if not shards.is_stored:
            return list(range(len(records)))
        labels: list[int] = []
        distinct: dict[object, int] = {}
        for record, array in zip(records, self.read(shards), strict=True):
            bits = record.dtype.name, array.shape, array.tobytes()
            labels.append(distinct.setdefault(bits, len(distinct)))
        return labels

    def _require_one_run(self) -> None:
        first = self.archives[0]
        for rank, archive in enumerate(self.archives[1:], 1):
            facts = (
                (
                    "is of a model",
                    first.info.model_class,
                    archive.info.model_class,
                    "Name only the archives of one run.",
                ),
                (
                    "has steps",
                    _steps(first),
                    _steps(archive),
                    "Are they of one run? A rank that died early has fewer steps.",
                ),
            )
            for what, expected, found, hint in facts:
                if found != expected:
                    raise UsageError(
                        f"{archive.path}: rank {rank} {what} {found or 'unknown'}, "
                        f"rank 0 {expected or 'unknown'}; expected the same",
                        hint=hint,
                    )
            ranked = next((r for r in archive.records if r.key.rank), None)
            if ranked is not None:
                raise UsageError(f"{archive.path}: {ranked.key.text}: names a rank in an archive of one rank")

    def _gather(self) -> list[Shards]:
        """Bring the records of all ranks together, in an order that contradicts none of theirs."""
        by_text: dict[str, dict[int, Record]] = {}
        for rank, archive in enumerate(self.archives):
            for record in archive.records:
                by_text.setdefault(record.key.text, {})[rank] = record
        order = [record.key.text for record in self.archives[0].records]
        for archive in self.archives[1:]:
            order = _with_others(order, [(r.key.text, r.key.step) for r in archive.records])
        gathered = []
        for text in order:
            members = sorted(by_text[text].items())
            gathered.append(Shards(members[0][1].key, *map(tuple, zip(*members, strict=True))))
        return gathered


def rank_of(archive: Archive) -> int:
    """The rank that an archive is of: by its run's metadata, else by `rankN` in its name.

    Raises:
        UsageError: Neither says it, or the archive is of several ranks.
    """
    ranks = archive.info.ranks
    if ranks is not None and ranks.is_merged:
        raise UsageError(
            f"{archive.path}: holds all ranks already, expected an archive of one rank",
            hint="Name only the archives of single ranks.",
        )
    if ranks is not None and ranks.rank is not None:
        return ranks.rank
    numbers = _RANK.findall(archive.path.name)
    if len(numbers) != 1:
        raise UsageError(
            f"{archive.path}: does not say which rank it is of, expected rankN in its name",
            hint="Rename it, as NAME.rank0.h5.",
        )
    return int(numbers[0])


def _with_others(order: Sequence[str], other: Sequence[tuple[str, int]]) -> list[str]:
    """Insert keys of another rank before the next one that both have, or at the end."""
    known = set(order)
    before: dict[str, list[str]] = {}
    waiting: list[str] = []
    for text, _ in other:
        if text in known:
            if waiting:
                before.setdefault(text, []).extend(waiting)
            waiting = []
        else:
            waiting.append(text)
    merged: list[str] = []
    for text in order:
        merged += [*before.get(text, ()), text]
    return merged + waiting


def _steps(archive: Archive) -> str:
    """The steps that have records, as a text."""
    steps = sorted({record.key.step for record in archive.records})
    if not steps:
        return ""
    if len(steps) > 1 and len(steps) == steps[-1] - steps[0] + 1:
        return f"{steps[0]} to {steps[-1]}"
    return ", ".join(map(str, steps))
