"""Adapters: what tensorcap knows of each framework; the only rooms that import one.

In comes a model or a workload of a framework; out go recorded values, by the methods of `protocol.Adapter`.
Read `protocol` first, then a framework's folder. All folders name the same subject alike: `adapter`, `model`,
`modules`, `parameters`, `model_inputs`, `description`, `tensors`, `tap`, `injector`, `roots`, `rerun`.
`edits` describes changes of a module's call for the diagnosis; `dumps` and `graph_dump` write archives as
other tools do. Runtimes of graphs in files share `input_arrays`, `array_records` and `control_run`.
"""

from tensorcap.adapters.dumps import export
from tensorcap.adapters.edits import (
    MASK_EXTENTS,
    Absent,
    Added,
    Argument,
    CallMutation,
    Cleared,
    Edit,
    Filled,
    Masked,
    OfModel,
    Operation,
    Ordered,
    Quantised,
    Replaced,
    Rerun,
    Rounded,
    Scaled,
    Shifted,
    Transposed,
)
from tensorcap.adapters.graph_dump import GraphDump, export_graph
from tensorcap.adapters.protocol import (
    Adapter,
    CalledRoot,
    CompiledAhead,
    Grafts,
    GraftSide,
    Layer,
    ProgramOperation,
    adapter_for,
    adapter_named,
)

__all__ = [
    "MASK_EXTENTS",
    "Absent",
    "Adapter",
    "Added",
    "Argument",
    "CallMutation",
    "CalledRoot",
    "Cleared",
    "CompiledAhead",
    "Edit",
    "Filled",
    "GraftSide",
    "Grafts",
    "GraphDump",
    "Layer",
    "Masked",
    "OfModel",
    "Operation",
    "Ordered",
    "ProgramOperation",
    "Quantised",
    "Replaced",
    "Rerun",
    "Rounded",
    "Scaled",
    "Shifted",
    "Transposed",
    "adapter_for",
    "adapter_named",
    "export",
    "export_graph",
]
