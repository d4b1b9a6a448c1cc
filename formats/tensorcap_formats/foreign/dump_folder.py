"""Folders of print hooks and layer verifications: a file for each tensor, whose name says which it is.

Three layouts (specs/max-files.md, section 3): files beside each other, as MAX writes them; folders of them by
the number of the step, each with the order in `tensor_names.txt`; and one with `layer_metadata.json`.
Files that cannot be read, and those with one key, are left out and reported, and the archive is incomplete.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from tensorcap_formats.errors import CorruptArchiveError, NotAnArchiveError, ReadError
from tensorcap_formats.flat_arrays import Bands
from tensorcap_formats.folder import list_folder
from tensorcap_formats.foreign.dump_files import (
    METADATA,
    NAMES_FILE,
    TORCH,
    DumpContents,
    DumpFile,
    note_unlisted,
    read_list,
    remove_root_name,
    tensor_files,
)
from tensorcap_formats.foreign.dump_labels import parse_file_name, parse_label
from tensorcap_formats.foreign.max_file import MAX_SUFFIX, read_max_tensor
from tensorcap_formats.foreign.raw_file import RawSpec
from tensorcap_formats.foreign.torch_file import read_contents
from tensorcap_formats.foreign_archive import ForeignArchive, ForeignTensor
from tensorcap_formats.index import decode_json
from tensorcap_formats.keys import Key, check_length, escape, natural

_SIDES: Final = ("max_layers", "torch_layers", "without_injection", "with_injection")
_STEP: Final = re.compile(r"0|[1-9]\d{0,17}")
_INJECTED: Final = "_injected"
_NAMES_SHOWN: Final = 3  # of many, in one sentence


class DumpArchive(ForeignArchive):
    """The tensors of a dump.

    Attributes:
        probes: Files whose labels are no layer's, which are kept as probes.
    """

    def __init__(self, *args: Any, probes: Sequence[str], **options: Any) -> None:
        """Make records of the tensors; arguments are those of `ForeignArchive`, and the attributes."""
        super().__init__(*args, **options)
        self.probes = tuple(probes)


def is_dump(path: Path, names: Sequence[str]) -> bool:
    """Whether a folder with files and folders of these names is of one of the layouts."""
    if {NAMES_FILE, METADATA, *_SIDES[:2]} & set(names) or set(_SIDES[2:]) <= set(names):
        return True
    if any(name.lower().endswith(MAX_SUFFIX) for name in names):
        return True
    stems = [os.path.splitext(name)[0] for name in names if name.lower().endswith(TORCH)]
    if stems:
        return all(parse_label(stem) for stem in stems)
    return any(
        NAMES_FILE in inner or any(name.lower().endswith(MAX_SUFFIX) for name in inner)
        for step in _steps(names)
        if (path / step).is_dir()
        for inner in [os.listdir(path / step)]
    )


def open_dump(path: Path, *, raw: Sequence[RawSpec] = (), by_time: bool = False) -> DumpArchive:
    """Open a folder as an archive whose keys are what the names of its files mean.

    What could not be read is in `skipped`, and remarks are in the run's `notes`.

    Args:
        path: The folder.
        raw: Dtype and shape of files of raw numbers, by globs over their names.
        by_time: Whether to order files by the time at which they were written, if the order is unknown.

    Raises:
        NotAnArchiveError: There is no tensor in it, or it holds several runs.
        CorruptArchiveError: Its list of names is invalid.
        UnsafeFileError: A file is a link that leads out of the folder.
        ReadError: The system cannot read it.
    """
    names = sorted(list_folder(path), key=natural)
    several = [name for name in _SIDES if name in names]
    if several:
        raise NotAnArchiveError(
            f"{path}: holds several runs, expected one",
            hint=f"Name one of: {', '.join(str(path / name) for name in several)}",
        )
    dump = DumpContents(path, raw)
    injected: list[Key] = []
    if METADATA in names:
        injected = _add_verification(dump, names)
    else:
        _add_prints(dump, names)
    files = _with_unique_keys(dump)
    if by_time and not dump.is_ordered:
        _order_by_time(dump, files)
    tensors, values = _read(dump, files)
    if not tensors and not dump.problems:
        raise NotAnArchiveError(f"{path}: holds no {MAX_SUFFIX} or .pt file")
    framework = "torch" if all(file.is_torch for file in files) else "max"
    run: dict[str, Any] = {"framework": {"name": framework}, "dump": "files"}
    if notes := _notes(dump, files):
        run["notes"] = notes
    if injected:
        run["injected"] = _injection_metadata(injected)
    return DumpArchive(
        path,
        "dump-folder",
        tensors,
        values=values,
        skipped=dump.others,
        problems=dump.problems,
        run=run,
        is_ordered=dump.is_ordered,
        is_direct=not any(file.is_torch for file in files),
        probes=_probes(dump, files),
    )


def _steps(names: Sequence[str]) -> list[str]:
    return sorted((name for name in names if _STEP.fullmatch(name)), key=int)


def _add_prints(dump: DumpContents, names: Sequence[str]) -> None:
    """Add the files of print hooks, of all steps."""
    steps = [name for name in _steps(names) if (dump.path / name).is_dir()]
    for step, folder in [(0, ""), *((int(name), name) for name in steps)]:
        inner = (
            sorted(list_folder(dump.path / folder), key=natural)
            if folder
            else [name for name in names if name not in steps]
        )
        files = list(tensor_files(dump, folder, inner, parse_label, step=step))
        if not files and NAMES_FILE not in inner:
            continue
        if NAMES_FILE in inner:
            _order_by_names(dump, folder, files)
        else:
            dump.is_ordered = False
        dump.files += files
    remove_root_name(dump.files)


def _order_by_names(dump: DumpContents, folder: str, files: Sequence[DumpFile]) -> None:
    """Put the files in the order of the list of names, and report files and names without the other."""
    path = dump.path / folder / NAMES_FILE
    try:
        text = read_list(dump, path).decode()
    except UnicodeDecodeError:
        raise CorruptArchiveError(f"{path}: is no UTF-8 text") from None
    lines = [line.removesuffix("\r") for line in text.split("\n") if line.strip()]
    by_name = {one.name: one for one in files}
    counts = Counter(line.replace("/", "_") for line in lines)
    for position, line in enumerate(lines):
        name = line.replace("/", "_")
        shown = f"{folder}/{line}" if folder else line
        if name not in by_name:
            dump.problems[shown] = f"{NAMES_FILE} names it and there is no such file"
            continue
        by_name[name].position = position
        if counts[name] > 1:
            dump.problems[shown] = (
                f"{NAMES_FILE} names it {counts[name]} times: one tensor was written over another"
            )
    note_unlisted(dump, files)


def _with_unique_keys(dump: DumpContents) -> list[DumpFile]:
    """The files with a key of their own; of several with one key, none, since any may be meant."""
    by_key: dict[str, list[DumpFile]] = {}
    for file in dump.files:
        try:
            check_length(file.key.text)
        except ValueError as error:
            dump.problems[dump.shown(file)] = str(error)
        else:
            by_key.setdefault(file.key.text, []).append(file)
    for key, files in by_key.items():
        for file in files if len(files) > 1 else ():
            others = ", ".join(dump.shown(other) for other in files if other is not file)
            dump.problems[dump.shown(file)] = f"means {key}, and so does {others}"
    distinct = [files[0] for files in by_key.values() if len(files) == 1]
    if dump.is_ordered:
        distinct.sort(key=lambda file: (file.step, file.position))
    return distinct


def _order_by_time(dump: DumpContents, files: list[DumpFile]) -> None:
    """Put files in the order in which they were written, if no two of a step have one time."""
    times = {id(file): os.stat(file.path).st_mtime_ns for file in files}
    if len({(file.step, times[id(file)]) for file in files}) < len(files):
        dump.notes.append("The order is unknown: some files were written at the same time.")
        return
    files.sort(key=lambda file: (file.step, times[id(file)]))
    dump.is_ordered = True
    dump.notes.append(
        "The order is that in which files were last written, a hint at most: copying them or running the "
        "model again alters it."
    )


def _read(dump: DumpContents, files: Sequence[DumpFile]) -> tuple[list[ForeignTensor], dict[str, Any]]:
    """Read the tensors and the other values of the files; files that cannot be read are problems."""
    tensors: dict[str, ForeignTensor] = {}
    values: dict[str, Any] = {}
    bands = Bands()
    for file in files:
        shown = dump.shown(file)
        try:
            if file.raw:
                in_file = [file.raw.tensor(file.path, file.key.text)]
            elif not file.is_torch:
                in_file = [read_max_tensor(file.path, file.key.text)]
            else:
                contents = read_contents(file.path, "", is_prefix=True, bands=bands)
                in_file = [replace(t, name=_leaf_key(file.key, t.name)) for t in contents.tensors]
                values |= {_leaf_key(file.key, below): value for below, value in contents.values.items()}
                dump.others |= {f"{shown}{below}": what for below, what in contents.skipped.items()}
        except ReadError as error:
            dump.problems[shown] = str(error).removeprefix(f"{file.path}: ")
            continue
        for tensor in in_file:
            if tensors.setdefault(tensor.name, tensor) is not tensor:
                dump.problems[shown] = f"means {tensor.name}, and so does another"
    return [*tensors.values()], values


def _leaf_key(key: Key, below: str) -> str:
    """The key of a tensor or a value in a file; `below` is its path in a nested structure, else ""."""
    return replace(key, slot=f"{key.slot}.{escape(below[1:])}").text if below else key.text


def _probes(dump: DumpContents, files: Sequence[DumpFile]) -> list[str]:
    """Files that were read and whose labels are no layers'."""
    names = [dump.shown(file) for file in files if file.label is None]
    return [name for name in names if name not in dump.problems]


def _notes(dump: DumpContents, files: Sequence[DumpFile]) -> list[str]:
    """Remarks for the user, beside problems."""
    notes = list(dump.notes)
    if probes := _probes(dump, files):
        what = "is no label of a layer's input or output: it is kept as a probe"
        if len(probes) > 1:
            what = "are no labels of layers' inputs or outputs: they are kept as probes"
        notes.append(f"{_first_names(probes)} {what}.")
    if dump.unlisted:
        are = "is" if len(dump.unlisted) == 1 else "are"
        notes.append(f"{_first_names(dump.unlisted)} {are} in no list of names, and last in order.")
    return notes


def _first_names(names: Sequence[str]) -> str:
    rest = len(names) - _NAMES_SHOWN
    return ", ".join(names[:_NAMES_SHOWN]) + (f" and {rest} more" if rest > 0 else "")


def _add_verification(dump: DumpContents, names: Sequence[str]) -> list[Key]:
    """Add the files of one side of a layer verification, in the order of its list of layers (MXF-32).

    Returns:
        The keys of tensors that replaced the model's own.
    """
    path = dump.path / METADATA
    layers = decode_json(read_list(dump, path), str(path))
    files = list(tensor_files(dump, "", names, parse_file_name))
    expected: dict[str, int] = {}
    for name, layer in layers.items():
        for kind, slots in (("input", "inputs"), ("output", "outputs")):
            listed = layer.get(slots, []) if isinstance(layer, dict) else None
            if not isinstance(listed, list) or not all(isinstance(one, dict) for one in listed):
                raise CorruptArchiveError(f"{path}: {name!r} has no list of objects {slots!r}")
            for number, one in enumerate(listed):
                slot = "" if kind == "output" and len(listed) == 1 else f"_{one.get('index', number)}"
                expected[f"{name}_{kind}{slot}".replace("/", "_")] = len(expected)
    names_of_files = {file.name for file in files}
    missing = dict(expected)
    for file in files:
        name = file.name.removesuffix(_INJECTED)
        if name not in expected:  # one output, numbered or not
            name = name.removesuffix("_0")
        file.position = expected.get(name)
        missing.pop(name, None)
    for name in missing:
        dump.problems[name] = f"{METADATA} names it and there is no such file"
    remove_root_name(files)
    injected = [file for file in files if file.label and file.label.is_injected]
    for file in injected:
        if (own := file.name.removesuffix(_INJECTED)) in names_of_files:
            dump.others[dump.shown(file)] = f"what was put in the place of {own}"
            files.remove(file)
    note_unlisted(dump, files)
    dump.files += files
    return [file.key for file in injected]


def _injection_metadata(keys: Sequence[Key]) -> dict[str, Any]:
    """The run metadata of an injection (INJ-20)."""
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
