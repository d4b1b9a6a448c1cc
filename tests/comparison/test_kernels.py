"""Both engines against float64 numpy written here, on random tensors; counts and indices exactly (MET-40)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Final

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tensorcap.metrics import NumpyEngine, Operands, Tolerance, Totals
from tensorcap.metrics.compiled_engine import CompiledEngine, OutOfRangeError
from tensorcap_formats.dtypes import Array, bits_of, dtype, dtype_of

ENGINES: Final = (NumpyEngine, CompiledEngine)
NARROW: Final[dict[str, Any]] = {
    "float32": np.float32,
    "float16": np.float16,
    **{
        name: getattr(ml_dtypes, name)
        for name in (
            "bfloat16",
            "float8_e3m4",
            "float8_e4m3",
            "float8_e4m3b11fnuz",
            "float8_e4m3fn",
            "float8_e4m3fnuz",
            "float8_e5m2",
            "float8_e5m2fnuz",
            "float6_e2m3fn",
            "float6_e3m2fn",
            "float4_e2m1fn",
        )
    },
}
LEAST: Final = float(np.finfo(np.float32).min)
SENTINELS: Final = (-65504.0, -1e9, -(2.0**127) * (2 - 2.0**-7), LEAST, float(np.finfo(np.float64).min))
SPECIAL: Final = (
    math.nan, math.inf, -math.inf, 0.0, -0.0, 1e-45, -1e-40, 3.4e38, -3e38, 1e9, *SENTINELS
)  # fmt: skip


@dataclass(frozen=True)
class Case:
    """Two tensors, what is allowed, and how they are cut."""

    reference: Array
    target: Array
    tolerance: Tolerance
    cuts: int

    @property
    def operands(self) -> Operands:
        return Operands(dtype_of(self.reference), dtype_of(self.target), self.reference.shape, self.tolerance)

    def run(self, kind: Any, cuts: int) -> Totals:
        """Feed one engine with reads of random sizes."""
        random = np.random.default_rng(cuts)
        operands = self.operands
        engine = kind(operands)
        sides = [bits_of(side).reshape(-1) for side in (self.reference, self.target)]
        at = 0
        while at < operands.size:
            end = operands.cut(at, int(random.integers(kind.unit, 4 * kind.unit)), kind.unit)
            engine.add(*(side[at:end] for side in sides))
            at = end
        totals: Totals = engine.totals()
        return totals


@st.composite
def cases(draw: st.DrawFn, dtypes: dict[str, Any] = NARROW) -> Case:
    names = st.sampled_from(sorted(dtypes))
    kinds = dtypes[draw(names)], dtypes[draw(names)]
    shape = draw(
        st.one_of(
            st.lists(st.integers(1, 70), max_size=3),
            st.tuples(st.integers(1, 3), st.integers(4000, 9000)),
            st.tuples(st.integers(1, 300), st.sampled_from([64, 65, 1000, 4096])),
            st.tuples(st.sampled_from([4095, 4096, 4097, 20000])),
        ).map(tuple)
    )
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    scale = 10.0 ** draw(st.integers(-40, 37) if kinds == (np.float32,) * 2 else st.integers(-6, 3))
    error = draw(st.sampled_from([0.0, 1e-7, 1e-3, 0.3]))
    with np.errstate(over="ignore", invalid="ignore"):
        x = random.standard_normal(shape) * scale
        y = x * (1 + error * random.standard_normal(shape))
        if draw(st.booleans()):  # ties
            x, y = np.round(x, 1), np.round(y, 1)
        reference, target = (np.array(side).astype(kind) for side, kind in zip((x, y), kinds, strict=True))
        rate = draw(st.sampled_from([0, 0, 3, 50]))
        if rate:
            for side in (reference, target):
                places = random.integers(0, side.size, -(-side.size // rate))
                # squares of larger ones overflow here, though not there
                special = [v for v in SPECIAL if side.dtype != np.float64 or not 1e100 < abs(v) < math.inf]
                side.reshape(-1)[places] = random.choice(special, places.size).astype(side.dtype)
        if draw(st.booleans()) and rate:  # a mask, alike on both sides
            places = random.integers(0, reference.size, -(-reference.size // 3))
            value = draw(st.sampled_from(SPECIAL))
            for side in (reference, target):
                side.reshape(-1)[places] = np.array(value).astype(side.dtype)
    rtol = draw(st.sampled_from([0.0, 1e-3, 1e-5, 1e-60, 1e30]))
    atol = draw(st.sampled_from([0.0, 1e-2, 1e-5, 2e-45, 1e-50, 1e60]))
    return Case(reference, target, Tolerance(rtol, atol), draw(st.integers(0, 100)))


WHOLE: Final = ("bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64")
FLOATS: Final = ("float64", "float32")  # an integer against a float


def whole_values(random: np.random.Generator, name: str, shape: tuple[int, ...], largest: int) -> Array:
    if name == "bool":
        return np.array(random.integers(0, 2, shape)).astype(bool)
    if name in FLOATS:
        return np.array(random.integers(-largest, largest, shape)).astype(name)
    limits = np.iinfo(name)
    least = max(limits.min, -largest)
    return np.array(random.integers(least, min(limits.max, largest), shape, endpoint=True)).astype(name)


@st.composite
def whole_cases(draw: st.DrawFn) -> Case:
    names = draw(st.sampled_from(WHOLE)), draw(st.sampled_from((*WHOLE, *FLOATS)))
    if draw(st.booleans()):
        names = names[0], names[0]
    shape = draw(
        st.one_of(
            st.lists(st.integers(1, 70), max_size=3),
            st.tuples(st.integers(1, 3), st.integers(4000, 9000)),
            st.tuples(st.integers(1, 300), st.sampled_from([64, 65, 1000, 4096])),
        ).map(tuple)
    )
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    largest = draw(st.sampled_from([1, 3, 300, 70_000, 2**31, 2**35]))
    reference = whole_values(random, names[0], shape, largest)
    target = whole_values(random, names[1], shape, largest)
    if names[0] == names[1]:  # few errors
        target = np.where(random.random(shape) < draw(st.sampled_from([0, 0.001, 0.5])), target, reference)
    for side in (reference, target):  # what is a mask sentinel among floats
        if side.dtype.kind == "i" and side.dtype.itemsize >= 4 and draw(st.booleans()):
            side.reshape(-1)[: side.size // 2] = draw(st.sampled_from([-65504, -1_000_000_000]))
    tolerance = Tolerance(draw(st.sampled_from([0.0, 1e-3])), draw(st.sampled_from([0.0, 1.0, 2.5])))
    return Case(reference, target, tolerance, draw(st.integers(0, 100)))


def assert_as_defined(totals: Totals, case: Case) -> None:
    """Hold what an engine counted against specs/metrics.md, done in float64 and all at once."""
    x, y = (side.astype(np.float64).reshape(-1) for side in (case.reference, case.target))
    has_sentinels = not any(side.dtype.kind in "biu" for side in (case.reference, case.target))
    hidden = np.isin(x, SENTINELS) & np.isin(y, SENTINELS) & has_sentinels
    measured = np.isfinite(x) & np.isfinite(y) & ~hidden
    classes = [np.select([np.isnan(s), s == np.inf, s == -np.inf], [1, 2, 3], 0) for s in (x, y)]
    unlike = classes[0] != classes[1]
    assert totals.elements == x.size
    assert totals.measured == np.count_nonzero(measured)
    assert totals.sentinels == np.count_nonzero(hidden)
    assert totals.sentinels_lost == np.count_nonzero(np.isin(x, SENTINELS) & (y == -np.inf))
    assert totals.nonfinite == tuple([int(np.sum(c == k)) for k in (1, 2, 3)] for c in classes)
    assert (totals.masks, totals.mask_at) == (unlike.sum(), unlike.argmax() if unlike.any() else None)

    x, y = np.where(measured, x, 0), np.where(measured, y, 0)
    error = np.abs(y - x)
    ratio = np.divide(error, np.abs(x), out=np.zeros_like(x), where=x != 0)
    assert totals.unequal == np.count_nonzero(error)
    bound = case.tolerance.atol + case.tolerance.rtol * np.abs(x)
    above = error > bound
    assert totals.mismatches == np.count_nonzero(above)
    assert totals.mismatch_at == (above.argmax() if above.any() else None)
    assert totals.zeros == np.count_nonzero(measured & (x == 0))
    assert totals.zero_reference_errors == np.count_nonzero(error[x == 0])
    for found, values in ((totals.error, error), (totals.ratio, ratio)):
        assert (found.value, found.at) == (values.max(), values.argmax() if values.any() else None)
    if totals.error.at is not None:
        at = totals.error.at
        sides = case.reference.reshape(-1)[at], case.target.reshape(-1)[at]
        assert totals.error_values == tuple(side.item() for side in sides)
    squares = [float(square) for square in totals.squares]
    assert squares == pytest.approx([(x * x).sum(), (y * y).sum(), (error * error).sum()], rel=1e-12)
    assert float(totals.errors_sum) == pytest.approx(error.sum(), rel=1e-12)
    assert totals.ratios_sum == pytest.approx(ratio.sum(), rel=2e-7)
    assert float(totals.dot) == pytest.approx((x * y).sum(), abs=1e-12 * np.abs(x * y).sum())
    counts = dict(totals.errors)
    assert sum(counts.values()) == totals.measured
    assert counts.get(0, 0) == totals.measured - totals.unequal
    assert_rows_as_defined(totals, case.operands.row, x, error)
    assert_correlation_as_defined(totals, x[measured], y[measured])


def assert_rows_as_defined(totals: Totals, row: int, x: Array, error: Array) -> None:
    outliers, rows, zero_rows = np.zeros_like(x), [], 0
    for first in range(0, x.size, row):
        for start in range(first, first + row, 4096):
            part = slice(start, min(start + 4096, first + row))
            rr, dd = (x[part] ** 2).sum(), (error[part] ** 2).sum()
            if rr:
                rows.append(math.sqrt(dd / rr))
                outliers[part] = error[part] / (np.abs(x[part]) + np.sqrt(rr / x[part].size))
            zero_rows += bool(dd and not rr)
    assert totals.zero_rows == zero_rows
    assert sum(count for _, count in totals.rows) == len(rows)
    found = np.array([number for number, count in totals.rows for _ in range(count)])
    expected = np.sort(np.array(rows, np.float32).view(np.int32) >> 18)
    assert (np.abs(found - expected) <= 1).all()  # a sum beside the edge of a bin
    assert totals.outlier.value == pytest.approx(outliers.max(), rel=1e-12)
    if totals.outlier.at is not None:
        assert outliers[totals.outlier.at] == pytest.approx(outliers.max(), rel=1e-12)


def assert_correlation_as_defined(totals: Totals, x: Array, y: Array) -> None:
    if not x.size:
        assert totals.moments.count == 0
        return
    for span, side in zip(totals.spans, (x, y), strict=True):
        assert (span.least, span.largest) == (side.min(), side.max())
    moments = totals.moments
    x, y = x - x.mean(), y - y.mean()
    for i, side in enumerate((x, y)):
        found = math.ldexp(moments.squares[i], 2 * moments.exponents[i])
        slack = 1e-12 * float(totals.squares[i])
        assert found == pytest.approx((side * side).sum(), rel=1e-12, abs=slack)
    product = math.ldexp(moments.product, sum(moments.exponents))
    slack = 1e-12 * math.sqrt(float(totals.squares[0])) * math.sqrt(float(totals.squares[1]))
    assert product == pytest.approx((x * y).sum(), abs=slack)


@pytest.mark.spec("MET-40")
@settings(max_examples=120)
@given(cases())
def test_engines_find_what_is_defined_however_they_are_fed(case: Case) -> None:
    with np.errstate(all="ignore"):
        found = {kind: case.run(kind, case.cuts) for kind in ENGINES}
        for kind, totals in found.items():
            assert_as_defined(totals, case)
            assert repr(case.run(kind, case.cuts + 1)) == repr(totals)
    plain, compiled = found.values()
    assert plain.errors == compiled.errors
    for name in ("max_ulp", "same_bits", "peak", "error_values"):
        assert repr(getattr(plain, name)) == repr(getattr(compiled, name)), name


@pytest.mark.spec("MET-40")
@settings(max_examples=60)
@given(
    cases(
        {
            "float64": np.float64,
            "float32": np.float32,
            "bfloat16": ml_dtypes.bfloat16,
            "float8_e4m3fn": ml_dtypes.float8_e4m3fn,
        }
    )
)
def test_wider_floats_are_as_defined(case: Case) -> None:
    with np.errstate(all="ignore"):
        assert_engines_agree(case)


@pytest.mark.spec("MET-40")
@settings(max_examples=100)
@given(whole_cases())
def test_integers_and_bools_are_as_defined(case: Case) -> None:
    with np.errstate(all="ignore"):
        assert_engines_agree(case)


def assert_engines_agree(case: Case) -> None:
    x, y = (side.astype(np.float64) for side in (case.reference, case.target))
    assert CompiledEngine.can_measure(case.operands)
    plain = case.run(NumpyEngine, case.cuts)
    assert_as_defined(plain, case)
    try:
        compiled = case.run(CompiledEngine, case.cuts)
    except OutOfRangeError:
        assert any(((np.abs(side) > 2.0**400) & (np.abs(side) < np.inf)).any() for side in (x, y))
        return
    assert_as_defined(compiled, case)
    assert repr(case.run(CompiledEngine, case.cuts + 1)) == repr(compiled)
    assert plain.errors == compiled.errors
    differences = [totals.difference(case.operands) for totals in (plain, compiled)]
    assert repr(differences[0].max_abs) == repr(differences[1].max_abs)  # of integers an int
    for name in ("max_ulp", "same_bits", "peak", "error_values", "exact_sum"):
        assert repr(getattr(plain, name)) == repr(getattr(compiled, name)), name


@pytest.mark.parametrize(
    ("reference", "target"),
    [
        pytest.param([1e200, 1.0], [1.5e200, 1.0], id="squares_overflow"),
        pytest.param([1e-200, 0.0], [1.5e-200, 0.0], id="squares_vanish"),
        pytest.param([1.0, 1e-250], [1.0, 2e-250], id="squares_of_errors_vanish"),
        pytest.param([2**53 + 1, 0], [2**53, 0], id="integers_above_float64"),
        pytest.param([2**40, 0], [0, -(2**40)], id="integers_whose_sums_may_not_fit"),
    ],
)
def test_the_wide_kernel_refuses_what_it_would_measure_wrongly(
    reference: list[float], target: list[float]
) -> None:
    case = Case(np.array(reference), np.array(target), Tolerance(0.0, 0.0), 0)
    with pytest.raises(OutOfRangeError):
        case.run(CompiledEngine, 0)


@pytest.mark.parametrize("name", sorted(NARROW))
def test_every_bit_pattern_is_widened_exactly(name: str) -> None:
    width = np.dtype(NARROW[name]).itemsize
    bits = {"float4_e2m1fn": 4, "float6_e2m3fn": 6, "float6_e3m2fn": 6}.get(name, 8 * width)
    patterns = np.arange(2 ** min(bits, 16)).astype(f"<u{width}")
    if width == 4:
        patterns = patterns * np.uint32(65537)
    reference = patterns.view(NARROW[name])
    case = Case(reference, np.zeros(reference.size, np.float32), Tolerance(0.0, 0.0), 0)
    with np.errstate(all="ignore"):
        assert_as_defined(case.run(CompiledEngine, 0), case)


@pytest.mark.parametrize("names", [("complex64", "complex64"), ("float32", "complex128")])
def test_compiled_code_leaves_complex_numbers_to_numpy(names: tuple[str, str]) -> None:
    assert not CompiledEngine.can_measure(Operands(dtype(names[0]), dtype(names[1]), (3,)))


@pytest.mark.spec("MET-40")
def test_parts_of_a_tensor_add_up_to_the_whole() -> None:
    random = np.random.default_rng(7)
    reference = random.standard_normal((40, 1000)).astype(np.float32)
    target = reference + random.standard_normal((40, 1000)).astype(np.float32) * np.float32(1e-3)
    target[30, 7] = np.nan
    operands = Operands(dtype_of(reference), dtype_of(target), reference.shape)
    for kind in ENGINES:
        whole, parts = kind(operands), []
        for start in range(0, 40_000, 8000):
            engine = kind(operands, start)
            sides = [side.reshape(-1)[start : start + 8000] for side in (reference, target)]
            engine.add(*sides)
            whole.add(*sides)
            parts.append(engine.totals())
        total = parts[0]
        for part in parts[1:]:
            total.add(part)
        found, expected = total.difference(operands), whole.totals().difference(operands)
        assert found.errors == expected.errors
        assert found.mask_index == expected.mask_index == (30, 7)
        for name in ("max_abs", "max_abs_index", "max_rel_index", "outlier_index", "max_ulp", "unequal"):
            assert getattr(found, name) == getattr(expected, name), name
        for name in ("mean_abs", "pearson", "cosine", "relative_frobenius", "mean_rel"):
            assert getattr(found, name) == pytest.approx(getattr(expected, name), rel=1e-12), name
