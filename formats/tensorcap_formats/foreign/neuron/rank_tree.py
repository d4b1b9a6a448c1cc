"""Trees of captures of vllm-neuron: a folder for each step, in it one for each module with a file a rank.

`dpD/prefill_sBUCKET_N/MODULE/rankR.pt` and `dpD/decode_bBATCH_N/…`, in each folder of a step the file of its
metadata, named as the folder with `_meta.json` (specs/neuron.md, section 4).
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tensorcap_formats.errors import NotAnArchiveError, ReadError
from tensorcap_formats.flat_arrays import Bands
from tensorcap_formats.folder import list_folder, read_side_file, refuse_link_out, walk
from tensorcap_formats.foreign.neuron.archive import NeuronArchive, NeuronContents
from tensorcap_formats.foreign.torch_file import read_contents
from tensorcap_formats.index import decode_json
from tensorcap_formats.keys import PROBES, Key, inner_site, module_site, natural

_REPLICA: Final = re.compile(r"dp\d{1,9}")
_PARTS: Final = ("draft", "vision")  # other models of the same run
_STEP: Final = re.compile(r"(prefill_s|decode_b)(\d{1,9})_(\d{1,9})")
_BY_CODE: Final = "manual."
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
    for number, step in enumerate(_steps(contents, runs[0])):
        contents.set_phase(number, step.phase)
        contents.notes.append(f"Step {number} is {contents.shown(step.folder)}.")
        _read(contents, number, step.folder, bands)
    return contents.archive()


def _runs(path: Path) -> Iterator[Path]:
    """The folders that hold steps: of each replica and each model of the run."""
    names = list_folder(path)
    if any(_STEP.fullmatch(name) for name in names):
        yield path
    for name in names:
        if (_REPLICA.fullmatch(name) or name in _PARTS) and (path / name).is_dir():
            yield from _runs(path / name)


@dataclass(frozen=True, slots=True)
class _Step:
    """One step of a run.

    Attributes:
        folder: Its folder.
        is_prefill: Whether it is one of prefill.
        size: Of its bucket, or its batch.
        number: Of the steps of its kind and size, from 0.
        requests: The requests in it; None if its metadata do not say.
        position: The highest position of its tokens, likewise.
    """

    folder: Path
    is_prefill: bool
    size: int
    number: int
    requests: tuple[str, ...] | None
    position: int | None

    @property
    def phase(self) -> str:
        """Its phase."""
        return "prefill" if self.is_prefill else "decode"


def _steps(contents: NeuronContents, run: Path) -> list[_Step]:
    """The steps in the order in which they ran, as far as that is known.

    1. A request begins with its prefill, and prefills are in the order of their numbers.
    2. A step comes behind the last prefill of its requests, in the order of its tokens' positions.
    3. Without metadata of all steps, prefills come first, each kind in the order of its numbers.
    """
    steps = []
    for name in sorted(list_folder(run)):
        match = _STEP.fullmatch(name)
        if match is None or not (run / name).is_dir():
            contents.others[contents.shown(run / name)] = "no folder of a step"
            continue
        metadata = _metadata(contents, run / name / f"{name}_meta.json")
        requests, positions = metadata.get("req_ids"), metadata.get("positions")
        numbers = [n for n in positions if type(n) is int] if isinstance(positions, list) else []
        steps.append(
            _Step(
                run / name,
                match[1] == "prefill_s",
                int(match[2]),
                int(match[3]),
                tuple(map(str, requests)) if isinstance(requests, list) else None,
                max(numbers, default=None),
            )
        )
    steps.sort(key=lambda step: (not step.is_prefill, step.number, step.size))
    if any(step.requests is None or step.position is None for step in steps):
        if len(steps) > 1:
            contents.notes.append("The order of steps is that of their numbers, prefill before decode.")
        return steps
    begins: dict[str, int] = {}
    for number, step in enumerate(steps):
        for request in step.requests or () if step.is_prefill else ():
            begins.setdefault(request, number)

    def order(step: _Step) -> tuple[int, bool, int]:
        begin = max((begins.get(request, -1) for request in step.requests or ()), default=-1)
        return begin, not step.is_prefill, step.position or 0

    return sorted(steps, key=order)


def _metadata(contents: NeuronContents, path: Path) -> dict[str, Any]:
    """What the file of a step's metadata says, {} if there is none."""
    if not path.exists():
        return {}
    try:
        return decode_json(read_side_file(path, contents.path, _MAX_METADATA_BYTES), str(path))
    except ReadError as error:
        contents.problems[contents.shown(path)] = str(error).removeprefix(f"{path}: ")
        return {}


def _read(contents: NeuronContents, step: int, folder: Path, bands: Bands) -> None:
    for directory, folders, files in walk(folder):
        folders.sort()
        for file in sorted(files, key=natural):
            path = Path(directory, file)
            rank, shown = _RANK.fullmatch(file), contents.shown(path)
            if rank is None:
                if path != folder / f"{folder.name}_meta.json":
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
                contents.add(_key(module, tensor.name[1:], step, int(rank[1])), tensor, shown)


def _key(name: str, below: str, step: int, rank: int) -> Key:
    """The key of a module's result, or of a tensor that code captures, whose name begins with `manual.`."""
    if name.startswith(_BY_CODE):
        return Key(inner_site(PROBES, name.removeprefix(_BY_CODE)), "value", step, rank=rank)
    return Key(module_site(name), f"output.{below}" if below else "output", step, rank=rank)
