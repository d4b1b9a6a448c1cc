"""What every archive that is made of another one's records holds, whatever it changes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tensorcap.alignment import Alignment, Entry, GatheredArchive, MappedArchive, ReversedArchive, resolve
from tensorcap.runs import Node, PartialArchive, TensorArchive, Value
from tensorcap_formats.archive import Archive
from tensorcap_formats.dtypes import Array, bits_of, dtype_of
from tensorcap_formats.keys import Key
from tensorcap_formats.records import Record
from tensorcap_formats.view import ArchiveView

ARRAYS = {
    "0/x/output": np.array([[1, 2]], np.float32),
    "0/w/output": np.array([[3, 4]], np.float32),
    "0/y/output": np.array([[5, 6], [7, 8]], np.float32),
    "0/z/output": np.array([9], np.float32),
}
RUN = {"dtype": "float32", "modules": [{"path": "z", "class": "Z"}], "notes": ["a note"]}
LINKS = Alignment((Entry(("x", "w"), ("y",), steps=("split 0 1,1",)),))


class Source(Archive):
    """A complete run, beside whose tensors there is a text, with a remark for each tensor."""

    is_closed = False

    def __init__(self, name: str, arrays: dict[str, Array]) -> None:
        self._bits = [bits_of(array).reshape(-1) for array in arrays.values()]
        records = [
            Record(Key.parse(text), dtype_of(array), array.shape, 10 + row, "", None, stored=True, row=row)
            for row, (text, array) in enumerate(arrays.items())
        ]
        super().__init__(
            Path(name),
            "hdf5",
            records,
            is_foreign=True,
            is_ordered=False,
            is_complete=False,
            run=RUN,
            algorithm="xxh3_128",
            trusts_digests=True,
            skipped={"notes.txt": "a text"},
        )

    def remark(self, record: Record) -> str:
        return f"{self.path}: {record.key.text}"

    def close(self) -> None:
        self.is_closed = True

    def _read_flat(self, record: Record, start: int, out: Array) -> None:
        assert not self.is_closed
        assert self.records[record.row] is record
        out[:] = self._bits[record.row][start : start + out.size]


def _part(source: Source) -> ArchiveView:
    return PartialArchive(source, [source.get("0/y/output"), source.get("0/z/output")])


def _gathered(source: Source) -> ArchiveView:
    return GatheredArchive(source, ())


def _mapped(source: Source) -> ArchiveView:
    """The rows of `y` are `x` and `w`; the source's own `x` and `w` get other names."""
    reference = Source("reference", {text: ARRAYS[text] for text in ("0/x/output", "0/w/output")})
    return MappedArchive(reference, source, resolve(LINKS, reference, source).links)


def _reversed(source: Source) -> ArchiveView:
    """`x` of the source, as a matrix, is called `y`; `z` stays."""
    target = Source(
        "target", {"0/y/output": np.zeros((2, 2), np.float32), "0/z/output": ARRAYS["0/z/output"]}
    )
    return ReversedArchive(source, target, resolve(LINKS, source, target).links)


def _viewed(source: Source) -> ArchiveView:
    node = Node("0/v", "aten.view.default", 12, "v", 0, "V", None, None, None, (), {}, ())
    return TensorArchive(source, "0/v/output", node, Value("output"), ARRAYS["0/y/output"])


VIEWS = [
    pytest.param(_part, {"0/y/output": [[5, 6], [7, 8]], "0/z/output": [9]}, id="part"),
    pytest.param(
        _gathered,
        {
            "0/x/output": [[1, 2]],
            "0/w/output": [[3, 4]],
            "0/y/output": [[5, 6], [7, 8]],
            "0/z/output": [9],
        },
        id="gathered",
    ),
    pytest.param(
        _mapped,
        {
            "0/unmapped:x/output": [[1, 2]],
            "0/unmapped:w/output": [[3, 4]],
            "0/x/output": [[5, 6]],
            "0/w/output": [[7, 8]],
            "0/z/output": [9],
        },
        id="mapped",
    ),
    pytest.param(_reversed, {"0/y/output": [[1, 2], [3, 4]], "0/z/output": [9]}, id="reversed"),
    pytest.param(_viewed, {"0/v/output": [[5, 6], [7, 8]]}, id="viewed"),
]
Make = Callable[[Source], ArchiveView]


@pytest.fixture
def source() -> Source:
    return Source("source", ARRAYS)


@pytest.mark.parametrize(("make", "tensors"), VIEWS)
def test_records_are_in_execution_order_and_can_be_read(
    source: Source, make: Make, tensors: dict[str, list[object]]
) -> None:
    view = make(source)
    assert {r.key.text: view.read(r).tolist() for r in view.records} == tensors
    assert [r.key.text for r in view.records] == list(tensors)
    assert [r.row for r in view.records] == list(range(len(tensors)))
    assert [r.order for r in view.records] == sorted(r.order for r in view.records)


@pytest.mark.parametrize(("make", "tensors"), VIEWS)
def test_what_was_skipped_and_how_the_run_ended_is_the_sources(
    source: Source, make: Make, tensors: dict[str, list[object]]
) -> None:
    view = make(source)
    assert view.skipped == {"notes.txt": "a text"}
    assert (view.path, view.container) == (Path("source"), "hdf5")
    assert (view.is_foreign, view.is_ordered, view.is_complete) == (True, False, False)
    assert (view.algorithm, view.trusts_digests) == ("xxh3_128", True)
    assert view.run == RUN
    assert (view.info.dtype, view.info.notes) == ("float32", ("a note",))
    assert {site: module.class_name for site, module in view.info.modules.items()} == {"z": "Z"}
    assert view.source is source


@pytest.mark.parametrize(("make", "tensors"), VIEWS)
def test_remarks_on_the_tensors_behind_a_record_are_passed_on(
    source: Source, make: Make, tensors: dict[str, list[object]]
) -> None:
    view = make(source)
    for text, records in view.sources.items():
        assert view.remark(view.get(text)) == "; ".join(f"source: {record.key.text}" for record in records)
    assert view.sources.keys() == ({*tensors} - {"0/v/output"})


@pytest.mark.parametrize(("make", "tensors"), VIEWS)
def test_a_view_leaves_its_source_open_and_can_be_read_after_a_close(
    source: Source, make: Make, tensors: dict[str, list[object]]
) -> None:
    with make(source) as view:
        pass
    view.close()
    assert not source.is_closed
    assert [view.read(record).tolist() for record in view.records] == list(tensors.values())
