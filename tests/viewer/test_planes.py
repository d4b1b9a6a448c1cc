"""Planes of tensors: held against numpy's own slices, for any axes, boxes and ways to read."""

from __future__ import annotations

import itertools
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tensorcap.diagnosis import diagnose
from tensorcap.viewer.inspector import draw_charts
from tensorcap.viewer.planes import Maps, PlaneView, Side, TensorReader, can_seek, pictures, read_maps
from tensorcap_formats.errors import UsageError
from tensorcap_formats.open import open_archive
from tests.support.archives import new_archive

GENERATOR = np.random.default_rng(11)


def sides(folder: Path, ours: Any, theirs: Any, suffix: str = ".h5") -> list[Side]:
    archives = [new_archive(folder / f"{n}{suffix}", {"0/a/output": v}) for n, v in enumerate((ours, theirs))]
    return [
        Side(name, archive, archive.records[0])
        for name, archive in zip(("reference", "target"), archives, strict=True)
    ]


def maps_of(both: list[Side], view: PlaneView, **options: Any) -> Maps:
    return read_maps(TensorReader(), both, view, **options)


@pytest.mark.spec("VIEW-41")
@pytest.mark.parametrize("suffix", [".h5", ".safetensors"])
def test_a_plane_along_any_axes_has_the_values_that_numpy_has(tmp_path: Path, suffix: str) -> None:
    ours = GENERATOR.standard_normal((3, 4, 5, 6)).astype(np.float32)
    theirs = ours + GENERATOR.standard_normal(ours.shape).astype(np.float32)
    both = sides(tmp_path, ours, theirs, suffix)
    at = (2, 1, 3, 4)
    for rows, columns in itertools.permutations(range(4), 2):
        view = PlaneView.of(ours.shape, rows, columns, at, (1, 3, 0, 3))
        index = tuple(slice(None) if axis in (rows, columns) else at[axis] for axis in range(4))
        expected = {"reference": ours[index], "target": theirs[index]}
        expected["difference"] = abs(theirs[index].astype("f8") - ours[index])
        planes = maps_of(both, view).planes
        for name, plane in expected.items():
            drawn = (plane if rows < columns else plane.T)[1:3, 0:3]
            np.testing.assert_allclose(planes[name], drawn, rtol=1e-6, atol=1e-7)


@pytest.mark.spec("VIEW-41")
def test_one_bad_element_of_a_large_plane_stays_visible(tmp_path: Path) -> None:
    ours = np.zeros((900, 700), np.float32)
    theirs = ours.copy()
    theirs[123, 457] = 9
    maps = maps_of(sides(tmp_path, ours, theirs), PlaneView.of(ours.shape))
    assert (maps.cell, maps.is_sampled) == ((4, 3), False)
    difference = maps.planes["difference"]
    assert difference.shape == (225, 234)
    assert difference[123 // 4, 457 // 3] == 9
    assert np.count_nonzero(difference) == 1
    difference_picture = pictures(maps)[1]
    assert (difference_picture.name, difference_picture.high) == ("difference", 9.0)
    assert difference_picture.worst == (123 // 4, 457 // 3)


@pytest.mark.spec("VIEW-41")
def test_what_is_not_finite_on_one_side_only_is_an_infinite_difference(tmp_path: Path) -> None:
    ours = np.array([[np.nan, np.nan, 1, np.inf, -np.inf, 3e38]], np.float32)
    theirs = np.array([[np.nan, 1, np.nan, np.inf, np.inf, -3e38]], np.float32)
    difference = maps_of(sides(tmp_path, ours, theirs), PlaneView.of(ours.shape)).planes["difference"]
    assert difference.tolist()[0][:5] == [0, np.inf, np.inf, 0, np.inf]
    assert difference[0, 5] == pytest.approx(6e38, rel=1e-6)


@pytest.mark.spec("VIEW-42")
def test_no_query_leads_outside_of_a_tensor() -> None:
    view = PlaneView.of((2, 8, 5), 7, -3, (9, -9, 99), (-5, 100, 90, 3))
    assert view == PlaneView.of((2, 8, 5), 1, 2, (1, 0, 4), (0, 8, 4, 5))
    assert PlaneView.of((2, 8, 5), 2, 2).columns == 1
    assert PlaneView.of(()).shape == (1, 1)
    assert PlaneView.of((7,)).box == (0, 1, 0, 7)
    # Without axes, the last two that have more than one index.
    chosen = PlaneView.of((4, 8, 1, 1))
    assert (chosen.rows, chosen.columns) == (0, 1)


@pytest.mark.spec("VIEW-42")
def test_the_known_worst_element_is_gone_to_in_whatever_box_is_open() -> None:
    view = PlaneView.of((3, 50, 50), box=(0, 10, 0, 10))
    assert view.showing((2, 5, 6)) == PlaneView.of((3, 50, 50), at=(2, 5, 6), box=(0, 10, 0, 10))
    assert view.showing((2, 30, 6)) == PlaneView.of((3, 50, 50), at=(2, 30, 6))


@pytest.fixture(scope="module")
def huge(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A pair of 4 GiB, all but one plane of which are holes of the file; one element is off by 5."""
    shape = (2, 32, 4096, 4096)
    both = []
    for name in ("reference", "target"):
        path = tmp_path_factory.mktemp(name) / "scores.npy"
        with open(path, "wb") as file:
            header = {"descr": "<f4", "fortran_order": False, "shape": shape}
            np.lib.format.write_array_header_1_0(file, header)
            start = file.tell()
            file.truncate(start + 4 * int(np.prod(shape, dtype=np.int64)))
            if name == "target":
                file.seek(start + 4 * (((1 * 32 + 5) * 4096 + 507) * 4096 + 3000))
                file.write(np.float32(5).tobytes())
        archive = open_archive(path)
        both.append(Side(name, archive, archive.records[0]))
    return both


@pytest.mark.spec("VIEW-42", "VIEW-50")
@pytest.mark.parametrize(("rows", "columns"), list(itertools.permutations(range(4), 2)))
def test_a_plane_of_4_gib_is_read_in_few_reads(huge: list[Side], rows: int, columns: int) -> None:
    worst = (1, 5, 507, 3000)
    view = PlaneView.of((2, 32, 4096, 4096), rows, columns, worst)
    start = time.process_time()
    maps = maps_of(huge, view, worst=worst)
    images = pictures(maps)
    assert time.process_time() - start < 0.4  # five times the budget: other work is on the machine too
    assert all(size <= 256 for size in maps.planes["difference"].shape)
    row, column = (worst[axis] // cell for axis, cell in zip((rows, columns), maps.cell, strict=True))
    assert (images[1].high, images[1].worst) == (5.0, (row, column))


def test_a_pair_of_4_gib_is_not_diagnosed_for_its_rows_do_not_fit_into_memory(huge: list[Side]) -> None:
    with pytest.raises(
        UsageError, match="each index of axis 0 has 536870912 elements, expected at most 67108864"
    ):
        diagnose(huge[0].archive, huge[1].archive, "scores")


@pytest.mark.spec("VIEW-44")
def test_charts_of_4_gib_are_of_a_sample_that_is_quick_to_read(huge: list[Side]) -> None:
    start = time.process_time()
    charts = draw_charts(TensorReader(), huge)
    assert time.process_time() - start < 0.4
    assert charts.is_sampled
    assert charts.axes == ()  # the one bad element is not in the sample: no axis can be blamed


@pytest.mark.spec("VIEW-44")
def test_charts_of_a_small_pair_say_where_the_whole_error_is(tmp_path: Path) -> None:
    ours = GENERATOR.standard_normal((4, 3, 10)).astype(np.float32)
    theirs = ours.copy()
    theirs[2, :, 7] += 1
    charts = draw_charts(TensorReader(), sides(tmp_path, ours, theirs))
    assert not charts.is_sampled
    assert [(axis.worst, round(axis.share, 3)) for axis in charts.axes] == [
        (2, 1.0),
        (charts.axes[1].worst, 0.333),
        (7, 1.0),
    ]
    (tmp_path / "long").mkdir()
    long = np.zeros((1 << 21) + 3, np.float32)
    one_axis = draw_charts(TensorReader(), sides(tmp_path / "long", long, long + np.arange(len(long)) % 7))
    assert one_axis.is_sampled


@pytest.mark.spec("VIEW-43")
def test_what_can_only_be_read_whole_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    values = GENERATOR.standard_normal((300, 20))
    np.savez(tmp_path / "a.npz", a=values)
    archive = open_archive(tmp_path / "a.npz")
    side = Side("values", archive, archive.records[0])
    assert not can_seek(side)
    reader, reads, load = TensorReader(), [], archive.load

    def counted(record: Any) -> Any:
        reads.append(record)
        return load(record)

    monkeypatch.setattr(archive, "load", counted)
    for column in (0, 7):
        plane = read_maps(reader, [side], PlaneView.of((300, 20), box=(0, 5, column, column + 1))).planes
        assert plane["values"][:, 0].tolist() == values[:5, column].tolist()
    assert len(reads) == 1
    stats = new_archive(tmp_path / "s.h5", {"0/a/output": values}, stats_only=True)
    with pytest.raises(UsageError, match="only its statistics were kept"):
        read_maps(reader, [Side("values", stats, stats.records[0])], PlaneView.of((300, 20)))


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (np.array([3 + 4j, 1j], np.complex64), [5.0, 1.0]),
        (np.array([True, False]), [1.0, 0.0]),
        (np.array([2**53 - 1, -7]), [2.0**53 - 1, -7.0]),
        (np.array(2.5, np.float16), [2.5]),
    ],
    ids=["complex", "bool", "int64", "scalar"],
)
def test_values_of_any_kind_are_drawn_as_real_ones(tmp_path: Path, values: Any, expected: Any) -> None:
    archive = new_archive(tmp_path / "a.h5", {"0/a/output": values})
    side = Side("values", archive, archive.records[0])
    assert maps_of([side], PlaneView.of(values.shape)).planes["values"].tolist() == [expected]
