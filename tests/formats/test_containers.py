"""What every container promises; the same tests for all three."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest

from tensorcap_formats.archive import Archive
from tensorcap_formats.dtypes import DTYPES, dtype
from tensorcap_formats.errors import CorruptArchiveError, UsageError
from tensorcap_formats.keys import Key
from tensorcap_formats.open import open_archive
from tensorcap_formats.statistics import Statistics
from tensorcap_formats.writing import Writer

# Four stored elements of each dtype, as the bytes that must come back: extremes, NaN with a payload, -0.
EIGHT_BITS = "00 7f 80 ff"
BYTES = {
    "bool": "00 01 01 00",
    "int8": EIGHT_BITS,
    "uint8": EIGHT_BITS,
    "int16": "0080 ff7f ffff 0100",
    "uint16": "0080 ff7f ffff 0100",
    "int32": "00000080 ffffff7f ffffffff 01000001",
    "uint32": "00000080 ffffff7f ffffffff 01000001",
    "int64": "0000000000000080 ffffffffffffff7f 0100000000002000 ffffffffffffffff",
    "uint64": "0000000000000080 ffffffffffffff7f 0100000000002000 ffffffffffffffff",
    "float16": "0080 017e 007c 0100",
    "bfloat16": "0080 c17f 807f 0100",
    "float32": "00000080 0100c07f 0000807f 01000000",
    "float64": "0000000000000080 010000000000f87f 000000000000f07f 0100000000000000",
    "complex32": "00800000 017e003c 007c00fc 01000100",
    "complex64": "0000008000000000 0100c07f0000803f 0000807f000080ff 0100000001000000",
    "complex128": "00000000000000800000000000000000 010000000000f87f000000000000f03f"
    " 000000000000f07f000000000000f0ff 01000000000000000100000000000000",
    "float4_e2m1fn_x2": "00 7f 80 f1",
    **dict.fromkeys(
        (
            "float8_e3m4",
            "float8_e4m3",
            "float8_e4m3b11fnuz",
            "float8_e4m3fn",
            "float8_e4m3fnuz",
            "float8_e5m2",
            "float8_e5m2fnuz",
            "float8_e8m0fnu",
            "float6_e2m3fn",
            "float6_e3m2fn",
            "float4_e2m1fn",
        ),
        EIGHT_BITS,
    ),
    **{f"{sign}int{n}": EIGHT_BITS for n in range(1, 8) for sign in ("", "u")},
}
RUN = {"framework": {"name": "torch", "version": "2.13"}, "text": 'quote " and ü and \u2028', "steps": 1}


def test_there_is_a_line_of_bytes_for_every_dtype() -> None:
    assert BYTES.keys() == DTYPES.keys()


def floats(*values: float) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    return np.array(values, np.float32)


class ContainerContract:
    suffix: ClassVar[str]

    @pytest.fixture
    def path(self, tmp_path: Path) -> Path:
        return tmp_path / f"run{self.suffix}"

    @pytest.fixture
    def archive(self, path: Path) -> Iterator[Archive]:
        """Three records of two tensors, values and a run."""
        writer = Writer(path, run=RUN)
        writer.add(Key("b", "output"), floats(1, -2, 0), dtype("float32"), (3,))
        writer.add(Key("a", "input.x"), floats(1, -2, 0), dtype("float32"), (3,))
        writer.add(
            Key("@root", "output", step=1, call=2, rank=3), floats(5, np.nan), dtype("float32"), (2, 1)
        )
        writer.add_value("0/a/input.scale", 0.5)
        writer.add_value("0/a/input.mode", None)
        writer.close()
        with open_archive(path) as opened:
            yield opened

    @pytest.mark.spec("ARC-2", "ARC-10")
    @pytest.mark.parametrize("name", BYTES)
    def test_four_elements_come_back_bit_for_bit(self, path: Path, name: str) -> None:
        logical = dtype(name)
        bits = np.frombuffer(bytes.fromhex(BYTES[name]), logical.storage)
        writer = Writer(path)
        writer.add(Key("m", "output"), bits.reshape(2, 2), logical, (2, 2))
        writer.close()
        with open_archive(path) as archive:
            (record,) = archive.records
            assert (record.dtype.name, record.shape) == (name, (2, 2))
            read = archive.read(record)
            assert read.shape == (2, 2)
            assert read.tobytes() == bytes.fromhex(BYTES[name])

    @pytest.mark.parametrize("name", ["float32", "bfloat16", "complex128", "float4_e2m1fn_x2", "bool"])
    @pytest.mark.parametrize("shape", [(), (1,), (0,), (0, 4), (3, 0, 2), (1,) * 32], ids=str)
    def test_odd_shapes_come_back(self, path: Path, name: str, shape: tuple[int, ...]) -> None:
        logical = dtype(name)
        writer = Writer(path)
        writer.add(Key("m", "output"), np.ones(shape, logical.storage), logical, shape)
        writer.close()
        with open_archive(path) as archive:
            assert archive.records[0].shape == shape
            read = archive.read(archive.records[0])
            assert (read.shape, read.dtype.str) == (shape, logical.storage)
            assert read.tobytes() == np.ones(shape, logical.storage).tobytes()

    def test_equal_bytes_of_other_dtype_or_shape_stay_apart(self, path: Path) -> None:
        bits = np.arange(4, dtype="<u2")
        writer = Writer(path)
        for site, name, shape in (("a", "uint16", (4,)), ("b", "bfloat16", (4,)), ("c", "uint16", (2, 2))):
            writer.add(Key(site, "output"), bits, dtype(name), shape)
        writer.close()
        with open_archive(path) as archive:
            assert [(r.dtype.name, r.shape) for r in archive.records] == [
                ("uint16", (4,)),
                ("bfloat16", (4,)),
                ("uint16", (2, 2)),
            ]
            assert [archive.read(r).tobytes() for r in archive.records] == [bits.tobytes()] * 3

    def test_records_are_in_execution_order_and_are_found_by_key(self, archive: Archive) -> None:
        assert archive.is_ordered
        assert [r.key.text for r in archive.records] == [
            "0/b/output",
            "0/a/input.x",
            "rank3/1/@root@2/output",
        ]
        assert [r.order for r in archive.records] == [0, 1, 2]
        assert archive.get("a/input.x").row == 1

    @pytest.mark.spec("ARC-14")
    def test_order_numbers_stay_as_they_were_given(self, path: Path) -> None:
        writer = Writer(path)
        writer.add(Key("late", "output"), floats(1), dtype("float32"), (1,), order=30)
        writer.add(Key("early", "output"), floats(2), dtype("float32"), (1,), order=7)
        writer.close(ordered=False)
        with open_archive(path) as archive:
            assert [(r.key.text, r.order) for r in archive.records] == [
                ("0/early/output", 7),
                ("0/late/output", 30),
            ]
            assert not archive.is_ordered

    @pytest.mark.spec("ARC-13")
    def test_run_and_values_come_back(self, archive: Archive) -> None:
        assert archive.run == RUN
        assert archive.values == {"0/a/input.scale": 0.5, "0/a/input.mode": None}
        assert not archive.is_foreign

    @pytest.mark.spec("ARC-11", "ARC-12")
    def test_statistics_and_digests_come_back(self, archive: Archive) -> None:
        first, second, third = archive.records
        assert first.statistics == Statistics(-2.0, 1.0, -1 / 3, 5**0.5, 0, 0, 0, 1)
        assert third.statistics == Statistics(5.0, 5.0, 5.0, 5.0, 1, 0, 0, 0)
        assert first.digest == second.digest != third.digest
        assert len(first.digest) == 32

    @pytest.mark.spec("ARC-60")
    def test_equal_tensors_are_stored_once(self, path: Path) -> None:
        tensor = np.arange(100_000, dtype="<f4")
        writer = Writer(path)
        for step in range(10):
            writer.add(Key("m", "output", step=step), tensor, dtype("float32"), (100_000,))
        writer.close()
        files = [path] if path.is_file() else [p for p in path.rglob("*") if p.is_file()]
        assert sum(p.stat().st_size for p in files) < 1.1 * 400_000
        with open_archive(path) as archive:
            assert all(archive.read(r).tobytes() == tensor.tobytes() for r in archive.records)

    def test_only_statistics_are_kept_if_that_was_asked_for(self, path: Path) -> None:
        writer = Writer(path, stats_only=True)
        writer.add(Key("m", "output"), floats(3, 4), dtype("float32"), (2,))
        writer.close()
        with open_archive(path) as archive:
            assert archive.records[0].statistics == Statistics(3.0, 4.0, 3.5, 5.0, 0, 0, 0, 0)
            with pytest.raises(UsageError, match="only its statistics were kept"):
                archive.read(archive.records[0])

    def test_a_run_that_ended_by_an_error_says_so(self, path: Path) -> None:
        writer = Writer(path)
        writer.add(Key("m", "output"), floats(1), dtype("float32"), (1,))
        writer.close(run={"error": "ValueError"}, complete=False)
        with open_archive(path) as archive:
            assert not archive.is_complete
            assert archive.run == {"error": "ValueError"}

    def test_any_part_of_a_tensor_is_read_in_blocks(self, path: Path) -> None:
        tensor = np.arange(3 * 5 * 7, dtype="<i2").reshape(3, 5, 7)
        writer = Writer(path)
        writer.add(Key("m", "output"), tensor, dtype("int16"), tensor.shape)
        writer.close()
        with open_archive(path) as archive:
            blocks = [block.tolist() for block in archive.blocks(archive.records[0], block_bytes=22)]
            assert [len(b) for b in blocks] == [11] * 9 + [6]
            assert [x for block in blocks for x in block] == list(range(105))

    def test_hostile_sites_stay_inside(self, path: Path, tmp_path: Path) -> None:
        sites = ["%2E%2E", "zarr.json", "__x", "x" * 2000, "ü" * 300, "c", "index", "run", "a%2F..%2Fb"]
        writer = Writer(path)
        for i, site in enumerate(sites):
            writer.add(Key(site, "output"), floats(i), dtype("float32"), (1,))
        writer.close()
        assert [p.name for p in tmp_path.iterdir()] == [path.name]
        with open_archive(path) as archive:
            assert [(r.key.site, archive.load(r).tolist()) for r in archive.records] == [
                (site, [float(i)]) for i, site in enumerate(sites)
            ]

    def test_an_archive_without_records_opens(self, path: Path) -> None:
        Writer(path).close()
        with open_archive(path) as archive:
            assert len(archive) == 0

    def test_an_archive_is_replaced_by_the_next(self, path: Path, archive: Archive) -> None:
        writer = Writer(path)
        writer.add(Key("new", "output"), floats(9), dtype("float32"), (1,))
        writer.close()
        with open_archive(path) as opened:
            assert [r.key.text for r in opened.records] == ["0/new/output"]
        assert [p.name for p in path.parent.iterdir()] == [path.name]

    @pytest.mark.parametrize(
        "mebibytes",
        [pytest.param(96, id="96-MiB"), pytest.param(2048, id="2-GiB", marks=pytest.mark.slow)],
    )
    def test_a_large_tensor_is_written_and_read_in_bounded_memory(self, path: Path, mebibytes: int) -> None:
        block = np.arange(2**18, dtype="<f4")  # 1 MiB
        shape = (mebibytes, 2**18)
        tracemalloc.start()
        try:
            writer = Writer(path)
            blocks = (block for _ in range(mebibytes))
            writer.add_blocks(Key("m", "output"), blocks, dtype("float32"), shape)
            writer.close()
            with open_archive(path) as archive:
                total = sum(int(b[0]) + int(b[-1]) for b in archive.blocks(archive.records[0], 2**20))
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert total == mebibytes * (2**18 - 1)
        assert peak < 24 * 2**20

    def test_a_byte_that_changed_is_found(self, path: Path) -> None:
        writer = Writer(path)
        writer.add(Key("m", "output"), np.full(5000, 77.5, "<f4"), dtype("float32"), (5000,))
        writer.close()
        files = [path] if path.is_file() else [p for p in path.rglob("*") if "steps" in p.parts]
        for file in files:
            if file.is_file() and (data := file.read_bytes()).count(b"\0\0\x9b\x42") > 4000:
                at = data.index(b"\0\0\x9b\x42" * 5000) + 4000
                file.write_bytes(data[:at] + b"\1" + data[at + 1 :])
        with (
            open_archive(path) as archive,
            pytest.raises(CorruptArchiveError, match="0/m/output: is damaged"),
        ):
            list(archive.blocks(archive.records[0]))


class TestHdf5(ContainerContract):
    suffix = ".h5"


class TestZarr(ContainerContract):
    suffix = ".zarr"


class TestSafetensors(ContainerContract):
    suffix = ".safetensors"
