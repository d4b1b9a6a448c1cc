"""All entries by name; those of ONNX only if its packages are installed."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Final

from tests.quantised_zoo.entry import Entry
from tests.quantised_zoo.torch_targets import TORCH_ENTRIES


def _onnx_entries() -> tuple[Entry, ...]:
    if find_spec("onnxruntime") is None or find_spec("onnxscript") is None:
        return ()
    from tests.quantised_zoo.onnx_targets import ONNX_ENTRIES

    return ONNX_ENTRIES


ENTRIES: Final = {entry.name: entry for entry in (*TORCH_ENTRIES, *_onnx_entries())}
