"""Arrays of numpy as records of a call."""

from __future__ import annotations

import numpy as np

from tensorcap.recording import Call, NothingLeftError, Recorder
from tensorcap_formats.dtypes import Array, bits_of, dtype_of


def record_array(recorder: Recorder, call: Call, slot: str, array: Array, *, required: bool = False) -> str:
    """Record an array; return why it was not recorded as a whole, "" if it was."""
    if not recorder.wants(call, slot, required=required):
        return "not asked for"
    array = np.asarray(array, order="C")
    try:
        part = recorder.part(call, slot, array.shape) if recorder.has_slices and not required else None
    except NothingLeftError as error:
        recorder.lose(call.point, slot, str(error), call=call, required=required)
        return str(error)
    bits = bits_of(array if part is None else np.array(array[part], order="C"))
    recorder.tensor(call, slot, bits, dtype_of(array), bits.shape, required=required)
    return "" if part is None else "recorded only in part"
