"""Pairs of archives made of numpy arrays, and their diagnosis."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tensorcap.diagnosis.diagnosing import Diagnosis, diagnose
from tensorcap_formats.dtypes import Array, bits_of, dtype, dtype_of
from tensorcap_formats.keys import Key
from tensorcap_formats.opening import open_archive
from tensorcap_formats.writer import Writer

Diagnose = Callable[..., Diagnosis]


def bfloat16_bits(values: Array) -> Array:
    """Round finite values to nearest even, and give the upper half of their bits."""
    bits = np.asarray(values, np.float32).view(np.uint32)
    return ((bits + np.uint32(0x7FFF) + ((bits >> 16) & np.uint32(1))) >> 16).astype(np.uint16)


def to_bfloat16(values: Array) -> Array:
    return (bfloat16_bits(values).astype(np.uint32) << 16).view(np.float32)


def write_archive(path: Path, tensors: Mapping[str, Array], *, precision: str, run: dict[str, Any]) -> Path:
    writer = Writer(path, run={"compute_dtype": precision, **run})
    for text, array in tensors.items():
        array = np.asarray(array)
        if array.dtype.kind != "f":
            writer.add(Key.parse(text), bits_of(array), dtype_of(array), array.shape)
        elif precision == "bfloat16":
            writer.add(Key.parse(text), bfloat16_bits(array), dtype("bfloat16"), array.shape)
        else:
            writer.add(Key.parse(text), array.astype("<f4"), dtype("float32"), array.shape)
    return writer.close()


@pytest.fixture
def diagnosed(tmp_path: Path) -> Diagnose:
    """Diagnose two tensors `0/m/output`, or two sets of tensors by key; the reference is in float32."""

    def run(
        reference: Array | Mapping[str, Array],
        target: Array | Mapping[str, Array],
        *,
        key: str = "0/m/output",
        precision: str = "float32",
        config: Mapping[str, Any] | None = None,
        reference_precision: str = "float32",
        **options: Any,
    ) -> Diagnosis:
        sides = [side if isinstance(side, Mapping) else {key: side} for side in (reference, target)]
        about = {"model": {"config": dict(config or {})}}
        precisions = reference_precision, precision
        paths = [
            write_archive(tmp_path / name, side, precision=each, run=about)
            for name, side, each in zip(("ref.h5", "tgt.h5"), sides, precisions, strict=True)
        ]
        with open_archive(paths[0]) as ours, open_archive(paths[1]) as theirs:
            return diagnose(ours, theirs, key, **options)

    return run
