"""The flat file that every archive is written as: a reserved head, tensors, and their description.

Bytes 0 to 2047 stay zero until the end, so that nothing opens an unfinished file. `finish_flat_file`

1. appends the index, the run, a table of offsets and the HDF5 metadata;
2. writes a private note into the head, by which our own reader needs no HDF5 library;
3. writes the superblock last of all (specs/archive.md, sections 3 and 5).
"""

from __future__ import annotations

import hashlib
import os
import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import astuple, dataclass, replace
from typing import Any, Final, NamedTuple

from tensorcap_formats.hdf5.header import (
    SIGNATURE,
    SUPERBLOCK_SIZE,
    Dataset,
    Tree,
    datatype_of,
    emit,
    string_type,
)
from tensorcap_formats.index import Index, encode_index
from tensorcap_formats.input_file import InputFile
from tensorcap_formats.records import Record

HEAD_SIZE: Final = 2048
ALIGNMENT: Final = 64
END_MARK: Final = b"TCAP-END"  # behind what HDF5 knows of: its library cuts it off a file that it may alter
NO_OFFSET: Final = 0xFFFF_FFFF_FFFF_FFFF
INDEX_NAME: Final = "index"
RUN_NAME: Final = "run"

_NOTE: Final = struct.Struct("<8sIIQQQQQQQQ16s")
_GUARD_SIZE: Final = 16
_BLOCK_BYTES: Final = 1 << 20
_NOTE_MAGIC: Final = b"TCAPNOTE"
_NOTE_VERSION: Final = 1


class Description(NamedTuple):
    """What is read of a flat file besides its tensors, as bytes: see `Note`."""

    index: bytes
    run: bytes
    offsets: bytes


@dataclass(frozen=True, slots=True)
class Note:
    """The private note: where the parts of the file are, and a hash that shows if the file was altered.

    Attributes:
        file_size: Size of the whole file, in bytes.
        tail_at: Offset at which the tensors end and the description begins.
        index_at: Offset of the index; `index_size` bytes.
        run_at: Offset of the run metadata; `run_size` bytes.
        offsets_at: Offset of the table of offsets; `offsets_count` numbers of 8 bytes.
        guard: blake2b-128 of the bytes of the note before it, and of all bytes from `tail_at` on.
    """

    file_size: int
    tail_at: int
    index_at: int
    index_size: int
    run_at: int
    run_size: int
    offsets_at: int
    offsets_count: int
    guard: bytes = b""

    def pack(self) -> bytes:
        """The bytes of the note, to be written at offset 96."""
        return _NOTE.pack(_NOTE_MAGIC, _NOTE_VERSION, 0, *astuple(self))

    @classmethod
    def unpack(cls, head: bytes) -> Note | None:
        """Read the note from the first bytes of a file; None if there is none that is ours."""
        if len(head) < SUPERBLOCK_SIZE + _NOTE.size:
            return None
        magic, version, _, *fields = _NOTE.unpack_from(head, SUPERBLOCK_SIZE)
        return cls(*fields) if magic == _NOTE_MAGIC and version == _NOTE_VERSION else None

    def guarded(self, tail: Iterable[bytes | bytearray]) -> Note:
        """The note with the guard of `tail`, all bytes from `tail_at` on, in blocks."""
        hasher = hashlib.blake2b(self.pack()[:-_GUARD_SIZE], digest_size=_GUARD_SIZE)
        for block in tail:
            hasher.update(block)
        return replace(self, guard=hasher.digest())

    def read_description(self, file: InputFile) -> Description | None:
        """The index, the run and the table of offsets, if the file is still as it was written; else None.

        The HDF5 metadata, which are most of what describes small tensors, are hashed and not kept.
        """
        places = (
            (self.index_at, self.index_size),
            (self.run_at, self.run_size),
            (self.offsets_at, 8 * self.offsets_count),
        )
        are_inside = all(self.tail_at <= at and at + size <= self.file_size for at, size in places)
        if self.tail_at < HEAD_SIZE or not are_inside or file.size != self.file_size:
            return None
        parts = [bytearray(size) for _, size in places]

        def blocks() -> Iterator[bytes]:
            for at in range(self.tail_at, self.file_size, _BLOCK_BYTES):
                block = file.read(at, min(_BLOCK_BYTES, self.file_size - at))
                for part, (start, size) in zip(parts, places, strict=True):
                    first, last = max(start, at), min(start + size, at + len(block))
                    if first < last:
                        part[first - start : last - start] = block[first - at : last - at]
                yield block

        return Description(*map(bytes, parts)) if self.guarded(blocks()) == self else None


def write_at(fd: int, offset: int, data: Any) -> None:
    """Write all bytes of a buffer; OSError when the disk is full."""
    view = memoryview(data)
    while view.nbytes:
        done = os.pwrite(fd, view, offset)
        view, offset = view[done:], offset + done


def align_offset(offset: int) -> int:
    """The next offset at which a tensor may begin."""
    return -(-offset // ALIGNMENT) * ALIGNMENT


def finish_flat_file(
    fd: int, index: Index, offsets: Sequence[int | None], end: int, *, fsync: bool = False
) -> None:
    """Turn a flat file of tensors into an HDF5 file; repeatable until the superblock is there.

    Args:
        fd: The file, open for writing.
        index: All records, in execution order, and the run.
        offsets: For each record where its bytes lie in the file; None if it has no bytes there.
        end: Offset at which the last tensor ends; everything behind is overwritten or cut.
        fsync: Whether to survive a power cut, and not only a kill.
    """
    index_json, run_json = encode_index(index)
    table = struct.pack(f"<{len(offsets)}Q", *(NO_OFFSET if at is None else at for at in offsets))
    tail, tail_at = bytearray(), align_offset(end)
    places = []
    for part in (index_json, run_json, table):
        places.append(tail_at + len(tail))
        tail += part + bytes(-len(part) % ALIGNMENT)
    index_at, run_at, offsets_at = places
    tree = _tree(index.records, offsets)
    tree[INDEX_NAME] = Dataset(string_type(len(index_json)), (), index_at, len(index_json))
    tree[RUN_NAME] = Dataset(string_type(len(run_json)), (), run_at, len(run_json))
    metadata, superblock = emit(tree, tail_at + len(tail))
    tail += metadata + END_MARK
    note = Note(
        file_size=tail_at + len(tail),
        tail_at=tail_at,
        index_at=index_at,
        index_size=len(index_json),
        run_at=run_at,
        run_size=len(run_json),
        offsets_at=offsets_at,
        offsets_count=len(offsets),
    )
    write_at(fd, tail_at, tail)
    os.ftruncate(fd, note.file_size)  # an earlier attempt, or an unconfirmed tensor, reached further
    write_at(fd, SUPERBLOCK_SIZE, note.guarded([tail]).pack())
    if fsync:
        os.fsync(fd)
    write_at(fd, 0, superblock)
    if fsync:
        os.fsync(fd)


def is_finished_flat_file(file: InputFile) -> bool:
    """Whether a flat file has its superblock and everything that it leads to."""
    head = file.read(0, min(HEAD_SIZE, file.size))
    note = Note.unpack(head)
    return head.startswith(SIGNATURE) and note is not None and note.read_description(file) is not None


def _tree(records: Sequence[Record], offsets: Sequence[int | None]) -> Tree:
    """The groups and datasets of all stored records; one dataset for equal place, dtype and shape."""
    datasets: dict[tuple[int, str, tuple[int, ...]], Dataset] = {}
    root: Tree = {}
    for record, offset in zip(records, offsets, strict=True):
        if not record.stored:
            continue
        dataset = Dataset(datatype_of(record.dtype), record.shape, offset, record.nbytes)
        if offset is not None:
            dataset = datasets.setdefault((offset, record.dtype.name, record.shape), dataset)
        *groups, name = record.key.path.split("/")
        node = root
        for group in groups:
            child = node.setdefault(group, {})
            assert isinstance(child, dict)  # `Key.path` has a fixed depth for each kind of key
            node = child
        node[name] = dataset
    return root
