"""What a device run can capture, planned before the graph is compiled.

An archive or a list of modules goes in with points, a `CapturePlan` comes out. Read `module_list`,
`neuron_rules` (what NxDI takes of a module) and `capture_plan`.
"""

from tensorcap.capture_plan.capture_plan import CapturePlan, PlannedPoint, plan, read_points, read_settings
from tensorcap.capture_plan.module_list import ModuleList, read_modules

__all__ = [
    "CapturePlan",
    "ModuleList",
    "PlannedPoint",
    "plan",
    "read_modules",
    "read_points",
    "read_settings",
]
