"""Which operation of a Core AI asset holds the value of which node of the torch graph.

The converter notes, for each output of a torch node, the Core AI operations that compute it. Where several
are noted, the one of the highest id holds the value. The nodes are those of the graph that the converter was
given, which is decomposed: `addmm`, where the exported graph had `linear`. Of an asset from a file, which has
no graph, nodes have the modules and lines that the asset keeps of them: modules as instances of their class,
`Block-2.Linear-5`, and not by their paths in the model.

The converter gives some ids to operations of two nodes, and the runtime has one value of an id. Whose value
it is, its type says, or nothing.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

from tensorcap.adapters.coreai.engine import locations, operations_by_id, output_maps, torch_sources
from tensorcap.adapters.coreai.output_order import ResultType, kind_of
from tensorcap.adapters.torch.frames import Source
from tensorcap.adapters.torch.graph_nodes import source_of
from tensorcap.workload import redact
from tensorcap_formats.dtypes import Array

_TORCH: Final = re.compile(r"[/\\](site|dist)-packages[/\\]torch[/\\]")  # also of another machine
_OWN_TORCH: Final = os.path.join(os.path.dirname(torch.__file__), "")
_COUNTER: Final = re.compile(r"_\d+$")
_TYPE: Final = re.compile(r"tensor<((?:\d+x)*)([a-z]+)(\d+)>")
_KINDS: Final = {"f": "f", "bf": "f", "si": "i", "i": "i", "ui": "u"}  # of numpy, by what precedes the bits
_DTYPES: Final = {"bf16": "bfloat16", "f16": "float16", "f32": "float32", "f64": "float64"}
SILENT: Final = frozenset({"coreai.constant", "coreai.output", "coreai.graph"})  # compute no value


@dataclass(frozen=True)
class MappedOutput:
    """An output of a torch node, and where its value is.

    Attributes:
        node: The node of the graph that was converted.
        stack: The calls of modules that it lies in, outermost first: key of the call, path.
        module: Path of the innermost one in the model; "" if the asset knows instances and no paths.
        output: Which output of the torch node.
        slot: The slot of the output, `output` of a node with one.
        op_id: The Core AI operation that holds it.
        op_ids: All Core AI operations that are mapped to it.
        op_name: Its name.
        op_output: Which of its outputs.
        source: The line of code outside of torch; all None if the asset has no locations.
    """

    node: str
    stack: tuple[tuple[str, str], ...]
    module: str
    output: int
    slot: str
    op_id: int
    op_ids: tuple[int, ...]
    op_name: str
    op_output: int
    source: Source

    def describe(self) -> dict[str, Any]:
        """The row of the run's metadata."""
        return {
            "node": self.node,
            "module": self.module,
            "output": self.output,
            "op_id": self.op_id,
            "op_ids": list(self.op_ids),
            "op": self.op_name,
            "op_output": self.op_output,
            "file": self.source.file or "",
            "line": self.source.line,
        }


@dataclass(frozen=True)
class Namesakes:
    """The operations of other nodes that have the id of a node's own.

    Attributes:
        text: The last of them, and its node.
        own: The types of the results of the node's own operation.
        others: Those of each of the others.
        hide: Whether one of them is the last operation of the id in the program.
    """

    text: str
    own: tuple[ResultType | None, ...]
    others: tuple[tuple[ResultType | None, ...], ...]
    hide: bool

    @classmethod
    def of(cls, own: Any, others: Sequence[Any], last: Any) -> Namesakes:
        """Describe them."""
        other = last_of(others)
        text = " of ".join((other.name, *_nodes_of(other)[:1]))
        return cls(text, _types_of(own), tuple(map(_types_of, others)), last is not own)

    def are_excluded(self, array: Array, output: int) -> bool:
        """Whether a value has the type of an output of the node's own operation, and none of the others'."""
        own, *others = (types[output] if output < len(types) else None for types in (self.own, *self.others))
        return own == ResultType(array.shape, kind_of(array)) and own not in others and None not in others


class OperationMap:
    """The operations of an asset.

    Attributes:
        nodes: The nodes of the graph that was converted, by name; none of an asset from a file.
        outputs: The mapped outputs of torch nodes, in the order of the nodes.
        unmapped: Names of the operations that compute a value of no torch node, by id.
        modules: The class of each module by its path, of an asset from a file: the root first.
        results: The types of the results of operations with several, by id.
        dtype: The dtype of most floating values that are computed, "" if there are none.
        namesakes: The operations of other nodes that have the id of a node's own, by its name.
    """

    def __init__(self, asset_program: Any, exported: Any) -> None:
        by_id = operations_by_id(asset_program)
        operations = {op_id: last_of(same) for op_id, same in by_id.items()}
        self.nodes = {} if exported is None else {node.name: node for node in exported.graph.nodes}
        names = {
            source.id: source.identifiers[0]
            for source in torch_sources(asset_program).get("torch", {}).values()
            if source.identifiers
        }
        origins = _origins(operations)
        targets = {key: ids for key, ids in _targets(asset_program).items() if key[0] in names}
        multiple = {names[node] for node, output in targets if output}
        self.outputs = []
        self.namesakes: dict[str, Namesakes] = {}
        for (number, output), ids in sorted(targets.items()):
            name = names[number]
            op_id, op_output = max(ids)
            operation = operations.get(op_id)
            own, others = _split(name, by_id.get(op_id, ()))
            if own and others:
                operation = last_of(own)
                self.namesakes[name] = Namesakes.of(operation, others, operations[op_id])
            node = self.nodes.get(name)
            origin = origins.get(name, operation)
            stack = _frames(origin) if node is None else _stack(node)
            is_multiple = name in multiple or _returns_several(node, name)
            self.outputs.append(
                MappedOutput(
                    name,
                    stack,
                    "" if node is None or not stack else stack[-1][1],
                    output,
                    f"output.{output}" if is_multiple else "output",
                    op_id,
                    tuple(sorted({known for known, _ in ids})),
                    "" if operation is None else operation.name,
                    op_output,
                    line_of(origin) if node is None else source_of(node),
                )
            )
        mapped = {op_id for row in self.outputs for op_id in row.op_ids}
        self.unmapped = {
            op_id: operation.name
            for op_id, operation in operations.items()
            if op_id not in mapped and operation.name not in SILENT
        }
        self.modules = _modules(operations.values())
        types = {
            op_id: [_TYPE.search(str(result.type)) for result in operation.results]
            for op_id, operation in operations.items()
            if operation.name not in SILENT
        }
        self.results = {
            op_id: [_result_type(*each.groups()) for each in matches if each is not None]
            for op_id, matches in types.items()
            if len(matches) > 1
        }
        floats = Counter(
            f"{each[2]}{each[3]}" for matches in types.values() for each in matches if each and "f" in each[2]
        )
        self.dtype = _DTYPES.get(floats.most_common(1)[0][0], "") if floats else ""


def _targets(program: Any) -> dict[tuple[int, int], list[tuple[int, int]]]:
    """The operations and their outputs that are noted for each output of a torch node, by its number."""
    targets: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for row in output_maps(program):
        if row.source_level == "torch" and row.target_level == "coreai":
            key = row.source_op_id, row.source_output
            targets.setdefault(key, []).append((row.target_op_id, row.target_output))
    return targets


def last_of(operations: Sequence[Any]) -> Any:
    """The operation whose value the runtime gives for an id: the last one that computes a value."""
    return next((each for each in reversed(operations) if each.name not in SILENT), operations[-1])


def _nodes_of(operation: Any) -> list[str]:
    """The torch nodes that an operation was made of, one for each source."""
    sources = locations.get_source_info(operation.location) or ()
    return [str(each.identifiers[0]) for each in sources if each.name == "torch" and each.identifiers]


def _split(node: str, operations: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """The operations of an id that compute a value: those that were made of a node, and the others."""
    computing = [each for each in operations if each.name not in SILENT and len(each.results)]
    own = [each for each in computing if node in _nodes_of(each)]
    return own, [each for each in computing if node not in _nodes_of(each)]


def _origins(operations: Mapping[int, Any]) -> dict[str, Any]:
    """An operation that was made of each node: that which holds its value may be one of a later node."""
    origins: dict[str, Any] = {}
    for operation in operations.values():
        for node in _nodes_of(operation):
            origins.setdefault(node, operation)
    return origins


def mappings_of(program: Any) -> dict[str, Any]:
    """The operators of a converted program and the nodes that they were made of, in Apple's own form (AIM-6).

    Args:
        program: Core AI's program.
    """
    sources = torch_sources(program)
    return {
        "sources": {
            level: {op_id: source.to_dict() for op_id, source in operations.items()}
            for level, operations in sources.items()
        },
        "outputs": [row.to_dict() for row in output_maps(program)],
    }


def _stack(node: Any) -> tuple[tuple[str, str], ...]:
    return tuple((key, path) for key, (path, _) in (node.meta.get("nn_module_stack") or {}).items())


def instances_of(operation: Any) -> list[str]:
    """The instances of modules that an operation lies in, the root first: `Mlp$1`, `Block$2`."""
    return [str(frame) for frame in locations.get_stack_trace(operation.location) or ()]


def _frames(operation: Any) -> tuple[tuple[str, str], ...]:
    """The same as calls of modules; the root has no path."""
    frames = [] if operation is None else [frame.replace("$", "-") for frame in instances_of(operation)]
    paths = [".".join(frames[1:end]) for end in range(1, len(frames) + 1)]
    return tuple((path, path) for path in paths)


def _modules(operations: Any) -> dict[str, str]:
    modules: dict[str, str] = {}
    for operation in operations:
        for (_, path), frame in zip(_frames(operation), instances_of(operation), strict=True):
            modules.setdefault(path, frame.partition("$")[0])
    return dict(sorted(modules.items(), key=lambda entry: entry[0].count(".") + bool(entry[0])))


def _returns_several(node: Any, name: str) -> bool:
    """Whether a node returns a tuple or a list; without its graph, by the schema of the op of its name."""
    if node is not None:
        return isinstance(node.meta.get("val"), tuple | list)
    packet = getattr(torch.ops.aten, _COUNTER.sub("", name), None)
    if not isinstance(packet, torch._ops.OpOverloadPacket):
        return False
    schema = getattr(packet, packet._overload_names[0])._schema
    return len(schema.returns) > 1 or isinstance(schema.returns[0].type, torch.ListType)


def line_of(operation: Any) -> Source:
    """The innermost line of code outside of torch that an operation keeps; innermost ones come first."""
    places = [] if operation is None else locations.get_file_line_col_locations(operation.location) or []
    for place in places:
        file = str(place.filename)
        if file not in ("", "-") and not file.startswith(_OWN_TORCH) and not _TORCH.search(file):
            return Source(redact(file), int(place.line), None)
    return Source(None, None, None)


def _result_type(sizes: str, kind: str, bits: str) -> ResultType:
    """The type `tensor<2x8xf32>`, by its parts."""
    shape = tuple(int(size) for size in sizes.split("x") if size)
    return ResultType(shape, "b" if (kind, bits) == ("i", "1") else _KINDS.get(kind, ""))


def _types_of(operation: Any) -> tuple[ResultType | None, ...]:
    """The types of an operation's results; None of one that has an axis of any length."""
    matches = [_TYPE.search(str(result.type)) for result in operation.results]
    return tuple(None if each is None else _result_type(*each.groups()) for each in matches)
