"""Writes archives as dumps of other tools: a file for each tensor, named by its label."""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final, Literal

from tensorcap_formats.archive import Archive
from tensorcap_formats.content import write_errors
from tensorcap_formats.errors import UsageError, WriteError, missing_package
from tensorcap_formats.foreign import MAX_DTYPE_CODES, MAX_SUFFIX, NAMES_FILE, label_of, write_max
from tensorcap_formats.keys import unescape
from tensorcap_formats.output_path import build_beside, put_in_place, refuse_overlap
from tensorcap_formats.progress import Progress
from tensorcap_formats.records import Record

Layout = Literal["max", "torch", "neuron"]

_NEURON_MODULE: Final = re.compile(r"[\w.]+", re.ASCII)  # what NxDI's tensor replacement reads of a name


def export(
    archive: Archive,
    folder: str | os.PathLike[str],
    *,
    layout: Layout,
    only: Iterable[str] = (),
    exclude: Iterable[str] = (),
    modules: Mapping[str, str] | None = None,
    progress: Progress | None = None,
) -> list[Record]:
    """Write records of an archive as the dump of another tool; all of them, or nothing.

    `max` is a folder of `.max` files, written in execution order; a run of several steps has a folder for
    each step, named by its number. `torch` always has these folders, of `.pt` files with `tensor_names.txt`.
    `neuron` is the folder of references of NxDI's tensor replacement: a `.pt` file for each result of a
    module, of rows of channels; it was not run on a device.

    Args:
        archive: Open archive.
        folder: The folder to write, new or empty.
        layout: `max`, `torch` or `neuron`.
        only: Globs; a key must match one of them, if there are any.
        exclude: Globs; a key must match none of them.
        modules: The port's path of each module, for `neuron`; what has none is left out. As they are if None.
        progress: Called with the bytes written so far, and with their final number.

    Returns:
        The records that were written.

    Raises:
        UsageError: Nothing is selected, two records have one label, a record is of another rank than 0 or
            of a dtype that the layout cannot hold, or only its statistics were kept; for `neuron`, it is no
            result of a first call, has no rows of channels, or its dtype differs by step.
        MissingPackageError: torch, which writes `.pt` files, is not installed.
        ReadError: The archive cannot be read, or fails a checksum.
        WriteError: The folder is not empty, or the disk is full.
    """
    folder = Path(folder)
    records = archive.select(only, exclude=exclude)
    if modules is not None:
        records = [record for record in records if record.key.site in modules]
    if not records:
        raise UsageError(f"{archive.path}: none of {len(archive.records)} records is selected")
    refuse_overlap(archive.path, folder)
    if os.path.lexists(folder) and not (folder.is_dir() and not any(folder.iterdir())):
        raise WriteError(
            f"{folder}: is there and is not empty, expected a new folder", hint="Choose another one."
        )
    if layout != "max":
        _check_torch()
    suffix = MAX_SUFFIX if layout == "max" else ".pt"
    labels = _replacement_names(archive, records, modules) if layout == "neuron" else _labels(records, layout)
    steps = sorted({record.key.step for record in records})
    is_flat = layout == "neuron" or (layout == "max" and len(steps) == 1)
    written_bytes, total_bytes = 0, sum(record.nbytes for record in records)
    with build_beside(folder) as building, write_errors(folder):
        building.mkdir()
        for step in steps:
            inner = building if is_flat else building / str(step)
            inner.mkdir(exist_ok=True)
            step_records = [record for record in records if record.key.step == step]
            for record in step_records:
                label = labels[record.key.text]
                _save(archive, record, inner / f"{_file_name(label)}{suffix}", label, layout)
                written_bytes += record.nbytes
                if progress:
                    progress.advance(written_bytes, total_bytes)
            if layout == "torch":
                names = "".join(f"{labels[record.key.text]}\n" for record in step_records)
                (inner / NAMES_FILE).write_text(names, encoding="utf-8")
        if folder.is_dir():
            folder.rmdir()
        put_in_place(building, folder)
    return records


def _file_name(label: str) -> str:
    return label.replace("/", "_")


def _replacement_names(
    archive: Archive, records: Sequence[Record], modules: Mapping[str, str] | None
) -> dict[str, str]:
    """The name of each record's file in the reference folder of NxDI's tensor replacement (NRN-81).

    NxDI takes one result of a module in a step, as rows of channels, of one dtype in all steps.
    """
    names: dict[str, str] = {}
    dtypes: dict[str, str] = {}
    phases = archive.info.phases
    for record in records:
        key, text = record.key, record.key.text
        module = unescape(modules[key.site] if modules else key.site)
        if problem := _replacement_problem(record, module, dtypes.setdefault(module, record.dtype.name)):
            raise UsageError(f"{text}: {problem}", hint="Choose with --only and --exclude.")
        is_decode = phases[key.step] == "decode" if key.step < len(phases) else key.step > 0
        phase = "tkg" if is_decode else "cte"
        names[text] = f"captured_tensors_{phase}_step_{key.step + 1}_module_{module}_output"
    if len(set(names.values())) < len(names):
        raise UsageError("two modules have one name in the map, expected a name for each")
    return names


def _replacement_problem(record: Record, module: str, dtype: str) -> str:
    """Why NxDI cannot put a record in the place of a module's result, "" if it can."""
    key = record.key
    if not record.stored:
        return "only its statistics were kept, expected its values"
    if key.rank or key.call or key.is_bare or key.slot != "output":
        return "is no result of the first call of a module on rank 0, which NxDI replaces"
    if not _NEURON_MODULE.fullmatch(module):
        return f"NxDI reads no module of the name {module!r}"
    if len(record.shape) not in (2, 3):
        return f"is of shape {list(record.shape)}, expected tokens and channels, with a batch or without"
    if record.dtype.name != dtype:
        return f"is {record.dtype.name}, and {dtype} in another step; expected one dtype"
    return ""


def _labels(records: Sequence[Record], layout: Layout) -> dict[str, str]:
    """The label of each key, after a check that every record can be written."""
    labels: dict[str, str] = {}
    holders: dict[tuple[int, str], list[str]] = defaultdict(list)
    for record in records:
        text = record.key.text
        if not record.stored:
            raise UsageError(f"{text}: only its statistics were kept, expected its values")
        if record.key.rank:
            raise UsageError(
                f"{text}: is of rank {record.key.rank}, which a dump has no place for",
                hint="Export one rank: --exclude 'rank*'.",
            )
        if layout == "max" and record.dtype.name not in MAX_DTYPE_CODES:
            raise UsageError(
                f"{text}: .max files have no dtype {record.dtype.name!r} (MXF-6)",
                hint="Leave it out with --exclude.",
            )
        labels[text] = label_of(record.key)
        holders[record.key.step, _file_name(labels[text])].append(text)
    for (_, label), texts in holders.items():
        if len(texts) > 1:
            raise UsageError(
                f"{' and '.join(texts)}: have one label, {label!r}", hint="Leave one out with --exclude."
            )
    return labels


def _check_torch() -> None:
    try:
        import tensorcap.adapters.torch.tensors  # noqa: F401  # an absent torch is an error before anything is written
    except ImportError:
        raise missing_package("writing .pt files", "torch", extra="torch") from None


def _save(archive: Archive, record: Record, path: Path, label: str, layout: Layout) -> None:
    if path.suffix == MAX_SUFFIX:
        write_max(path, label, record.dtype, record.shape, archive.blocks(record))
        return
    from tensorcap.adapters.torch.tensors import save_tensor

    bits = archive.read(record)
    if layout == "neuron":
        bits = bits.reshape(-1, record.shape[-1])  # NxDI makes the batch of its rows
    save_tensor(bits, record.dtype, path)
