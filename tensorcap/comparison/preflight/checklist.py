"""What may differ between two runs before any tensor does: inputs, configuration, parameters, mode, versions.

What is looked at, and in which order it is told, is normative in `specs/preflight.md`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tensorcap.comparison.preflight.inputs import inputs, repeated
from tensorcap.comparison.preflight.item import Item, Kind, UnknownError
from tensorcap.comparison.preflight.parameters import parameters
from tensorcap.comparison.preflight.runs import (
    attention,
    buffers,
    classes,
    config,
    mode,
    precision,
    settings,
    versions,
)
from tensorcap_formats.archive import Archive
from tensorcap_formats.json_values import json_object


@dataclass(frozen=True, slots=True)
class Preflight:
    """What differs between two runs apart from their tensors.

    Attributes:
        items: All that differs, what explains a divergence first.
        equal: Kinds that were looked at and do not differ.
        unchecked: Kinds that could not be looked at, and why.
    """

    items: tuple[Item, ...]
    equal: tuple[Kind, ...]
    unchecked: Mapping[Kind, str]

    @property
    def explaining(self) -> tuple[Item, ...]:
        """Those that alone can make outputs differ by more than rounding does."""
        return tuple(item for item in self.items if item.explains)

    @property
    def exit_status(self) -> int:
        """1 if something explains a divergence, else 0 (PRE-9)."""
        return 1 if self.explaining else 0

    def to_json(self) -> dict[str, Any]:
        """Convert to the object that `tcap preflight --json` prints."""
        head = {"format": "tensorcap-preflight", "version": 1, "exit_status": self.exit_status}
        return {**head, **json_object(self)}


def preflight(reference: Archive, target: Archive, *, repeat: Archive | None = None) -> Preflight:
    """Look at everything but the tensors that a comparison is about.

    Args:
        reference: The trusted archive.
        target: The archive under test.
        repeat: A second run of the reference, which ought to be bit-equal to it.

    Raises:
        ReadError: Inputs or parameters cannot be read.
    """
    looks: dict[Kind, Callable[[], Iterator[Item]]] = {
        "inputs": lambda: inputs(reference, target),
        "repeat": lambda: repeated(reference, repeat),
        "mode": lambda: mode(reference, target),
        "config": lambda: config(reference, target),
        "modules": lambda: classes(reference, target),
        "parameters": lambda: parameters(reference, target),
        "attention": lambda: attention(reference, target),
        "buffers": lambda: buffers(reference, target),
        "settings": lambda: settings(reference, target),
        "precision": lambda: precision(reference, target),
        "versions": lambda: versions(reference, target),
    }
    items: list[Item] = []
    equal: list[Kind] = []
    unchecked: dict[Kind, str] = {}
    for kind, look in looks.items():
        try:
            found = list(look())
        except UnknownError as reason:
            unchecked[kind] = str(reason)
            continue
        items += found
        if not found:
            equal.append(kind)
    items.sort(key=lambda item: (not item.explains, item.rank))
    return Preflight(tuple(items), tuple(equal), unchecked)
