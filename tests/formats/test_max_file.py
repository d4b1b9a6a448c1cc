"""Checkpoints of MAX's debug prints, byte for byte."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from tensorcap_formats.dtypes import DTYPES
from tensorcap_formats.errors import UsageError
from tensorcap_formats.foreign import write_max
from tensorcap_formats.open import open_archive

SPEC = (Path(__file__).parents[2] / "specs/max-files.md").read_text()
# magic, version 0.1, 19 bytes of metadata, a label of one byte: x
HEAD = "93f09f94a52b2b93 00000000 01000000 1300000000000000 01000000 78"

CASES = {  # code, elements, values
    "bool": ("01", "01 00 01", [True, False, True]),
    "uint8": ("86", "00 01 ff", [0, 1, 255]),
    "int8": ("87", "00 01 ff", [0, 1, -1]),
    "uint16": ("88", "0000 0100 ffff", [0, 1, 65535]),
    "int16": ("89", "0000 0100 feff", [0, 1, -2]),
    "uint32": ("8a", "00000000 01000000 ffffffff", [0, 1, 2**32 - 1]),
    "int32": ("8b", "00000000 01000000 ffffffff", [0, 1, -1]),
    "uint64": ("8c", "0000000000000000 0100000000000000 ffffffffffffffff", [0, 1, 2**64 - 1]),
    "int64": ("8d", "0000000000000000 0100000000000000 ffffffffffffffff", [0, 1, -1]),
    "float16": ("4f", "003c 00c0 ff7b", [1.0, -2.0, 65504.0]),
    "bfloat16": ("50", "803f 00c0 407f", [1.0, -2.0, 255211775190703847597530955573826158592.0]),
    "float32": ("51", "0000803f 000000c0 01000000", [1.0, -2.0, 2.0**-149]),
    "float64": ("52", "000000000000f03f 00000000000000c0 182d4454fb210940", [1.0, -2.0, 3.141592653589793]),
    "float8_e8m0fnu": ("49", "7f 80 7d", [1.0, 2.0, 0.25]),
    "float8_e4m3fn": ("4b", "38 c0 7e", [1.0, -2.0, 448.0]),
    "float8_e4m3fnuz": ("4c", "40 c8 7f", [1.0, -2.0, 240.0]),
    "float8_e5m2": ("4d", "3c c0 7b", [1.0, -2.0, 57344.0]),
    "float8_e5m2fnuz": ("4e", "40 c4 7f", [1.0, -2.0, 57344.0]),
    "float4_e2m1fn": ("40", "02 0c 07", [1.0, -2.0, 6.0]),
    "float6_e2m3fn": ("41", "08 30 1f", [1.0, -2.0, 7.5]),
    "float6_e3m2fn": ("42", "0c 30 1f", [1.0, -2.0, 28.0]),
}


def literal(code: str, elements: str) -> bytes:
    return bytes.fromhex(f"{HEAD} {code} 01 03000000 2b00000000000000 {elements}")


@pytest.mark.spec("MXF-1", "MXF-6")
@pytest.mark.parametrize("name", CASES)
def test_every_dtype_code_is_read_and_written_as_these_bytes(tmp_path: Path, name: str) -> None:
    code, elements, values = CASES[name]
    path, written = tmp_path / "t.max", tmp_path / "w.max"
    path.write_bytes(literal(code, elements))
    with open_archive(path) as archive:
        (record,) = archive.records
        assert (record.dtype.name, record.shape) == (name, (3,))
        assert archive.load(record).tolist() == values
        write_max(written, "x", record.dtype, (3,), archive.blocks(record))
    assert written.read_bytes() == path.read_bytes()


def test_no_other_dtype_has_a_code(tmp_path: Path) -> None:
    for name in sorted(DTYPES.keys() - CASES.keys()):
        with pytest.raises(UsageError, match=rf"have no dtype '{name}' \(MXF-6\)"):
            write_max(tmp_path / "x.max", "x", DTYPES[name], (0,), [])
    assert not (tmp_path / "x.max").exists()


@pytest.mark.spec("MXF-1")
def test_examples_of_the_specification_are_read_and_written(tmp_path: Path) -> None:
    scalar, pair = map(bytes.fromhex, re.findall(r"```hex\n(.*?)```", SPEC, re.DOTALL))
    for label, data, shape, values in (("a", scalar, (), 7.5), ("b-output", pair, (1, 2), [[1.0, -2.0]])):
        path = tmp_path / f"{label}.max"
        path.write_bytes(data)
        with open_archive(path) as archive:
            (record,) = archive.records
            assert record.shape == shape
            assert archive.load(record).tolist() == values
            again = tmp_path / f"{label}.again"
            write_max(again, label, record.dtype, shape, archive.blocks(record))
        assert again.read_bytes() == data


@pytest.mark.spec("MXF-8")
def test_a_single_file_is_named_as_it_is_called_whatever_its_label(tmp_path: Path) -> None:
    path = tmp_path / "model.norm-output.max"
    path.write_bytes(literal(*CASES["float32"][:2]))
    with open_archive(path) as archive:
        assert [record.key.text for record in archive.records] == ["model.norm-output"]
        assert (archive.container, archive.is_foreign, archive.is_ordered) == ("max", True, False)


@pytest.mark.spec("MXF-7")
def test_elements_that_lie_unaligned_are_read_from_any_place(tmp_path: Path) -> None:
    path = tmp_path / "t.max"
    path.write_bytes(literal(*CASES["float64"][:2]))  # they begin at byte 43
    with open_archive(path) as archive:
        (record,) = archive.records
        assert archive.read_range(record, 1, 3).tolist() == [-2.0, 3.141592653589793]
        assert [block.tolist() for block in archive.blocks(record, 8)] == [[1.0], [-2.0], [3.141592653589793]]
        assert archive.read(record).flags.aligned


@pytest.mark.spec("MXF-7")
def test_elements_may_begin_behind_a_gap(tmp_path: Path) -> None:
    path = tmp_path / "t.max"
    path.write_bytes(
        bytes.fromhex(f"{HEAD} 51 01 01000000 3000000000000000") + bytes(5) + bytes.fromhex("0000803f")
    )
    with open_archive(path) as archive:
        assert archive.read(archive.records[0]).tolist() == [1.0]


def test_empty_tensors_have_their_shape(tmp_path: Path) -> None:
    path = tmp_path / "t.max"
    write_max(path, "x", DTYPES["bfloat16"], (3, 0), [])
    with open_archive(path) as archive:
        assert archive.read(archive.records[0]).shape == (3, 0)


@pytest.mark.spec("MXF-5")
@pytest.mark.parametrize("label", ["", "x" * 4097, "a\0b"])
def test_labels_that_the_format_cannot_hold_are_refused(tmp_path: Path, label: str) -> None:
    with pytest.raises(UsageError, match=r"expected 1 to 4096 without NUL \(MXF-5\)"):
        write_max(tmp_path / "x.max", label, DTYPES["int8"], (1,), [np.zeros(1, "i1")])


def test_slashes_of_a_label_become_underscores(tmp_path: Path) -> None:
    write_max(tmp_path / "x.max", "a/b", DTYPES["int8"], (1,), [np.zeros(1, "i1")])
    assert (tmp_path / "x.max").read_bytes()[28:31] == b"a_b"


@pytest.mark.spec("MXF-40")
def test_raw_numbers_open_with_dtype_and_shape_given(tmp_path: Path) -> None:
    path = tmp_path / "x.bin"
    path.write_bytes(bytes.fromhex("803f 0040 4040 8040 a040 c040"))
    with open_archive(f"{path}:bfloat16:2,3") as archive:
        (record,) = archive.records
        assert (record.key.text, archive.container) == ("x", "raw")
        assert archive.load(record).tolist() == [[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]
    with pytest.raises(OSError, match=r"has 12 bytes, expected 24 for float32 of shape \(2, 3\) \(MXF-40\)"):
        open_archive(f"{path}:float32:2,3")
    with pytest.raises(ValueError, match=r"expected up to 32 sizes of at most \d+ bytes in all"):
        open_archive(f"{path}:float32:99999999999,99999999999")
    (tmp_path / "s").write_bytes(b"\1")
    with open_archive(f"{tmp_path / 's'}:bool:") as archive:
        assert archive.read(archive.records[0]).tolist() is True


@pytest.mark.spec("MXF-40")
def test_a_file_of_that_very_name_goes_before_raw_numbers(tmp_path: Path) -> None:
    path = tmp_path / "x.max:int8:1"
    path.write_bytes(literal(*CASES["int8"][:2]))
    with open_archive(path) as archive:
        assert archive.container == "max"


def test_what_is_no_known_file_is_told_how_raw_numbers_are_opened(tmp_path: Path) -> None:
    for name in ("x.bin", "model.norm-output", "x.max"):
        (tmp_path / name).write_bytes(bytes(range(1, 25)))
        with pytest.raises(OSError, match="expected") as caught:
            open_archive(tmp_path / name)
        assert f"{name}:float32:2,3" in (getattr(caught.value, "hint", None) or "")
