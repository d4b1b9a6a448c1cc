"""Arrays of numpy as records of a call."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from tensorcap.adapters.input_arrays import as_array
from tensorcap.recording import Call, NothingLeftError, Recorder
from tensorcap_formats.dtypes import Array, DType, bits_of, dtype_of
from tensorcap_formats.keys import escape


def record_inputs(inputs: Any, recorder: Recorder) -> None:
    """Record the arrays that a run is given as `given.NAME` of the root, before its first call."""
    named = inputs if isinstance(inputs, Mapping) else {str(i): value for i, value in enumerate(inputs)}
    call = Call(recorder.points[""], 0, 0)
    for name, value in named.items():
        array = np.array(as_array(value), order="C")
        record_array(recorder, call, f"given.{escape(name)}", array, required=True)


def record_array(recorder: Recorder, call: Call, slot: str, array: Array, *, required: bool = False) -> str:
    """Record an array; return why it was not recorded as a whole, "" if it was."""
    array = np.asarray(array, order="C")
    return record_bits(recorder, call, slot, bits_of(array), dtype_of(array), required=required)


def record_bits(
    recorder: Recorder, call: Call, slot: str, bits: Array, dtype: DType, *, required: bool = False
) -> str:
    """Record the stored elements of a tensor; return why they were not recorded as a whole, "" if so."""
    if not recorder.wants(call, slot, required=required):
        return "not asked for"
    try:
        part = recorder.part(call, slot, bits.shape) if recorder.has_slices and not required else None
    except NothingLeftError as error:
        recorder.lose(call.point, slot, str(error), call=call, required=required)
        return str(error)
    bits = bits if part is None else np.array(bits[part], order="C")
    recorder.tensor(call, slot, bits, dtype, bits.shape, required=required)
    return "" if part is None else "recorded only in part"
