"""The control: a run of a compiled graph without taps, held against the run with taps."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from tensorcap.adapters.protocol import NotCapturableError
from tensorcap_formats.dtypes import Array, DType, decode


def compare_with_control(
    slot: str, control: Any, tapped: Any, stored: Callable[[Any], tuple[Array, DType]]
) -> dict[str, Any]:
    """Measure how far an output of the instrumented graph lies from that of the graph without taps.

    Args:
        slot: Which output.
        control: The framework's array of the run without taps.
        tapped: That of the run with taps.
        stored: Gives the stored elements of an array of the framework, and their dtype; raises
            `NotCapturableError` if it has none.
    """
    entry: dict[str, Any] = {"slot": slot}
    try:
        (control_bits, dtype), (tapped_bits, _) = stored(control), stored(tapped)
    except NotCapturableError as error:
        return {**entry, "reason": str(error)}
    if control_bits.tobytes() == tapped_bits.tobytes():
        return {**entry, "identical": True, "max_abs": 0.0}
    expected, actual = (decode(bits, dtype).astype(np.float64) for bits in (control_bits, tapped_bits))
    is_finite = np.isfinite(expected) & np.isfinite(actual)
    entry["identical"] = False
    entry["max_abs"] = float(np.abs(expected - actual)[is_finite].max(initial=0.0))
    entry["largest"] = float(np.abs(expected)[is_finite].max(initial=0.0))
    is_equal = (expected == actual) | (np.isnan(expected) & np.isnan(actual))
    mismatches = int((~is_finite & ~is_equal).sum())
    if mismatches:
        entry["nonfinite_mismatches"] = mismatches
    return entry


def describe_control(entries: Sequence[Mapping[str, Any]]) -> str:
    """Summarize in a sentence what the taps changed, from the entries of `compare_with_control`."""
    if all(entry.get("identical") for entry in entries):
        return "a run without taps gave the same bits"
    worst = max((e for e in entries if "max_abs" in e), key=lambda e: e["max_abs"], default=None)
    if worst is None:
        return "a run without taps could not be compared with this one"
    text = (
        f"taps end the fusion of kernels: a run without them gave {worst['slot']} that differs by up to "
        f"{worst['max_abs']:.3g}, of values up to {worst.get('largest', 0.0):.3g}"
    )
    mismatches = sum(int(entry.get("nonfinite_mismatches", 0)) for entry in entries)
    return f"{text}; and {mismatches} of its elements are not finite in one of both" if mismatches else text
