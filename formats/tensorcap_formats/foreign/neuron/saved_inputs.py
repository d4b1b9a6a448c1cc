"""Inputs that NxDI saves at its capture indices, a tuple in each file, as `saved_inputs_cte_output_0.pt`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

from tensorcap_formats.errors import ReadError
from tensorcap_formats.flat_arrays import Bands
from tensorcap_formats.folder import list_folder, refuse_link_out
from tensorcap_formats.foreign.neuron.archive import NeuronArchive, NeuronContents
from tensorcap_formats.foreign.torch_file import read_contents
from tensorcap_formats.foreign_archive import ForeignTensor
from tensorcap_formats.keys import ROOT_SITE, Key, natural

_FILE: Final = re.compile(r"saved_inputs_(cte|tkg_with(?:out)?_kv_cache)_output_(\d{1,9})\.pt")
_ARGUMENTS: Final = ("input_ids", "attention_mask", "position_ids", "seq_ids", "sampling_params")
_CACHE_AXES: Final = 4  # of a key or value: batch, head, position, channel


def is_saved_inputs_folder(names: Iterable[str]) -> bool:
    """Whether a folder with these names in it holds saved inputs."""
    return any(_FILE.fullmatch(name) for name in names)


def open_saved_inputs(path: Path) -> NeuronArchive:
    """Open a folder of saved inputs as an archive. Not tried with files of a device.

    Raises:
        NotAnArchiveError: There is no tensor in it.
        UnsafeFileError: A file is a link that leads out of the folder.
        ReadError: The system cannot read it.
    """
    contents = NeuronContents(path, "neuron-inputs")
    names = sorted(list_folder(path), key=natural)
    for name in add_saved_inputs(contents, names):
        contents.others[name] = "no saved inputs, by its name"
    return contents.archive()


def add_saved_inputs(contents: NeuronContents, names: Sequence[str]) -> list[str]:
    """Add the saved inputs in a folder; what else is there is returned.

    Raises:
        UnsafeFileError: A file is a link that leads out of the folder.
    """
    matches = {name: match for name in names if (match := _FILE.fullmatch(name))}
    with_cache = {match[2] for match in matches.values() if match[1] == "tkg_with_kv_cache"}
    bands = Bands()
    for name, match in matches.items():
        path = contents.path / name
        refuse_link_out(path, contents.path, hint="Put a copy in its place.")
        kind, step = match[1], int(match[2])
        if kind == "tkg_without_kv_cache" and match[2] in with_cache:
            contents.others[name] = "the other file of this step has the same inputs, and the cache"
            continue
        try:
            tensors = read_contents(path, "", is_prefix=True, bands=bands).tensors
            if any(not tensor.name.removeprefix("/").isdigit() for tensor in tensors):
                raise ReadError("holds no tuple of tensors, expected the arguments of a call")
        except ReadError as error:
            contents.problems[name] = str(error).removeprefix(f"{path}: ")
            continue
        _add(contents, step, name, tensors)
        contents.set_phase(step, "prefill" if kind == "cte" else "decode")
    if matches:
        contents.notes.append(
            "Inputs are padded to the bucket, and whole numbers are int32, as the device has them."
        )
    return [name for name in names if name not in matches]


def _add(contents: NeuronContents, step: int, name: str, tensors: Sequence[ForeignTensor]) -> None:
    cached = 0
    for tensor in tensors:
        number = int(tensor.name.removeprefix("/"))
        shown = f"{name}: {number}"
        if 0 in tensor.shape:
            contents.others[shown] = "an empty tensor, which stands for no argument"
            continue
        if len(tensor.shape) >= _CACHE_AXES:
            slot = f"given.kv_cache.{cached}"
            cached += 1
        else:
            slot = f"input.{_ARGUMENTS[number]}" if number < len(_ARGUMENTS) else f"input.{number}"
        contents.add(Key(ROOT_SITE, slot, step), tensor, shown)
