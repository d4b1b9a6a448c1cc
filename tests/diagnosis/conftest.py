"""Pairs of archives made of numpy arrays, and their diagnosis."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tensorcap.diagnosis import Diagnosis, diagnose
from tensorcap_formats.dtypes import Array
from tensorcap_formats.open import open_archive
from tests.support.archives import write_archive
from tests.support.floats import bfloat16

Diagnose = Callable[..., Diagnosis]


def write_in(path: Path, tensors: Mapping[str, Array], *, precision: str, run: dict[str, Any]) -> Path:
    """Write floats in this precision, all else as it is."""
    kept = {}
    for key, array in tensors.items():
        array = np.asarray(array)
        is_float, is_low = array.dtype.kind == "f", precision == "bfloat16"
        kept[key] = (bfloat16(array) if is_low else array.astype("<f4")) if is_float else array
    return write_archive(path, kept, run={"compute_dtype": precision, **run})


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
        modules: Sequence[Mapping[str, Any]] = (),
        **options: Any,
    ) -> Diagnosis:
        sides = [side if isinstance(side, Mapping) else {key: side} for side in (reference, target)]
        about = {"model": {"config": dict(config or {})}, **({"modules": modules} if modules else {})}
        precisions = reference_precision, precision
        paths = [
            write_in(tmp_path / name, side, precision=each, run=about)
            for name, side, each in zip(("ref.h5", "tgt.h5"), sides, precisions, strict=True)
        ]
        with open_archive(paths[0]) as ours, open_archive(paths[1]) as theirs:
            return diagnose(ours, theirs, key, **options)

    return run
