"""Arrays of numpy as records of a call."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from tensorcap.adapters.input_arrays import ARRAY_KINDS, NUMBERS, as_array
from tensorcap.recording import Call, NothingLeftError, Recorder, walk
from tensorcap_formats.dtypes import Array, DType, bits_of, dtype_of
from tensorcap_formats.keys import escape


def record_inputs(inputs: Any, recorder: Recorder) -> None:
    """Record the arrays that a run is given as `given.NAME` of the root, before its first call.

    Nested ones are `given.NAME.FIELD`. Numbers, and lists of them of one shape, count as arrays; other values
    are none.
    """
    named = inputs if isinstance(inputs, Mapping) else {str(i): value for i, value in enumerate(inputs)}
    call = Call(recorder.points[""], 0, 0)
    for name, value in named.items():
        for path, array in _arrays(name, value):
            record_array(recorder, call, f"given.{escape(path)}", array, required=True)


def _arrays(name: str, value: Any) -> Iterator[tuple[str, Array]]:
    """The arrays in an input, by path, as arrays of numpy of their own."""
    leaves = [leaf for leaf in walk({name: value}, ARRAY_KINDS) if leaf.is_tensor]
    if leaves:
        for leaf in leaves:
            yield leaf.name, np.array(as_array(leaf.value), order="C")
    elif isinstance(value, NUMBERS):
        try:
            array = np.array(value, order="C")
        except ValueError:  # lists of unlike lengths
            return
        if array.dtype.kind in "biufc":
            yield name, array


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
