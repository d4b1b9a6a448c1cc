"""The files of a dump, and the keys that their names mean (specs/max-files.md, section 3)."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from tensorcap_formats.folder import read_side_file, refuse_link_out
from tensorcap_formats.foreign.dump_labels import Label, probe_key, remove_root, undouble_names
from tensorcap_formats.foreign.max_file import MAX_SUFFIX
from tensorcap_formats.foreign.raw_file import RawSpec
from tensorcap_formats.keys import Key

TORCH: Final = ".pt"
NAMES_FILE: Final = "tensor_names.txt"
METADATA: Final = "layer_metadata.json"
_MAX_BYTES: Final = 64 * 1024 * 1024  # of a list of names


@dataclass(slots=True)
class DumpFile:
    """One file of a dump.

    Attributes:
        path: Of the file.
        name: Its name, without the suffix.
        step: Of the run.
        label: The parsed name; None if it is no label of a layer.
        position: In the order of the step; None if it is not known yet.
        raw: Dtype and shape, if it has raw numbers.
    """

    path: Path
    name: str
    step: int
    label: Label | None
    position: float | None = None
    raw: RawSpec | None = None

    @property
    def is_torch(self) -> bool:
        """Whether it is one of torch.save, not of MAX or of raw numbers."""
        return self.path.suffix.lower() == TORCH

    @property
    def key(self) -> Key:
        """The key that its name means."""
        return self.label.key(self.step) if self.label else probe_key(self.name, self.step)


@dataclass(slots=True)
class DumpContents:
    """The contents of a dump, as far as they are read.

    Attributes:
        path: Of the folder.
        raw: Dtype and shape of files of raw numbers.
        files: Those that have tensors.
        problems: Why tensors could not be read, by the name of the file.
        others: Why other things are not read, by name.
        notes: Remarks for the user, a sentence each.
        unlisted: Files that no list names.
        is_ordered: Whether lists give the order of all steps.
    """

    path: Path
    raw: Sequence[RawSpec]
    files: list[DumpFile] = field(default_factory=list)
    problems: dict[str, str] = field(default_factory=dict)
    others: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    unlisted: list[str] = field(default_factory=list)
    is_ordered: bool = True

    def shown(self, file: DumpFile) -> str:
        """A file's path in the folder."""
        return file.path.relative_to(self.path).as_posix()


def tensor_files(
    dump: DumpContents,
    folder: str,
    names: Sequence[str],
    parse: Callable[[str], Label | None],
    *,
    step: int = 0,
) -> Iterator[DumpFile]:
    """The files of tensors in a folder of a dump; what else is in it is noted as `others`.

    Args:
        dump: The dump.
        folder: Name of the folder in the dump, "" for the dump itself.
        names: What is in the folder.
        parse: Parses the name of a file.
        step: That the files belong to.
    """
    for name in names:
        path, shown = dump.path / folder / name, f"{folder}/{name}" if folder else name
        stem, suffix = os.path.splitext(name)
        spec = next((spec for spec in dump.raw if spec.fits(name)), None)
        if path.is_dir():
            dump.others[f"{shown}/"] = "a folder that is no step"
        elif spec is None and suffix.lower() not in (MAX_SUFFIX, TORCH):
            if name not in (NAMES_FILE, METADATA):
                dump.others[shown] = f"no {MAX_SUFFIX} or .pt file"
        else:
            refuse_link_out(path, dump.path, hint="Put a copy in its place.")
            # a label has dots, so that a raw file's has no suffix unless it has one of those for raw files
            text = name if spec and suffix.lower() not in (".bin", ".raw", ".data") else stem
            file = DumpFile(path, text, step, parse(text), raw=spec)
            if file.label and not file.is_torch:
                file.label = undouble_names(file.label)
            yield file


def read_list(dump: DumpContents, path: Path) -> bytes:
    """Read a list of names."""
    return read_side_file(path, dump.path, _MAX_BYTES)


def note_unlisted(dump: DumpContents, files: Sequence[DumpFile]) -> None:
    """Put files that no list named behind the others."""
    for file in files:
        if file.position is None:
            file.position = float("inf")
            dump.unlisted.append(dump.shown(file))


def remove_root_name(files: Sequence[DumpFile]) -> None:
    """Remove the name of the whole model from the labels of the files, if all begin with it."""
    labels = iter(remove_root(file.label for file in files if file.label))
    for file in files:
        file.label = next(labels) if file.label else None
