"""Which operation of a Core AI asset holds the value of which node of the torch graph.

The converter notes, for each output of a torch node, the Core AI operations that compute it. Where several
are noted, the one of the highest id holds the value. The nodes are those of the graph that the converter was
given, which is decomposed: `addmm`, where the exported graph had `linear`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Final

from tensorcap.adapters.coreai.engine import locations, operations_by_id, output_maps, torch_sources
from tensorcap.workload import redact

_FRAME: Final = re.compile(r'File "(.+)", line (\d+), in .+')
_TORCH: Final = re.compile(r"[/\\]torch[/\\]")
SILENT: Final = frozenset({"coreai.constant", "coreai.output", "coreai.graph"})  # compute no value


@dataclass(frozen=True)
class MappedOutput:
    """An output of a torch node, and where its value is.

    Attributes:
        node: The node of the graph that was converted.
        stack: The calls of modules that it lies in, outermost first: key of the call, path.
        output: Which output of the torch node.
        op_id: The Core AI operation that holds it.
        op_ids: All Core AI operations that are mapped to it.
        op_name: Its name.
        op_output: Which of its outputs.
        file: Source file, "" if the asset has no locations.
        line: Line in it; None likewise.
    """

    node: str
    stack: tuple[tuple[str, str], ...]
    output: int
    op_id: int
    op_ids: tuple[int, ...]
    op_name: str
    op_output: int
    file: str
    line: int | None

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
            "file": self.file,
            "line": self.line,
        }


class OperationMap:
    """The operations of an asset.

    Attributes:
        outputs: The mapped outputs of torch nodes, in the order of their operations.
        unmapped: Names of the operations that compute a value of no torch node, by id.
    """

    def __init__(self, asset_program: Any, exported: Any) -> None:
        operations = operations_by_id(asset_program)
        nodes = {} if exported is None else {node.name: node for node in exported.graph.nodes}
        names = {
            source.id: source.identifiers for source in torch_sources(asset_program).get("torch", {}).values()
        }
        targets: dict[tuple[str, int], list[tuple[int, int]]] = {}
        for row in output_maps(asset_program):
            if row.source_level == "torch" and row.target_level == "coreai" and names.get(row.source_op_id):
                key = names[row.source_op_id][0], row.source_output
                targets.setdefault(key, []).append((row.target_op_id, row.target_output))
        outputs = []
        for (node, output), ids in targets.items():
            op_id, op_output = max(ids)
            operation = operations.get(op_id)
            file, line = _source(nodes.get(node), operation)
            outputs.append(
                MappedOutput(
                    node,
                    _stack(nodes.get(node)),
                    output,
                    op_id,
                    tuple(sorted({known for known, _ in ids})),
                    "" if operation is None else operation.name,
                    op_output,
                    file,
                    line,
                )
            )
        self.outputs = sorted(outputs, key=lambda row: (row.op_id, row.output))
        mapped = {op_id for row in self.outputs for op_id in row.op_ids}
        self.unmapped = {
            op_id: operation.name
            for op_id, operation in operations.items()
            if op_id not in mapped and operation.name not in SILENT
        }


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
    stack = {} if node is None else node.meta.get("nn_module_stack") or {}
    return tuple((key, path) for key, (path, _) in stack.items())


def _source(node: Any, operation: Any) -> tuple[str, int | None]:
    """The innermost line of code outside of torch."""
    if node is not None and node.stack_trace:
        frames = [(file, int(line)) for file, line in _FRAME.findall(node.stack_trace)]
    elif operation is not None:
        places = locations.get_file_line_col_locations(operation.location) or []
        frames = [(str(getattr(p, "filename", "")), int(getattr(p, "line", 0))) for p in places]
    else:
        frames = []
    users = [(file, line) for file, line in frames if file not in ("", "-") and not _TORCH.search(file)]
    return (redact(users[-1][0]), users[-1][1]) if users else ("", None)
