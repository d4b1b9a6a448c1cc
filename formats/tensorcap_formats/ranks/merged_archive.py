"""An archive of all ranks of a run: tensors put together as they are read."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tensorcap_formats.archive import Archive
from tensorcap_formats.dtypes import Array
from tensorcap_formats.keys import Key
from tensorcap_formats.ranks.members import Members, Shards
from tensorcap_formats.ranks.plan import MergedTensor, Plan, iterate_rules, plan_merge, problem_json
from tensorcap_formats.records import Record


@dataclass(frozen=True, slots=True)
class _Source:
    """Where a record comes from: a tensor that is put together, or one rank's record."""

    archive: Archive
    record: Record
    tensor: MergedTensor | None = None


def merge_ranks(
    archives: Iterable[Archive],
    path: Path,
    *,
    rules: Mapping[str, str] | None = None,
    reference: Archive | None = None,
) -> MergedArchive:
    """Open the archives of all ranks as one, which closes them.

    Args:
        archives: In any order.
        path: What the whole is called in messages.
        rules: As for `plan_merge`.
        reference: As for `plan_merge`.

    Raises:
        UsageError: They are not those of all ranks of one run, or a rule fits nothing.
        ReadError: One cannot be read.
    """
    members = Members(archives)
    plan = plan_merge(members, rules=rules or {}, reference=reference)
    return MergedArchive(members, plan, path)


class MergedArchive(Archive):
    """The tensors of all ranks; those that no rule joins have the rank in their keys."""

    def __init__(self, members: Members, plan: Plan, path: Path) -> None:
        archives = members.archives
        self.plan = plan
        self._archives = archives
        self._sources: list[_Source] = []
        self._kept: tuple[int, Array] | None = None
        self._rank = -1  # whose copies are read; those of the first of each tensor
        records: list[Record] = []
        for tensor in plan.tensors:
            for record, source in _records(tensor, archives):
                records.append(replace(record, order=len(records), row=len(records)))
                self._sources.append(source)
        algorithms = {archive.algorithm for archive in archives}
        super().__init__(
            path,
            "ranks",
            records if len(algorithms) == 1 else [replace(record, digest="") for record in records],
            is_foreign=all(archive.is_foreign for archive in archives),
            is_ordered=all(archive.is_ordered for archive in archives),
            is_complete=all(archive.is_complete for archive in archives),
            run=_run(archives, plan),
            values=_values(archives),
            algorithm=algorithms.pop() if len(algorithms) == 1 else None,
            trusts_digests=all(archive.trusts_digests for archive in archives),
            skipped={name: why for archive in archives for name, why in archive.skipped.items()},
            problems={name: why for archive in archives for name, why in archive.problems.items()},
        )
        self.checks_digests = all(archive.checks_digests for archive in archives)

    def of_rank(self, rank: int) -> MergedArchive:
        """The same archive with what ranks hold copies of as one of them has it."""
        view = copy.copy(self)
        view._rank, view._kept = rank, None
        return view

    def _read_flat(self, record: Record, start: int, out: Array) -> None:
        source = self._sources[record.row]
        if source.tensor is None or source.tensor.is_whole:
            archive, own = source.archive, source.record
            if source.tensor is not None and self._rank in source.tensor.shards.ranks:
                shards = source.tensor.shards
                archive, own = self._archives[self._rank], shards.records[shards.ranks.index(self._rank)]
            archive.read_into(own, start, out)
            return
        out[:] = self._joined(record.row, source.tensor)[start : start + out.size]

    def _joined(self, row: int, tensor: MergedTensor) -> Array:
        """The whole tensor, flat; kept until another one is asked for, since it is read in blocks."""
        kept = self._kept  # another thread may set it
        if kept is None or kept[0] != row:
            pairs = zip(tensor.shards.ranks, tensor.shards.records, strict=True)
            arrays = [self._archives[rank].read(record) for rank, record in pairs]
            kept = self._kept = row, tensor.rule.merge(arrays, tensor.shards.dtype).reshape(-1)
        return kept[1]

    def verify(self, record: Record) -> None:
        """Read the tensors of all ranks behind a record, and check them."""
        source = self._sources[record.row]
        if source.tensor is None:
            source.archive.verify(source.record)
            return
        for rank, one in zip(source.tensor.shards.ranks, source.tensor.shards.records, strict=True):
            self._archives[rank].verify(one)

    def close(self) -> None:
        """Close the archives of all ranks."""
        self._kept = None
        for archive in self._archives:
            archive.close()


def _records(tensor: MergedTensor | Shards, archives: Sequence[Archive]) -> Iterable[tuple[Record, _Source]]:
    if isinstance(tensor, MergedTensor):
        first, rank = tensor.shards.records[0], tensor.shards.ranks[0]
        key = tensor.shards.key
        if tensor.is_whole:
            yield replace(first, key=key), _Source(archives[rank], first, tensor)
            return
        whole = replace(first, key=key, shape=tensor.shape, digest="", statistics=None)
        yield whole, _Source(archives[rank], first, tensor)
        return
    for rank, record in zip(tensor.ranks, tensor.records, strict=True):
        yield replace(record, key=_of_rank(record.key, rank)), _Source(archives[rank], record)


def _of_rank(key: Key, rank: int) -> Key:
    if key.is_bare:
        return Key(f"rank{rank}/{key.site}")
    return replace(key, rank=rank)


def _run(archives: Sequence[Archive], plan: Plan) -> dict[str, Any]:
    """The run of rank 0, with what holds for all ranks only, and how tensors were put together."""
    run = {name: value for name, value in archives[0].run.items() if name != "ranks"}
    if "modules" in run:
        run["modules"] = _modules([archive.run.get("modules") for archive in archives])
    run["ranks"] = {
        "count": len(archives),
        "archives": [archive.path.name for archive in archives],
        "tensors": list(iterate_rules(plan.merged)),
        "problems": [problem_json(problem) for problem in plan.problems],
    }
    return run


def _modules(lists: Sequence[Any]) -> Any:
    """Rank 0's modules; those of parameters and buffers of which ranks say unlike things are left out."""
    first = lists[0]
    if not isinstance(first, list):
        return first
    by_path = [
        {entry.get("path"): entry for entry in modules if isinstance(entry, Mapping)}
        for modules in lists
        if isinstance(modules, list)
    ]
    merged = []
    for entry in first:
        if isinstance(entry, Mapping):
            others = [modules.get(entry.get("path"), {}) for modules in by_path]
            entry = {
                name: _agreed(value, [other.get(name) for other in others])
                if name in ("parameters", "buffers") and isinstance(value, Mapping)
                else value
                for name, value in entry.items()
            }
        merged.append(entry)
    return merged


def _agreed(tensors: Mapping[str, Any], others: Sequence[Any]) -> dict[str, Any]:
    return {
        name: entry
        for name, entry in tensors.items()
        if all(isinstance(other, Mapping) and other.get(name) == entry for other in others)
    }


def _values(archives: Sequence[Archive]) -> dict[str, Any]:
    """What is no tensor: rank 0's, then what only other ranks have."""
    values: dict[str, Any] = {}
    for archive in archives:
        for key, value in archive.values.items():
            values.setdefault(key, value)
    return values
