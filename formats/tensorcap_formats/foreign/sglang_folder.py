"""Dumps of SGLang's dumper: a .pt file for each value, with tags in its name.

Names are `step=0___rank=0___dump_index=1___name=X.pt`, with further tags behind that. Each file holds the
value and what was known of it (specs/tool-dumps.md).
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from tensorcap_formats.errors import NotAnArchiveError, ReadError
from tensorcap_formats.flat_arrays import Bands
from tensorcap_formats.folder import files_below, others_below
from tensorcap_formats.foreign.torch_file import read_contents
from tensorcap_formats.foreign_archive import ForeignArchive, ForeignTensor
from tensorcap_formats.keys import PROBES, Key, check_length, escape, inner_site, module_site

_NAME: Final = re.compile(
    r"step=(\d{1,18})___rank=(\d{1,9})___dump_index=(\d{1,18})___(?:(.*)___)?name=(.+?)((?:___\w+=.*)?)",
    re.DOTALL,
)
_MODULE: Final = re.compile(r"(grad__)?non_intrusive__(?:(.*)\.)?(inputs|output)((?:\.[^.]+)*)", re.DOTALL)
_LAYER: Final = re.compile(r"___layer_id=(\d{1,9})(?=___|$)")
_RECOMPUTED: Final = re.compile(r"___recompute_status=recomputed(?=___|$)")
_SLOTS: Final = {"inputs": "input", "output": "output"}


@dataclass(frozen=True, slots=True)
class _File:
    """A file, and what its name says.

    Attributes:
        path: Its path.
        name: Its path in the folder.
        key: The key of its value, by which call it is of none yet.
        index: Its number in the order of the run of a rank.
    """

    path: Path
    name: str
    key: Key
    index: int


def is_sglang_folder(names: Sequence[str]) -> bool:
    """Whether a folder with files of these names is such a dump."""
    files = [name for name in names if name.endswith(".pt")]
    return bool(files) and all(_NAME.fullmatch(name[:-3]) for name in files)


def open_sglang(path: Path) -> ForeignArchive:
    """Open a dump as an archive of all its steps and ranks.

    Raises:
        NotAnArchiveError: It holds no tensor.
        UnsafeFileError: A file is a link out of the folder.
        ReadError: The system cannot read it.
    """
    skipped: dict[str, str] = {}
    files = []
    for name, file in files_below(path, (".pt",)):
        match = _NAME.fullmatch(os.path.basename(name))
        if match is None:
            skipped[f"{name}.pt"] = "no name of SGLang's dumper"
        elif _RECOMPUTED.search(match[6]):
            skipped[f"{name}.pt"] = "computed anew by a backward pass"
        else:
            files.append(_File(file, f"{name}.pt", _key(match), int(match[3])))
    files.sort(key=lambda one: (one.key.step, one.key.rank, one.index))
    tensors: dict[str, ForeignTensor] = {}
    values: dict[str, Any] = {}
    problems: dict[str, str] = {}
    calls: Counter[str] = Counter()
    bands = Bands()
    for one in files:
        key = replace(one.key, call=calls[one.key.text])
        calls[one.key.text] += 1
        try:
            check_length(key.text)
            contents = read_contents(one.path, "", is_prefix=True, bands=bands)
        except ReadError as error:
            problems[one.name] = str(error).removeprefix(f"{one.path}: ")
            continue
        except ValueError as error:
            problems[one.name] = str(error)
            continue
        found = {own: replace(t, name=own) for t in contents.tensors if (own := _own_key(key, t.name))}
        plain = {own: value for name, value in contents.values.items() if (own := _own_key(key, name))}
        if not found and not plain:
            problems[one.name] = "it has no member 'value'"
        elif taken := next((own for own in (*found, *plain) if own in tensors or own in values), ""):
            problems[one.name] = f"another file has {taken}"
        else:
            tensors |= found
            values |= plain
        skipped |= {f"{one.name}{name}": why for name, why in contents.skipped.items()}
    if not tensors:
        reasons = f": {next(iter(problems.values()))}" if problems else ""
        raise NotAnArchiveError(f"{path}: holds no tensor of SGLang's dumper{reasons}")
    others = others_below(path, [one.path for one in files], "no .pt file")
    return ForeignArchive(
        path,
        "sglang",
        tensors.values(),
        values=values,
        skipped=others | skipped,
        problems=problems,
        run={"framework": {"name": "torch"}},
        is_ordered=True,
    )


def _key(match: re.Match[str]) -> Key:
    """The key of a value, as of the first call."""
    step, rank, name = int(match[1]), int(match[2]), match[5]
    module = _MODULE.fullmatch(name)
    if module is not None:
        fields = "".join(f".{escape(part)}" for part in module[4].split(".")[1:])
        slot = f"{'grad_' if module[1] else ''}{_SLOTS[module[3]]}{fields}"
        return Key(module_site(module[2] or ""), slot, step, 0, rank)
    layer = _LAYER.search(match[6])
    probe = name if layer is None else f"layers.{layer[1]}.{name}"
    return Key(inner_site(PROBES, probe), "value", step, 0, rank)


def _own_key(key: Key, below: str) -> str | None:
    """The key of a leaf of a file, by its path in it; what is known of the value has none."""
    if below == "":  # a value alone, as older files have it
        return key.text
    kind, _, rest = below.removeprefix("/").partition(".")
    if kind != "value":
        return None
    return replace(key, slot=f"{key.slot}.{escape(rest)}").text if rest else key.text
