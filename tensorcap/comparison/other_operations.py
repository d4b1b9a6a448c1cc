"""Ops that the target runs otherwise, in the code of a module whose results are right (CMP-280).

Ops are paired by their names and numbers within a module's code. Where that code is another one, as of a
fused attention or of a partition, what stands under one name is not the same on both sides. Whether it
matters is told by the reference's data flow:

1. A result of an op that a record of a module holds as well, in whichever shape, is what that is.
2. A result that nothing is computed of says nothing.
3. Else all that is nearest computed of it and agrees has to be far less wrong; through what the target
   lacks, or has otherwise itself. An op that hands an error on much smaller, as a softmax, proves nothing,
   unless the target has a tensor of another shape: that is as if it had none.
4. What is computed of a tensor that a mapping brings into another order is in that order.

A target that was compiled of the reference's program runs the same ops, and runs that recorded nodes of an
exported program do: there an op is itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Final

from tensorcap.alignment import MappedArchive
from tensorcap.comparison.node_flow import NodeFlow
from tensorcap.comparison.pair import Pair
from tensorcap.comparison.ranking import error_of
from tensorcap.runs import is_inner, is_parameter, is_telling, ops_of, rms_of
from tensorcap.wording import some
from tensorcap_formats.archive import Archive
from tensorcap_formats.keys import unescape
from tensorcap_formats.records import Record

_UNDONE: Final = 8.0  # as in CMP-55
_SUMS: Final = frozenset(("add", "sub", "rsub"))  # which a small term hardly changes
# Ops whose result is far less wrong than what they are given, if that is small
_LESSEN: Final = ("softmax", "attention", "sigmoid", "tanh", "exp", "log")

_Contents = tuple[object, ...]


class OtherOperations:
    """What the reference's data flow says of ops that differ.

    Args:
        reference: The trusted archive.
        target: The archive under test, under the reference's keys.
        pairs: Their pairs, judged.
        flow: The data flow of these.
    """

    def __init__(self, reference: Archive, target: Archive, pairs: Sequence[Pair], flow: NodeFlow) -> None:
        self._reference, self._target, self._flow = reference, target, flow
        self._ops = ops_of(reference)
        self._has_digests = reference.trusts_digests
        self._pairs = pairs

    def why(self, pair: Pair, results: Sequence[Pair]) -> str:
        """Why a result of an op may differ; "" if it may not.

        Args:
            pair: The pair.
            results: Results of the module around it, which agree.
        """
        record = pair.reference
        if record is None or record.key.where not in self._flow.nodes or not self._flow.is_of_reference:
            return ""
        if self._target.info.operation_map or self._is_of_programs:
            return ""
        place = record.key.where
        if held := self._modules.get(_contents(record), []) if self._has_digests else []:
            agreeing = [other for other in held if other.agrees]
            same = "it holds what {} holds, which agrees; the target has something else under this name"
            return same.format(agreeing[0].key) if len(agreeing) == len(held) else ""
        ends, is_handed_on = self._nearest(record)
        if not ends and not is_handed_on:
            return "nothing is computed of it"
        if not all(self._is_undone(pair, end, record) for end in results if end.is_green):
            return ""
        if self._is_of_other_order(place):
            return "it is computed of a tensor that the mapping lays out anew, and what comes of it agrees"
        is_lacking = pair.status == "shape-mismatch"  # what the target has is another tensor
        if not all((is_lacking or self._is_end(end)) and self._is_undone(pair, end, record) for end in ends):
            return ""
        names = [unescape(end.key.rpartition("/")[0]) for end in (ends or results)]
        return f"the target computes something else here, and what comes of it agrees: {some(names, 2)}"

    @cached_property
    def _is_of_programs(self) -> bool:
        """Whether both runs recorded nodes of exported programs."""
        scopes = self._reference.info.scope, self._target.info.scope
        return all(scope is not None and scope.level == "export" for scope in scopes)

    def _nearest(self, record: Record) -> tuple[list[Pair], bool]:
        """The nearest pairs that agree of what is computed of a result; whether any is handed on."""
        ends: dict[str, Pair] = {}
        is_handed_on = False
        known, waiting = {record.key.where}, [record.key.where]
        text = record.key.text
        while waiting:
            place = waiting.pop()
            users = [*self._users(place, text)]
            text = ""
            is_handed_on |= not users or self._is_held(place)
            for user in users:
                if user in known:
                    continue
                known.add(user)
                agreeing = [p for p in self._flow.pairs(user) if p.is_compared and p.is_green]
                if agreeing:
                    ends.update((pair.key, pair) for pair in agreeing)
                else:
                    waiting.append(user)
        return [*ends.values()], is_handed_on and len(known) > 1

    def _users(self, place: str, text: str) -> Iterator[str]:
        """Nodes that take a result of a node, or one alone."""
        if text and self._flow.graph is not None:
            yield from (user.where for user in self._flow.graph.consumers(text))
        else:
            yield from self._flow.users(place)

    def _is_held(self, place: str) -> bool:
        """Whether a record of a module holds what a node returned."""
        records = [pair.reference for pair in self._flow.pairs(place) if pair.reference is not None]
        return any(_contents(record) in self._modules for record in records)

    def _is_end(self, end: Pair) -> bool:
        """Whether an op that agrees would show an error of what it is given."""
        assert end.reference is not None
        name = self._ops.name(end.reference.key.where)
        return not any(word in name for word in _LESSEN)

    def _is_undone(self, pair: Pair, end: Pair, record: Record) -> bool:
        """Whether what comes of a result is that much less wrong; of sums, absolutely as well."""
        before, after = error_of(pair), error_of(end) or 0.0
        before = 1.0 if before is None else min(before, 1.0)
        if after * _UNDONE > before:
            return False
        follower = end.reference
        if follower is None or self._ops.name(follower.key.where) not in _SUMS:
            return True
        return after * rms_of(follower) * _UNDONE <= before * rms_of(record)

    def _is_of_other_order(self, place: str) -> bool:
        """Whether a node is computed of a tensor that a mapping brings into another order.

        What agrees as it is has the reference's order, and so has what is computed of that alone.
        """
        known, waiting = {place}, [place] if self._in_other_order else []
        while waiting:
            here = waiting.pop()
            pairs = self._flow.pairs(here)
            records = [pair.reference for pair in pairs if pair.reference is not None]
            if any(_contents(record) in self._in_other_order for record in records):
                return True
            if pairs and all(pair.is_compared and pair.is_green for pair in pairs):
                continue
            fresh = [one for one in self._flow.inputs(here) if one not in known]
            known.update(fresh)
            waiting += fresh
        return False

    @cached_property
    def _modules(self) -> dict[_Contents, list[Pair]]:
        """Pairs of what modules were given and returned, by what the reference holds there."""
        modules: dict[_Contents, list[Pair]] = {}
        for pair in self._pairs:
            record = pair.reference
            if record is None or is_inner(record.key) or is_parameter(record.key) or not is_telling(record):
                continue
            modules.setdefault(_contents(record), []).append(pair)
        return modules

    @cached_property
    def _in_other_order(self) -> set[_Contents]:
        """What the reference holds where a mapping brings the target's elements into another order."""
        if not isinstance(self._target, MappedArchive):
            return set()
        links = (link for link in self._target.links.values() if not link.is_renaming)
        return {_contents(record) for link in links for record in link.reference if is_telling(record)}


def _contents(record: Record) -> _Contents:
    """What records of one value in a step have in common, in whichever shape."""
    return record.key.rank, record.key.step, record.digest, record.dtype.name, record.size
