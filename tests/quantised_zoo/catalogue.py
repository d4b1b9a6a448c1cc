"""All entries by name; those of torchao and of ONNX only where these packages are installed."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Final

from tests.quantised_zoo.entry import Entry
from tests.quantised_zoo.torch_targets import TORCH_ENTRIES


def _is_installed(*names: str) -> bool:
    return all(find_spec(name) is not None for name in names)


def _entries() -> tuple[Entry, ...]:
    entries = [
        entry for entry in TORCH_ENTRIES if not entry.name.startswith("torchao/") or _is_installed("torchao")
    ]
    if _is_installed("onnxruntime", "onnxscript"):
        from tests.quantised_zoo.onnx_targets import ONNX_ENTRIES

        entries += ONNX_ENTRIES
    return tuple(entries)


ENTRIES: Final = {entry.name: entry for entry in _entries()}
