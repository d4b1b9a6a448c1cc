"""The tests of the policy: each asks one question of measured pairs and gives findings.

In: a `Context` (archives, calls, pairs by key, errors, routers). Out: pairs of key text and `Finding`.
Read `context`, then `tests` (the list, in the order of a pair's findings), then the subjects: `exact_values`,
`value_range`, `own_error`, `quantisation`, `recomputed` (with the room's `attention_formula`), `angles`,
`growth`, `outlier`, `gains`, `op_gains`, `code_gains`, `run_gains`, `input_dependence`. A test that is added
is a class in its module, a line in `tests.TESTS` and a limit in `Policy`.
"""

from tensorcap.comparison.policy_tests.context import (
    Context,
    Gain,
    GainLog,
    PolicyTest,
    is_whole,
    measured_pair,
)
from tensorcap.comparison.policy_tests.gains import count_tail, judge_gain, judge_tail
from tensorcap.comparison.policy_tests.growth import judge_total_error
from tensorcap.comparison.policy_tests.own_error import judge_own_error
from tensorcap.comparison.policy_tests.quantisation import without_estimates
from tensorcap.comparison.policy_tests.tests import (
    EVIDENCE_TESTS,
    GROWTH_TESTS,
    LOCAL_TESTS,
    ROUNDED_INPUT_TESTS,
    TESTS,
)

__all__ = [
    "EVIDENCE_TESTS",
    "GROWTH_TESTS",
    "LOCAL_TESTS",
    "ROUNDED_INPUT_TESTS",
    "TESTS",
    "Context",
    "Gain",
    "GainLog",
    "PolicyTest",
    "count_tail",
    "is_whole",
    "judge_gain",
    "judge_own_error",
    "judge_tail",
    "judge_total_error",
    "measured_pair",
    "without_estimates",
]
