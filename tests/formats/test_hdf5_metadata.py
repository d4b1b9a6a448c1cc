"""Our own HDF5 metadata, read back by the HDF5 library and by its tools."""

from __future__ import annotations

import random
import shutil
import struct
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Union

import h5py
import numpy as np
import pytest

from tensorcap_formats.dtypes import DTYPES, dtype
from tensorcap_formats.hdf5 import datatype_of
from tensorcap_formats.hdf5.header import Dataset, Tree, emit
from tensorcap_formats.keys import Key
from tensorcap_formats.writing import Writer

# What plain h5py makes of each dtype that HDF5 has; all others are bytes.
SEEN_BY_H5PY = {
    "bool": "?",
    "int8": "i1",
    "uint8": "u1",
    "int16": "<i2",
    "uint16": "<u2",
    "int32": "<i4",
    "uint32": "<u4",
    "int64": "<i8",
    "uint64": "<u8",
    "float16": "<f2",
    "bfloat16": "<f4",
    "float32": "<f4",
    "float64": "<f8",
    "float8_e5m2": "<f2",
    "complex64": "<c8",
    "complex128": "<c16",
    **{f"int{n}": "i1" for n in range(1, 8)},
}
HALF_COMPLEX = np.dtype([("r", "<f2"), ("i", "<f2")])
# entries of the root group, by seed: on both sides of what a node holds at each depth of the B-tree
SIZES = [0, 1, 2, 257, 4, 5, 8, 33, 7, 1000, 9, 16, 17, 31, 32, 3000, 255, 256, 9000, 129]
QUICK = range(10)


@dataclass(eq=False)
class Leaf:
    dataset: Dataset
    dtype: str
    data: bytes


Truth = dict[str, Union[Leaf, "Truth"]]


class Forest:
    """One random tree: what is to be in the file, and the bytes of its tensors."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.blob = bytearray(2048)
        self.leaves: list[Leaf] = []
        self.truth = self.group(0, SIZES[seed % len(SIZES)])

    def group(self, depth: int, size: int) -> Truth:
        r = self.random
        group: Truth = {}
        for _ in range(size):
            draw = r.random()
            if depth < 3 and draw < (0.05 if size > 50 else 0.4):
                group[self.name()] = self.group(depth + 1, r.choice([0, 1, 2, 5, 8, 9, 20]))
            elif self.leaves and draw > 0.8:
                group[self.name()] = r.choice(self.leaves)
            else:
                group[self.name()] = self.leaf()
        return group

    def name(self) -> str:
        r = self.random
        number = r.randrange(10**6)
        draw = r.random()
        if draw < 0.1:
            return "é∑字"[r.randrange(3)] * r.randrange(1, 30) + str(number)
        if draw < 0.15:
            return "x" * r.choice([1, 7, 8, 9, 15, 16, 17, 255, 5000]) + str(number)
        if draw < 0.2:
            return r.choice("!#$%&()*+,-:;<=>?@[]^_{|}~ \t\n\\\"'") + str(number)
        return f"model.layers.{r.randrange(400)}.{r.choice('abcdef')}{number}"

    def leaf(self) -> Leaf:
        r = self.random
        logical = dtype(r.choice(sorted(DTYPES)))
        rank = r.choice([0, 1, 1, 2, 3, 5, 8, 32])
        shape = tuple(r.choice([0, 1, 1, 2, 3]) if rank < 20 else 1 for _ in range(rank))
        if rank == 1:
            shape = (r.choice([0, 1, 5, 1000, 20000]),)
        nbytes = int(np.prod(shape, dtype=np.int64)) * logical.itemsize
        data = bytes(r.choices((0, 1), k=nbytes)) if logical.name == "bool" else r.randbytes(nbytes)
        offset = None
        if nbytes:
            offset = len(self.blob)
            self.blob += data + bytes(-nbytes % 64)
        leaf = Leaf(Dataset(datatype_of(logical), shape, offset, nbytes), logical.name, data)
        if nbytes:
            self.leaves.append(leaf)
        return leaf

    def write(self, path: Path) -> None:
        metadata, superblock = emit(as_tree(self.truth), len(self.blob))
        self.blob[: len(superblock)] = superblock
        path.write_bytes(self.blob + metadata)


def as_tree(truth: Truth) -> Tree:
    return {name: node.dataset if isinstance(node, Leaf) else as_tree(node) for name, node in truth.items()}


def link_counts(truth: Truth) -> dict[Leaf, int]:
    counts: dict[Leaf, int] = {}
    groups = [truth]
    while groups:
        for node in groups.pop().values():
            if isinstance(node, Leaf):
                counts[node] = counts.get(node, 0) + 1
            else:
                groups.append(node)
    return counts


def assert_same(group: Any, truth: Truth, counts: dict[Leaf, int], *, offsets: bool = True) -> None:
    assert sorted(group) == sorted(truth)
    for name, node in truth.items():
        member = group[name]
        if not isinstance(node, Leaf):
            assert_same(member, node, counts, offsets=offsets)
            continue
        assert member.shape == node.dataset.shape
        assert member.dtype == (
            HALF_COMPLEX if node.dtype == "complex32" else np.dtype(SEEN_BY_H5PY.get(node.dtype, "u1"))
        )
        if node.data:
            raw = np.empty(len(node.data), np.uint8)
            member.id.read(h5py.h5s.ALL, h5py.h5s.ALL, raw, mtype=member.id.get_type())
            assert raw.tobytes() == node.data
        if offsets:
            assert member.id.get_offset() == node.dataset.offset
        assert h5py.h5o.get_info(member.id).rc == counts[node]


def run_tool(*command: str | Path) -> str:
    if shutil.which(command[0]) is None:
        pytest.skip(f"{command[0]} is not installed: a part of the HDF5 tools")
    return subprocess.run(command, check=True, capture_output=True, encoding="utf-8", errors="replace").stdout


def cases(seeds: range) -> list[Any]:
    return [
        pytest.param(seed, id=f"seed{seed}", marks=[] if seed in QUICK else pytest.mark.sampled)
        for seed in seeds
    ]


@pytest.mark.spec("ARC-22")
@pytest.mark.parametrize("seed", cases(range(100)))
def test_any_tree_is_read_back_by_the_hdf5_library(seed: int, tmp_path: Path) -> None:
    forest = Forest(seed)
    forest.write(tmp_path / "a.h5")
    with h5py.File(tmp_path / "a.h5") as file:
        assert_same(file, forest.truth, link_counts(forest.truth))


@pytest.mark.parametrize("seed", cases(range(3, 100, 9)))
def test_any_tree_survives_the_hdf5_tools(seed: int, tmp_path: Path) -> None:
    forest = Forest(seed)
    forest.write(tmp_path / "a.h5")
    assert run_tool("h5dump", "-H", tmp_path / "a.h5").startswith("HDF5")
    run_tool("h5repack", tmp_path / "a.h5", tmp_path / "b.h5")
    with h5py.File(tmp_path / "b.h5") as file:
        assert_same(file, forest.truth, link_counts(forest.truth), offsets=False)


@pytest.mark.parametrize("seed", cases(range(4, 100, 5)))
def test_any_tree_may_be_edited_by_the_hdf5_library(seed: int, tmp_path: Path) -> None:
    forest = Forest(seed)
    forest.write(tmp_path / "a.h5")
    truth = forest.truth
    with h5py.File(tmp_path / "a.h5", "r+") as file:
        for name in list(truth)[:3]:
            del file[name]
            del truth[name]
        for name in list(truth)[:1]:
            file.move(name, "moved")
            truth["moved"] = truth.pop(name)
        for number in range(50):
            file[f"added{number}"] = np.arange(number)
        file.attrs["remark"] = "edited"
    with h5py.File(tmp_path / "a.h5") as file:
        for number in range(50):
            assert file[f"added{number}"][...].tolist() == list(range(number))
        rest = {name: file[name] for name in file if not name.startswith("added")}
        assert_same(rest, truth, link_counts(truth))


def written(path: Path, bits: np.ndarray[Any, Any], logical: str) -> Path:
    writer = Writer(path)
    writer.add(Key("m", "output"), bits, dtype(logical), bits.shape)
    return writer.close()


def test_plain_h5py_reads_all_bfloat16_patterns_as_the_right_float32(tmp_path: Path) -> None:
    patterns = np.arange(65536, dtype="<u2")
    path = written(tmp_path / "a.h5", patterns, "bfloat16")
    with h5py.File(path) as file:
        values = file["steps/0/m/output"][...]
    expected = (patterns.astype(np.uint32) << 16).view(np.float32)
    assert values.dtype == np.float32
    is_nan = np.isnan(expected)
    assert (np.isnan(values) == is_nan).all()
    assert (values.view(np.uint32)[~is_nan] == expected.view(np.uint32)[~is_nan]).all()


def test_plain_h5py_reads_all_float8_e5m2_patterns_as_the_right_float16(tmp_path: Path) -> None:
    patterns = np.arange(256, dtype="u1")
    path = written(tmp_path / "a.h5", patterns, "float8_e5m2")
    with h5py.File(path) as file:
        values = file["steps/0/m/output"][...]
    np.testing.assert_array_equal(values, (patterns.astype("<u2") << 8).view("<f2"))


def test_h5dump_prints_the_values_of_a_bfloat16_tensor(tmp_path: Path) -> None:
    bits = np.array([0x3F80, 0xC020, 0x3E20, 0x7F80, 0x0000], "<u2")
    path = written(tmp_path / "a.h5", bits, "bfloat16")
    printed = run_tool("h5dump", "-d", "/steps/0/m/output", path)
    assert "(0): 1, -2.5, 0.15625, inf, 0\n" in printed


@pytest.mark.parametrize(
    ("logical", "bits", "values"),
    [
        pytest.param("bool", np.array([True, False]), [True, False], id="bool"),
        pytest.param("complex64", np.array([1 + 2j, -0.5j], "<c8"), [1 + 2j, -0.5j], id="complex64"),
        pytest.param("complex128", np.array([1e300 + 2j], "<c16"), [1e300 + 2j], id="complex128"),
        pytest.param("complex32", np.array([0xBC003C00], "<u4"), [(1.0, -1.0)], id="complex32"),
        pytest.param("float8_e4m3fn", np.array([0x7E], "u1"), [0x7E], id="float8_e4m3fn-as-bytes"),
        pytest.param("int4", np.array([-8, 7], "i1"), [-8, 7], id="int4-as-signed-bytes"),
    ],
)
def test_plain_h5py_gives_the_values(
    logical: str, bits: np.ndarray[Any, Any], values: list[Any], tmp_path: Path
) -> None:
    with h5py.File(written(tmp_path / "a.h5", bits, logical)) as file:
        assert file["steps/0/m/output"][...].tolist() == values


def test_a_tensor_of_each_rank_up_to_32_is_read_back(tmp_path: Path) -> None:
    path = tmp_path / "a.h5"
    writer = Writer(path)
    for rank in range(33):
        writer.add(Key(f"rank{rank}", "output"), np.array([rank], "u1"), dtype("uint8"), (1,) * rank)
    writer.close()
    with h5py.File(path) as file:
        for rank in range(33):
            dataset = file[f"steps/0/rank{rank}/output"]
            assert (dataset.shape, dataset[...].item()) == ((1,) * rank, rank)


def test_the_nodes_of_a_large_group_know_their_neighbours() -> None:
    tree: Tree = {f"{i:04}": Dataset(datatype_of(dtype("uint8")), (0,), None, 0) for i in range(1000)}
    metadata, superblock = emit(tree, 2048)
    image = bytes(2048) + metadata
    undefined = 2**64 - 1
    (at,) = struct.unpack_from("<Q", superblock, 80)  # cached in the root's symbol table entry
    levels = []
    while True:
        signature, kind, level, used, left, right, _, first = struct.unpack_from("<4sBBHQQQQ", image, at)
        assert (signature, kind, left) == (b"TREE", 0, undefined)
        count, before = 1, at
        while right != undefined:
            used, left, here = *struct.unpack_from("<HQ", image, right + 6), right
            (right,) = struct.unpack_from("<Q", image, here + 16)
            assert left == before
            count, before = count + 1, here
        assert used <= 8
        levels.append((level, count))
        if level == 0:
            break
        at = first
    assert levels == [(2, 1), (1, 4), (0, 32)]  # 250 symbol nodes of 4 entries, 8 children a node
