"""The list of the policy's tests: one line each, in the order in which a pair's findings are reported."""

from __future__ import annotations

from typing import Final

from tensorcap.comparison.policy_tests.context import PolicyTest
from tensorcap.comparison.policy_tests.exact_values import (
    CoarserDtypeTest,
    ParameterTest,
    StatisticsTest,
    WholeNumberTest,
    ZeroRowTest,
)
from tensorcap.comparison.policy_tests.gains import GainTest
from tensorcap.comparison.policy_tests.growth import GrowthTest
from tensorcap.comparison.policy_tests.input_dependence import InputDependenceTest
from tensorcap.comparison.policy_tests.op_gains import OpGainTest
from tensorcap.comparison.policy_tests.outlier import OutlierTest
from tensorcap.comparison.policy_tests.own_error import OwnErrorTest

TESTS: Final[tuple[PolicyTest, ...]] = (
    WholeNumberTest(),
    StatisticsTest(),
    ParameterTest(),
    CoarserDtypeTest(),
    ZeroRowTest(),
    OwnErrorTest(),
    GrowthTest(),
    OutlierTest(),
    GainTest(),
    OpGainTest(),
    InputDependenceTest(),
)
# Names of findings that speak of the module itself; masks are compared before the policy
LOCAL_TESTS: Final = frozenset(("mask", *(name for test in TESTS if test.is_local for name in test.names)))
