"""Prints of tensors, against statistics that numpy takes here."""

from __future__ import annotations

import math

import numpy as np
import pytest

from tensorcap.alignment.match import Fingerprint, NearestFingerprints, agreements, rounding_of
from tensorcap_formats.dtypes import Array, dtype
from tensorcap_formats.keys import Key
from tensorcap_formats.records import Record


def _print(array: Array) -> Fingerprint:
    x = array.astype(np.float64)
    return Fingerprint(x.size, x.mean(), math.sqrt((x * x).sum()), x.min(), x.max())


def _drawn(seed: int, size: int = 64) -> Array:
    return np.random.default_rng(seed).standard_normal(size)


@pytest.mark.spec("ALN-20")
def test_a_print_is_that_of_every_permutation() -> None:
    x = _drawn(0)
    assert _print(x).distance(_print(np.random.default_rng(1).permutation(x))) < 1e-14


@pytest.mark.spec("ALN-24")
def test_the_print_of_a_concatenation_follows_from_its_parts() -> None:
    x, y = _drawn(0, 40), 3 + _drawn(1, 24)
    joined = Fingerprint.concatenated([_print(x), _print(y)])
    assert joined.distance(_print(np.concatenate([x, y]))) < 1e-14


@pytest.mark.spec("ALN-20")
def test_a_distance_is_the_largest_of_four_relative_differences() -> None:
    one = Fingerprint(4, mean=0.0, l2=2.0, minimum=-1.0, maximum=1.0)  # root mean square 1
    assert one.distance(Fingerprint(4, 0.0, 2.5, -1.0, 1.0)) == pytest.approx(0.2)  # 0.25 of 1.25
    assert one.distance(Fingerprint(4, 0.1, 2.0, -1.0, 1.0)) == pytest.approx(0.1)
    assert one.distance(Fingerprint(4, 0.0, 2.0, -1.0, 2.0)) == pytest.approx(0.5)
    assert one.distance(Fingerprint(5, 0.0, 2.0, -1.0, 1.0)) == math.inf


@pytest.mark.spec("ALN-20")
def test_nats_grow_with_how_much_nearer_the_nearest_is() -> None:
    x, y = Fingerprint(8, 0.0, 4.0, -2.0, 2.0), Fingerprint(8, 0.0, 4.0, -2.0, 1.9)
    near = Fingerprint(8, 0.0, 4.0, -2.0, 2.002)  # 0.001 from x, 0.102 / 2.002 from y
    (found,) = agreements([x, y], [near], 1e-6).values()
    assert found.distance == pytest.approx(0.001, rel=1e-2)
    assert found.other == pytest.approx(0.051, rel=1e-2)
    assert found.nats == pytest.approx(3 * math.log(0.051 / 0.001), rel=1e-2)


@pytest.mark.spec("ALN-21")
def test_equal_prints_are_one_group_whatever_the_order() -> None:
    x = _print(_drawn(0))
    prints = {"b": x, "a": x, "c": _print(_drawn(1))}
    for ordered in (prints, dict(reversed(prints.items()))):
        assert NearestFingerprints(ordered).groups(1e-6) == [("a", "b"), ("c",)]


@pytest.mark.spec("ALN-20")
@pytest.mark.parametrize(
    ("name", "rounding"),
    [
        ("int64", 0.0),
        ("bool", 0.0),
        ("float64", 2.0**-22),
        ("float32", 2.0**-22),
        ("float16", 2.0**-11),
        ("complex32", 2.0**-11),
        ("bfloat16", 2.0**-8),
        ("float8_e4m3fn", 2.0**-4),
        ("float8_e5m2", 2.0**-3),
        ("float6_e2m3fn", 2.0**-4),
        ("float4_e2m1fn", 2.0**-2),
    ],
)
def test_the_rounding_of_a_record_is_the_unit_roundoff_of_its_dtype(name: str, rounding: float) -> None:
    record = Record(Key("layer", "output"), dtype(name), (8,), 0, "", None, stored=True, row=0)
    assert rounding_of(record) == rounding
