"""A plane of values as a picture: a small PNG whose colours go from the smallest value to the largest."""

from __future__ import annotations

import base64
import struct
import zlib
from typing import Final

import numpy as np

from tensorcap_formats.dtypes import Array

_STOPS: Final = {  # colours of a map from its smallest value to its largest
    "values": ("440154", "3b528b", "21918c", "5ec962", "fde725"),
    "errors": ("f4f4f6", "fdd49e", "ef6548", "7f0000"),
}
_NOT_FINITE: Final = (255, 0, 255)
_STEPS: Final = 63  # colours between the stops: more cannot be told apart, and each costs bytes


def finite_range(*planes: Array) -> tuple[float, float]:
    """The smallest and the largest finite value; zeros without any."""
    values = np.concatenate([plane.ravel() for plane in planes])
    values = values[np.isfinite(values)]
    return (float(values.min()), float(values.max())) if values.size else (0.0, 0.0)


def _ramp(stops: tuple[str, ...]) -> bytes:
    """Colours from the first stop to the last, and one for what is not finite, three bytes each."""
    colours = np.array([[int(stop[i : i + 2], 16) for i in (0, 2, 4)] for stop in stops], float)
    at = np.linspace(0, len(stops) - 1, _STEPS)
    table = np.stack([np.interp(at, range(len(stops)), colours[:, i]) for i in range(3)], axis=1)
    return np.vstack([table, _NOT_FINITE]).round().astype(np.uint8).tobytes()


_RAMPS: Final = {name: _ramp(stops) for name, stops in _STOPS.items()}


def draw_picture(values: Array, low: float, high: float, ramp: str) -> str:
    """A palette PNG as a data URL, one pixel a value.

    Args:
        values: Real ones, two-dimensional; what is not finite is magenta.
        low: The value of the first colour.
        high: That of the last one.
        ramp: `values` or `errors`.
    """
    # Halved, since a range from -1e308 to 1e308 has no width in float64.
    width = high / 2 - low / 2
    with np.errstate(all="ignore"):
        share = (values / 2 - low / 2) / width if width else np.zeros_like(values)
        pixels = np.where(np.isfinite(values), np.clip(share, 0, 1) * (_STEPS - 1), _STEPS)
    rows = pixels.round().astype(np.uint8)
    raw = np.hstack([np.zeros((len(rows), 1), np.uint8), rows]).tobytes()
    head = struct.pack(">IIBBBBB", rows.shape[1], rows.shape[0], 8, 3, 0, 0, 0)
    image = b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        for kind, data in (
            (b"IHDR", head),
            (b"PLTE", _RAMPS[ramp]),
            (b"IDAT", zlib.compress(raw, 9)),
            (b"IEND", b""),
        )
    )
    return f"data:image/png;base64,{base64.b64encode(image).decode('ascii')}"
