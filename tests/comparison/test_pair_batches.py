"""Small pairs that are measured together: the numbers, and the errors, of pairs that are measured alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tensorcap.metrics import Difference, Operands, Tolerance, measure_pairs
from tensorcap.metrics.compiled_engine import CompiledEngine, EngineMemory, OutOfRangeError
from tensorcap.metrics.pair_batch import measure_batch
from tensorcap_formats.dtypes import Array, bits_of, dtype_of
from tensorcap_formats.open import opened_both
from tests.comparison.test_kernels import Case, cases, whole_cases
from tests.support.archives import new_archive

MakeArchive = Callable[..., Any]


def alone(case: Case, operands: Operands) -> Difference:
    engine = CompiledEngine(operands)
    engine.add(*(bits_of(side).reshape(-1) for side in (case.reference, case.target)))
    return engine.totals().difference(operands)


def buffer_of(tensors: list[Array]) -> tuple[Array, list[int]]:
    places: list[int] = []
    parts: list[Array] = []
    for tensor in tensors:
        places.append(sum(part.size for part in parts))
        data = bits_of(tensor).reshape(-1).view(np.uint8)
        parts.append(np.concatenate([data, np.zeros(-data.size % 64, np.uint8)]))
    return np.concatenate(parts), places


@pytest.mark.spec("MET-40")
@settings(max_examples=150)
@given(st.lists(st.one_of(cases(), whole_cases()), min_size=1, max_size=6), st.booleans())
def test_pairs_measured_together_have_every_bit_of_those_measured_alone(
    drawn: list[Case], has_tolerance: bool
) -> None:
    groups: dict[tuple[str, str], list[Case]] = {}
    for case in drawn:
        names = case.reference.dtype.name, case.target.dtype.name
        groups.setdefault(names, []).append(case)
    memory = EngineMemory()
    for members in groups.values():
        operands = [
            Operands(
                dtype_of(case.reference),
                dtype_of(case.target),
                case.reference.shape,
                case.tolerance if has_tolerance else None,
            )
            for case in members
        ]
        kernel = CompiledEngine.kernel(operands[0])
        assert kernel is not None
        sides = [buffer_of([getattr(case, side) for case in members]) for side in ("reference", "target")]
        with np.errstate(all="ignore"):
            try:
                expected = [alone(case, one) for case, one in zip(members, operands, strict=True)]
            except OutOfRangeError:
                with pytest.raises(OutOfRangeError):
                    measure_batch(kernel, operands, sides[0], sides[1], memory)
                continue
            together = measure_batch(kernel, operands, sides[0], sides[1], memory)
        assert [repr(one) for one in together] == [repr(one) for one in expected]


def mixed_tensors() -> tuple[dict[str, Array], dict[str, Array]]:
    random = np.random.default_rng(3)
    reference: dict[str, Array] = {}
    for i in range(40):
        values = random.standard_normal((1 + i % 5, 30)) * 50
        kind = (np.float32, np.float32, np.float64, np.int64, np.uint8, np.float16)[i % 6]
        reference[f"0/layers.{i}/output"] = np.abs(values).astype(kind)
    reference["0/layers.7/output"] = np.zeros((0, 3), np.float32)
    reference["0/layers.8/output"] = np.full((2, 3), 2**53 + 1)
    reference["0/layers.9/output"] = random.standard_normal((300, 100)).astype(np.float32)  # no small one
    target = {key: values + values.dtype.type(1) for key, values in reference.items()}
    target["0/layers.12/output"] = reference["0/layers.12/output"] * np.float32(1.25)
    return reference, target


@pytest.mark.spec("MET-40")
@pytest.mark.parametrize("suffix", [".h5", ".safetensors", ".zarr"])
def test_numbers_do_not_depend_on_the_pairs_that_are_measured_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str
) -> None:
    monkeypatch.setenv("TCAP_ENGINE", "numba")
    sides = mixed_tensors()
    with (
        new_archive(tmp_path / f"reference{suffix}", sides[0]) as reference,
        new_archive(tmp_path / f"target{suffix}", sides[1]) as target,
    ):
        pairs = [(record, target.get(record.key)) for record in reference.records]
        tolerances = [Tolerance(0.0, 0.5) if i % 3 else None for i in range(len(pairs))]
        single = [
            next(measure_pairs(reference, target, [pair], tolerance=[tolerance]))
            for pair, tolerance in zip(pairs, tolerances, strict=True)
        ]
        for threads in (1, 3):
            together = list(measure_pairs(reference, target, pairs, tolerance=tolerances, threads=threads))
            assert [repr(one) for one in together] == [repr(one) for one in single]
        largest = {
            record.key.text: one.max_abs
            for (record, _), one in zip(pairs, single, strict=True)
            if isinstance(one, Difference)
        }
    for key, values in sides[0].items():
        ours, theirs = values.reshape(-1).tolist(), sides[1][key].reshape(-1).tolist()
        assert largest[key] == max((abs(x - y) for x, y in zip(ours, theirs, strict=True)), default=None), key


def test_a_damaged_tensor_spoils_no_other_that_is_read_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TCAP_ENGINE", "numba")
    random = np.random.default_rng(5)
    sides = {f"0/layers.{i}/output": random.standard_normal(16).astype(np.float32) for i in range(8)}
    new_archive(tmp_path / "reference.h5", sides).close()
    new_archive(tmp_path / "target.h5", {key: values * 2 for key, values in sides.items()}).close()
    path = tmp_path / "target.h5"
    data = bytearray(path.read_bytes())
    at = data.index((sides["0/layers.5/output"] * 2).tobytes())
    data[at] ^= 1
    path.write_bytes(data)
    with opened_both(tmp_path / "reference.h5", path) as (reference, target):
        pairs = list(zip(reference.records, target.records, strict=True))
        results = list(measure_pairs(reference, target, pairs))
    assert [isinstance(one, OSError) for one in results] == [i == 5 for i in range(8)]
    assert "0/layers.5/output: is damaged: digest of its bytes is" in str(results[5])
    assert [one.relative_frobenius for one in results if isinstance(one, Difference)] == [1.0] * 7


def test_tensors_are_read_together_into_one_buffer(tmp_path: Path) -> None:
    random = np.random.default_rng(6)
    sides = {f"0/layers.{i}/output": random.standard_normal(5 + i).astype(np.float32) for i in range(6)}
    sides["0/layers.6/output"] = sides["0/layers.1/output"]  # stored once
    for suffix in (".h5", ".safetensors", ".zarr"):
        with new_archive(tmp_path / f"a{suffix}", sides) as archive:
            for records in (archive.records, archive.records[2:5], archive.records[::-1]):
                buffer = np.zeros(64 * len(records), np.uint8)
                places = archive.read_many(records, buffer)
                for record, place in zip(records, places, strict=True):
                    assert place % 64 == 0
                    values = buffer[place : place + record.nbytes].view(np.float32)
                    assert values.tolist() == sides[record.key.text].tolist()
