"""Input snapshots of vllm-neuron: the inputs of calls of a compiled graph, each described by a `meta.json`.

`HASH/rankR/callN/tensorI.npy` or `tensorI.pt` (specs/neuron.md, section 4).
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tensorcap_formats.dtypes import DTYPES
from tensorcap_formats.errors import CorruptArchiveError, ReadError, abbreviate
from tensorcap_formats.flat_arrays import Bands
from tensorcap_formats.folder import list_folder, read_side_file, refuse_link_out
from tensorcap_formats.foreign.neuron.archive import NeuronArchive, NeuronContents
from tensorcap_formats.foreign.numpy_files import read_npy_tensor
from tensorcap_formats.foreign.torch_file import read_contents
from tensorcap_formats.foreign_archive import ForeignTensor
from tensorcap_formats.index import decode_json
from tensorcap_formats.keys import ROOT_SITE, Key, natural

METADATA: Final = "meta.json"
_RANK: Final = re.compile(r"rank(\d{1,9})")
_CALL: Final = re.compile(r"call(\d{1,9})")
_TENSOR: Final = re.compile(r"tensor(\d{1,9})\.(npy|pt)")
_MAX_METADATA_BYTES: Final = 64 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class _Call:
    """One rank's call of a graph.

    Attributes:
        graph: Path of the graph's folder.
        rank: The rank among all processes.
        number: Of the graph's calls on the rank.
        folder: Of its inputs.
        metadata: What `meta.json` says; {} if it could not be read.
    """

    graph: str
    rank: int
    number: int
    folder: Path
    metadata: Mapping[str, Any]

    @property
    def step(self) -> int | None:
        """The number of the model's step, which all graphs of a step share; None if unknown."""
        step = self.metadata.get("global_step")
        return step if type(step) is int else None


def is_call_folder(path: Path, names: list[str]) -> bool:
    """Whether a folder is of such snapshots, of all graphs or of one."""
    return any(_has_calls(path / name) for name in names if _RANK.fullmatch(name)) or any(
        _RANK.fullmatch(inner) and _has_calls(path / name / inner)
        for name in names
        if (path / name).is_dir()
        for inner in os.listdir(path / name)
    )


def open_calls(path: Path) -> NeuronArchive:
    """Open a folder of snapshots as an archive: a step for each call. Not tried with files of a device.

    Raises:
        NotAnArchiveError: There is no tensor in it.
        UnsafeFileError: A file is a link that leads out of the folder.
        ReadError: The system cannot read it.
    """
    contents = NeuronContents(path, "neuron-snapshots")
    by_step: dict[tuple[str, int], list[_Call]] = {}
    for call in _calls(contents, path):
        by_step.setdefault((call.graph, call.number), []).append(call)

    def order(calls: list[_Call]) -> tuple[Any, ...]:
        steps = [call.step for call in calls if call.step is not None]
        return min(steps, default=-1), natural(calls[0].graph), calls[0].number

    bands = Bands()
    for step, calls in enumerate(sorted(by_step.values(), key=order)):
        first = calls[0]
        is_prompt = first.metadata.get("is_prompt")
        contents.set_phase(step, "prefill" if is_prompt is True else "decode" if is_prompt is False else "")
        number = "" if first.step is None else f", of step {first.step} of the model"
        contents.notes.append(f"Step {step} is call {first.number} of {first.graph or path.name}{number}.")
        for call in calls:
            _read(contents, step, call, bands)
    return contents.archive()


def _has_calls(folder: Path) -> bool:
    return folder.is_dir() and any(_CALL.fullmatch(name) for name in os.listdir(folder))


def _calls(contents: NeuronContents, path: Path) -> Iterator[_Call]:
    names = sorted(list_folder(path), key=natural)
    graphs = [path] if any(_RANK.fullmatch(name) for name in names) else [path / name for name in names]
    for graph in graphs:
        if not graph.is_dir():
            contents.others[contents.shown(graph)] = "no folder of a graph"
            continue
        for rank_name in sorted(list_folder(graph), key=natural):
            rank = _RANK.fullmatch(rank_name)
            if rank is None or not (graph / rank_name).is_dir():
                contents.others[contents.shown(graph / rank_name)] = "no folder of a rank"
                continue
            for name in sorted(list_folder(graph / rank_name), key=natural):
                folder = graph / rank_name / name
                if call := _CALL.fullmatch(name):
                    shown = "" if graph == path else contents.shown(graph)
                    yield _Call(shown, int(rank[1]), int(call[1]), folder, _metadata(contents, folder))


def _metadata(contents: NeuronContents, folder: Path) -> dict[str, Any]:
    path = folder / METADATA
    try:
        return decode_json(read_side_file(path, contents.path, _MAX_METADATA_BYTES), str(path))
    except (ReadError, OSError) as error:
        contents.problems[contents.shown(path)] = str(error).removeprefix(f"{path}: ")
        return {}


def _read(contents: NeuronContents, step: int, call: _Call, bands: Bands) -> None:
    listed = call.metadata.get("inputs")
    entries = [entry for entry in (listed if isinstance(listed, list) else ()) if isinstance(entry, dict)]
    inputs = {entry["index"]: entry for entry in entries if type(entry.get("index")) is int}
    numbers = set()
    for name in sorted(list_folder(call.folder), key=natural):
        path, match = call.folder / name, _TENSOR.fullmatch(name)
        shown = contents.shown(path)
        if match is None:
            if name != METADATA:
                contents.others[shown] = "no input of a call"
            continue
        refuse_link_out(path, contents.path, hint="Put a copy in its place.")
        numbers.add(int(match[1]))
        try:
            tensor = _tensor(path, inputs.get(int(match[1]), {}), bands)
        except ReadError as error:
            contents.problems[shown] = str(error).removeprefix(f"{path}: ")
            continue
        contents.add(Key(ROOT_SITE, f"input.{int(match[1])}", step, rank=call.rank), tensor, shown)
    for number in sorted(inputs.keys() - numbers):
        contents.problems[f"{contents.shown(call.folder)}/tensor{number}"] = (
            f"{METADATA} names it and there is no such file"
        )


def _tensor(path: Path, entry: Mapping[str, Any], bands: Bands) -> ForeignTensor:
    """The tensor of a file, of the dtype and shape that the metadata say."""
    dtype = str(entry.get("dtype", "")).removeprefix("torch.")
    if path.suffix == ".npy":
        known = {DTYPES[dtype].itemsize: dtype} if dtype in DTYPES else None
        tensor = read_npy_tensor(path, path.stem, void_dtypes=known)
    else:
        tensors = read_contents(path, "", is_prefix=True, bands=bands).tensors
        if len(tensors) != 1:
            raise ReadError(f"{path}: holds {len(tensors)} tensors, expected one")
        tensor = tensors[0]
    expected = (dtype, entry.get("shape"))
    if entry and expected != (tensor.dtype.name, list(tensor.shape)):
        raise CorruptArchiveError(
            f"{path}: is {tensor.dtype.name} of shape {list(tensor.shape)}, expected "
            f"{abbreviate(dtype)} of {abbreviate(repr(expected[1]))} as {METADATA} says"
        )
    return tensor
