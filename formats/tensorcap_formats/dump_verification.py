"""One side of a layer verification: its files, by the list of its layers (specs/max-files.md, MXF-32)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from tensorcap_formats.dump_files import (
    METADATA,
    TORCH,
    Found,
    content,
    note_unlisted,
    take_root,
    tensor_files,
)
from tensorcap_formats.dump_labels import parse_file_name, undoubled
from tensorcap_formats.errors import CorruptArchiveError
from tensorcap_formats.index import from_json
from tensorcap_formats.keys import Key

_INJECTED: Final = "_injected"


def find_verified(dump: Found, names: Sequence[str]) -> list[Key]:
    """The files of one side of a layer verification, in the order of its list of layers.

    Returns:
        What was put in the place of the model's own tensors.
    """
    path = dump.path / METADATA
    layers = from_json(content(path), str(path))
    found = list(tensor_files(dump, "", names, parse_file_name))
    expected: dict[str, int] = {}
    for name, layer in layers.items():
        for kind, slots in (("input", "inputs"), ("output", "outputs")):
            listed = layer.get(slots, []) if isinstance(layer, dict) else None
            if not isinstance(listed, list) or not all(isinstance(one, dict) for one in listed):
                raise CorruptArchiveError(f"{path}: {name!r} has no list of objects {slots!r}")
            for number, one in enumerate(listed):
                slot = "" if kind == "output" and len(listed) == 1 else f"_{one.get('index', number)}"
                expected[f"{name}_{kind}{slot}".replace("/", "_")] = len(expected)
    natural_ones = {file.name for file in found}
    missing = dict(expected)
    for file in found:
        name = file.name.removesuffix(_INJECTED)
        if name not in expected:  # one output, numbered or not
            name = name.removesuffix("_0")
        file.position = expected.get(name)
        missing.pop(name, None)
        if file.label and file.path.suffix.lower() != TORCH:
            file.label = undoubled(file.label)
    for name in missing:
        dump.problems[name] = f"{METADATA} names it and there is no such file"
    take_root(found)
    injected = [file for file in found if file.label and file.label.is_injected]
    for file in injected:
        if (own := file.name.removesuffix(_INJECTED)) in natural_ones:
            dump.others[dump.shown(file)] = f"what was put in the place of {own}"
            found.remove(file)
    note_unlisted(dump, "", found)
    dump.files += found
    return [file.key for file in injected]


def injection(keys: Sequence[Key]) -> dict[str, Any]:
    """What was put in the place of a run's own tensors, as run metadata say it (INJ-20)."""
    return {
        "source": "the other side of the verification",
        "mapping": "",
        "inputs": None,
        "outputs": None,
        "slots": [
            {
                "site": key.site,
                "slot": key.slot,
                "status": "injected",
                "injected": 1,
                "archived": 1,
                "calls": {"0": "0"},
            }
            for key in keys
        ],
    }
