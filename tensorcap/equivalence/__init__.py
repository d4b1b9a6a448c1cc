"""The Equivalence workflow: eight stages that validate a port, on one folder, each usable alone.

A folder with `equivalence.toml` goes in; the method's files and a record of each stage come out. Read
`parameters` (the file), `experiment` (the folder), `stage` (what a stage is, and when it is believed),
`models` (how both sides are built and called on ranks), then the stages in the order of `stages`.
"""

from tensorcap.equivalence.experiment import Experiment
from tensorcap.equivalence.parameters import (
    FILE,
    Limits,
    Parameters,
    RunSettings,
    Settings,
    changed_settings,
    new_settings,
    write_settings,
)
from tensorcap.equivalence.stage import Stage, StageResult
from tensorcap.equivalence.stages import STAGES, StageState, run_stage, run_stages, stage_named, states

__all__ = [
    "FILE",
    "STAGES",
    "Experiment",
    "Limits",
    "Parameters",
    "RunSettings",
    "Settings",
    "Stage",
    "StageResult",
    "StageState",
    "changed_settings",
    "new_settings",
    "run_stage",
    "run_stages",
    "stage_named",
    "states",
    "write_settings",
]
