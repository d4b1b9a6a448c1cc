"""Tensors of odd shapes and values: lengths 0 and 1, scalars, NaN, infinities, huge, tiny, whole, truth."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final

import numpy as np

from tensorcap_formats.dtypes import Array

_SIZES: Final = (0, 1, 1, 2, 3, 4, 5, 8, 16)
_WIDTHS: Final = (1, 2, 4, 8, 8, 12, 24)  # heads of 4 channels fit some of them
ODD_VALUES: Final[Mapping[str, Callable[[np.random.Generator, Array], Array]]] = {
    "plain": lambda rng, x: x.astype(np.float32),
    "float64": lambda rng, x: x,
    "float16": lambda rng, x: x.astype(np.float16),
    "some NaN": lambda rng, x: np.where(rng.random(x.shape) < 0.3, np.nan, x).astype(np.float32),
    "some infinite": lambda rng, x: np.where(rng.random(x.shape) < 0.3, np.inf, x).astype(np.float32),
    "all NaN": lambda rng, x: np.full(x.shape, np.nan, np.float32),
    "zeros": lambda rng, x: np.zeros(x.shape, np.float32),
    "constant": lambda rng, x: np.full(x.shape, 3.0, np.float32),
    "huge": lambda rng, x: x * 1e300,
    "tiny": lambda rng, x: x * 1e-300,
    "whole": lambda rng, x: (10 * x).astype(np.int64),
    "bytes": lambda rng, x: np.abs(10 * x).astype(np.uint8),
    "truth": lambda rng, x: x > 0,
}


def odd_shape(rng: np.random.Generator) -> tuple[int, ...]:
    """A shape of up to four axes, most often (batch, token, channel)."""
    sizes = tuple(int(size) for size in rng.choice(_SIZES, 4))
    width = int(rng.choice(_WIDTHS))
    shapes: Sequence[tuple[int, ...]] = (
        (),
        sizes[:1],
        (sizes[0], width),
        (int(rng.integers(3)), sizes[1], width),
        (int(rng.integers(3)), sizes[1], width),
        (int(rng.integers(1, 3)), int(rng.choice((1, 2, 4))), sizes[2], int(rng.choice((1, 4)))),
    )
    return shapes[int(rng.integers(len(shapes)))]


def odd_tensor(rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
    """Values of a random kind, plain ones half of the time."""
    kind = "plain" if rng.random() < 0.5 else str(rng.choice(list(ODD_VALUES)))
    return np.asarray(ODD_VALUES[kind](rng, np.asarray(rng.standard_normal(shape))))
