"""Which layers of a target cost how much of its output, and which have to stay in the reference's precision.

A reference's and a target's workload go in; a `Sensitivity` comes out; of two archives, with less certainty,
an `ArchiveSensitivity`. Read `output_metrics` (what is measured of an output), then `layer_sensitivity`
(which runs are made, in which order), then `precision_lists` (the layers that stay, as quantisers take
them), and `archive_sensitivity`.
"""

from tensorcap.sensitivities.archive_sensitivity import (
    ArchiveSensitivity,
    LayerOwnError,
    archive_sensitivity,
)
from tensorcap.sensitivities.layer_sensitivity import (
    GROUPINGS,
    Grouping,
    LayerGroup,
    Sensitivity,
    sensitivity,
)
from tensorcap.sensitivities.output_metrics import Goal, OutputMetric, metric_of, parse_goal
from tensorcap.sensitivities.precision_lists import LISTS, precision_list

__all__ = [
    "GROUPINGS",
    "LISTS",
    "ArchiveSensitivity",
    "Goal",
    "Grouping",
    "LayerGroup",
    "LayerOwnError",
    "OutputMetric",
    "Sensitivity",
    "archive_sensitivity",
    "metric_of",
    "parse_goal",
    "precision_list",
    "sensitivity",
]
