"""HDF5 metadata for a flat file of tensors: object headers, groups and the superblock, as bytes.

The oldest and simplest form of the format (superblock 0, object header 1, symbol tables), which has no
checksums and which every HDF5 library since 1.0 reads. Field layouts are those of the HDF5 File Format
Specification 3.0: superblock II.A, B-tree III.A.1, symbol nodes III.B, local heap III.D, object header
IV.A.1.a, messages IV.A.2 (dataspace b, datatype d, fill value f, layout i, symbol table r).
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Final, Union

from tensorcap_formats.dtypes import DType
from tensorcap_formats.float_formats import DTYPE_FORMATS, FLOAT_FORMATS, FloatFormat

UNDEFINED: Final = 0xFFFF_FFFF_FFFF_FFFF
SUPERBLOCK_SIZE: Final = 96
SIGNATURE: Final = b"\x89HDF\r\n\x1a\n"

# Small nodes, since most groups are sites with a few slots: a symbol node holds up to twice _LEAF_K entries,
# a B-tree node up to twice _INTERNAL_K children.
_LEAF_K: Final = 2
_INTERNAL_K: Final = 4
_SYMBOL_NODE_SIZE: Final = 8 + 2 * _LEAF_K * 40
_TREE_NODE_SIZE: Final = 24 + 2 * _INTERNAL_K * 16 + 8
_GROUP_HEADER_SIZE: Final = 40
_HEAP_HEADER_SIZE: Final = 32


@dataclass(frozen=True, slots=True, eq=False)
class Dataset:
    """One dataset object; in a tree, the same object under two names is a hard link.

    Attributes:
        datatype: Datatype message, from `datatype_of` or `string_type`.
        shape: Sizes, slowest axis first; () for a scalar.
        offset: Where its bytes lie in the file; None for a dataset without elements.
        nbytes: How many bytes.
    """

    datatype: bytes
    shape: tuple[int, ...]
    offset: int | None
    nbytes: int


NATIVE_FLOATS: Final = ("float8_e5m2", "float16", "bfloat16", "float32", "float64")  # that HDF5 can describe

Tree = dict[str, Union[Dataset, "Tree"]]


def _float_type(form: FloatFormat) -> bytes:
    # class 1, version 1; little endian, leading mantissa bit implied (normalisation 2)
    head = struct.pack("<BBBBIHH", 0x11, 0x20, form.bits - 1, 0, form.bits // 8, 0, form.bits)
    return head + struct.pack(
        "<BBBBI", form.mantissa_bits, form.exponent_bits, 0, form.mantissa_bits, form.bias
    )


def _integer_type(size: int, *, signed: bool) -> bytes:
    return struct.pack("<BBBBIHH", 0x10, 8 if signed else 0, 0, 0, size, 0, 8 * size)


def _complex_type(form: FloatFormat) -> bytes:
    """A compound of members `r` and `i`, as h5py writes complex numbers."""
    part, size = _float_type(form), form.bits // 8
    head = struct.pack("<BBBBI", 0x16, 2, 0, 0, 2 * size)
    members = [
        name + bytes(8 - len(name)) + struct.pack("<IB3xI4x16x", at, 0, 0) + part
        for name, at in ((b"r", 0), (b"i", size))
    ]
    return head + b"".join(members)


def _bool_type() -> bytes:
    """The enumeration FALSE 0, TRUE 1 over int8, as h5py writes bool."""
    head = struct.pack("<BBBBI", 0x18, 2, 0, 0, 1)
    return head + _integer_type(1, signed=True) + b"FALSE\0\0\0TRUE\0\0\0\0" + b"\0\1"


_NATIVE: Final = {
    "bool": _bool_type(),
    **{f"int{8 * n}": _integer_type(n, signed=True) for n in (1, 2, 4, 8)},
    **{f"uint{8 * n}": _integer_type(n, signed=False) for n in (1, 2, 4, 8)},
    **{name: _float_type(FLOAT_FORMATS[name]) for name in NATIVE_FLOATS},
    **{name: _complex_type(DTYPE_FORMATS[name]) for name in ("complex32", "complex64", "complex128")},
}


def datatype_of(logical: DType) -> bytes:
    """The datatype message of a logical dtype; raw bytes if HDF5 has no faithful form (ARC-22)."""
    return _NATIVE.get(logical.name) or _NATIVE["int8" if logical.storage == "|i1" else "uint8"]


def string_type(nbytes: int) -> bytes:
    """A fixed-length UTF-8 string, padded with NUL."""
    return struct.pack("<BBBBI", 0x13, 0x11, 0, 0, nbytes)


def emit(tree: Tree, at: int) -> tuple[bytes, bytes]:
    """Write the metadata of a whole file.

    Args:
        tree: The root group; names are non-empty, without `/` and NUL.
        at: File offset of the metadata, a multiple of 8; the file ends where they end.

    Returns:
        The metadata, to be written at `at`, and the superblock, to be written at 0 after everything else.
    """
    emitter = _Emitter(at)
    emitter.count_links(tree)
    root, scratch = emitter.group(tree)
    end = emitter.end
    superblock = SIGNATURE + struct.pack(
        "<BBBxBBBxHHIQQQQ", 0, 0, 0, 0, 8, 8, _LEAF_K, _INTERNAL_K, 0, 0, UNDEFINED, end, UNDEFINED
    )
    superblock += struct.pack("<QQII16s", 0, root, 1, 0, scratch)
    return b"".join(emitter.blobs), superblock


class _Emitter:
    """Appends objects from the leaves to the root, so that every address is known when it is needed."""

    def __init__(self, at: int) -> None:
        self.blobs: list[bytes] = []
        self.end = at
        self._links: dict[Dataset, int] = {}
        self._placed: dict[Dataset, int] = {}
        self._templates: dict[tuple[bytes, tuple[int, ...]], bytearray] = {}

    def count_links(self, tree: Tree) -> None:
        for node in tree.values():
            if isinstance(node, Dataset):
                self._links[node] = self._links.get(node, 0) + 1
            else:
                self.count_links(node)

    def group(self, tree: Tree) -> tuple[int, bytes]:
        """Append a group and all below it; return its address and its symbol table (tree and heap)."""
        entries: dict[bytes, tuple[int, bytes]] = {}
        for name, node in tree.items():
            entries[name.encode("utf-8", "surrogatepass")] = (
                (self._dataset(node), b"") if isinstance(node, Dataset) else self.group(node)
            )
        names = sorted(entries)  # symbol nodes are searched in the order of strcmp
        heap, name_at = _local_heap(names)
        header_at = self.end
        heap_at = header_at + _GROUP_HEADER_SIZE
        heap_data_at = heap_at + _HEAP_HEADER_SIZE
        nodes_at = heap_data_at + len(heap)
        nodes, children = _symbol_nodes(names, name_at, entries, nodes_at)
        levels, tree_at = _tree_levels(children, nodes_at + len(nodes))
        scratch = struct.pack("<QQ", tree_at, heap_at)
        free_at = len(heap) - 16
        self._append(
            _object_header([_message(0x11, scratch)], links=1)
            + struct.pack("<4sB3xQQQ", b"HEAP", 0, len(heap), free_at, heap_data_at)
            + heap
            + nodes
            + levels
        )
        return header_at, scratch

    def _dataset(self, dataset: Dataset) -> int:
        placed = self._placed.get(dataset)
        if placed is None:
            placed = self._placed[dataset] = self._append(self._dataset_header(dataset))
        return placed

    def _dataset_header(self, dataset: Dataset) -> bytes:
        header = self._templates.get((dataset.datatype, dataset.shape))
        if header is None:
            rank = len(dataset.shape)
            space = struct.pack(f"<BBB5x{rank}Q", 1, rank, 0, *dataset.shape)
            fill = struct.pack("<BBBB", 2, 1, 1, 0)  # allocated early, fill value never written, undefined
            layout = struct.pack("<BBQQ", 3, 1, UNDEFINED, dataset.nbytes)
            header = bytearray(
                _object_header(
                    [
                        _message(0x01, space),
                        _message(0x03, dataset.datatype, flags=1),
                        _message(0x05, fill),
                        _message(0x08, layout),
                    ],
                    links=1,
                )
            )
            self._templates[dataset.datatype, dataset.shape] = header
        struct.pack_into("<I", header, 4, self._links[dataset])
        # the layout message is last: 24 bytes, address at its third
        struct.pack_into(
            "<Q", header, len(header) - 22, UNDEFINED if dataset.offset is None else dataset.offset
        )
        return bytes(header)

    def _append(self, blob: bytes) -> int:
        """Append at a multiple of 8 and return the address."""
        at = self.end
        blob += bytes(-len(blob) % 8)
        self.blobs.append(blob)
        self.end += len(blob)
        return at


def _message(kind: int, data: bytes, flags: int = 0) -> bytes:
    data += bytes(-len(data) % 8)
    return struct.pack("<HHB3x", kind, len(data), flags) + data


def _object_header(messages: list[bytes], *, links: int) -> bytes:
    body = b"".join(messages)
    return struct.pack("<BxHII4x", 1, len(messages), links, len(body)) + body


def _local_heap(names: list[bytes]) -> tuple[bytes, list[int]]:
    """The names, each ended by NUL and padded to 8, and the offset of each; then one free block."""
    heap, name_at = bytearray(8), []  # offset 0 is the empty name
    for name in names:
        name_at.append(len(heap))
        heap += name + bytes(8 - len(name) % 8)
    heap += struct.pack("<QQ", 1, 16)  # next free block: 1 for none; size of this one
    return bytes(heap), name_at


def _symbol_nodes(
    names: list[bytes], name_at: list[int], entries: dict[bytes, tuple[int, bytes]], at: int
) -> tuple[bytes, list[tuple[int, int]]]:
    """Symbol nodes from `at` on, and for each its address and the heap offset of its last name."""
    nodes, children = bytearray(), []
    step = 2 * _LEAF_K
    for first in range(0, max(len(names), 1), step):
        part = names[first : first + step]
        node = struct.pack("<4sBxH", b"SNOD", 1, len(part))
        for name, where in zip(part, name_at[first : first + step], strict=True):
            address, scratch = entries[name]
            node += struct.pack("<QQII16s", where, address, 1 if scratch else 0, 0, scratch)
        children.append((at + len(nodes), name_at[first + len(part) - 1] if part else 0))
        nodes += node.ljust(_SYMBOL_NODE_SIZE, b"\0")
    return bytes(nodes), children


def _tree_levels(children: list[tuple[int, int]], at: int) -> tuple[bytes, int]:
    """B-tree nodes over `children`, level by level from `at` on, and the address of the root.

    Key number i + 1 of a node is the last name of its child i; key 0 the last name before the node.
    """
    out, depth = bytearray(), 0
    while True:
        parents: list[tuple[int, int]] = []
        groups = [children[i : i + 2 * _INTERNAL_K] for i in range(0, len(children), 2 * _INTERNAL_K)]
        before = 0
        for number, group in enumerate(groups):
            here = at + len(out)
            left = here - _TREE_NODE_SIZE if number else UNDEFINED
            right = here + _TREE_NODE_SIZE if number + 1 < len(groups) else UNDEFINED
            is_empty = len(group) == 1 and group[0][1] == 0
            node = struct.pack("<4sBBHQQ", b"TREE", 0, depth, 0 if is_empty else len(group), left, right)
            node += struct.pack("<Q", before)
            for child, last in group:
                node += struct.pack("<QQ", child, last)
                before = last
            parents.append((here, before))
            out += node.ljust(_TREE_NODE_SIZE, b"\0")
        if len(parents) == 1:
            return bytes(out), parents[0][0]
        children, depth = parents, depth + 1
