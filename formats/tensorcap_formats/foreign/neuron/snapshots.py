"""Input snapshots of NxDI: the inputs, states and weights of a compiled graph, a .npy file for each.

`SUBMODEL/_tp0_bkB/requestR/[batchB_tokenT/]rankK/inputI.npy`; numpy has no name for bfloat16 and float8, so
that their bits lie there as `|V2` and `|V1` (specs/neuron.md, section 4).
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from tensorcap_formats.errors import ReadError
from tensorcap_formats.folder import list_folder, refuse_link_out
from tensorcap_formats.foreign.neuron.archive import NeuronArchive, NeuronContents
from tensorcap_formats.foreign.numpy_files import read_npy_tensor
from tensorcap_formats.keys import ROOT_SITE, Key

_BUCKET: Final = re.compile(r"_tp\d+_bk(\d{1,9})")
_PARTS: Final = (re.compile(r"request(\d{1,9})"), re.compile(r"batch(\d{1,9})_token(\d{1,9})"))
_RANK: Final = re.compile(r"rank(\d{1,9})")
_INPUT: Final = re.compile(r"input(\d{1,9})\.npy")
_PICKLE: Final = re.compile(r"inp-\d{3,}\.p")
_CONTEXT: Final = "context_encoding"
_VOID_DTYPES: Final = {1: "float8_e4m3fn", 2: "bfloat16"}  # by width: what NxDI writes as |V1 and |V2


def is_snapshot_folder(path: Path, names: list[str]) -> bool:
    """Whether a folder is of snapshots, of all submodels or of one."""
    if any(_BUCKET.fullmatch(name) for name in names):
        return True
    return any(
        (path / name).is_dir() and any(_BUCKET.fullmatch(inner) for inner in os.listdir(path / name))
        for name in names
        if "model" in name
    )


def open_snapshots(path: Path) -> NeuronArchive:
    """Open a folder of snapshots as an archive: a step for each run of a graph. Not tried with a device's.

    Raises:
        NotAnArchiveError: There is no tensor in it.
        UnsafeFileError: A file is a link that leads out of the folder.
        ReadError: The system cannot read it.
    """
    contents = NeuronContents(path, "neuron-snapshots")
    runs = sorted(_runs(contents, path), key=lambda run: run[0])
    for step, (order, folder) in enumerate(runs):
        is_context = order[0] == 0
        contents.set_phase(step, "prefill" if is_context else "decode")
        contents.notes.append(f"Step {step} is {contents.shown(folder)}.")
        _read(contents, step, folder)
    if contents.tensors:
        contents.notes.append(
            "Inputs are numbered as the graph has them: those of the call, then states and weights, without "
            "0-d tensors. |V2 is read as bfloat16, |V1 as float8_e4m3fn, as NxDI writes them."
        )
    return contents.archive()


def _runs(contents: NeuronContents, path: Path) -> Iterator[tuple[tuple[int, ...], Path]]:
    """The folders of ranks, each with what sorts it: context encoding, then token, bucket and request."""
    names = sorted(list_folder(path))
    submodels = [path] if any(_BUCKET.fullmatch(name) for name in names) else [path / name for name in names]
    for number, submodel in enumerate(submodels):
        if not submodel.is_dir():
            contents.others[contents.shown(submodel)] = "no folder of a submodel"
            continue
        name = submodel.name if submodel != path else Path(os.path.abspath(path)).name
        for below in sorted(list_folder(submodel)):
            bucket = _BUCKET.fullmatch(below)
            if bucket is None or not (submodel / below).is_dir():
                contents.others[contents.shown(submodel / below)] = "no bucket of a submodel"
                continue
            for numbers, folder in _leaves(submodel / below):
                request, batch, token = numbers
                kind = 0 if _CONTEXT in name else 1
                yield (kind, token, int(bucket[1]), request, batch, number), folder


def _leaves(folder: Path) -> Iterator[tuple[tuple[int, int, int], Path]]:
    """Folders that hold ranks or pickles, with numbers of request, batch line and token; -1 for none."""
    pending = [((-1, -1, -1), folder)]
    while pending:
        numbers, current = pending.pop()
        inner = list_folder(current)
        for name in inner:
            if match := _PARTS[0].fullmatch(name):
                pending.append(((int(match[1]), *numbers[1:]), current / name))
            elif match := _PARTS[1].fullmatch(name):
                pending.append(((numbers[0], int(match[1]), int(match[2])), current / name))
        if any(_RANK.fullmatch(name) or _PICKLE.fullmatch(name) for name in inner):
            yield numbers, current


def _read(contents: NeuronContents, step: int, folder: Path) -> None:
    for name in sorted(list_folder(folder)):
        rank = _RANK.fullmatch(name)
        path = folder / name
        if _PICKLE.fullmatch(name):
            contents.problems[contents.shown(path)] = (
                "is a pickle, which may run code when it is read: take snapshots as NUMPY_IMAGES"
            )
        if rank is None or not path.is_dir():
            continue
        files = [(int(match[1]), file) for file in list_folder(path) if (match := _INPUT.fullmatch(file))]
        for number, file in sorted(files):
            shown = contents.shown(path / file)
            refuse_link_out(path / file, contents.path, hint="Put a copy in its place.")
            try:
                tensor = read_npy_tensor(path / file, shown, void_dtypes=_VOID_DTYPES)
            except ReadError as error:
                contents.problems[shown] = str(error).removeprefix(f"{path / file}: ")
                continue
            key = Key(ROOT_SITE, f"input.{number}", step, rank=int(rank[1]))
            contents.add(key, tensor, shown)
