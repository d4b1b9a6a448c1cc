"""How far one tensor lies from another: numbers without a verdict, as in `specs/metrics.md`.

Pairs of archived records go in, a `Difference` comes out. Read `difference` (the metrics, the tolerance),
`operands` (rows and blocks) and `measurement` (the loop over pairs, which chooses an engine); then the
engines: `numpy_engine`, and `compiled_engine` with `kernels`, `wide_kernels`, `kernel_loops`, `kernel_state`,
`kernel_tasks` and `machine_code`. Both add up `totals` with `error_bins` and `scaled_sums`; small pairs are
measured many at a time (`pair_batch`). `location`, `logits` and `expert_choices` are further passes, over
`value_blocks`. `three_tensors` is the Equivalence method's R.
"""

from tensorcap.metrics.difference import Difference, Nonfinite, Tolerance
from tensorcap.metrics.error_bins import Histogram, quantiles
from tensorcap.metrics.expert_choices import WIDEST, RoutingDifference, is_routing, routing_metrics
from tensorcap.metrics.location import ErrorMap, Location, error_along, locate
from tensorcap.metrics.logits import (
    LogitDifference,
    agreement,
    are_logits,
    divergences,
    logit_metrics,
    shared_vocabulary,
)
from tensorcap.metrics.measurement import measure, measure_pairs
from tensorcap.metrics.numpy_engine import UNIT, NumpyEngine, exact_difference
from tensorcap.metrics.operands import Operands
from tensorcap.metrics.three_tensors import ThreeTensors, compare_three
from tensorcap.metrics.totals import Totals

__all__ = [
    "UNIT",
    "WIDEST",
    "Difference",
    "ErrorMap",
    "Histogram",
    "Location",
    "LogitDifference",
    "Nonfinite",
    "NumpyEngine",
    "Operands",
    "RoutingDifference",
    "ThreeTensors",
    "Tolerance",
    "Totals",
    "agreement",
    "are_logits",
    "compare_three",
    "divergences",
    "error_along",
    "exact_difference",
    "is_routing",
    "locate",
    "logit_metrics",
    "measure",
    "measure_pairs",
    "quantiles",
    "routing_metrics",
    "shared_vocabulary",
]
