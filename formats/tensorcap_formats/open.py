"""Open any archive or file of tensors: recognized by its content, or else by its suffix."""

from __future__ import annotations

import glob
import os
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Final

from tensorcap_formats.archive import Archive
from tensorcap_formats.errors import (
    NotAnArchiveError,
    ReadError,
    TensorcapError,
    UnfinishedArchiveError,
    missing_reader,
)
from tensorcap_formats.folder import list_folder
from tensorcap_formats.hdf5 import is_hdf5, open_hdf5, open_hdf5_part
from tensorcap_formats.input_file import InputFile
from tensorcap_formats.output_path import is_locked, is_moved_aside
from tensorcap_formats.ranks import (
    MergedArchive,
    is_rank_pattern,
    merge_ranks,
    rank_archives,
    written_ranks,
)

Source = Archive | str | os.PathLike[str]

_MAX_CHECKPOINT: Final = bytes.fromhex("93f09f94a52b2b93")
_MAX_SAFETENSORS_HEADER: Final = 100_000_000
_KINDS: Final = (
    "HDF5, zarr, safetensors, .npz, .npy, a torch .pt, a .max, .gguf, .onnx, .keras, JSON of Polygraphy, "
    "transformers' debugger or msprobe, a folder .aimodelintermediates, or a folder of .npy, .pt, .max or "
    ".safetensors"
)
_ALONE: Final = (".gguf", ".h5", ".hdf5", ".keras", ".npz", ".onnx")  # files that are opened one by one
_KERAS_WEIGHTS: Final = "model.weights.h5"
_TEST_DATA: Final = re.compile(r"(?:input|output)_\d+\.pb")  # of an ONNX test data set
_ONNX_START: Final = re.compile(rb"\x08[\x01-\x7f](?:\x12[\x01-\x7f][\x20-\x7e]|\x3a[\x80-\xff])")


def open_archive(path: str | os.PathLike[str]) -> Archive:
    """Open an archive, or a file of tensors from elsewhere as a read-only archive.

    Args:
        path: A file or a folder; or `FILE:DTYPE:SIZES` for a file of raw numbers, as `x.bin:float32:2,3`; or
            a pattern, as `tgt.rank*.h5`, for the archives of all ranks of a run, which are opened as one.

    Returns:
        The open archive; close it, or use it in a `with`.

    Raises:
        UsageError: The sizes of raw numbers are absurd, or a rank is missing.
        ReadError: One of its subclasses says why it cannot be read.
    """
    if os.fspath(path).count(":") >= 2 and not os.path.exists(path):
        from tensorcap_formats.foreign import RawSpec, open_raw

        if spec := RawSpec.parse(os.fspath(path)):
            return open_raw(spec)
    if is_rank_pattern(path):
        return open_ranks(rank_archives(path), Path(path))
    path = Path(path)
    locked = is_locked(path)
    try:
        os.stat(path)
    except PermissionError as error:
        raise _unreadable(path, error) from None
    except (OSError, ValueError):
        from tensorcap_formats.foreign import open_polygraphy, split_runner

        if found := split_runner(os.fspath(path)):
            return open_polygraphy(*found)
        raise _nothing_to_open(path, locked) from None
    if locked:
        warnings.warn(f"{path}: another process is writing it anew; this is the archive before", stacklevel=2)
    return open_present(path)


def open_ranks(
    paths: Iterable[str | os.PathLike[str]],
    name: Path,
    *,
    rules: Mapping[str, str] | None = None,
    reference: Archive | None = None,
) -> MergedArchive:
    """Open the archives of all ranks of a run as one (`specs/ranks.md`).

    Args:
        paths: The archives, in any order.
        name: What the whole is called in messages.
        rules: Rules by glob for keys, which go before those that were recorded.
        reference: A run of the whole model, whose shapes show how tensors belong together, and whose values
            are not looked at.

    Raises:
        UsageError: They are not the archives of all ranks of one run, or a rule is none or fits nothing.
        ReadError: One cannot be read.
    """
    with ExitStack() as stack:
        archives = [stack.enter_context(open_archive(path)) for path in paths]
        merged = merge_ranks(archives, name, rules=rules, reference=reference)
        stack.pop_all()
    return merged


@contextmanager
def opened(source: Source, *, reference: Archive | None = None) -> Iterator[Archive]:
    """Open an archive for as long as a block lasts; one that is open already stays so.

    Args:
        source: The archive.
        reference: What it is a target of: archives of ranks are then put together by its shapes too.
    """
    if isinstance(source, Archive):
        yield source
        return
    if is_rank_pattern(source):
        archive: Archive = open_ranks(rank_archives(source), Path(source), reference=reference)
    else:
        archive = open_archive(source)
    with archive:
        yield archive


@contextmanager
def opened_both(reference: Source, target: Source) -> Iterator[tuple[Archive, Archive]]:
    """Open two archives for as long as a block lasts; one file under two names is opened once."""
    with opened(reference) as trusted:
        if not (isinstance(reference, Archive) or isinstance(target, Archive)) and is_same_file(
            reference, target
        ):
            yield trusted, trusted
            return
        with opened(target, reference=trusted) as tested:
            yield trusted, tested


def is_same_file(one: str | os.PathLike[str], other: str | os.PathLike[str]) -> bool:
    """Whether two paths lead to one file or folder, or are one pattern or one part of a file."""
    from tensorcap_formats.foreign import split_runner

    text = os.fspath(one)
    if text == os.fspath(other) and (glob.has_magic(text) or split_runner(text) is not None):
        return True
    try:
        return os.path.samefile(one, other)
    except (OSError, ValueError):
        return False


def open_present(path: Path) -> Archive:
    """Open what is at `path` now, even if it is being written anew; else as `open_archive`."""
    try:
        return _folder_opener(path)(path) if os.path.isdir(path) else _file_opener(path)(path)
    except TensorcapError:
        raise
    except OSError as error:  # such as a folder within it that this user may not enter
        raise _unreadable(path, error) from None


def _unreadable(path: Path, error: OSError) -> ReadError:
    place = error.filename if isinstance(error.filename, str) else path
    return ReadError(f"{place}: cannot be read: {error.strerror or error}")


def _nothing_to_open(path: Path, locked: bool | None) -> ReadError:
    if locked:
        return UnfinishedArchiveError(
            f"{path}: another process is writing it", hint="Wait until the capture has ended."
        )
    if locked is False:
        return UnfinishedArchiveError(
            f"{path}: its writer died before it was complete",
            hint=f"Save what it holds with `tcap recover {path}`.",
        )
    if is_moved_aside(path):
        return UnfinishedArchiveError(
            f"{path}: was moved aside by a process that died before it put another in its place",
            hint=f"Put it back with `tcap recover {path}`.",
        )
    hint = None
    if ranks := written_ranks(path):
        pattern = path.with_name(f"{path.stem}.rank*{path.suffix}")
        hint = f"There are archives of {len(ranks)} ranks: name them as '{pattern}', or see tcap merge."
    return NotAnArchiveError(f"{path}: there is no such file or folder", hint=hint)


def _folder_opener(path: Path) -> Callable[[Path], Archive]:
    listed = list_folder(path)
    names = {name.lower() for name in listed}
    suffixes = {os.path.splitext(name)[1] for name in names}
    if names & {"zarr.json", ".zgroup", ".zarray"}:
        from tensorcap_formats.zarr import open_zarr

        return open_zarr
    from tensorcap_formats.foreign import (
        is_dump,
        is_intermediates_folder,
        is_msprobe_folder,
        is_polygraphy_folder,
        is_sglang_folder,
        neuron_opener,
        open_dump,
        open_intermediates,
        open_msprobe,
        open_npy_folder,
        open_polygraphy,
        open_sglang,
        open_torch_folder,
        refuse_known_folder,
    )

    if is_intermediates_folder(path, set(listed)):
        return open_intermediates
    if opener := neuron_opener(path, listed):
        return opener
    if is_msprobe_folder(path, listed):
        return open_msprobe
    if is_sglang_folder(listed):
        return open_sglang
    if is_polygraphy_folder(listed):
        return open_polygraphy
    if any(_TEST_DATA.fullmatch(name) for name in listed):
        return _test_data_opener(path)
    if is_dump(path, listed):
        return open_dump
    from tensorcap_formats.safetensors import TREE_SUFFIX, open_debug_tree

    if any(name.endswith(TREE_SUFFIX) for name in listed):
        return open_debug_tree
    if ".safetensors" in suffixes:
        from tensorcap_formats.safetensors import open_safetensors_folder

        return open_safetensors_folder
    if ".npy" in suffixes:
        return open_npy_folder
    refuse_known_folder(path, names)
    if suffixes & {".pt", ".pth", ".bin"}:
        return open_torch_folder
    alone = [name for name in sorted(listed) if name.lower().endswith(_ALONE)]
    raise NotAnArchiveError(
        f"{path}: holds nothing that is one of: {_KINDS}",
        hint=f"Name one file, as {path / alone[0]}" if alone else None,
    )


def _file_opener(path: Path) -> Callable[[Path], Archive]:
    from tensorcap_formats.foreign import (
        MAX_SUFFIX,
        SIGNATURE_BYTES,
        is_print_log,
        open_max,
        open_npy,
        open_print_log,
        open_torch_file,
        raw_file_hint,
        refuse_known_file,
        refuse_other_file,
    )

    with closing(InputFile(path)) as file:
        first = file.read(0, min(SIGNATURE_BYTES, file.size))
        if is_hdf5(file):
            return open_hdf5
    if first.startswith(b"\x93NUMPY"):
        return open_npy
    if first.startswith(_MAX_CHECKPOINT):
        return open_max
    if first.startswith(b"PK"):
        return _zip_opener(path)
    if first.startswith(b"GGUF"):
        return _gguf_opener(path)
    length = int.from_bytes(first[:8], "little")
    is_safetensors = first[8:9] == b"{" and 0 < length <= _MAX_SAFETENSORS_HEADER
    if not is_safetensors:
        refuse_known_file(path, first)
    if is_safetensors or path.suffix == ".safetensors":
        from tensorcap_formats.safetensors import open_safetensors

        return open_safetensors
    if path.suffix == MAX_SUFFIX:
        return open_max
    if path.suffix == ".onnx" or _ONNX_START.match(first):
        return _onnx_opener(path)
    if first[:1] == b"\x80" or path.suffix in (".pt", ".pth", ".pkl", ".bin"):
        return open_torch_file
    if opener := _json_opener(first):
        return opener
    if is_print_log(path):
        return open_print_log
    if first and not any(first[:16]):
        raise UnfinishedArchiveError(
            f"{path}: begins with zeros: an archive whose writer did not end, or a damaged file",
            hint="Give `tcap recover` the path without .partial.",
        )
    refuse_other_file(path, first)
    raise NotAnArchiveError(
        f"{path}: begins with {first[:16]!r}, expected one of: {_KINDS}", hint=raw_file_hint(path)
    )


def _zip_opener(path: Path) -> Callable[[Path], Archive]:
    from tensorcap_formats.foreign import ZipMembers, open_npz, open_torch_file, refuse_known_zip

    with closing(ZipMembers(path)) as members:
        if _KERAS_WEIGHTS in members.sizes:
            return _open_keras
        refuse_known_zip(path, members.sizes)
        is_torch = any(name.endswith("/data.pkl") for name in members.sizes)
    return open_torch_file if is_torch else open_npz


def _json_opener(first: bytes) -> Callable[[Path], Archive] | None:
    """What opens a file of JSON of another tool; None if it is none that is known."""
    from tensorcap_formats.foreign import json_kind, open_msprobe, open_polygraphy
    from tensorcap_formats.safetensors import open_debug_tree

    kind = json_kind(first)
    if kind == "debug-tree":
        return open_debug_tree
    return {"polygraphy": open_polygraphy, "msprobe": open_msprobe}.get(kind or "")


def _gguf_opener(path: Path) -> Callable[[Path], Archive]:
    try:
        from tensorcap_formats.foreign.gguf_file import open_gguf
    except ImportError:
        raise missing_reader(path, "a GGUF file", "gguf", extra="gguf") from None
    return open_gguf


def _onnx_opener(path: Path) -> Callable[[Path], Archive]:
    try:
        from tensorcap_formats.foreign.onnx_file import open_onnx
    except ImportError:
        raise missing_reader(path, "an ONNX model", "onnx", extra="onnx") from None
    return open_onnx


def _test_data_opener(path: Path) -> Callable[[Path], Archive]:
    try:
        from tensorcap_formats.foreign.onnx_test_data import open_test_data
    except ImportError:
        raise missing_reader(path, "an ONNX test data set", "onnx", extra="onnx") from None
    return open_test_data


def _open_keras(path: Path) -> Archive:
    """Open the weights of a .keras file: an HDF5 file within a zip file, which Keras does not compress."""
    from tensorcap_formats.foreign import ZipMembers

    with closing(ZipMembers(path)) as members:
        members.check(_KERAS_WEIGHTS)
        if not members.is_stored(_KERAS_WEIGHTS):
            raise NotAnArchiveError(
                f"{path}: its weights are compressed, expected plain bytes",
                hint=f"Unpack {_KERAS_WEIGHTS}, and give that.",
            )
        part = members.offset(_KERAS_WEIGHTS), members.sizes[_KERAS_WEIGHTS]
        skipped = {name: "no weights" for name in members.sizes if name != _KERAS_WEIGHTS}
    return open_hdf5_part(path, part, container="keras", skipped=skipped)
