"""The specifications and the code hold each other: every clause has a test, tables say what is done."""

import json
import re
from pathlib import Path

import numpy as np
import pytest

from tensorcap_formats import errors
from tensorcap_formats.dtypes import DTYPES, dtype
from tensorcap_formats.hdf5 import datatype_of
from tensorcap_formats.keys import Key, escape
from tensorcap_formats.open import open_archive
from tensorcap_formats.output_path import journal_path
from tensorcap_formats.writing import Writer

ROOT = Path(__file__).parents[1]
ARCHIVE_SPEC = (ROOT / "specs/archive.md").read_text()
NAMES_SPEC = (ROOT / "specs/names.md").read_text()


def ids(pattern: str, *globs: str) -> set[str]:
    return {
        found for glob in globs for path in ROOT.glob(glob) for found in re.findall(pattern, path.read_text())
    }


def block(kind: str) -> str:
    return str(re.findall(rf"```{kind}\n(.*?)```", ARCHIVE_SPEC, re.DOTALL)[0])


def test_clauses_and_tests_name_each_other() -> None:
    written = ids(r"(?m)^- \*\*([A-Z]+-\d+)\*\* ", "specs/*.md")
    assert written, "no clause found: has the markup of specs/ changed?"
    marks = ids(r"mark\.spec\(([^)]*)\)", "tests/**/*.py")
    assert {clause for mark in marks for clause in re.findall(r'"([A-Z]+-\d+)"', mark)} == written


def test_clauses_that_messages_name_exist() -> None:
    written = ids(r"(?m)^- \*\*([A-Z]+-\d+)\*\* ", "specs/*.md")
    assert (
        ids(r"\b((?:ARC|NAM|CMP|MET)-\d+)\b", "formats/**/*.py", "tensorcap/**/*.py", "cli/**/*.py")
        <= written
    )


@pytest.fixture
def written(tmp_path: Path) -> tuple[Path, str]:
    """The archive of the test vectors, and its journal as it was before `close`."""
    path = tmp_path / "a.h5"
    writer = Writer(path)
    writer.add(Key("fc", "output"), np.array([1, -2], "<f4"), dtype("float32"), (2,))
    writer.add_value("0/fc/input.mask", None)
    journal = journal_path(path).read_text()
    writer.close()
    return path, journal


@pytest.mark.spec("ARC-31", "ARC-40", "ARC-51")
def test_the_test_vectors_are_what_is_written(written: tuple[Path, str]) -> None:
    path, journal = written
    data = path.read_bytes()
    assert data[2048:2056] == bytes.fromhex(block("hex"))
    index = block("json").strip().encode()
    assert data[2112 : 2112 + len(index)] == index
    assert journal == block("journal")


@pytest.mark.spec("ARC-43")
def test_the_note_is_laid_out_as_specified(written: tuple[Path, str]) -> None:
    data = written[0].read_bytes()
    assert data[96:112] == b"TCAPNOTE\x01\0\0\0\0\0\0\0"
    size, tail, index_at, index_size, run_at, run_size, table_at, count = np.frombuffer(data, "<u8", 8, 112)
    assert (size, tail, index_at, count) == (len(data), 2112, 2112, 1)
    assert json.loads(data[index_at : index_at + index_size])["tensorcap"] == "1.0"
    assert data[run_at : run_at + run_size] == b"{}"
    assert data[table_at : table_at + 8] == (2048).to_bytes(8, "little")


@pytest.mark.spec("ARC-41")
def test_the_tail_stands_in_the_order_of_the_specification(written: tuple[Path, str]) -> None:
    data = written[0].read_bytes()
    _, tail, index_at, _, run_at, _, table_at, _ = np.frombuffer(data, "<u8", 8, 112)
    assert tail == index_at < run_at < table_at < data.index(b"HEAP")


@pytest.mark.spec("ARC-10")
def test_dtypes_are_those_of_the_table() -> None:
    table = ARCHIVE_SPEC.partition("| dtype | bytes an element | |")[2].partition("\n\n")[0]
    names = set(re.findall(r"`(\w+)`", table)) | {f"{u}int{n}" for u in ("", "u") for n in range(1, 8)}
    assert names | {"uint16", "uint32"} == set(DTYPES)


@pytest.mark.spec("ARC-22")
@pytest.mark.parametrize(
    ("name", "message"), re.findall(r"(?m)^\| `(\w+)`.* \| `([0-9a-f ]+)` \|$", ARCHIVE_SPEC)
)
def test_hdf5_datatypes_are_those_of_the_table(name: str, message: str) -> None:
    assert datatype_of(dtype(name)) == bytes.fromhex(message)


@pytest.mark.spec("NAM-4")
@pytest.mark.parametrize(
    ("name", "escaped"),
    re.findall(r"(?m)^\| `(.+?)` \| `(.+?)` \|$", NAMES_SPEC.partition("| key |")[0]),
)
def test_names_are_escaped_as_in_the_table(name: str, escaped: str) -> None:
    assert escape(name) == escaped


def test_errors_of_the_table_have_its_exit_status() -> None:
    table = re.findall(r"(?m)^\| .* \| `(\w+Error)` \| (\d) \|$", ARCHIVE_SPEC)
    assert len(table) == 6
    for name, status in table:
        assert getattr(errors, name).exit_status == int(status)


@pytest.mark.spec("ARC-14", "ARC-30")
def test_index_columns_have_an_entry_for_each_record_in_execution_order(tmp_path: Path) -> None:
    writer = Writer(tmp_path / "a.h5")
    for site, order in (("b", 7), ("a", 3)):
        writer.add(Key(site, "output"), np.zeros(1, "<f4"), dtype("float32"), (1,), order=order)
    writer.close()
    with open_archive(tmp_path / "a.h5") as archive:
        assert [r.key.text for r in archive.records] == ["0/a/output", "0/b/output"]
        assert [r.order for r in archive.records] == [3, 7]
