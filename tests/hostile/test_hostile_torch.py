"""Torch files and pickles that want to run code, or reach out of their storages."""

from __future__ import annotations

import io
import pickle
import struct
import subprocess
import sys
import time
import tracemalloc
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from tensorcap_formats.errors import CorruptArchiveError, NotAnArchiveError, ReadError, UnsafeFileError
from tensorcap_formats.foreign import torch_pickle
from tensorcap_formats.open import open_archive


class Evil:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return open, (str(self.path), "w")  # harmless stand-in for a payload: creates a file


class Innocent:
    """A user's class in a legitimate dump."""


def test_a_payload_is_named_and_not_run(tmp_path: Path) -> None:
    marker, path = tmp_path / "marker", tmp_path / "x.pt"
    torch.save({"a": torch.ones(2), "e": Evil(marker)}, path)
    with pytest.raises(
        UnsafeFileError, match=r"pickle wants (_?io|builtins)\.open, .* may run code"
    ) as caught:
        open_archive(path)
    assert caught.value.hint is not None
    assert "safetensors" in caught.value.hint
    assert not marker.exists()
    torch.load(path, weights_only=False)["e"].close()  # what a fallback would do
    assert marker.exists()


@pytest.mark.parametrize(
    ("value", "name"),
    [
        pytest.param(np.float64(1.5), r"numpy\S*\.scalar", id="numpy-scalar"),
        pytest.param(np.ones(2), r"numpy\S*\._reconstruct", id="numpy-array"),
        pytest.param(Innocent(), r"\S*Innocent", id="class-of-a-user"),
        pytest.param(Path("x"), r"pathlib\S*", id="path"),
        pytest.param(getattr, r"(__builtin__|builtins)\.getattr", id="builtin"),
        pytest.param(torch.nn.Linear(1, 1), r"torch\.nn\S*", id="module"),
        pytest.param(torch.eye(2).to_sparse(), r"torch._utils._rebuild_sparse_tensor", id="sparse"),
    ],
)
def test_anything_but_tensors_and_plain_values_is_refused_by_name(
    tmp_path: Path, value: object, name: str
) -> None:
    torch.save({"a": torch.ones(1), "v": value}, tmp_path / "x.pt")
    with pytest.raises(UnsafeFileError, match=f"pickle wants {name}, which is not on the list"):
        open_archive(tmp_path / "x.pt")


@pytest.mark.parametrize("suffix", ["pkl", "pt", "bin"])
def test_a_bare_pickle_is_refused(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"x.{suffix}"
    path.write_bytes(pickle.dumps({"a": Evil(tmp_path / "marker")}))
    with pytest.raises(UnsafeFileError, match="is a bare pickle") as caught:
        open_archive(path)
    assert caught.value.hint is not None
    assert not (tmp_path / "marker").exists()


def test_a_torch_file_of_before_1_6_is_refused(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(1)}, tmp_path / "x.pt", _use_new_zipfile_serialization=False)
    with pytest.raises(UnsafeFileError, match="expected the zip format of torch"):
        open_archive(tmp_path / "x.pt")


def write(
    path: Path,
    stream: bytes,
    data: bytes | None = None,
    *,
    order: str = "little",
    method: int = zipfile.ZIP_STORED,
) -> None:
    with zipfile.ZipFile(path, "w", method) as file:
        file.writestr("x/data.pkl", stream)
        file.writestr("x/byteorder", order)
        if data is not None:
            file.writestr("x/data/0", data)


def tensor(
    *, numel: int = 4, offset: int = 0, shape: object = (4,), strides: object = (1,), key: str = "0"
) -> bytes:
    """A pickle of one float32 tensor, written by hand."""
    class_ = b"ctorch._utils\n_rebuild_tensor_v2\n"
    parts = (
        b"(" + class_,
        b"((X\7\0\0\0storage",
        b"ctorch\nFloatStorage\n",
        b"X" + struct.pack("<I", len(key)) + key.encode(),
        b"X\3\0\0\0cpu" + number(numel) + b"tQ",
        number(offset) + sizes(shape) + sizes(strides),
        b"\x89ccollections\nOrderedDict\n)RtR.",
    )
    return b"\x80\2" + b"".join(parts)[1:]


def number(value: int) -> bytes:
    return pickle.dumps(value, 2)[2:-1]


def sizes(value: object) -> bytes:
    return (
        b"".join([b"(", *map(number, value), b"t"])
        if isinstance(value, tuple)
        else pickle.dumps(value, 2)[2:-1]
    )


DATA = np.arange(4, dtype="<f4").tobytes()


def test_the_handmade_pickle_is_read_when_it_is_right(tmp_path: Path) -> None:
    write(tmp_path / "x.pt", tensor(), DATA)
    with open_archive(tmp_path / "x.pt") as archive:
        assert archive.load(archive.records[0]).tolist() == [0.0, 1.0, 2.0, 3.0]
    with zipfile.ZipFile(tmp_path / "x.pt", "a") as file:
        file.writestr("x/version", "3")
    assert torch.load(tmp_path / "x.pt").tolist() == [0.0, 1.0, 2.0, 3.0]


TENSORS: dict[str, tuple[bytes, type[ReadError], str]] = {
    "offset-too-large": (tensor(offset=1), CorruptArchiveError, "reaches to element 4 of a storage of 4"),
    "shape-too-large": (tensor(shape=(5,)), CorruptArchiveError, "reaches to element 4"),
    "stride-too-large": (tensor(strides=(2,)), CorruptArchiveError, "reaches to element 6"),
    "stride-absurd": (tensor(strides=(2**62,)), CorruptArchiveError, "reaches to element"),
    "stride-negative": (tensor(strides=(-1,)), CorruptArchiveError, r"strides of a tensor is \(-1,\)"),
    "offset-negative": (tensor(offset=-1), CorruptArchiveError, r"offset of a tensor is \(-1,\)"),
    "shape-negative": (tensor(shape=(-4,)), CorruptArchiveError, r"shape of a tensor is \(-4,\)"),
    "shape-a-list": (tensor(shape=[4]), CorruptArchiveError, r"shape of a tensor is \[4\]"),
    "shape-of-4-EiB": (tensor(shape=(2**62,), strides=(0,)), CorruptArchiveError, "ARC-34"),
    "shape-of-100-axes": (tensor(shape=(1,) * 100, strides=(1,) * 100), CorruptArchiveError, "ARC-34"),
    "strides-fewer": (tensor(shape=(2, 2)), CorruptArchiveError, "a stride for each axis"),
    "numel-too-large": (tensor(numel=2**30), CorruptArchiveError, "has 16 bytes, expected 4294967296"),
    "numel-too-small": (tensor(numel=3), CorruptArchiveError, "has 16 bytes, expected 12"),
    "numel-negative": (tensor(numel=-4), CorruptArchiveError, "names no storage"),
    "storage-missing": (tensor(key="1"), CorruptArchiveError, "storage 'x/data/1' is missing"),
    "storage-elsewhere": (tensor(key="../data.pkl"), CorruptArchiveError, "is missing"),
    "no-stop": (tensor()[:-1], CorruptArchiveError, "pickle"),
    "cut": (tensor()[:40], CorruptArchiveError, "pickle makes no sense"),
    "empty": (b"", CorruptArchiveError, "pickle"),
    "underflow": (b"\x80\2R.", CorruptArchiveError, "stack underflow"),
    "nothing": (b"\x80\2.", CorruptArchiveError, "pickle makes no sense"),
    "no-mark": (b"\x80\2t.", CorruptArchiveError, "pickle makes no sense"),
    "memo": (b"\x80\2h\5.", CorruptArchiveError, "pickle makes no sense"),
    "memo-of-2-GiB": (b"\x80\2Nr\xff\xff\xff\x7f.", CorruptArchiveError, ""),
    "text-of-4-GiB": (b"\x80\2X\xff\xff\xff\xff.", CorruptArchiveError, "pickle makes no sense"),
    "bytes-of-8-EiB": (b"\x80\4\x8e" + b"\xff" * 7 + b"\x7f.", CorruptArchiveError, "pickle makes no sense"),
    "extension": (b"\x80\2\x82\1.", UnsafeFileError, "pickle instruction EXT1 is not allowed"),
    "instance": (b"(ios\nsystem\n.", UnsafeFileError, "pickle instruction INST is not allowed"),
    "object": (b"(cos\nsystem\no.", UnsafeFileError, r"pickle wants os\.system"),
    "new-object": (b"\x80\2ccollections\nOrderedDict\n)\x81.", UnsafeFileError, "instruction NEWOBJ"),
    "class-by-stack": (b"\x80\4\x8c\2os\x8c\6system\x93.", UnsafeFileError, r"pickle wants os\.system"),
    "class-by-lists": (b"\x80\4]]\x93.", CorruptArchiveError, "a class whose name is no text"),
    "call-of-a-dtype": (b"\x80\2ctorch\nfloat32\n)R.", CorruptArchiveError, "pickle makes no sense"),
    "key-a-tuple": (b"\x80\2})Ns.", CorruptArchiveError, "a key that is a tuple"),
    "state-of-a-list": (b"\x80\2]}b.", CorruptArchiveError, "state of a list"),
    "persistent-id": (b"\x80\2NQ.", CorruptArchiveError, "pickle makes no sense"),
}


@pytest.mark.parametrize("case", TENSORS)
def test_a_pickle_that_lies_is_one_line_and_allocates_nothing(tmp_path: Path, case: str) -> None:
    stream, error, reason = TENSORS[case]
    if case == "memo-of-2-GiB":  # harmless to us: nothing but a value without a tensor
        write(tmp_path / "x.pt", stream)
        tracemalloc.start()
        with open_archive(tmp_path / "x.pt") as archive:
            assert archive.values == {"x": None}
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
        tracemalloc.stop()
        return
    write(tmp_path / "x.pt", stream, DATA)
    tracemalloc.start()
    try:
        with pytest.raises(error, match=reason) as caught:
            open_archive(tmp_path / "x.pt")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 1_000_000
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 600


def nested(depth: int) -> bytes:
    """`depth` lists, each with the one before twice: 2 ** depth leaves in a few bytes."""
    return b"\x80\2]q\0Na" + b"".join(b"](h%ch%ce" % (0, 0) + b"q\0" for _ in range(depth)) + b"."


@pytest.mark.parametrize(
    "stream",
    [
        pytest.param(nested(60), id="billion-laughs"),
        pytest.param(b"\x80\2]q\0h\0a.", id="cycle"),
        pytest.param(b"\x80\2" + b"]" * 200_000 + b"a" * 199_999 + b".", id="deep"),
        pytest.param(b"\x80\2" + b")" + b"\x85" * 200_000 + b".", id="deep-tuple"),
        pytest.param(b"\x80\2}" + b")" + b"\x85" * 200_000 + b"Ns.", id="deep-key"),
        pytest.param(b"\x80\4" + nested(60)[2:-1] + b"\x8c\1x\x93.", id="laughs-in-a-message"),
        pytest.param(nested(60)[:-1] + b"Q.", id="laughs-as-an-id"),
    ],
)
def test_a_small_pickle_of_endless_values_is_refused_soon(tmp_path: Path, stream: bytes) -> None:
    write(tmp_path / "x.pt", stream)
    begin = time.process_time()
    with pytest.raises(CorruptArchiveError) as caught:
        open_archive(tmp_path / "x.pt")
    assert time.process_time() - begin < 20
    assert len(str(caught.value)) < 600


FILES: dict[str, tuple[Callable[[Path], object], type[ReadError], str]] = {
    "big-endian": (
        lambda p: write(p, tensor(), DATA, order="big"),
        NotAnArchiveError,
        "byte order is b'big'",
    ),
    "compressed": (
        lambda p: write(p, tensor(), DATA, method=zipfile.ZIP_DEFLATED),
        NotAnArchiveError,
        "its pickle is compressed",
    ),
    "two-pickles": (
        lambda p: _two(p),
        NotAnArchiveError,
        "has 2 members data.pkl",
    ),
}


def _two(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("x/data.pkl", tensor())
        file.writestr("y/data.pkl", tensor())


@pytest.mark.parametrize("case", FILES)
def test_a_file_that_is_not_as_torch_writes_it_is_refused(tmp_path: Path, case: str) -> None:
    make, error, reason = FILES[case]
    make(tmp_path / "x.pt")
    with pytest.raises(error, match=reason):
        open_archive(tmp_path / "x.pt")


def test_a_conjugated_view_is_refused_and_not_misread(tmp_path: Path) -> None:
    torch.save(torch.ones(2, dtype=torch.complex64).conj(), tmp_path / "x.pt")
    with pytest.raises(NotAnArchiveError, match="conjugation or sign is yet to be applied"):
        open_archive(tmp_path / "x.pt")


@pytest.mark.parametrize("cut", [1, 100, 600])
def test_a_file_that_was_cut_short_is_refused(tmp_path: Path, cut: int) -> None:
    torch.save(torch.ones(100), tmp_path / "x.pt")
    (tmp_path / "x.pt").write_bytes((tmp_path / "x.pt").read_bytes()[:-cut])
    with pytest.raises(ReadError):
        open_archive(tmp_path / "x.pt")


def test_a_link_out_of_a_folder_is_not_followed(tmp_path: Path) -> None:
    torch.save(torch.ones(1), tmp_path / "secret.pt")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "x.pt").symlink_to(tmp_path / "secret.pt")
    with pytest.raises(UnsafeFileError, match="is a link to a file outside"):
        open_archive(tmp_path / "folder")


def test_random_damage_ends_in_an_error_of_ours_or_in_a_right_read(tmp_path: Path) -> None:
    out = io.BytesIO()
    torch.save({"a": torch.arange(20.0).reshape(4, 5).T, "b": [1, "x", torch.ones(3, dtype=torch.int8)]}, out)
    random = np.random.default_rng(0)
    path = tmp_path / "x.pt"
    refused = 0
    for _ in range(300):
        data = bytearray(out.getvalue())
        for at in random.integers(0, len(data), 3):
            data[at] = random.integers(0, 256)
        path.write_bytes(data)
        try:
            with open_archive(path) as archive:
                for record in archive.records:
                    archive.read(record)
        except ReadError:
            refused += 1
    assert refused > 30


def test_the_module_imports_neither_pickle_nor_torch() -> None:
    code = "import sys; import tensorcap_formats.foreign.torch_pickle; print('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={"PYTHONPATH": str(Path(torch_pickle.__file__).parents[1])},
    )
    assert done.stdout == "False\n"
    assert not hasattr(torch_pickle, "pickle")
