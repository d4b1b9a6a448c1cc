"""A log with a line for each tensor as it is recorded, for people and for `diff`, alike in all frameworks."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import TYPE_CHECKING, Final, Literal, TextIO

from tensorcap.recording.options import as_tuple
from tensorcap.recording.record_filter import fits_key
from tensorcap.runs import stored_summary
from tensorcap_formats.dtypes import Array, DType
from tensorcap_formats.statistics import Statistics, StatisticsBuilder

if TYPE_CHECKING:
    from tensorcap.recording.recorder import Sink
    from tensorcap_formats.keys import Key

Form = Literal["compact", "full"]
_DIGITS: Final = 6  # of every number: enough to see what differs, few enough to be read


class PlainLog:
    """Prints a line for each record: key, dtype, shape, minimum, maximum, mean, l2, nonfinite counts.

    The lines hold no time and no address, so that `diff` compares the logs of two runs. If the stream cannot
    be written any more, such as a closed pipe, the log ends and the run goes on.

    Attributes:
        globs: What is printed; all if empty.
        trouble: The error that ended the log before the run did; None if there was none.

    Example:
        >>> import numpy as np, sys
        >>> from tensorcap_formats.dtypes import dtype
        >>> from tensorcap_formats.keys import Key
        >>> log = PlainLog(sys.stdout, "full")
        >>> log.print(Key("mlp", "output"), np.float32([[1, 2.5], [3, 4]]), dtype("float32"), (2, 2))
        0/mlp/output  float32  2x2  min 1  max 4  mean 2.625  l2 5.67891
          [[  1, 2.5],
           [  3,   4]]
    """

    def __init__(self, stream: TextIO, form: Form = "compact", globs: str | Iterable[str] = ()) -> None:
        """Make a log.

        Args:
            stream: Where it is printed.
            form: `compact`, or `full` with some of the values of each tensor.
            globs: What is printed, all if empty; as for `tensorcap.capture(only=...)`.
        """
        self.globs = as_tuple(globs)
        self.trouble: OSError | ValueError | None = None
        self._stream = stream
        self._is_full = form == "full"
        self._lock = threading.Lock()

    def print(self, key: Key, bits: Array, dtype: DType, shape: tuple[int, ...]) -> None:
        """Print one tensor; arguments as for `Writer.add`."""
        if self.trouble is not None or not self._is_wanted(key):
            return
        builder = StatisticsBuilder(dtype)
        builder.add(bits.reshape(-1))
        sizes = "x".join(map(str, shape)) or "()"
        text = f"{key.text}  {dtype.name}  {sizes}  {_statistics_text(builder.result())}\n"
        if self._is_full:
            lines = stored_summary(bits.reshape(shape), dtype).splitlines()
            text += "".join(f"  {line}\n" for line in lines)
        with self._lock:
            try:
                self._stream.write(text)
                self._stream.flush()
            except (OSError, ValueError) as error:  # the latter from a closed stream
                self.trouble = error

    def _is_wanted(self, key: Key) -> bool:
        return not self.globs or any(fits_key(glob, key) for glob in self.globs)


class Logged:
    """A sink that adds each tensor to another sink and prints it."""

    def __init__(self, sink: Sink, log: PlainLog) -> None:
        self._sink = sink
        self._log = log

    @property
    def stored_bytes(self) -> int:
        """Those of the other sink."""
        return self._sink.stored_bytes

    def add(
        self, key: Key, bits: Array, dtype: DType, shape: tuple[int, ...], *, order: int | None = None
    ) -> None:
        """Add a tensor to the other sink, and print it."""
        self._sink.add(key, bits, dtype, shape, order=order)
        self._log.print(key, bits, dtype, shape)

    def add_value(self, key_text: str, value: object) -> None:
        """Add a value to the other sink."""
        self._sink.add_value(key_text, value)


def _statistics_text(statistics: Statistics) -> str:
    numbers = {
        "min": statistics.minimum,
        "max": statistics.maximum,
        "mean": statistics.mean,
        "l2": statistics.l2,
    }
    parts = [f"{name} {_number_text(value)}" for name, value in numbers.items()]
    counts = {"nan": statistics.nan, "inf": statistics.posinf, "-inf": statistics.neginf}
    parts += [f"{name} {count}" for name, count in counts.items() if count]
    return "  ".join(parts)


def _number_text(value: float | None) -> str:
    if value is None:
        return "-"
    return str(value) if isinstance(value, int) else f"{value:.{_DIGITS}g}"
