"""Results and inputs that NVIDIA's Polygraphy saves: JSON in which each array is a .npy file in base64.

`polygraphy run --save-outputs FILE.json` writes the runs of all runners, each of several iterations;
`--save-outputs FOLDER` a file for each iteration; `--save-inputs` a list of iterations (specs/tool-dumps.md).
"""

from __future__ import annotations

import base64
import binascii
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np

from tensorcap_formats.dtypes import Array
from tensorcap_formats.errors import CorruptArchiveError, NotAnArchiveError, ReadError, abbreviate
from tensorcap_formats.folder import files_below, list_folder
from tensorcap_formats.foreign.json_file import json_object, read_json
from tensorcap_formats.foreign.numpy_files import npy_tensor_in
from tensorcap_formats.foreign_archive import ForeignArchive, ForeignTensor
from tensorcap_formats.keys import Key, module_site

_FILE: Final = re.compile(r"\d{10}\.json")
_FRAMEWORKS: Final = {"onnxrt": "onnx", "trt": "tensorrt", "pluginref": "polygraphy", "tf": "tensorflow"}
_LARGE: Final = "Save a folder, of a file for each iteration: --save-outputs FOLDER."
_TORCH: Final = "a tensor of torch within JSON, which is not read"


@dataclass(frozen=True, slots=True)
class _Run:
    """The run of a runner, or inputs, whose runner is ""."""

    runner: str
    iterations: list[Mapping[str, Any]]


def is_polygraphy_folder(names: Sequence[str]) -> bool:
    """Whether a folder with these names is one of files of iterations."""
    return bool(names) and all(_FILE.fullmatch(name) for name in names)


def split_runner(text: str) -> tuple[Path, str] | None:
    """A file or a folder of iterations, and what is behind the colon after it: `FOLDER:onnxrt`.

    Returns:
        None if nothing of the kind is there.
    """
    for colon in re.finditer(":", text):
        path, runner = Path(text[: colon.start()]), text[colon.end() :]
        is_file = path.suffix == ".json" and os.path.isfile(path)
        if runner and (is_file or (os.path.isdir(path) and is_polygraphy_folder(list_folder(path)))):
            return path, runner
    return None


def open_polygraphy(path: Path, runner: str = "") -> ForeignArchive:
    """Open a file, or a folder of files of iterations, as an archive of one runner's outputs, or of inputs.

    Args:
        path: Of the file or folder.
        runner: What the runner's name begins with, if there are several.

    Raises:
        NotAnArchiveError: It holds several runs, none of that runner, or no array.
        CorruptArchiveError: It is no JSON of Polygraphy, or an array is damaged.
        ReadError: The system cannot read it.
    """
    runs: dict[str, _Run] = {}
    for file in [file for _, file in files_below(path, (".json",))] if path.is_dir() else [path]:
        inner = read_json(file, folder=path if path.is_dir() else None, hint=_LARGE)
        for number, one in enumerate(_runs(inner, str(file))):
            name = one.runner if path.is_dir() else f"{number}/{one.runner}"
            runs.setdefault(name, _Run(one.runner, [])).iterations.extend(one.iterations)
    chosen = _chosen(list(runs.values()), path, runner)
    tensors: list[ForeignTensor] = []
    problems: dict[str, str] = {}
    for step, outputs in enumerate(chosen.iterations):
        for name, value in outputs.items():
            many = len(chosen.iterations) > 1
            own = Key(module_site(name), "output", step).text if many and name else name
            where = f"{path}: {abbreviate(name)!r}"
            try:
                text = _text_of(value, where)
            except _TorchTensorError:
                problems[own] = _TORCH
                continue
            size = len(text) // 4 * 3 - text[-2:].count(b"=")
            tensors.append(npy_tensor_in(partial(_read, text, where), size, own, where))
    if not tensors and not problems:
        raise NotAnArchiveError(f"{path}: holds no array in {len(chosen.iterations)} iterations")
    kind = chosen.runner.partition("-")[0]
    run = {"framework": {"name": _FRAMEWORKS.get(kind, "polygraphy")}, "runner": chosen.runner}
    place = Path(f"{path}:{runner}") if runner else path  # another runner's run is not the same one
    return ForeignArchive(place, "polygraphy", tensors, problems=problems, run=run, is_ordered=True)


def _chosen(runs: Sequence[_Run], path: Path, runner: str) -> _Run:
    named = [run for run in runs if run.runner == runner]
    found = named or [run for run in runs if run.runner.startswith(runner)]
    names = ", ".join(abbreviate(run.runner) for run in runs)
    if len(found) == 1:
        return found[0]
    if not runs:
        raise NotAnArchiveError(f"{path}: holds no run, expected one of a runner")
    if not found:
        raise NotAnArchiveError(f"{path}: has no runner {abbreviate(runner)!r}, found {names}")
    raise NotAnArchiveError(
        f"{path}: holds the runs of {names}, expected one",
        hint=f"Name one by how it begins, as {path}:{_prefix(found)}",
    )


def _prefix(runs: Sequence[_Run]) -> str:
    """The shortest beginning of the first runner's name, up to a hyphen, that no other has."""
    parts = runs[0].runner.split("-")
    beginnings = ("-".join(parts[:count]) for count in range(1, len(parts) + 1))
    return next(
        (text for text in beginnings if sum(run.runner.startswith(text) for run in runs) == 1), runs[0].runner
    )


def _runs(value: Any, where: str) -> Iterator[_Run]:
    """The runs of a file."""
    if isinstance(value, list):
        yield _Run("", [json_object(one, f"{where}: inputs") for one in value])
        return
    for entry in _list(json_object(value, where).get("lst"), f"{where}: 'lst'"):
        pair = _list(entry, f"{where}: a run")
        if len(pair) != 2 or not isinstance(pair[0], str):
            raise CorruptArchiveError(f"{where}: a run is {len(pair)} things, expected a name and iterations")
        iterations = [json_object(one, f"{where}: an iteration") for one in _list(pair[1], f"{where}: a run")]
        outputs = [json_object(one.get("outputs"), f"{where}: outputs of an iteration") for one in iterations]
        yield _Run(pair[0], outputs)


class _TorchTensorError(ReadError):
    """An array is one of torch, in its own format. Never leaves this module."""


def _text_of(value: Any, where: str) -> bytes:
    """The .npy file of an array, in base64."""
    array = json_object(value, where)
    if "values" in array:  # a lazy one
        array = json_object(array["values"], where)
    if "tensor" in array:
        raise _TorchTensorError(where)
    text = array.get("array")
    if not isinstance(text, str):
        raise CorruptArchiveError(f"{where}: has no text 'array', expected one of base64")
    if len(text) % 4 or not text.isascii():
        raise CorruptArchiveError(f"{where}: is no base64: {len(text)} characters, expected a multiple of 4")
    return text.encode()


def _read(text: bytes, where: str, offset: int, out: Array) -> None:
    """Fill an array with decoded bytes from an offset on: four characters are three bytes."""
    memory = out.reshape(-1).view(np.uint8)
    start, end = offset // 3, -(-(offset + memory.size) // 3)
    try:
        part = base64.b64decode(text[4 * start : 4 * end], validate=True)
    except (binascii.Error, ValueError) as error:
        raise CorruptArchiveError(f"{where}: is no base64: {error}") from None
    own = part[offset - 3 * start :][: memory.size]
    if len(own) != memory.size:
        raise CorruptArchiveError(f"{where}: is no base64: it ends within")
    memory[:] = np.frombuffer(own, np.uint8)


def _list(value: Any, where: str) -> list[Any]:
    if not isinstance(value, list):
        raise CorruptArchiveError(f"{where}: is a JSON {type(value).__name__}, expected a list")
    return value
