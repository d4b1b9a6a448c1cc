"""Adapters: what tensorcap knows of each framework; the only rooms that import one.

In comes a model or a workload of a framework; out go recorded values, by the methods of `protocol.Adapter`.
Read `protocol` first, then a framework's folder. All folders name the same subject alike: `adapter`, `model`,
`modules`, `parameters`, `inputs`, `description`, `tensors`, `tap`, `substitution`, `roots`, `rerun`.
`edits` describes changes of a module's call for the diagnosis; `dumps` writes archives as other tools do.
"""
