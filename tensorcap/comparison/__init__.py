"""Compare two archives: pairs of records, a status for each, and what a report needs besides.

In come two archives with equal keys (`tensorcap.alignment` makes them so); out comes a `Comparison`. Read
`pair` (the data, and `decide`, the one place that sets a status), `pairing` with `program_pair`, `pipeline`
(the whole way);
then what decides: `exact`, `thresholds`, `calibration`, `judge` with `policy` and `policy_tests`, `routing`,
`near_ties`; `held_values`, `element_order`, `folded_results` and `agreement` (what differs and is no
mistake); `quantised_layers`, with `weight_judge` and `layer_errors` (what a target in few bits may be off
by); then the rest: `sync_points` with `bands`, `divergence`, `exchanged_operations`, `warnings`,
`blind_spots`, `baseline`,
`explanation`, `preflight`.
"""

from tensorcap.comparison.agreement import explain_as
from tensorcap.comparison.bands import (
    METRIC_TEXTS,
    SYNC_METRICS,
    Bands,
    SyncMetric,
    metric_values,
    peak_of,
)
from tensorcap.comparison.baseline import label_of
from tensorcap.comparison.blind_spots import RunSummary
from tensorcap.comparison.calibration import CALIBRATED, Calibration, kind_of
from tensorcap.comparison.calibration_runs import Calibrated, calibrate, write_calibration
from tensorcap.comparison.comparison import Comparison, json_pieces
from tensorcap.comparison.cut_values import RoundedArguments
from tensorcap.comparison.divergence import (
    Divergence,
    Inputs,
    called_sites,
    caller_of,
    first_divergence,
    has_only_grown,
    is_circumstance,
    state_writer,
)
from tensorcap.comparison.exact import judge_by_metadata, require_readable
from tensorcap.comparison.examination import Examination
from tensorcap.comparison.exchanged_operations import ExchangedOperations, exchanged_operations
from tensorcap.comparison.explanation import Explanation, explain
from tensorcap.comparison.folded_results import FoldedResults
from tensorcap.comparison.injected import Injected, injection_text
from tensorcap.comparison.layer_errors import LayerError
from tensorcap.comparison.mapping_provenance import BY_VALUES
from tensorcap.comparison.near_ties import NearTies
from tensorcap.comparison.padding import Padding
from tensorcap.comparison.pair import (
    ABSENT,
    GREEN,
    JUDGED,
    SEVERITY,
    STATUSES,
    Decision,
    Finding,
    Pair,
    Ratio,
    Status,
    decide,
    worst_status,
)
from tensorcap.comparison.pairing import Selection
from tensorcap.comparison.pipeline import compare, compare_records, paired
from tensorcap.comparison.policy import LETTERS, POLICY, Limits, Precision, describe_test
from tensorcap.comparison.policy_tests import (
    EVIDENCE_TESTS,
    GROWTH_TESTS,
    ROUNDED_INPUT_TESTS,
    count_tail,
    judge_gain,
    judge_own_error,
    without_estimates,
)
from tensorcap.comparison.quantised_layers import QuantisedLayers, measure_layers
from tensorcap.comparison.quantised_weights import (
    QuantisedModule,
    holds_packed_weights,
    packed_weights,
    quantised_modules,
)
from tensorcap.comparison.ranking import SHADES, Shade, by_error, by_module, contents, error_of, shade, worst
from tensorcap.comparison.ranks import given_unlike_on_ranks, rank_text, ranks_that_add, rule_of_ranks
from tensorcap.comparison.robust_errors import RobustErrors, sample
from tensorcap.comparison.sync_point import ModuleShare, Sort, SyncPoint, SyncPoints
from tensorcap.comparison.sync_points import has_sync_points, points_of, sync_points
from tensorcap.comparison.tensorless_calls import GivenValues
from tensorcap.comparison.thresholds import (
    METRICS,
    KeyThresholds,
    Thresholds,
    is_better_if_higher,
    judge_metric,
    metric_named,
)
from tensorcap.comparison.warnings import digest_warnings
from tensorcap.comparison.weight_grids import find_weight_grid
from tensorcap.comparison.weight_judge import QuantisedWeight

__all__ = [
    "ABSENT",
    "BY_VALUES",
    "CALIBRATED",
    "EVIDENCE_TESTS",
    "GREEN",
    "GROWTH_TESTS",
    "JUDGED",
    "LETTERS",
    "METRICS",
    "METRIC_TEXTS",
    "POLICY",
    "ROUNDED_INPUT_TESTS",
    "SEVERITY",
    "SHADES",
    "STATUSES",
    "SYNC_METRICS",
    "Bands",
    "Calibrated",
    "Calibration",
    "Comparison",
    "Decision",
    "Divergence",
    "Examination",
    "ExchangedOperations",
    "Explanation",
    "Finding",
    "FoldedResults",
    "GivenValues",
    "Injected",
    "Inputs",
    "KeyThresholds",
    "LayerError",
    "Limits",
    "ModuleShare",
    "NearTies",
    "Padding",
    "Pair",
    "Precision",
    "QuantisedLayers",
    "QuantisedModule",
    "QuantisedWeight",
    "Ratio",
    "RobustErrors",
    "RoundedArguments",
    "RunSummary",
    "Selection",
    "Shade",
    "Sort",
    "Status",
    "SyncMetric",
    "SyncPoint",
    "SyncPoints",
    "Thresholds",
    "by_error",
    "by_module",
    "calibrate",
    "called_sites",
    "caller_of",
    "compare",
    "compare_records",
    "contents",
    "count_tail",
    "decide",
    "describe_test",
    "digest_warnings",
    "error_of",
    "exchanged_operations",
    "explain",
    "explain_as",
    "find_weight_grid",
    "first_divergence",
    "given_unlike_on_ranks",
    "has_only_grown",
    "has_sync_points",
    "holds_packed_weights",
    "injection_text",
    "is_better_if_higher",
    "is_circumstance",
    "json_pieces",
    "judge_by_metadata",
    "judge_gain",
    "judge_metric",
    "judge_own_error",
    "kind_of",
    "label_of",
    "measure_layers",
    "metric_named",
    "metric_values",
    "packed_weights",
    "paired",
    "peak_of",
    "points_of",
    "quantised_modules",
    "rank_text",
    "ranks_that_add",
    "require_readable",
    "rule_of_ranks",
    "sample",
    "shade",
    "state_writer",
    "sync_points",
    "without_estimates",
    "worst",
    "worst_status",
    "write_calibration",
]
