"""Operations that the target runs in the place of others, as the traces of both sides show them."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from tensorcap.comparison.pair import Pair
from tensorcap.runs import Graph, Node, Value, is_inner
from tensorcap.wording import joined_name, name_pattern, shortened, some
from tensorcap_formats.archive import Archive
from tensorcap_formats.errors import ReadError, TensorNotFoundError
from tensorcap_formats.keys import Key, module_site
from tensorcap_formats.records import Record
from tensorcap_formats.view import ArchiveView, recorded

_MOST_OPERATIONS: Final = 6  # of a side that a sentence lists
_LONGEST: Final = 140  # characters of one of them, with its arguments


@dataclass(frozen=True, slots=True)
class ExchangedOperations:
    """What the target runs where the reference runs something else.

    Attributes:
        reference: The reference's operations, in execution order, with their arguments.
        target: The target's.
        modules: Sites of the reference's modules in which this is so, in execution order.
        place: Source line of the last of the target's operations, "" if it is not known.
        key: Key text of the first result of them that the comparison has, which is not green.
    """

    reference: tuple[str, ...]
    target: tuple[str, ...]
    modules: tuple[str, ...]
    place: str
    key: str

    @property
    def text(self) -> str:
        """What was run in the place of what, and where, as a sentence."""
        ours, theirs = (some(list(side), _MOST_OPERATIONS) for side in (self.reference, self.target))
        place = f", {self.place}" if self.place else ""
        where = shortened(joined_name(list(self.modules)))
        return f"The target ran {theirs} in the place of {ours} in {where}{place}."


class _Region(NamedTuple):
    """Operations that one side alone has, connected with each other, in one call of a module.

    Attributes:
        nodes: They, in execution order.
        inputs: What they take from elsewhere: keys of pairs, or names of parameters; "" for what is unknown.
        results: What is made of them elsewhere: keys of pairs.
    """

    nodes: tuple[Node, ...]
    inputs: frozenset[str]
    results: frozenset[str]


def exchanged_operations(
    pairs: Sequence[Pair], reference: Archive, target: Archive
) -> tuple[ExchangedOperations, ...]:
    """Find operations that the target runs in the place of others, where results begin to differ.

    1. Of either side take the operations whose results the other one has not, views apart, and join those
       that take each other's results, within one call of a module.
    2. Two such regions stand in one another's place if they take the same tensors, recorded parameters among
       them, by the pairs, and if what takes their results is a pair, too: an operation behind them, or the
       result of their module, which has their bytes.
    3. It is told if all that they take is equal and a result is not green. What computes the same in other
       operations is none.
    4. The same exchange in further modules is named with the first, also behind it, where inputs differ.

    Args:
        pairs: What was compared.
        reference: The trusted archive, as it was compared.
        target: The archive under test, as it was compared.

    Returns:
        In the reference's execution order; nothing if a side has no operations.
    """
    alone = [pair for pair in pairs if _is_of_an_operation(pair)]
    if not (any(pair.reference for pair in alone) and any(pair.target for pair in alone)):
        return ()
    try:
        ours = _Side.of(reference, [(p.key, p.reference) for p in pairs])
        theirs = _Side.of(target, [(p.key, p.target) for p in pairs])
    except (TensorNotFoundError, ReadError):
        return ()
    shared = {pair.key for pair in pairs if pair.reference and pair.target}
    by_inputs: dict[frozenset[str], list[_Region]] = {}
    for region in theirs.regions({pair.key for pair in alone if pair.target}, shared):
        by_inputs.setdefault(region.inputs, []).append(region)
    by_key = {pair.key: pair for pair in pairs}
    kinds: dict[tuple[object, ...], list[tuple[_Region, _Region, str]]] = {}
    for region in ours.regions({pair.key for pair in alone if pair.reference}, shared):
        candidates = by_inputs.get(region.inputs, [])
        other = next((one for one in candidates if one.results & region.results), None)
        if other is None or not region.inputs <= by_key.keys():
            continue
        candidates.remove(other)
        names = (tuple(node.call_text for node in one.nodes) for one in (region, other))
        kind = (*names, name_pattern(region.nodes[0].module))
        kinds.setdefault(kind, []).append((region, other, _first_wrong(region, other, by_key)))
    return tuple(_exchange(members) for members in kinds.values() if any(key for _, _, key in members))


def _is_of_an_operation(pair: Pair) -> bool:
    """Whether it is of a result within a module that one side alone has."""
    record = pair.reference or pair.target
    is_alone = pair.reference is None or pair.target is None
    return is_alone and record is not None and is_inner(record.key) and record.key.slot.startswith("output")


@dataclass(frozen=True, slots=True)
class _Side:
    """Operations of a side, and what the comparison calls their tensors.

    Attributes:
        graph: The operations, as they were recorded.
        key_of: Keys of pairs by key texts of the graph.
    """

    graph: Graph
    key_of: Mapping[str, str]

    @classmethod
    def of(cls, archive: Archive, records: Iterable[tuple[str, Record | None]]) -> _Side:
        """Read the operations of the archive behind all views, and the names of records there."""
        key_of = {}
        for key, record in records:
            own = recorded(archive, record)[1] if record is not None else None
            if own is not None:
                key_of[own.key.text] = key
        while isinstance(archive, ArchiveView):
            archive = archive.source
        return cls(Graph.of(archive), key_of)

    def regions(self, alone: Container[str], shared: Container[str]) -> Iterator[_Region]:
        """Join the operations whose results are of pairs that this side alone has."""
        places = {text.rpartition("/")[0] for text, key in self.key_of.items() if key in alone}
        region_of: dict[str, dict[str, Node]] = {}
        for node in self.graph.nodes:
            if node.where not in places:
                continue
            region = region_of[node.where] = {node.where: node}
            for value in node.inputs:
                before = region_of.get(self._origin(value).rpartition("/")[0], region)
                if before is not region and _call(next(iter(before.values()))) == _call(node):
                    smaller, region = sorted((region, before), key=len)
                    region.update(smaller)
                    region_of.update(dict.fromkeys(smaller, region))
        for region in {id(region): region for region in region_of.values()}.values():
            yield self._region(sorted(region.values(), key=lambda node: node.order), shared)

    def _region(self, nodes: Sequence[Node], shared: Container[str]) -> _Region:
        within = {node.where for node in nodes}
        taken = {self._origin(value) for node in nodes for value in node.inputs if value.number is None}
        inputs = {self.key_of.get(name, name) for name in taken if name.rpartition("/")[0] not in within}
        results = {*self._results_behind(nodes, within), *self._results_of_module(nodes[-1])}
        return _Region(tuple(nodes), frozenset(inputs), frozenset(key for key in results if key in shared))

    def _origin(self, value: Value) -> str:
        """The key text of the record that a value is, or is a view of, else its parameter; "" if unknown."""
        if value.key is None:
            module, _, name = (value.parameter or "").rpartition(".")
            text = Key(module_site(module), f"param.{name}").text
            return text if text in self.key_of else value.parameter or ""
        try:
            return self.graph.output(value.key).key or ""
        except TensorNotFoundError:  # an input of the model
            return value.key

    def _results_behind(self, nodes: Sequence[Node], within: Iterable[str]) -> Iterator[str]:
        """Keys of results of the operations that take results of some, through views."""
        known = set(within)
        waiting = [f"{node.where}/{value.name}" for node in nodes for value in node.outputs]
        while waiting:
            for node in self.graph.consumers(waiting.pop()):
                if node.where in known:
                    continue
                known.add(node.where)
                for value in node.outputs:
                    text = f"{node.where}/{value.name}"
                    if value.key != text:
                        waiting.append(text)
                    elif text in self.key_of:
                        yield self.key_of[text]

    def _results_of_module(self, node: Node) -> Iterator[str]:
        """Keys of results of a node's module that have the bytes of what the node returned."""
        archive = self.graph.archive
        digests = {archive.get(v.key).digest for v in node.outputs if v.key is not None and v.key in archive}
        step = node.where.partition("/")[0]
        for slot in ("output", "output.0"):
            call = f"@{node.module_call}" if node.module_call else ""
            text = f"{step}/{node.module}{call}/{slot}"
            if text in self.key_of and archive.get(text).digest in digests - {None, ""}:
                yield self.key_of[text]


def _call(node: Node) -> tuple[str, str, int]:
    return node.where.partition("/")[0], node.module, node.module_call


def _first_wrong(ours: _Region, theirs: _Region, pairs: Mapping[str, Pair]) -> str:
    """The first result that is not green, of what is equal; "" if there is none."""
    if not ours.inputs or not all(pairs[name].is_equal for name in ours.inputs):
        return ""
    wrong = [pairs[key] for key in ours.results & theirs.results if key in pairs]
    wrong = [pair for pair in wrong if pair.is_required and not pair.is_green and pair.reference is not None]
    return min(wrong, key=lambda pair: pair.reference.order if pair.reference else 0).key if wrong else ""


def _exchange(members: Sequence[tuple[_Region, _Region, str]]) -> ExchangedOperations:
    """Name one exchange in all modules that have it."""
    region, other, key = next(member for member in members if member[2])
    last = other.nodes[-1]
    line = f":{last.line}" if last.line else ""
    function = f" in {last.function}" if last.function else ""
    return ExchangedOperations(
        tuple(shortened(node.call_text, _LONGEST) for node in region.nodes),
        tuple(shortened(node.call_text, _LONGEST) for node in other.nodes),
        tuple(dict.fromkeys(ours.nodes[0].module for ours, _, _ in members)),
        f"{last.file.rpartition('/')[2]}{line}{function}" if last.file else "",
        key,
    )
