"""The checks of a preflight, in the order of their items: inputs, mode, configuration, modules, versions.

Their list and order are normative in `specs/preflight.md`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from tensorcap.comparison.preflight.hyperparameters import compare_hyperparameters
from tensorcap.comparison.preflight.item import Item, Kind, UnknownError
from tensorcap.comparison.preflight.parameters import compare_buffers, compare_parameters
from tensorcap.comparison.preflight.run_inputs import compare_inputs, compare_repeat
from tensorcap.comparison.preflight.runs import (
    compare_attention,
    compare_classes,
    compare_configs,
    compare_modes,
    compare_precision,
    compare_settings,
    compare_versions,
)
from tensorcap.comparison.quantised_layers import QuantisedLayers
from tensorcap.wording import is_product, joined_name, name_pattern
from tensorcap_formats.archive import Archive
from tensorcap_formats.json_values import json_object


@dataclass(frozen=True, slots=True)
class Preflight:
    """What differs between two runs apart from their tensors.

    Attributes:
        items: All that differs, what explains a divergence first.
        equal: Kinds that were compared and do not differ.
        unchecked: Kinds that could not be compared, or not in full, and why.
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


def preflight(
    reference: Archive,
    target: Archive,
    *,
    repeat: Archive | None = None,
    layers: QuantisedLayers | None = None,
) -> Preflight:
    """Compare everything of two runs but the tensors that a comparison is about.

    Args:
        reference: The trusted archive.
        target: The archive under test.
        repeat: A second run of the reference, which should be bit-equal to it.
        layers: The quantised layers of the target if a comparison measured them, which is not done again.

    Raises:
        ReadError: Inputs or parameters cannot be read.
    """
    checks: dict[Kind, Callable[[Archive, Archive], Iterator[Item]]] = {
        "inputs": compare_inputs,
        "repeat": lambda ours, _: compare_repeat(ours, repeat),
        "mode": compare_modes,
        "config": compare_configs,
        "modules": compare_classes,
        "hyperparameters": compare_hyperparameters,
        "parameters": partial(compare_parameters, layers=layers or QuantisedLayers()),
        "attention": compare_attention,
        "buffers": compare_buffers,
        "settings": compare_settings,
        "precision": compare_precision,
        "versions": compare_versions,
    }
    items: list[Item] = []
    equal: list[Kind] = []
    unchecked: dict[Kind, str] = {}
    for kind, check in checks.items():
        before = len(items)
        try:
            for item in check(reference, target):
                items.append(item)  # one by one: a check may give items before it says what is left open
        except UnknownError as reason:
            unchecked[kind] = str(reason)
            continue
        if len(items) == before:
            equal.append(kind)
    items = list(_join_siblings([_as_one(alike) for alike in _alike(items)]))
    items.sort(key=lambda item: (not item.explains, item.rank))
    return Preflight(tuple(items), tuple(equal), unchecked)


def _alike(items: Iterable[Item]) -> Iterator[Sequence[Item]]:
    """Yield items together that differ in nothing but numbers in their names, such as those of layers."""
    groups: dict[object, list[Item]] = {}
    for item in items:
        kind = item.kind, repr((item.reference, item.target)), item.text
        groups.setdefault((*kind, name_pattern(item.name)), []).append(item)
    for group in groups.values():
        if is_product([item.name for item in group]):
            yield group
            continue
        of_last: dict[str, list[Item]] = {}  # unlike ones in unlike layers: by what has one number
        for item in group:
            of_last.setdefault(name_pattern(item.name, last=True), []).append(item)
        yield from of_last.values()


def _as_one(alike: Sequence[Item]) -> Item:
    return replace(alike[0], name=joined_name([item.name for item in alike]))


def _join_siblings(items: Iterable[Item]) -> Iterator[Item]:
    """Yield modules of one parent that became another class alike as one item: `{0-2}.attn.{q,k,v}`."""
    groups: dict[object, list[Item]] = {}
    for number, item in enumerate(items):
        parent, _, name = item.name.rpartition(".")
        may_join = item.kind == "modules" and parent and "{" not in name
        alike = repr((item.reference, item.target)), item.text
        groups.setdefault((parent, *alike) if may_join else number, []).append(item)
    for first, *others in groups.values():
        parent, _, name = first.name.rpartition(".")
        names = ",".join((name, *(item.name.rpartition(".")[2] for item in others)))
        yield replace(first, name=f"{parent}.{{{names}}}") if others else first
