"""Read HDF5 files of others, and datasets of ours that others rewrote, through h5py.

A dataset gives its bits, unconverted; nothing is followed out of the file. Filters of compressed datasets
are found once hdf5plugin is imported.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from tensorcap_formats.archive import Archive
from tensorcap_formats.dtypes import DTYPES, Array, DType
from tensorcap_formats.errors import (
    CorruptArchiveError,
    NotAnArchiveError,
    ReadError,
    TensorcapError,
    UnsafeFileError,
    missing_package,
)
from tensorcap_formats.flat_arrays import read_flat
from tensorcap_formats.float_formats import FLOAT_FORMATS
from tensorcap_formats.foreign_archive import ForeignArchive, ForeignTensor
from tensorcap_formats.hdf5.chunks import ChunkCheck
from tensorcap_formats.hdf5.header import NATIVE_FLOATS
from tensorcap_formats.input_file import InputFile, check_expansion, check_total, is_credible

if TYPE_CHECKING:
    import h5py


# By size, (sign position, exponent position and bits, mantissa position and bits), bias
_FLOATS: Final = {
    (
        form.bits // 8,
        (form.bits - 1, form.mantissa_bits, form.exponent_bits, 0, form.mantissa_bits),
        form.bias,
    ): name
    for name, form in ((name, FLOAT_FORMATS[name]) for name in NATIVE_FLOATS)
}


@contextmanager
def library_errors(source: str) -> Iterator[None]:
    """Turn what h5py raises on a damaged file into `CorruptArchiveError`; ours pass.

    The library raises nearly every class of error there: KeyError for a lost object, TypeError for a type
    that numpy has not, OverflowError for an absurd size.
    """
    try:
        yield
    except TensorcapError:
        raise
    except (OSError, RuntimeError, LookupError, ValueError, TypeError, ArithmeticError, MemoryError) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise CorruptArchiveError(f"{source}: the HDF5 library cannot read it: {reason}") from None


def require_inside(dataset: h5py.Dataset, source: str) -> None:
    """Refuse a dataset whose bytes lie in other files (ARC-21).

    Raises:
        UnsafeFileError: It has external storage, or is a virtual one.
    """
    if dataset.id.get_create_plist().get_external_count() or dataset.is_virtual:
        raise UnsafeFileError(f"{source}: keeps its bytes in other files, which are not read (ARC-21)")


def require_plain_names(group: h5py.Group, source: str) -> None:
    """Refuse a group whose names are compressed: the library makes room for whatever comes of them.

    Raises:
        UnsafeFileError: Its names have filters, as no program writes them.
    """
    from h5py import h5i, h5p

    properties = group.id.get_create_plist()
    filters = h5p.PropDCID(properties.id)  # which h5py asks datasets for alone
    h5i.inc_ref(filters)  # as both close it
    if filters.get_nfilters():
        raise UnsafeFileError(
            f"{source}: the names in group {group.name!r} are compressed, expected plain ones"
        )


def child(group: Any, name: str, source: str) -> Any:
    """The object that a hard link of a group leads to.

    Raises:
        CorruptArchiveError: There is none of that name.
        UnsafeFileError: It is a soft or an external link, which may lead out of the file, or names of the
            group are compressed.
    """
    import h5py

    if isinstance(group, h5py.Group):
        require_plain_names(group, source)
    link = group.get(name, getlink=True) if isinstance(group, h5py.Group) else None
    if link is None:
        raise CorruptArchiveError(f"{source}: the file has no {name!r} where the index expects it (ARC-20)")
    if not isinstance(link, h5py.HardLink):
        raise UnsafeFileError(f"{source}: {name!r} is a {type(link).__name__}, expected a hard link (ARC-21)")
    return group[name]


def logical_dtype(dataset: h5py.Dataset) -> tuple[DType, Any] | None:
    """The logical dtype of a dataset and the HDF5 type to read it as; None if it is no tensor."""
    from h5py import h5t

    kind = dataset.id.get_type()
    size = kind.get_size()
    name = None
    if isinstance(kind, h5t.TypeFloatID):
        name = _FLOATS.get((size, kind.get_fields(), kind.get_ebias()))
        if name in ("bfloat16", "float8_e5m2"):
            return (DTYPES[name], kind) if size == 1 or kind.get_order() == h5t.ORDER_LE else None
    elif isinstance(kind, h5t.TypeEnumID):
        name = "bool" if dataset.dtype == np.bool_ else None
    elif isinstance(kind, h5t.TypeIntegerID) and kind.get_precision() == 8 * size:
        name = f"{'int' if kind.get_sign() == h5t.SGN_2 else 'uint'}{8 * size}"
    elif isinstance(kind, h5t.TypeCompoundID) and dataset.dtype.kind == "c":
        name = dataset.dtype.name
    if name not in DTYPES:
        return None
    return DTYPES[name], h5t.py_create(np.dtype(DTYPES[name].storage))


class DatasetReader:
    """Reads flat ranges of one dataset."""

    def __init__(
        self,
        dataset: h5py.Dataset,
        file: InputFile,
        source: str,
        *,
        storage: str,
        memory_type: Any = None,
    ) -> None:
        """Check how the dataset is stored.

        Args:
            dataset: The dataset, in an open file.
            file: The same file, to be read at positions.
            source: The dataset's name, for messages.
            storage: numpy type code of the stored elements.
            memory_type: HDF5 type to read as; that of the file, hence no conversion, if None.

        Raises:
            CorruptArchiveError: Elements are of another size.
            UnsafeFileError: The bytes lie in other files.
        """
        from h5py import h5d

        self._dataset = dataset
        self._file = file
        self._source = source
        self._storage = np.dtype(storage)
        kind = dataset.id.get_type()
        if memory_type is None and kind.get_size() != self._storage.itemsize:
            raise CorruptArchiveError(
                f"{source}: elements have {kind.get_size()} bytes, expected {self._storage.itemsize} (ARC-22)"
            )
        require_inside(dataset, source)
        self._type = kind if memory_type is None else memory_type
        layout = dataset.id.get_create_plist().get_layout()
        self._chunks = ChunkCheck(dataset, source) if layout == h5d.CHUNKED else None
        if self._chunks:
            require_filters(dataset, source)
        is_contiguous = layout == h5d.CONTIGUOUS
        self._is_checked = False
        self._offset = dataset.id.get_offset() if is_contiguous and self._type.equal(kind) else None

    def read(self, start: int, out: Array) -> None:
        """Fill `out` with the stored elements from number `start` on."""
        if self._offset is not None:
            self._file.read_into(self._offset + start * out.itemsize, out)
            return
        with library_errors(self._source):
            read_flat(self, self._dataset.shape, start, out)

    def read_foreign(self, start: int, out: Array) -> None:
        """As `read`; refuses a dataset that was not written whole, or that unpacks to far more than it is."""
        if not self._is_checked:
            with library_errors(self._source):
                self.require_written()
                declared = math.prod(self._dataset.shape) * out.itemsize
                check_expansion(self._dataset.id.get_storage_size(), declared, self._source)
            self._is_checked = True
        self.read(start, out)

    def declared_bytes(self) -> int:
        """Bytes that all of it takes in memory; 0 if so few are there that `read_foreign` refuses it."""
        declared = math.prod(self._dataset.shape) * self._storage.itemsize
        return declared if is_credible(self._dataset.id.get_storage_size(), declared) else 0

    def require_written(self) -> None:
        """Refuse a dataset with parts that HDF5 would read as zeros because they were never written."""
        shape, chunk = self._dataset.shape, self._dataset.chunks
        if not math.prod(shape):
            return
        if self._chunks:
            expected = math.prod(-(-n // c) for n, c in zip(shape, chunk, strict=True))
            count = self._dataset.id.get_num_chunks()
            if count != expected:
                raise CorruptArchiveError(f"{self._source}: {count} of {expected} chunks are there (ARC-23)")
            # the library unpacks a chunk at a time, so its size is what a read takes of memory
            declared = math.prod(chunk) * self._storage.itemsize
            check_expansion(self._dataset.id.get_storage_size(), declared, self._source)
        elif not self._dataset.id.get_storage_size():
            raise CorruptArchiveError(f"{self._source}: its bytes were never written (ARC-23)")

    def __getitem__(self, selection: tuple[int | slice, ...]) -> Array:
        """Read one hyperrectangle of stored elements, for `read_flat`."""
        from h5py import h5s

        begin = tuple(s if isinstance(s, int) else s.start for s in selection)
        count = tuple(1 if isinstance(s, int) else s.stop - s.start for s in selection)
        out = np.empty(count, self._storage)
        if self._chunks:
            self._chunks.require_whole(begin, count)
        space = self._dataset.id.get_space()
        if selection:
            space.select_hyperslab(begin, count)
        self._dataset.id.read(
            h5s.create_simple(count) if count else h5s.create(h5s.SCALAR), space, out, self._type
        )
        return out


def require_filters(dataset: h5py.Dataset, source: str) -> None:
    """Make the filters of a dataset available.

    Raises:
        MissingPackageError: One of them is not part of HDF5, and hdf5plugin is not installed.
        ReadError: hdf5plugin has it neither.
    """
    from h5py import h5z

    properties = dataset.id.get_create_plist()
    filters = [properties.get_filter(number)[0] for number in range(properties.get_nfilters())]
    if all(map(h5z.filter_avail, filters)):
        return
    try:
        import hdf5plugin  # noqa: F401  # registers its filters when it is imported
    except ImportError:
        raise missing_package(f"reading {source}", "hdf5plugin", extra="compress") from None
    for number in filters:
        if not h5z.filter_avail(number):
            raise ReadError(f"{source}: is compressed by HDF5 filter {number}, which is not installed")


def open_foreign_hdf5(
    file: InputFile,
    root: h5py.Group,
    resources: ExitStack,
    *,
    container: str = "hdf5",
    skipped: Mapping[str, str] | None = None,
) -> Archive:
    """Open all numeric datasets that hard links lead to; what else is there is named in `skipped`.

    Args:
        file: The file, to be read at positions.
        root: Its root group.
        resources: What to close with the archive; emptied.
        container: Name of the format.
        skipped: What else is not read, with reasons.

    Raises:
        NotAnArchiveError: Nothing in it is a numeric dataset.
    """
    import h5py

    tensors: list[ForeignTensor] = []
    readers: list[DatasetReader] = []
    others = dict(skipped or {})
    groups: list[tuple[str, h5py.Group]] = [("", root)]
    addresses = {_address(root)}
    while groups:
        prefix, group = groups.pop()
        require_plain_names(group, str(file.path))
        for name in group:
            full = prefix + name
            link = group.get(name, getlink=True)
            if not isinstance(link, h5py.HardLink):
                others[full] = f"not followed: {type(link).__name__}"
                continue
            node = group[name]
            if isinstance(node, h5py.Group):
                address = _address(node)
                if address not in addresses:  # a group may contain itself
                    addresses.add(address)
                    groups.append((f"{full}/", node))
            elif isinstance(node, h5py.Dataset):
                types = logical_dtype(node)
                if types is None or node.shape is None:
                    others[full] = "no tensor: its type is no number, or it has no elements"
                    continue
                reader = DatasetReader(
                    node, file, f"{file.path}: {full}", storage=types[0].storage, memory_type=types[1]
                )
                readers.append(reader)
                tensors.append(ForeignTensor(full, types[0], node.shape, reader.read_foreign))
            else:
                others[full] = "no tensor: a named datatype"
    if not tensors:
        raise NotAnArchiveError(f"{file.path}: none of its {len(others)} HDF5 objects is a numeric dataset")
    check_total(file.size, sum(reader.declared_bytes() for reader in readers), str(file.path))
    return ForeignArchive(file.path, container, tensors, resources=resources, skipped=others)


def _address(group: h5py.Group) -> tuple[int, ...]:
    """Where in its file a group lies.

    `h5py.h5o.get_info` would add up the size of its index too, and follow a circle there without an end.
    """
    import h5py

    place: tuple[int, ...] = h5py.h5g.get_objinfo(group.id).objno
    return place
