"""Archives of numpy arrays."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tensorcap_formats.archive import Archive
from tensorcap_formats.dtypes import Array, DType, bits_of, dtype_of
from tensorcap_formats.keys import Key
from tensorcap_formats.open import open_archive
from tensorcap_formats.writing import Writer

Tensors = Mapping[str, Array | tuple[Array, DType]]


def write_archive(
    path: Path,
    tensors: Tensors,
    *,
    values: Mapping[str, Any] | None = None,
    complete: bool = True,
    ordered: bool = True,
    **options: Any,
) -> Path:
    """Write tensors in this order.

    Args:
        path: The archive; its suffix says which container.
        tensors: Arrays, or stored elements and their dtype, by key; a bare site is its output in step 0.
        values: Values that are no tensors, by key.
        complete: Whether the run ended as it should.
        ordered: Whether the order is that of execution.
        options: What `Writer` takes: `run`, `stats_only` …
    """
    writer = Writer(path, **options)
    for name, tensor in tensors.items():
        bits, dtype = tensor if isinstance(tensor, tuple) else (bits_of(tensor), dtype_of(tensor))
        writer.add(Key.parse(name) if "/" in name else Key(name, "output"), bits, dtype, bits.shape)
    for name, value in (values or {}).items():
        writer.add_value(name, value)
    return writer.close(complete=complete, ordered=ordered)


def new_archive(path: Path, tensors: Tensors, **options: Any) -> Archive:
    """Write an archive as `write_archive` does, and open it."""
    return open_archive(write_archive(path, tensors, **options))
