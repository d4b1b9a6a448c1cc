"""The list of the policy's tests: one line each, in the order in which a pair's findings are reported."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from tensorcap.comparison.policy_tests.angles import AnglesTest
from tensorcap.comparison.policy_tests.code_gains import CodeGainTest
from tensorcap.comparison.policy_tests.context import PolicyTest
from tensorcap.comparison.policy_tests.exact_values import (
    CoarserDtypeTest,
    ParameterTest,
    StatisticsTest,
    WholeNumberTest,
    ZeroRowTest,
)
from tensorcap.comparison.policy_tests.gains import GainTest
from tensorcap.comparison.policy_tests.growth import GrowthTest, WideErrorTest
from tensorcap.comparison.policy_tests.input_dependence import InputDependenceTest
from tensorcap.comparison.policy_tests.op_gains import OpGainTest
from tensorcap.comparison.policy_tests.outlier import OutlierTest
from tensorcap.comparison.policy_tests.own_error import OwnErrorTest
from tensorcap.comparison.policy_tests.quantisation import QuantisationTest
from tensorcap.comparison.policy_tests.recomputed import RecomputedTest
from tensorcap.comparison.policy_tests.run_gains import RunGainTest
from tensorcap.comparison.policy_tests.value_range import RangeTest

TESTS: Final[tuple[PolicyTest, ...]] = (
    WholeNumberTest(),
    StatisticsTest(),
    ParameterTest(),
    CoarserDtypeTest(),
    ZeroRowTest(),
    RangeTest(),
    OwnErrorTest(),
    QuantisationTest(),
    RecomputedTest(),
    AnglesTest(),
    GrowthTest(),
    WideErrorTest(),
    OutlierTest(),
    GainTest(),
    OpGainTest(),
    CodeGainTest(),
    RunGainTest(),
    InputDependenceTest(),
)


def _names(has_attribute: Callable[[PolicyTest], bool]) -> frozenset[str]:
    """Return the names of the findings of all tests that have an attribute."""
    return frozenset(name for test in TESTS if has_attribute(test) for name in test.names)


# Names of findings by the attributes of `PolicyTest`; masks are compared before the policy's tests, and
# ranks after them
LOCAL_TESTS: Final = _names(lambda test: test.is_local) | {"mask", "unequal_copies"}
EVIDENCE_TESTS: Final = _names(lambda test: test.is_evidence) | {"unequal_copies"}
GROWTH_TESTS: Final = _names(lambda test: test.is_growth)
ROUNDED_INPUT_TESTS: Final = _names(lambda test: test.fails_by_rounded_inputs)
