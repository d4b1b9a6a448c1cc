"""The Equivalence workflow: eight stages that validate a port, on one folder, each usable alone.

A folder with `equivalence.toml` goes in; the method's files and a record of each stage come out. Read
`parameters` (the file), `experiment` (the folder), `stage` (what a stage is, and when it is believed),
`models` (how both sides are built and called on ranks), then the stages in the order of `stages`.
"""

from tensorcap.equivalence.calibration import CONFIG, LimitsOfPorts, calibrate
from tensorcap.equivalence.downstream import DownstreamComparison, compare_scores
from tensorcap.equivalence.experiment import Experiment
from tensorcap.equivalence.experiment_report import gather_experiment
from tensorcap.equivalence.forced_decoding import ForcedComparison, ForcedLimits, compare_forced
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
from tensorcap.equivalence.smoke import SmokeTest, compare_generations
from tensorcap.equivalence.stage import Stage, StageResult
from tensorcap.equivalence.stages import (
    STAGES,
    StageState,
    run_stage,
    run_stages,
    stage_named,
    states,
    steps_after,
)

__all__ = [
    "CONFIG",
    "FILE",
    "STAGES",
    "DownstreamComparison",
    "Experiment",
    "ForcedComparison",
    "ForcedLimits",
    "Limits",
    "LimitsOfPorts",
    "Parameters",
    "RunSettings",
    "Settings",
    "SmokeTest",
    "Stage",
    "StageResult",
    "StageState",
    "calibrate",
    "changed_settings",
    "compare_forced",
    "compare_generations",
    "compare_scores",
    "gather_experiment",
    "new_settings",
    "run_stage",
    "run_stages",
    "stage_named",
    "states",
    "steps_after",
    "write_settings",
]
