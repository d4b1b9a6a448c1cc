"""The operations of a Core AI asset: what each computes, and which code it was made of."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tensorcap.adapters.coreai.engine import AIModelAsset, locations, operations_by_id, quiet
from tensorcap.adapters.coreai.operation_map import SILENT, OperationMap, instances_of, last_of, line_of
from tensorcap.adapters.protocol import ProgramOperation
from tensorcap_formats.errors import ReadError, abbreviate


def operations_of(path: Path) -> list[ProgramOperation]:
    """The operations of an asset that compute a value, in the order of their ids.

    Raises:
        ReadError: Core AI cannot load it.
    """
    try:
        with quiet():
            program = AIModelAsset.load(path).program
    except Exception as error:
        reason = abbreviate(str(error).strip().partition("\n")[0], 300)
        raise ReadError(f"{path}: Core AI cannot load it: {type(error).__name__}: {reason}") from error
    with quiet():
        operation_map = OperationMap(program, None)
        operations = {op_id: last_of(same) for op_id, same in operations_by_id(program).items()}
    holds: dict[int, list[str]] = {}
    for row in operation_map.outputs:
        namesakes = operation_map.namesakes.get(row.node)
        if namesakes is not None and namesakes.hide:
            continue
        name = row.node if row.output == 0 else f"{row.node} output {row.output}"
        holds.setdefault(row.op_id, []).append(name)
    return [
        _described(op_id, operation, holds.get(op_id, []))
        for op_id, operation in sorted(operations.items())
        if operation.name not in SILENT and len(operation.results)
    ]


def _described(op_id: int, operation: Any, holds: list[str]) -> ProgramOperation:
    sources = locations.get_source_info(operation.location) or ()
    source = line_of(operation)
    return ProgramOperation(
        op_id,
        operation.name,
        tuple(str(result.type) for result in operation.results),
        tuple(str(name) for each in sources if each.name == "torch" for name in each.identifiers or ()),
        tuple(holds),
        tuple(instances_of(operation)),
        source.file or "",
        source.line,
    )
