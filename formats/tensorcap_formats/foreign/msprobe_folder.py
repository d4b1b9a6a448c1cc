"""Dumps of msprobe (MindStudio Probe): `dump.json`, `construct.json` and files of tensors.

A dump is a folder with `dump.json`, one of several ranks (`rank0`, or `proc4711` of a single process), or one
of several steps (`step0`) of those (specs/tool-dumps.md).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from tensorcap_formats.errors import CorruptArchiveError, NotAnArchiveError, ReadError, abbreviate
from tensorcap_formats.flat_arrays import Bands
from tensorcap_formats.folder import list_folder, refuse_link_out
from tensorcap_formats.foreign.json_file import is_plain, json_object, plain_value, read_json
from tensorcap_formats.foreign.numpy_files import read_npy_tensor
from tensorcap_formats.foreign.torch_file import read_contents
from tensorcap_formats.foreign_archive import ForeignArchive, ForeignTensor, nested_leaves
from tensorcap_formats.keys import ROOT_SITE, Key, check_length, escape, inner_site, module_site

DUMP_FILE: Final = "dump.json"
_CONSTRUCT_FILE: Final = "construct.json"
_TENSORS: Final = "dump_tensor_data"
_STEP: Final = re.compile(r"step(0|[1-9]\d{0,8})")
_RANK: Final = re.compile(r"rank(0|[1-9]\d{0,8})")
_PROCESS: Final = re.compile(r"proc\d{1,18}")
_MODULE: Final = re.compile(r"(?:Module|Cell)\.(?:(.+)\.)?(\w+)\.(forward|backward)\.(\d{1,18})", re.DOTALL)
_PARAMETERS: Final = re.compile(r"(?:Module|Cell)\.(?:(.+)\.)?(\w+)\.parameters_grad", re.DOTALL)
_API: Final = re.compile(r"(.+)\.(\d{1,18})\.(forward|backward)", re.DOTALL)
_TENSOR_TYPES: Final = ("torch.Tensor", "mindspore.Tensor", "numpy.ndarray")
_PARTS: Final = {  # members of an entry, and the slots that they are
    "forward": {"input_args": "input", "input_kwargs": "input", "input": "input", "output": "output"},
    "backward": {"input": "grad_input", "output": "grad_output"},
}


@dataclass
class _Dump:
    """What is found in a dump.

    Attributes:
        path: The folder that was opened.
        tensors: The tensors by key.
        values: Leaves that are no tensors, by key.
        skipped: Why things are not read that no comparison lacks.
        problems: Why others could not be read, which leaves the dump incomplete.
        without_values: How many tensors were kept as statistics alone.
        info: What the first file says of the run.
        bands: Keeps rows of strided tensors.
    """

    path: Path
    tensors: dict[str, ForeignTensor] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    problems: dict[str, str] = field(default_factory=dict)
    without_values: int = 0
    info: dict[str, Any] = field(default_factory=dict)
    bands: Bands = field(default_factory=Bands)


def is_msprobe_folder(path: Path, names: Sequence[str]) -> bool:
    """Whether a folder with these names is a dump, of a step and a rank, or of several."""
    if DUMP_FILE in names:
        return _CONSTRUCT_FILE in names or _TENSORS in names
    inner = [name for name in names if _STEP.fullmatch(name) or _is_rank(name)]
    return any(
        DUMP_FILE in below or any(_is_rank(name) for name in below)
        for name in inner[:1]
        if (path / name).is_dir() and not (path / name).is_symlink()
        for below in [list_folder(path / name)]
    )


def open_msprobe(path: Path) -> ForeignArchive:
    """Open a dump as an archive, with the ranks and steps that its folders name.

    Raises:
        NotAnArchiveError: It holds no tensor, or statistics alone, or processes of unknown rank.
        CorruptArchiveError: A file of it is no JSON of msprobe.
        UnsafeFileError: A file is a link out of the folder.
        ReadError: The system cannot read it.
    """
    folder = path if path.is_dir() else path.parent
    dump = _Dump(folder)
    for step, rank, file in _files(dump) if path.is_dir() else [(0, 0, path)]:
        _read_file(dump, file, step, rank)
    if not dump.tensors:
        if dump.without_values:
            raise NotAnArchiveError(
                f"{path}: holds the statistics of {dump.without_values} tensors and no values",
                hint='Dump with "task": "tensor".',
            )
        why = next(iter({**dump.problems, **dump.skipped}.values()), "")
        reasons = f": {why}" if why else ""
        raise NotAnArchiveError(f"{path}: holds no tensor that can be read{reasons}")
    framework = dump.info.get("framework")
    run: dict[str, Any] = {}
    if framework is not None:
        run["framework"] = {"name": "torch" if framework == "pytorch" else str(framework)}
    if dump.without_values:
        run["notes"] = [f"Of {dump.without_values} tensors only statistics were kept."]
    return ForeignArchive(
        path,
        "msprobe",
        dump.tensors.values(),
        values=dump.values,
        skipped=dump.skipped,
        problems=dump.problems,
        run=run,
        is_ordered=True,
    )


def _is_rank(name: str) -> bool:
    return bool(_RANK.fullmatch(name) or _PROCESS.fullmatch(name))


def _files(dump: _Dump) -> Iterator[tuple[int, int, Path]]:
    """Step, rank and path of each `dump.json`; other folders of steps, ranks and processes are problems."""
    names = list_folder(dump.path)
    steps = {int(match[1]): name for name in names if (match := _STEP.fullmatch(name))}
    if DUMP_FILE in names or not steps:
        yield from _ranks(dump, dump.path, names, 0)
        return
    _note_unread(dump, dump.path, names, steps.values())
    for step, name in sorted(steps.items()):
        refuse_link_out(dump.path / name, dump.path)
        yield from _ranks(dump, dump.path / name, list_folder(dump.path / name), step)


def _ranks(dump: _Dump, path: Path, names: Sequence[str], step: int) -> Iterator[tuple[int, int, Path]]:
    if DUMP_FILE in names:
        _note_unread(dump, path, names, ())
        yield step, 0, path / DUMP_FILE
        return
    ranks = {int(match[1]): name for name in names if (match := _RANK.fullmatch(name))}
    processes = [name for name in names if _PROCESS.fullmatch(name)]
    if not ranks and len(processes) > 1:
        raise NotAnArchiveError(
            f"{path}: holds the dumps of {len(processes)} processes whose ranks are not known, expected one",
            hint=f"Name one, as {path / min(processes)}.",
        )
    chosen = ranks or dict(enumerate(processes))
    _note_unread(dump, path, names, chosen.values())
    if not chosen:
        dump.problems[path.name] = f"it has neither a {DUMP_FILE} nor a rank"
    for rank, name in sorted(chosen.items()):
        refuse_link_out(path / name, path)
        yield step, rank, path / name / DUMP_FILE


def _note_unread(dump: _Dump, path: Path, names: Sequence[str], read: Collection[str]) -> None:
    """Note folders of steps, ranks and processes that are not read beside others, or beside a dump's file."""
    for name in names:
        if (_STEP.fullmatch(name) or _is_rank(name)) and name not in read:
            beside = next(iter(read), DUMP_FILE)
            dump.problems[(path / name).relative_to(dump.path).as_posix()] = f"it is not read beside {beside}"


def _read_file(dump: _Dump, file: Path, step: int, rank: int) -> None:
    """Add what the dump of a rank and a step holds."""
    where, folder = str(file), file.parent
    info = json_object(read_json(file, folder=folder), where)
    dump.info = dump.info or {name: value for name, value in info.items() if is_plain(value)}
    parents: Mapping[str, Any] = {}
    if (folder / _CONSTRUCT_FILE).exists():
        inner = read_json(folder / _CONSTRUCT_FILE, folder=folder)
        parents = json_object(inner, str(folder / _CONSTRUCT_FILE))
    counts: Counter[str] = Counter()
    for name, entry in json_object(info.get("data"), f"{where}: data").items():
        if match := _PARAMETERS.fullmatch(name):
            for item, value in json_object(entry, f"{where}: {abbreviate(name)!r}").items():
                key = Key(module_site(match[1] or ""), f"grad_param.{escape(item)}", step, 0, rank)
                _add(dump, folder, key, value, where)
            continue
        place = _place(name, parents, counts)
        if place is None:
            dump.skipped[name] = "a name of another form than those of modules and functions"
            continue
        site, call, direction = place
        for part, value in json_object(entry, f"{where}: {abbreviate(name)!r}").items():
            slot = _PARTS[direction].get(part)
            if part in ("parameters", "parameters_grad"):
                slot = "param" if part == "parameters" else "grad_param"
            if slot is None:
                dump.skipped[f"{name}.{part}"] = "a member of an unknown kind"
                continue
            own = Key(site, slot, step, 0 if slot == "param" else call, rank)
            _add(dump, folder, own, value, where)


def _place(name: str, parents: Mapping[str, Any], counts: Counter[str]) -> tuple[str, int, str] | None:
    """Site, number of the call and direction of an entry; a function lies in the module that calls it."""
    if match := _MODULE.fullmatch(name):
        return module_site(match[1] or ""), int(match[4]), match[3]
    if match := _API.fullmatch(name):
        parent = parents.get(name)
        module = _MODULE.fullmatch(parent) if isinstance(parent, str) else None
        site = inner_site(module_site(module[1] or "") if module else ROOT_SITE, match[1])
        counted = f"{match[3]} {site}"
        counts[counted] += 1
        return site, counts[counted] - 1, match[3]
    return None


def _add(dump: _Dump, folder: Path, key: Key, value: Any, where: str) -> None:
    """Add the leaves of a part of an entry."""
    may_be_one = key.slot in ("output", "grad_output") or key.slot.startswith("grad_param.")
    if may_be_one and isinstance(value, list) and len(value) == 1:
        (value,) = value
    for slot, leaf in nested_leaves(value, key.slot, _is_leaf, where):
        if isinstance(leaf, dict):  # else None, in the place of an argument that was not given
            _add_leaf(dump, folder, replace(key, slot=slot), leaf, where)


def _is_leaf(value: Mapping[str, Any]) -> bool:
    return isinstance(value.get("type"), str)


def _add_leaf(dump: _Dump, folder: Path, key: Key, leaf: Mapping[str, Any], where: str) -> None:
    try:
        check_length(key.text)
    except ValueError as error:
        raise CorruptArchiveError(f"{where}: {error}") from None
    if leaf["type"] not in _TENSOR_TYPES:
        value = leaf.get("value")
        if is_plain(value):
            dump.values[key.text] = plain_value(value)
        return
    name = leaf.get("data_name")
    if name is None:
        dump.without_values += 1
        return
    if not isinstance(name, str) or not name or set(name) & set("/\\\0") or name in (".", ".."):
        raise CorruptArchiveError(
            f"{where}: {abbreviate(key.text)}: data_name {abbreviate(repr(name))} is no name of a file"
        )
    if key.text in dump.tensors:
        dump.skipped[f"{key.text} ({name})"] = "another entry has its key"
        return
    file = folder / _TENSORS / name
    try:
        refuse_link_out(file, folder)
        tensor = _tensor(file, key.text, dump.bands)
    except ReadError as error:
        dump.problems[key.text] = f"its file cannot be read: {error}"
        return
    if list(tensor.shape) != leaf.get("shape", list(tensor.shape)):
        dump.problems[key.text] = (
            f"its file is of shape {list(tensor.shape)}, {abbreviate(str(leaf['shape']))} in {DUMP_FILE}"
        )
        return
    dump.tensors[key.text] = tensor


def _tensor(file: Path, name: str, bands: Bands) -> ForeignTensor:
    """The tensor of a file.

    Raises:
        ReadError: It cannot be read, or holds no single tensor.
    """
    if file.suffix == ".npy":
        return read_npy_tensor(file, name)
    contents = read_contents(file, name, is_prefix=True, bands=bands)
    if len(contents.tensors) != 1 or contents.tensors[0].name != name:
        raise NotAnArchiveError(f"{file}: holds no single tensor")
    return contents.tensors[0]
