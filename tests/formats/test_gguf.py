"""GGUF files: bytes made by hand as ggml's documents lay them out, and what each block stands for."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from tensorcap_formats.errors import CorruptArchiveError, NotAnArchiveError, ReadError
from tensorcap_formats.open import open_archive

F32, F16, Q4_0, Q8_0, I32, BF16, IQ1_M = 0, 1, 2, 8, 26, 30, 29


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


def gguf(
    tensors: Sequence[tuple[bytes, int, tuple[int, ...], bytes]], keys: bytes = b"", *, count: int = 0
) -> bytes:
    """A file of version 3 with tensors of name, type, sizes (fastest first) and bytes."""
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), count) + keys
    data = b""
    for name, kind, sizes, content in tensors:
        head += text(name) + struct.pack(f"<I{len(sizes)}Q", len(sizes), *sizes)
        head += struct.pack("<IQ", kind, len(data))
        data += content + bytes(-len(content) % 32)
    return head + bytes(-len(head) % 32) + data


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "net.gguf"


def read(path: Path, name: str) -> np.ndarray:
    with open_archive(path) as archive:
        return archive.load(archive.get(name))


@pytest.mark.spec("ARC-83")
def test_plain_tensors_have_their_dtypes_and_the_axis_that_varies_fastest_is_last(path: Path) -> None:
    path.write_bytes(
        gguf(
            [
                (b"token_embd.weight", F32, (3, 2), struct.pack("<6f", 1, 2, 3, 4, 5, 6)),
                (b"norm.weight", BF16, (2,), bytes.fromhex("803f2040")),
                (b"half", F16, (2,), bytes.fromhex("003c00c0")),
                (b"ids", I32, (2,), struct.pack("<2i", -1, 7)),
            ]
        )
    )
    with open_archive(path) as archive:
        records = [(r.key.text, r.dtype.name, r.shape) for r in archive.records]
    assert records == [
        ("half", "float16", (2,)),
        ("ids", "int32", (2,)),
        ("norm.weight", "bfloat16", (2,)),
        ("token_embd.weight", "float32", (2, 3)),
    ]
    assert read(path, "token_embd.weight").tolist() == [[1, 2, 3], [4, 5, 6]]
    assert read(path, "norm.weight").tolist() == [1, 2.5]
    assert read(path, "half").tolist() == [1, -2]
    assert read(path, "ids").tolist() == [-1, 7]


@pytest.mark.spec("ARC-83")
def test_quantised_tensors_are_dequantised(path: Path) -> None:
    # a block of Q8_0: a scale in float16 and 32 integers; of Q4_0: a scale and 32 halves of bytes, less 8
    eights = b"".join(struct.pack("<e32b", scale, *range(-16, 16)) for scale in (0.5, 2.0))
    fours = struct.pack("<e", 0.25) + bytes(0xF0 + low for low in range(16))
    path.write_bytes(gguf([(b"a", Q8_0, (32, 2), eights), (b"b", Q4_0, (32,), fours)]))
    values = read(path, "a")
    assert values.shape == (2, 32)
    assert values[0].tolist() == [0.5 * n for n in range(-16, 16)]
    assert values[1].tolist() == [2.0 * n for n in range(-16, 16)]
    assert read(path, "b").tolist() == [0.25 * (n - 8) for n in range(16)] + [0.25 * 7] * 16
    with open_archive(path) as archive:
        assert archive.get("a").dtype.name == "float32"
        assert archive.read_range(archive.get("a"), 31, 33).tolist() == [7.5, -32.0]
        assert archive.info.notes == ("Quantised tensors (1 Q8_0, 1 Q4_0) are dequantised to float32.",)


def test_a_long_quantised_tensor_is_read_in_bands(path: Path) -> None:
    rows = 70_000  # of 32 elements: more than two bands
    scales = np.arange(rows) % 100
    blocks = np.zeros(rows, [("scale", "<f2"), ("values", "i1", 32)])
    blocks["scale"], blocks["values"] = scales, np.arange(32)
    path.write_bytes(gguf([(b"w", Q8_0, (32, rows), blocks.tobytes())]))
    assert np.array_equal(read(path, "w"), scales[:, None] * np.arange(32.0))


def test_a_type_that_the_package_cannot_dequantise_makes_one_tensor_unreadable(path: Path) -> None:
    path.write_bytes(
        gguf([(b"w", IQ1_M, (256,), bytes(56)), (b"v", 24, (2,), b"\1\2"), (b"q", 15, (256,), bytes(292))])
    )
    with open_archive(path) as archive:
        assert archive.load(archive.get("v")).tolist() == [1, 2]
        with pytest.raises(
            ReadError, match="'q': is of type Q8_K, which the package gguf does not dequantise"
        ):
            archive.load(archive.get("q"))


def test_lists_of_tokens_before_the_tensors_are_passed_over(path: Path) -> None:
    keys = text(b"tokens") + struct.pack("<IIQ", 9, 8, 2) + text(b"a") + text(b"bcd")
    keys += (
        text(b"types") + struct.pack("<IIQ3i", 9, 5, 3, 1, 2, 3) + text(b"size") + struct.pack("<II", 4, 7)
    )
    path.write_bytes(gguf([(b"w", F32, (2,), struct.pack("<2f", 1, 2))], keys, count=3))
    assert read(path, "w").tolist() == [1, 2]


WHOLE = gguf([(b"w", F32, (2,), struct.pack("<2f", 1, 2)), (b"q", Q8_0, (32,), bytes(34))])
BROKEN = {
    "magic-only": b"GGUF",
    "version-1": b"GGUF" + struct.pack("<IQQ", 1, 0, 0),
    "tensors-without-end": b"GGUF" + struct.pack("<IQQ", 3, 2**62, 0),
    "keys-without-end": b"GGUF" + struct.pack("<IQQ", 3, 0, 2**62),
    "array-without-end": gguf([], text(b"k") + struct.pack("<IIQ", 9, 0, 2**62), count=1),
    "texts-without-end": gguf([], text(b"k") + struct.pack("<IIQQ", 9, 8, 2**62, 2**63), count=1),
    "arrays-in-arrays": gguf(
        [], text(b"k") + struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 5000, count=1
    ),
    "name-without-end": b"GGUF" + struct.pack("<IQQQ", 3, 1, 0, 2**63),
    "sizes-beyond-all": gguf([(b"w", F32, (2**62, 2**62), b"")]),
    "type-unknown": gguf([(b"w", 9999, (1,), bytes(4))]),
    "half-a-block": gguf([(b"w", Q8_0, (31,), bytes(34))]),
    "two-of-a-name": gguf([(b"w", F32, (1,), bytes(4)), (b"w", F32, (1,), bytes(4))]),
    "data-cut": WHOLE[:-40],
}


@pytest.mark.parametrize("kind", list(BROKEN))
def test_a_file_that_lies_is_one_error(kind: str, path: Path) -> None:
    path.write_bytes(BROKEN[kind])
    with pytest.raises(CorruptArchiveError) as caught:
        open_archive(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert "\n" not in str(caught.value)


def test_a_file_without_tensors_and_a_big_endian_one_are_named(path: Path) -> None:
    path.write_bytes(gguf([]))
    with pytest.raises(NotAnArchiveError, match="is a GGUF file without tensors"):
        open_archive(path)
    path.write_bytes(b"GGUF" + struct.pack(">IQQ", 3, 0, 0))
    with pytest.raises(NotAnArchiveError, match="is a big-endian GGUF file"):
        open_archive(path)


def test_a_damaged_file_is_an_error_or_opens(path: Path) -> None:
    draw = np.random.default_rng(0)
    for _ in range(200):
        damaged = bytearray(WHOLE[: draw.integers(5, len(WHOLE) + 1)])
        damaged[int(draw.integers(4, len(damaged)))] ^= int(draw.integers(1, 256))
        path.write_bytes(damaged)
        try:
            with open_archive(path) as archive:
                for record in archive.records:
                    archive.load(record)
        except ReadError:
            pass
