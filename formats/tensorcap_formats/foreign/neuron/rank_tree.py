"""Trees of captures of vllm-neuron: a folder for each step, in it one for each module with a file a rank.

`dpD/prefill_sBUCKET_N/MODULE/rankR.pt` and `dpD/decode_bBATCH_N/…`, with `prefill_sBUCKET_N_meta.json` beside
(specs/neuron.md, section 4).
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any, Final

from tensorcap_formats.errors import NotAnArchiveError, ReadError
from tensorcap_formats.flat_arrays import Bands
from tensorcap_formats.folder import list_folder, refuse_link_out
from tensorcap_formats.foreign.neuron.archive import NeuronArchive, NeuronContents
from tensorcap_formats.foreign.torch_file import read_contents
from tensorcap_formats.index import decode_json
from tensorcap_formats.input_file import InputFile
from tensorcap_formats.keys import Key, module_site, natural

_REPLICA: Final = re.compile(r"dp\d{1,9}")
_PARTS: Final = ("draft", "vision")  # other models of the same run
_STEP: Final = re.compile(r"(prefill_s|decode_b)(\d{1,9})_(\d{1,9})")
_RANK: Final = re.compile(r"rank(\d{1,9})\.pt")
_MAX_METADATA_BYTES: Final = 64 * 1024 * 1024


def is_rank_tree(path: Path, names: list[str]) -> bool:
    """Whether a folder is such a tree, or one of the folders in it that hold steps."""
    if any(_STEP.fullmatch(name) and (path / name).is_dir() for name in names):
        return True
    return any(
        (_REPLICA.fullmatch(name) or name in _PARTS)
        and (path / name).is_dir()
        and is_rank_tree(path / name, os.listdir(path / name))
        for name in names
    )


def open_rank_tree(path: Path) -> NeuronArchive:
    """Open a tree as an archive whose keys have ranks. Not tried with files of a device.

    Raises:
        NotAnArchiveError: It holds several runs, or no tensor.
        UnsafeFileError: A file is a link that leads out of the folder.
        ReadError: The system cannot read it.
    """
    runs = sorted(_runs(path), key=lambda run: natural(str(run)))
    if len(runs) != 1:
        raise NotAnArchiveError(
            f"{path}: holds {len(runs)} runs, expected one",
            hint=f"Name one of: {', '.join(map(str, runs))}",
        )
    contents = NeuronContents(path, "neuron-ranks")
    bands = Bands()
    for step, (phase, folder) in enumerate(_steps(contents, runs[0])):
        contents.set_phase(step, phase)
        contents.notes.append(f"Step {step} is {contents.shown(folder)}.")
        _read(contents, step, folder, bands)
    return contents.archive()


def _runs(path: Path) -> Iterator[Path]:
    """The folders that hold steps: of each replica and each model of the run."""
    names = list_folder(path)
    if any(_STEP.fullmatch(name) for name in names):
        yield path
    for name in names:
        if (_REPLICA.fullmatch(name) or name in _PARTS) and (path / name).is_dir():
            yield from _runs(path / name)


def _steps(contents: NeuronContents, run: Path) -> list[tuple[str, Path]]:
    """Phase and folder of each step, prefill before decode, each by its last position or else its number."""
    steps = []
    for name in list_folder(run):
        match = _STEP.fullmatch(name)
        if match is None or not (run / name).is_dir():
            if not name.endswith("_meta.json"):
                contents.others[contents.shown(run / name)] = "no folder of a step"
            continue
        phase = "prefill" if match[1] == "prefill_s" else "decode"
        position = _last_position(contents, run / f"{name}_meta.json")
        steps.append((phase, position, int(match[3]), int(match[2]), run / name))
    by_position = all(step[1] is not None for step in steps) and sum(s[0] == "prefill" for s in steps) <= 1
    if not by_position and len(steps) > 1:
        contents.notes.append("The order of steps is that of their numbers, prefill before decode.")
    steps.sort(key=lambda step: (step[0] != "prefill", (step[1] or 0) if by_position else 0, *step[2:4]))
    return [(step[0], step[4]) for step in steps]


def _last_position(contents: NeuronContents, path: Path) -> int | None:
    """The highest position of a step's tokens, as its metadata say it; None if they do not."""
    if not path.exists():
        return None
    try:
        with closing(InputFile(path)) as file:
            metadata = decode_json(file.read_all(_MAX_METADATA_BYTES), str(path))
    except ReadError as error:
        contents.problems[contents.shown(path)] = str(error).removeprefix(f"{path}: ")
        return None
    return max(_numbers(metadata.get("positions")), default=None)


def _numbers(value: Any) -> Iterator[int]:
    pending = [value]
    while pending:
        inner = pending.pop()
        if isinstance(inner, Mapping):
            pending += inner.values()
        elif isinstance(inner, list):
            pending += inner
        elif type(inner) is int:
            yield inner


def _read(contents: NeuronContents, step: int, folder: Path, bands: Bands) -> None:
    for directory, folders, files in os.walk(folder):
        folders.sort()
        for file in sorted(files, key=natural):
            path = Path(directory, file)
            rank, shown = _RANK.fullmatch(file), contents.shown(path)
            if rank is None:
                contents.others[shown] = "no file of a rank"
                continue
            refuse_link_out(path, contents.path, hint="Put a copy in its place.")
            module = ".".join(path.parent.relative_to(folder).parts)
            try:
                tensors = read_contents(path, "", is_prefix=True, bands=bands).tensors
            except ReadError as error:
                contents.problems[shown] = str(error).removeprefix(f"{path}: ")
                continue
            for tensor in tensors:
                slot = f"output.{tensor.name[1:]}" if tensor.name else "output"
                contents.add(Key(module_site(module), slot, step, rank=int(rank[1])), tensor, shown)
