"""The outputs of an operation in their order, in which the runtime does not give them.

It passes the inputs and outputs of an operation with several on in an order that changes from one process to
the next. What is known of each output is its type, and of an operation that takes its input apart that its
outputs put together are its input. An order that neither shows is not guessed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np

from tensorcap.adapters.coreai.engine import CoreAIInspector, NDArray
from tensorcap_formats.dtypes import Array

_INPUT: Final = "input"
_OUTPUT: Final = "output"


class ResultType(NamedTuple):
    """The type of a result of an operation: its shape, and the kind of its dtype, as numpy has it (`f`)."""

    shape: tuple[int, ...]
    kind: str


class OrderedInspector(CoreAIInspector):  # type: ignore[misc] # it has no types
    """An inspector that puts outputs in order.

    Attributes:
        unordered: The operations of whose outputs the order is not known; they have no values.
    """

    def __init__(self, types: Mapping[int, Sequence[ResultType]], *args: Any, **kwargs: Any) -> None:
        """Inspect a model.

        Args:
            types: Of the results of each operation with several, by its id.
            args: As of `CoreAIInspector`.
            kwargs: Likewise.
        """
        super().__init__(*args, **kwargs)
        self.unordered: set[int] = set()
        self._types = types
        self._inputs: dict[tuple[int, int | None], list[Array]] = {}

    def _create_capture_callback(
        self, results: Any, odix_output_to_source_map: Mapping[Any, tuple[int, int]]
    ) -> Callable[..., None]:
        capture = super()._create_capture_callback(results, odix_output_to_source_map)
        sources = {(key.odix_id, key.delegate_id): op for key, (op, _) in odix_output_to_source_map.items()}

        def capture_in_order(values: list[Any], kind: str, ids: Any) -> None:
            place = ids.id, ids.delegate_id
            source = sources.get(place)
            types = None if source is None else self._types.get(source)
            if types is None or len(values) < 2 or kind not in (_INPUT, _OUTPUT):
                capture(values, kind, ids)
                return
            arrays = [np.array(NDArray._wrap(value).numpy()) for value in values if value is not None]
            if kind == _INPUT:
                self._inputs[place] = arrays
                return
            order = None
            if len(arrays) == len(values):
                order = find_order(arrays, types, self._inputs.get(place, ()))
            if order is None:
                self.unordered.add(source)  # type: ignore[arg-type] # it has types
                return
            capture([values[i] for i in order], kind, ids)

        return capture_in_order


def find_order(
    arrays: Sequence[Array], types: Sequence[ResultType], inputs: Sequence[Array]
) -> list[int] | None:
    """Find which of the arrays is which result.

    1. If the types differ, by their types.
    2. If the arrays are the same bits, any order is right.
    3. By an input that is the results put together along an axis.

    Returns:
        For each result the index of its array; None if the order is not known.
    """
    if len(arrays) != len(types):
        return None
    if len(set(types)) == len(types):
        known = {ResultType(array.shape, kind_of(array)): i for i, array in enumerate(arrays)}
        return [known[each] for each in types] if set(known) == set(types) else None
    if len({(array.shape, array.tobytes()) for array in arrays}) == 1:
        return list(range(len(arrays)))
    for whole in inputs:
        for axis in range(whole.ndim):
            order = _order_along(whole, axis, arrays, types)
            if order is not None:
                return order
    return None


def kind_of(array: Array) -> str:
    """The kind of an array's dtype; numpy has none for bfloat16."""
    return "f" if array.dtype.name == "bfloat16" else array.dtype.kind


def _order_along(
    whole: Array, axis: int, arrays: Sequence[Array], types: Sequence[ResultType]
) -> list[int] | None:
    """The order in which arrays are consecutive parts of another along an axis; None if they are not."""
    order: list[int] = []
    start = 0
    for kind in types:
        if len(kind.shape) != whole.ndim:
            return None
        stop = start + kind.shape[axis]
        part = whole[(slice(None),) * axis + (slice(start, stop),)]
        bits = part.tobytes()
        index = next(
            (
                i
                for i, array in enumerate(arrays)
                if i not in order
                and array.shape == kind.shape == part.shape
                and array.dtype == part.dtype
                and array.tobytes() == bits
            ),
            None,
        )
        if index is None:
            return None
        order.append(index)
        start = stop
    return order if start == whole.shape[axis] else None
