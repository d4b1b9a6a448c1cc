"""Which module is wrong: evidence against modules, suspects, and where errors begin.

Two archives, and a model if there is one, go in; a `Localization` or a bisection comes out. Read `evidence`
(what a replay, an injection or the archives show), `operations` (the same of a compiled target), `suspect`
(the result), `curves` and `nonfinite` (where errors and non-finite values begin), `ranking`, `localization`;
then `archive_bisection`, `live_bisection`, `bisection`; `weights` and `verification` are parts of what
`tensorcap.port_verification` does.
"""

from tensorcap.localization.archive_bisection import Bisection, bisect_archives
from tensorcap.localization.bisection import bisect
from tensorcap.localization.curves import ChangePoint, Curve, CurvePoint, change_points, runs_of
from tensorcap.localization.differing_operations import add_differing_operations
from tensorcap.localization.evidence import (
    ComparedRuns,
    Evidence,
    EvidenceSource,
    GatheredEvidence,
    gather_evidence,
)
from tensorcap.localization.live_bisection import LiveBisection, bisect_live
from tensorcap.localization.localization import localize
from tensorcap.localization.nonfinite import NonfiniteOrigin
from tensorcap.localization.operations import gather_operation_evidence, why_not_injectable
from tensorcap.localization.ranking import rank_suspects
from tensorcap.localization.suspect import (
    DifferingOperations,
    Localization,
    Operation,
    Place,
    Suspect,
    find_mistake,
    joined_modules,
    line_text,
)
from tensorcap.localization.verification import Verification
from tensorcap.localization.weights import WeightComparison, compare_weights

__all__ = [
    "Bisection",
    "ChangePoint",
    "ComparedRuns",
    "Curve",
    "CurvePoint",
    "DifferingOperations",
    "Evidence",
    "EvidenceSource",
    "GatheredEvidence",
    "LiveBisection",
    "Localization",
    "NonfiniteOrigin",
    "Operation",
    "Place",
    "Suspect",
    "Verification",
    "WeightComparison",
    "add_differing_operations",
    "bisect",
    "bisect_archives",
    "bisect_live",
    "change_points",
    "compare_weights",
    "find_mistake",
    "gather_evidence",
    "gather_operation_evidence",
    "joined_modules",
    "line_text",
    "localize",
    "rank_suspects",
    "runs_of",
    "why_not_injectable",
]
