"""What a reader may spend on a small file (ARC-85): files of less than 4 MiB that would take all day."""

from __future__ import annotations

import copy
import io
import json
import struct
import time
import warnings
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest

from tensorcap.alignment.map_file import parse_map
from tensorcap_formats.errors import TensorcapError
from tensorcap_formats.output_path import journal_path
from tensorcap_formats.writing import recover
from tests.hostile.fuzzing.runner import read_all
from tests.hostile.fuzzing.seeds import write_unfinished

SECONDS: Final = 20  # of a CPU, ten times what the slowest takes
BYTES: Final = 4 << 20
ROW: Final = 13 << 16  # elements of the tensor that many share


@dataclass(frozen=True)
class Attack:
    """A small input, how it is read, and what the refusal says."""

    write: Callable[[Path], object]
    message: str
    name: str = "x"
    read: Callable[[Path], object] = read_all
    package: str = "numpy"


def _torch(pickle: bytes, count: int = 1, method: int = zipfile.ZIP_STORED) -> Callable[[Path], object]:
    """A file of torch.save of a pickle, and of one storage of some floats."""

    def write(path: Path) -> None:
        with zipfile.ZipFile(path, "w", method) as file:
            file.writestr("archive/data.pkl", b"\x80\2" + pickle + b".")
            file.writestr(zipfile.ZipInfo("archive/data/0"), bytes(4 * count))

    return write


def _view(shape: tuple[int, ...], strides: tuple[int, ...], count: int = 1) -> bytes:
    """The pickle of a view of the storage."""

    def sizes(values: tuple[int, ...]) -> bytes:
        return b"(" + b"".join(b"\x8a\x08" + struct.pack("<q", value) for value in values) + b"t"

    storage = b"(X\7\0\0\0storagectorch\nFloatStorage\nX\1\0\0\x000X\3\0\0\0cpuJ" + struct.pack("<i", count)
    rest = b"\x89ccollections\nOrderedDict\n)RtR"
    return b"ctorch._utils\n_rebuild_tensor_v2\n(" + storage + b"tQK\0" + sizes(shape) + sizes(strides) + rest


def _shared_view(path: Path) -> None:
    """A list of one tensor, 5,200 times."""
    tensor = _view((ROW,), (1,), ROW) + b"q\0"
    _torch(b"](" + tensor + b"h\0" * 5_200 + b"e", ROW)(path)


def _hdf5_names(path: Path) -> None:
    import h5py

    with h5py.File(path, "w") as file:
        file["0"] = np.ones(ROW, "f4")
        for number in range(1, 5_200):
            file[str(number)] = file["0"]


def _npz_names(path: Path) -> None:
    content = io.BytesIO()
    np.save(content, np.ones(ROW, "f4"))
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("0.npy", content.getvalue())
        for number in range(1, 5_200):
            info = copy.copy(file.filelist[0])
            info.filename = f"{number}.npy"
            file.filelist.append(info)


def _gguf_names(path: Path) -> None:
    count = 5_200
    head = b"GGUF" + struct.pack("<IQQ", 3, count, 0)
    for number in range(count):
        name = str(number).encode()
        head += struct.pack("<Q", len(name)) + name + struct.pack("<IQIQ", 1, ROW, 0, 0)
    path.write_bytes(head + bytes(-len(head) % 32) + bytes(4 * ROW))


def _onnx_names(path: Path) -> None:
    import onnx
    from onnx import helper

    weights = []
    for number in range(5_200):
        weight = onnx.TensorProto(name=str(number), data_type=onnx.TensorProto.FLOAT, dims=[ROW])
        weight.data_location = onnx.TensorProto.EXTERNAL
        weight.external_data.add(key="location", value="data")
        weights.append(weight)
    path.with_name("data").write_bytes(bytes(4 * ROW))
    onnx.save(helper.make_model(helper.make_graph([], "net", [], [], initializer=weights)), path)


def _zarr_array(path: Path, shape: int, chunk: int, count: int = 1) -> None:
    """Arrays of zarr 3 of which one chunk of zeros is there."""
    import zarr

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        zarr.create_array(
            path / "0", shape=(chunk,), chunks=(chunk,), dtype="f4", config={"write_empty_chunks": True}
        )[:] = 0
    metadata = json.loads((path / "0/zarr.json").read_text())
    (path / "zarr.json").write_text('{"zarr_format": 3, "node_type": "group", "attributes": {}}')
    metadata["shape"] = [shape]
    for number in range(count):
        (path / f"{number}/c").mkdir(parents=True, exist_ok=True)
        (path / f"{number}/c/0").write_bytes((path / "0/c/0").read_bytes())
        (path / f"{number}/zarr.json").write_text(json.dumps(metadata))


def _journal(path: Path) -> None:
    """The journal of an unfinished archive, with ever longer tensors at one place."""
    write_unfinished(path)
    partial = path.with_name(f"{path.name}.partial")
    partial.write_bytes(partial.read_bytes() + bytes(1 << 20))
    with journal_path(path).open("ab") as file:
        for number in range(5000):
            record: dict[str, Any] = {
                "key": f"0/x{number}/output",
                "dtype": "uint8",
                "shape": [(1 << 20) - number],
            }
            record |= {
                "order": 100 + number,
                "stored": True,
                "digest": "0" * 32,
                "offset": 2048,
                "statistics": None,
            }
            body = json.dumps(record).encode()
            file.write(b"%s\t%08x\n" % (body, zlib.crc32(body)))


def _deep_toml(path: Path) -> None:
    path.write_text("x = " + "[" * 100_000 + "]" * 100_000)


ATTACKS: Final = {
    "torch, stride 0": Attack(_torch(_view((2**40,), (0,))), "claim to expand to 4398046511104"),
    "torch, one tensor 5,200 times": Attack(_shared_view, "claim to be", read=read_all),
    "torch, deflated marks": Attack(
        _torch(b"(" * (1 << 26), method=zipfile.ZIP_DEFLATED),
        "its pickle is compressed, expected plain bytes",
    ),
    "hdf5, 5,200 names of a dataset": Attack(_hdf5_names, "claim to be 17720934400", package="h5py"),
    "npz, 5,200 names of a member": Attack(_npz_names, "bytes of tensors"),
    "gguf, 5,200 names of a tensor": Attack(_gguf_names, "claim to be 17720934400", package="gguf"),
    "onnx, 5,200 names of a tensor": Attack(_onnx_names, "bytes of tensors", name="x.onnx", package="onnx"),
    "zarr, 2^24 chunks": Attack(
        lambda path: _zarr_array(path, 2**24, 1), "16777214 chunks or more have no file", package="zarr"
    ),
    "zarr, 100 chunks in each of four arrays": Attack(
        lambda path: _zarr_array(path, 100, 1, count=4), "have no file, in it and before it", package="zarr"
    ),
    "zarr, 2^34 elements of one chunk": Attack(
        lambda path: _zarr_array(path, 2**34, 2**24), "claim to be 68719476736 bytes", package="zarr"
    ),
    "journal, 5,000 tensors at one place": Attack(
        _journal, "and its journal places", name="x.h5", read=recover
    ),
    "map, nested arrays": Attack(
        _deep_toml, "", name="x.toml", read=lambda path: parse_map(path.read_text(), path)
    ),
}


@pytest.mark.spec("ARC-85")
@pytest.mark.parametrize("name", ATTACKS)
def test_a_small_input_that_would_take_all_day_is_refused_soon(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "four arrays" in name:
        monkeypatch.setattr("tensorcap_formats.zarr.foreign._MAX_MISSING", 128)  # else it takes 20 s
    attack = ATTACKS[name]
    pytest.importorskip(attack.package)
    path = tmp_path / attack.name
    attack.write(path)
    files = [file for file in tmp_path.rglob("*") if file.is_file()]
    assert sum(file.stat().st_size for file in files) < BYTES
    begin = time.process_time()
    with pytest.raises(TensorcapError) as refused:
        attack.read(path)
    assert time.process_time() - begin < SECONDS
    assert attack.message in str(refused.value)
    assert "\n" not in str(refused.value)
    assert len(str(refused.value)) < 1000
