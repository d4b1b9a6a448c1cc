"""What pairs before a result are apart says how far it may be: an error does not excuse itself."""

from __future__ import annotations

import pytest

from tensorcap.alignment.match import Drift

PAIRS = [(order, 1e-6) for order in range(8)] + [(order, 0.02) for order in range(8, 40)]


@pytest.mark.spec("ALN-27")
def test_what_follows_an_error_does_not_count_before_it() -> None:
    drift = Drift(reversed(PAIRS))
    assert drift.near(1e-7, before=8) == pytest.approx(4e-6)
    assert drift.near(1e-7) == pytest.approx(0.08)


@pytest.mark.spec("ALN-27")
def test_before_all_pairs_only_rounding_counts() -> None:
    assert Drift(PAIRS).near(1e-7, before=0) == pytest.approx(4e-7)
    assert Drift([]).near(1e-7) == pytest.approx(4e-7)


@pytest.mark.spec("ALN-27")
def test_one_pair_of_four_that_is_far_apart_does_not_count() -> None:
    assert Drift([(0, 1e-6), (1, 1e-6), (2, 1e-6), (3, 1e-6), (4, 0.5)]).near(0.0) == pytest.approx(4e-6)
