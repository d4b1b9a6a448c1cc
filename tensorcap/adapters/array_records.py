"""Arrays of numpy as records of a call."""

from __future__ import annotations

import numpy as np

from tensorcap.recording import Call, NothingLeftError, Recorder
from tensorcap_formats.dtypes import Array, DType, bits_of, dtype_of


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
