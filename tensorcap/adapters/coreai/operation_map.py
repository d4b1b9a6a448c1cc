"""Which operation of a Core AI asset holds the value of which node of the torch graph.

The converter notes, for each output of a torch node, the Core AI operations that compute it. Where several
are noted, the one of the highest id holds the value. The nodes are those of the graph that the converter was
given, which is decomposed: `addmm`, where the exported graph had `linear`. Of an asset from a file, which has
no graph, nodes have the modules and lines that the asset keeps of them: modules as instances of their class,
`Block-2.Linear-5`, and not by their paths in the model.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch

from tensorcap.adapters.coreai.engine import locations, operations_by_id, output_maps, torch_sources
from tensorcap.adapters.torch.export import source_of
from tensorcap.adapters.torch.frames import Source
from tensorcap.workload import redact

_TORCH: Final = re.compile(r"[/\\](site|dist)-packages[/\\]torch[/\\]")  # also of another machine
_OWN_TORCH: Final = os.path.join(os.path.dirname(torch.__file__), "")
_COUNTER: Final = re.compile(r"_\d+$")
_FLOAT: Final = re.compile(r"[x<](bf16|f16|f32|f64)>")
_DTYPES: Final = {"bf16": "bfloat16", "f16": "float16", "f32": "float32", "f64": "float64"}
SILENT: Final = frozenset({"coreai.constant", "coreai.output", "coreai.graph"})  # compute no value


@dataclass(frozen=True)
class MappedOutput:
    """An output of a torch node, and where its value is.

    Attributes:
        node: The node of the graph that was converted.
        stack: The calls of modules that it lies in, outermost first: key of the call, path.
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
            "module": self.stack[-1][1] if self.stack else "",
            "output": self.output,
            "op_id": self.op_id,
            "op_ids": list(self.op_ids),
            "op": self.op_name,
            "op_output": self.op_output,
            "file": self.source.file or "",
            "line": self.source.line,
        }


class OperationMap:
    """The operations of an asset.

    Attributes:
        nodes: The nodes of the graph that was converted, by name; none of an asset from a file.
        outputs: The mapped outputs of torch nodes, in the order of the nodes.
        unmapped: Names of the operations that compute a value of no torch node, by id.
        modules: The class of each module by its path, of an asset from a file: the root first.
        dtype: The dtype of most floating values that are computed, "" if there are none.
    """

    def __init__(self, asset_program: Any, exported: Any) -> None:
        operations = operations_by_id(asset_program)
        self.nodes = {} if exported is None else {node.name: node for node in exported.graph.nodes}
        names = {
            source.id: source.identifiers[0]
            for source in torch_sources(asset_program).get("torch", {}).values()
            if source.identifiers
        }
        origins = _origins(operations)
        targets: dict[tuple[int, int], list[tuple[int, int]]] = {}
        for row in output_maps(asset_program):
            if row.source_level == "torch" and row.target_level == "coreai" and row.source_op_id in names:
                key = row.source_op_id, row.source_output
                targets.setdefault(key, []).append((row.target_op_id, row.target_output))
        multiple = {names[node] for node, output in targets if output}
        self.outputs = []
        for (number, output), ids in sorted(targets.items()):
            name = names[number]
            op_id, op_output = max(ids)
            operation = operations.get(op_id)
            node = self.nodes.get(name)
            origin = origins.get(name, operation)
            is_multiple = name in multiple or _returns_several(node, name)
            self.outputs.append(
                MappedOutput(
                    name,
                    _frames(origin) if node is None else _stack(node),
                    output,
                    f"output.{output}" if is_multiple else "output",
                    op_id,
                    tuple(sorted({known for known, _ in ids})),
                    "" if operation is None else operation.name,
                    op_output,
                    _innermost(origin) if node is None else source_of(node),
                )
            )
        mapped = {op_id for row in self.outputs for op_id in row.op_ids}
        self.unmapped = {
            op_id: operation.name
            for op_id, operation in operations.items()
            if op_id not in mapped and operation.name not in SILENT
        }
        self.modules = _modules(operations.values())
        kinds = Counter(kind for operation in operations.values() for kind in _float_types(operation))
        self.dtype = _DTYPES[kinds.most_common(1)[0][0]] if kinds else ""


def _origins(operations: Mapping[int, Any]) -> dict[str, Any]:
    """An operation that was made of each node: that which holds its value may be one of a later node."""
    origins: dict[str, Any] = {}
    for operation in operations.values():
        for source in locations.get_source_info(operation.location) or ():
            if source.name == "torch" and source.identifiers:
                origins.setdefault(str(source.identifiers[0]), operation)
    return origins


def _stack(node: Any) -> tuple[tuple[str, str], ...]:
    return tuple((key, path) for key, (path, _) in (node.meta.get("nn_module_stack") or {}).items())


def _trace(operation: Any) -> list[str]:
    """The instances of modules that an operation lies in, the root first: `Mlp$1`, `Block$2`."""
    return [str(frame) for frame in locations.get_stack_trace(operation.location) or ()]


def _frames(operation: Any) -> tuple[tuple[str, str], ...]:
    """The same as calls of modules; the root has no path."""
    frames = [] if operation is None else [frame.replace("$", "-") for frame in _trace(operation)]
    paths = [".".join(frames[1:end]) for end in range(1, len(frames) + 1)]
    return tuple((path, path) for path in paths)


def _modules(operations: Any) -> dict[str, str]:
    modules = {}
    for operation in operations:
        for (_, path), frame in zip(_frames(operation), _trace(operation), strict=True):
            modules.setdefault(path, frame.partition("$")[0])
    return dict(sorted(modules.items(), key=lambda entry: entry[0].count(".") + bool(entry[0])))


def _returns_several(node: Any, name: str) -> bool:
    """Whether a node returns a tuple or a list; without its graph, by the schema of the op of its name."""
    if node is not None:
        return isinstance(node.meta.get("val"), tuple | list)
    packet = getattr(torch.ops.aten, _COUNTER.sub("", name), None)
    if not isinstance(packet, torch._ops.OpOverloadPacket):
        return False
    schema = getattr(packet, packet.overloads()[0])._schema
    return len(schema.returns) > 1 or isinstance(schema.returns[0].type, torch.ListType)


def _innermost(operation: Any) -> Source:
    """The innermost line of code outside of torch that an operation keeps; innermost ones come first."""
    places = [] if operation is None else locations.get_file_line_col_locations(operation.location) or []
    for place in places:
        file = str(place.filename)
        if file not in ("", "-") and not file.startswith(_OWN_TORCH) and not _TORCH.search(file):
            return Source(redact(file), int(place.line), None)
    return Source(None, None, None)


def _float_types(operation: Any) -> list[str]:
    if operation.name in SILENT:
        return []
    return [kind for result in operation.results for kind in _FLOAT.findall(str(result.type))]
