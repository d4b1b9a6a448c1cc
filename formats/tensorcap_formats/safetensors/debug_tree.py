"""Call trees that the model addition debugger of transformers writes, `NAME_debug_tree_FULL_TENSORS.json`.

A tensor is in a safetensors file beside the tree, or a text as torch prints it (specs/tool-dumps.md).
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np

from tensorcap_formats.dtypes import DTYPES, Array, DType, encode
from tensorcap_formats.errors import CorruptArchiveError, NotAnArchiveError, ReadError, abbreviate
from tensorcap_formats.folder import others_below
from tensorcap_formats.foreign_archive import ForeignArchive, ForeignTensor, nested_leaves
from tensorcap_formats.index import decode_json
from tensorcap_formats.input_file import InputFile, read_stored
from tensorcap_formats.keys import Key, module_site
from tensorcap_formats.safetensors.foreign import file_inside, foreign_tensors
from tensorcap_formats.safetensors.header import read_header

TREE_SUFFIX: Final = "_debug_tree_FULL_TENSORS.json"
_SUMMARY_SUFFIX: Final = "_debug_tree_SUMMARY.json"
_MAX_BYTES: Final = 1 << 28
_MAX_NODES: Final = 1_000_000
_MAX_DEPTH: Final = 100
_SIZES: Final = re.compile(r"torch\.Size\(\[(\d{0,18}(?:, \d{1,18}){0,63})\]\)")
_NUMBER: Final = re.compile(r"[-+]?(?:nan|inf|\d+\.?\d*(?:e[-+]?\d+)?)(?![a-z0-9])|\b(?:True|False)\b")
_TAIL: Final = re.compile(r",\s*(?:size|dtype|device|grad_fn|requires_grad)=.*\Z", re.DOTALL)
_PLAIN: Final = {"None": None, "True": True, "False": False}  # whose repr is written
_OVERWRITTEN: Final = "the next call of the module wrote over its file"
_PRINTED: Final = "Values are as they were printed, with four decimals, and judged as those of float16."


@dataclass
class _Contents:
    """What was found in a tree.

    Attributes:
        tensors: The tensors, in the order of the tree.
        values: Leaves that are no tensors.
        skipped: Why other tensors are not read.
        problems: Why tensors that were printed cannot be read.
        files: Which key has the tensor of each file.
        is_printed: Whether a tensor is one that was printed.
    """

    tensors: dict[str, ForeignTensor] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    problems: dict[str, str] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)
    is_printed: bool = False


def open_debug_tree(path: Path) -> ForeignArchive:
    """Open a tree, or the folder of one, as an archive: one forward, with the model at the root.

    Raises:
        NotAnArchiveError: It has no tensors, as a summary.
        CorruptArchiveError: It is no such tree, or a file contradicts it.
        UnsafeFileError: A file lies outside of the folder.
        ReadError: The system cannot read it.
    """
    folder = path if path.is_dir() else None
    if folder is not None:
        trees = sorted(path.glob(f"*{TREE_SUFFIX}"))
        if len(trees) != 1:
            raise NotAnArchiveError(
                f"{path}: has {len(trees)} files *{TREE_SUFFIX}, expected one", hint="Name one of them."
            )
        file_inside(path, trees[0].name)
        path = trees[0]
    with closing(InputFile(path)) as file:
        root = decode_json(file.read_all(_MAX_BYTES), str(path))
    contents = _Contents()
    for key, leaf in _slots(root, str(path)):
        _add(contents, key, leaf, path)
    if folder is not None:
        summary = path.with_name(path.name.replace(TREE_SUFFIX, _SUMMARY_SUFFIX))
        named = [path, summary, *(folder / name for name in contents.files)]
        contents.skipped |= others_below(folder, named, f"{path.name} does not name it")
    if not contents.tensors:
        raise _without_tensors(path, contents)
    model = root.get("module_path")
    run: dict[str, Any] = {
        "framework": {"name": "torch"},
        "model": {"class": model if isinstance(model, str) else ""},
    }
    if contents.is_printed:
        run |= {"dump": "log", "compute_dtype": "float16", "notes": [_PRINTED]}
    return ForeignArchive(
        path,
        "debug-tree",
        contents.tensors.values(),
        values=contents.values,
        skipped=contents.skipped,
        problems=contents.problems,
        run=run,
        is_ordered=True,
    )


def _without_tensors(path: Path, contents: _Contents) -> NotAnArchiveError:
    full = path.name.replace(_SUMMARY_SUFFIX, TREE_SUFFIX)
    if full != path.name:
        return NotAnArchiveError(
            f"{path}: is a summary, which has shapes and rounded statistics and no values",
            hint=f"Give {path.with_name(full)}.",
        )
    reason = next(iter((contents.problems | contents.skipped).values()), "")
    return NotAnArchiveError(f"{path}: holds no tensor that can be read{': ' * bool(reason)}{reason}")


def _slots(root: dict[str, Any], where: str) -> Iterator[tuple[str, Any]]:
    """The leaves of a tree by key, in the order of the run: arguments, what is called within, results."""
    model = root.get("module_path")
    calls: Counter[str] = Counter()
    pending: list[tuple[Any, int, tuple[str, int] | None]] = [(root, 0, None)]
    visited = 0
    while pending:
        node, depth, ended = pending.pop()
        if ended is not None:
            module, call = ended
            yield from _leaves(module, call, "output", node.get("outputs"), where)
            continue
        visited += 1
        if visited > _MAX_NODES or depth > _MAX_DEPTH:
            raise CorruptArchiveError(
                f"{where}: has more than {_MAX_NODES} calls, or calls deeper than {_MAX_DEPTH}"
            )
        if not isinstance(node, dict) or not isinstance(node.get("module_path"), str):
            raise CorruptArchiveError(f"{where}: a call has no text 'module_path'")
        name, children, inputs = node["module_path"], node.get("children") or [], node.get("inputs") or {}
        if not isinstance(children, list) or not isinstance(inputs, dict):
            raise CorruptArchiveError(f"{where}: {abbreviate(name)!r}: children or inputs are none")
        module = "" if node is root else name.removeprefix(f"{model}.")
        call = calls[module]
        calls[module] += 1
        for kind in ("args", "kwargs"):
            yield from _leaves(module, call, "input", inputs.get(kind), where)
        pending.append((node, depth, (module, call)))
        pending += [(child, depth + 1, None) for child in reversed(children)]


def _leaves(module: str, call: int, slot: str, value: Any, where: str) -> Iterator[tuple[str, Any]]:
    """The leaves of arguments or of a result by key: objects of tensors, and texts."""
    for own, leaf in nested_leaves(value, slot, _is_tensor, where):
        if leaf is not None:
            yield Key(module_site(module), own, 0, call).text, leaf


def _is_tensor(value: dict[str, Any]) -> bool:
    return isinstance(value.get("shape"), str)


def _add(contents: _Contents, key: str, leaf: Any, path: Path) -> None:
    """Add a leaf to what was found."""
    if not isinstance(leaf, dict):
        contents.values[key] = _PLAIN.get(leaf, leaf) if isinstance(leaf, str) else str(leaf)
        return
    where = f"{path}: {abbreviate(key)}"
    shape, dtype = _shape_of(leaf, where), _dtype_of(leaf, where)
    value = leaf.get("value")
    if isinstance(value, str):
        name = value.removeprefix("./")
        if name in contents.files:
            before = contents.files[name]
            contents.tensors.pop(before, None)
            contents.skipped[before] = _OVERWRITTEN
        contents.files[name] = key
        contents.tensors[key] = _of_file(path, name, key, shape, dtype)
    elif isinstance(value, list) and all(isinstance(line, str) for line in value):
        body = _TAIL.sub("", "\n".join(value))
        if "..." in body:
            contents.skipped[key] = f"was printed in part, {math.prod(shape)} elements"
            return
        try:
            printed = _printed(body, shape, dtype)
        except ReadError as error:
            contents.problems[key] = str(error)
            return
        contents.is_printed |= dtype.kind == "float"
        contents.tensors[key] = ForeignTensor(key, dtype, shape, partial(_copy, printed))
    else:
        contents.skipped[key] = "only its shape and rounded statistics were kept"


def _shape_of(leaf: dict[str, Any], where: str) -> tuple[int, ...]:
    match = _SIZES.fullmatch(leaf["shape"])
    if match is None:
        raise CorruptArchiveError(
            f"{where}: shape is {abbreviate(leaf['shape'])!r}, expected a text such as torch.Size([2, 3])"
        )
    return tuple(int(size) for size in match[1].split(", ") if size)


def _dtype_of(leaf: dict[str, Any], where: str) -> DType:
    name = leaf.get("dtype")
    known = DTYPES.get(name.removeprefix("torch.")) if isinstance(name, str) else None
    if known is None:
        raise CorruptArchiveError(f"{where}: dtype {abbreviate(repr(name))} is unknown")
    return known


def _of_file(path: Path, name: str, key: str, shape: tuple[int, ...], dtype: DType) -> ForeignTensor:
    """The tensor of a safetensors file beside the tree, held against what the tree says of it."""
    file = InputFile(file_inside(path.parent, name))
    with closing(file):
        entries, _ = read_header(file)
    tensors = foreign_tensors(file, entries)
    if len(tensors) != 1:
        raise CorruptArchiveError(f"{file.path}: holds {len(tensors)} tensors, expected one")
    tensor, entry = tensors[0], next(iter(entries.values()))
    if (tensor.shape, tensor.dtype) != (shape, dtype):
        raise CorruptArchiveError(
            f"{file.path}: is {tensor.dtype.name} {list(tensor.shape)}, expected {dtype.name} {list(shape)} "
            f"as {path.name} says"
        )
    read = partial(read_stored, file.path, file.size, dtype.itemsize, entry.offset)
    return replace(tensor, name=key, read=read)


def _printed(body: str, shape: tuple[int, ...], dtype: DType) -> Array:
    """The stored elements of a tensor as torch prints it whole, without dtype and device.

    Raises:
        CorruptArchiveError: It shows another count of elements, or such as are not of the dtype.
    """
    count = math.prod(shape)
    numbers = _NUMBER.findall(body.partition("(")[2])
    if len(numbers) != count:
        raise CorruptArchiveError(f"shows {len(numbers)} elements, expected {count}")
    try:
        if dtype.kind == "bool":
            values = np.array([number == "True" for number in numbers])
        elif dtype.kind == "float":
            values = np.array([float(number) for number in numbers], np.float64)
        else:
            values = np.array([int(number) for number in numbers], dtype.storage)
        return encode(values, dtype).reshape(-1)
    except (ValueError, OverflowError, ReadError):
        raise CorruptArchiveError(f"shows elements that are no {dtype.name}") from None


def _copy(values: Array, start: int, out: Array) -> None:
    out[:] = values[start : start + out.size]
