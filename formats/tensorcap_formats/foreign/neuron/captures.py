"""Folders of NxDI's tensor capture, and of its capture of Hugging Face's model in eager mode.

A file for each tensor, `captured_tensors_PHASE_step_N_module_NAME_output.pt`; beside those of a device
`capture_metadata.json` (specs/neuron.md, section 3).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from tensorcap_formats.dtypes import decode
from tensorcap_formats.errors import CorruptArchiveError, ReadError, abbreviate
from tensorcap_formats.flat_arrays import Bands
from tensorcap_formats.folder import list_folder, read_side_file, refuse_link_out
from tensorcap_formats.foreign.neuron.archive import PHASES, NeuronArchive, NeuronContents
from tensorcap_formats.foreign.neuron.saved_inputs import add_saved_inputs
from tensorcap_formats.foreign.torch_file import read_contents
from tensorcap_formats.foreign_archive import ForeignTensor
from tensorcap_formats.index import decode_json
from tensorcap_formats.keys import PROBES, Key, escape, inner_site, module_site, natural

CAPTURE_METADATA: Final = "capture_metadata.json"
_FILE: Final = re.compile(
    r"captured_tensors_(cte|ctx|tkg)_step_([1-9]\d{0,8})_(module_.+|manual_tensor_\d+)\.pt", re.DOTALL
)
_MODULE: Final = (  # of what a module's file is called, the first that fits
    re.compile(r"(?P<module>.+)_inputs?_kwargs_(?P<field>.+)", re.DOTALL),
    re.compile(r"(?P<module>.+)_inputs?(?:_(?P<field>\d+(?:_\w+)*))?", re.DOTALL),
    re.compile(r"(?P<module>.+)_outputs?(?:_(?P<field>.+))?", re.DOTALL),
)
_FIELD: Final = re.compile(r"(.*?)((?:(?:^|_)\d+)*)", re.DOTALL)
_MAX_METADATA_BYTES: Final = 64 * 1024 * 1024
_NOT_CAPTURED: Final = (
    "the device handed out zeros of shape [1], which stand for a module that returned no tensor or was not "
    "called"
)


@dataclass(frozen=True, slots=True)
class _CaptureFile:
    """A file whose name is that of a capture.

    Attributes:
        path: Of the file.
        phase: `cte`, `ctx` or `tkg`.
        step: As NxDI counts, from 1.
        module: Path of the module, "" for a tensor that code registered.
        slot: The slot of its key.
        probe: Name of a tensor that code registered.
    """

    path: Path
    phase: str
    step: int
    module: str
    slot: str
    probe: str = ""

    @property
    def key(self) -> Key:
        """The key that the name means."""
        if self.probe:
            return Key(inner_site(PROBES, self.probe), "value", self.step - 1)
        return Key(module_site(self.module), self.slot, self.step - 1)


def is_capture_folder(names: Iterable[str]) -> bool:
    """Whether a folder with these names in it holds tensors that NxDI captured."""
    return any(name == CAPTURE_METADATA or _FILE.fullmatch(name) for name in names)


def open_captures(path: Path) -> NeuronArchive:
    """Open a folder of captured tensors as an archive. Not tried with files of a device.

    Raises:
        NotAnArchiveError: There is no tensor in it.
        CorruptArchiveError: The metadata are no JSON object.
        UnsafeFileError: A file is a link that leads out of the folder.
        ReadError: The system cannot read it.
    """
    names = sorted(list_folder(path), key=natural)
    is_of_device = CAPTURE_METADATA in names
    entries = _entries(path / CAPTURE_METADATA) if is_of_device else {}
    contents = NeuronContents(path, "neuron-captures", "neuron" if is_of_device else "torch")
    others = add_saved_inputs(contents, names)
    files = [file for name in others if (file := _parse(contents, name, entries.get(name)))]
    for name in entries:
        if name not in names:
            contents.problems[name] = f"{CAPTURE_METADATA} names it and there is no such file"
    bands = Bands()
    for file in files:
        _read(contents, file, entries.get(file.path.name), bands)
    _set_phases(contents, files)
    if is_of_device:
        contents.notes.append("NxDI hands out the tensors of rank 0: of a sharded module its part alone.")
        unlisted = [file.path.name for file in files if file.path.name not in entries]
        if unlisted:
            contents.notes.append(
                f"{CAPTURE_METADATA} does not name {unlisted[0]} ({len(unlisted)} such files)."
            )
    return contents.archive()


def _entries(path: Path) -> dict[str, Mapping[str, Any]]:
    text = read_side_file(path, path.parent, _MAX_METADATA_BYTES)
    tensors = decode_json(text, str(path)).get("tensors")
    if not isinstance(tensors, dict) or not all(isinstance(entry, dict) for entry in tensors.values()):
        raise CorruptArchiveError(f"{path}: has no JSON object 'tensors' of objects")
    return tensors


def _parse(contents: NeuronContents, name: str, entry: Mapping[str, Any] | None) -> _CaptureFile | None:
    match = _FILE.fullmatch(name)
    path = contents.path / name
    if match is None:
        if name != CAPTURE_METADATA:
            contents.others[name] = "no tensor of a capture, by its name"
        return None
    refuse_link_out(path, contents.path, hint="Put a copy in its place.")
    phase, step, what = match[1], int(match[2]), match[3]
    if what.startswith("manual_tensor_"):
        return _CaptureFile(path, phase, step, "", "value", what)
    what = what.removeprefix("module_")
    module = entry.get("module_name") if entry else None
    if isinstance(module, str) and what in (f"{module}_output", f"{module}_input"):
        return _CaptureFile(path, phase, step, module, _slot(what[len(module) + 1 :], ""))
    for pattern in _MODULE:
        if part := pattern.fullmatch(what):
            kind = "output" if pattern is _MODULE[-1] else "input"
            return _CaptureFile(path, phase, step, part["module"], _slot(kind, part["field"] or ""))
    contents.others[name] = "no tensor of a capture, by its name"
    return None


def _slot(kind: str, field: str) -> str:
    """The slot of a result or an argument: a name as it is, and positions in a tuple joined by dots."""
    if not field:
        return "input.0" if kind == "input" else kind
    name, positions = _FIELD.fullmatch(field).groups()  # type: ignore[union-attr]  # it fits all texts
    parts = [*([escape(name)] if name else []), *positions.split("_")]
    return ".".join([kind, *filter(None, parts)])


def _read(
    contents: NeuronContents, file: _CaptureFile, entry: Mapping[str, Any] | None, bands: Bands
) -> None:
    """Read one file, compare it with its metadata, and leave out what stands for no tensor."""
    shown = contents.shown(file.path)
    try:
        tensors = read_contents(file.path, "", is_prefix=True, bands=bands).tensors
        if len(tensors) != 1 or tensors[0].name:
            raise ReadError(f"{file.path}: holds {len(tensors)} tensors in a structure, expected one tensor")
        (tensor,) = tensors
        if entry is not None:
            _check(file.path, tensor, entry)
        placeholder = _placeholder(tensor)
    except ReadError as error:
        contents.problems[shown] = str(error).removeprefix(f"{file.path}: ")
        return
    if placeholder == "nan" and file.probe:
        contents.others[shown] = "NaN of shape [1], which NxDI pads tensors registered by code with"
    elif placeholder == "zero" and not file.probe:
        contents.uncaptured[file.key] = _NOT_CAPTURED
    else:
        contents.add(file.key, tensor, shown)


def _check(path: Path, tensor: ForeignTensor, entry: Mapping[str, Any]) -> None:
    expected = entry.get("tensor_shape"), str(entry.get("tensor_dtype", "")).removeprefix("torch.")
    if expected != (list(tensor.shape), tensor.dtype.name):
        raise CorruptArchiveError(
            f"{path}: is {tensor.dtype.name} of shape {list(tensor.shape)}, expected "
            f"{abbreviate(expected[1])} of {abbreviate(repr(expected[0]))} as {CAPTURE_METADATA} says"
        )


def _placeholder(tensor: ForeignTensor) -> str:
    """`zero` or `nan` for what stands for no tensor: one bfloat16 number in one axis; else ""."""
    if tensor.shape != (1,) or tensor.dtype.name != "bfloat16":
        return ""
    element = np.empty(1, tensor.dtype.storage)
    tensor.read(0, element)
    value = float(decode(element, tensor.dtype)[0])
    return "zero" if value == 0 else "nan" if value != value else ""


def _set_phases(contents: NeuronContents, files: Iterable[_CaptureFile]) -> None:
    """Say of each step whether it is prefill or decode.

    NxDI counts on over prompts and calls all steps but the first token generation. A step whose tensors have
    the token axis of the first step, longer than 1, is the context encoding of another prompt.
    """
    phases = {file.step - 1: PHASES[file.phase] for file in files}
    lengths = {key: tensor.shape[-2] for key, tensor in contents.tensors.items() if len(tensor.shape) >= 3}
    again = []
    for step, phase in sorted(phases.items()):
        if phase == "decode":
            pairs = {
                (length, lengths.get(replace(key, step=0), 0))
                for key, length in lengths.items()
                if key.step == step
            }
            if pairs and all(length == first > 1 for length, first in pairs):
                phase = "prefill"
                again.append(step)
        contents.set_phase(step, phase)
    if again:
        steps = ", ".join(map(str, again))
        contents.notes.append(
            f"Step {steps} is named token generation and has the tokens of context encoding: NxDI counts on "
            "over prompts. It is taken for the prefill of another prompt."
        )
