"""The tests of the policy: each asks one question of measured pairs and gives findings.

In: a `Context` (archives, calls, pairs by key, errors, routers). Out: pairs of key text and `Finding`.
Read `context`, then `tests` (the list, in the order of a pair's findings), then the subjects: `exact_values`,
`own_error`, `growth`, `outlier`, `gains`, `op_gains`, `input_dependence`. A test that is added is a class in
its module, a line in `tests.TESTS` and a limit in `Policy`.
"""

from tensorcap.comparison.policy_tests.context import Context, Gain, PolicyTest, is_whole, measured_pair
from tensorcap.comparison.policy_tests.growth import judge_total_error
from tensorcap.comparison.policy_tests.tests import LOCAL_TESTS, TESTS

__all__ = [
    "LOCAL_TESTS",
    "TESTS",
    "Context",
    "Gain",
    "PolicyTest",
    "is_whole",
    "judge_total_error",
    "measured_pair",
]
