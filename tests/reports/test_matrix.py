"""Several targets against one reference, and plots for papers."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest

import tensorcap
from tensorcap.reports.html import Matrix, html_of
from tensorcap_formats.errors import UsageError, WriteError
from tests.reports.test_page import Reader, layers
from tests.support.archives import write_archive


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A reference, and a target over time: right, wrong in layer 1, wrong in layer 2."""
    folder = tmp_path_factory.mktemp("runs")
    write_archive(folder / "ref.h5", layers(), run={"packages": {"torch": "2.8"}})
    for day, wrong, version in (("mon", (), "2.8"), ("tue", (1,), "2.9"), ("wed", (2,), "2.9")):
        run = {"packages": {"torch": version}, "started": f"2026-01-0{len(wrong) + 5}T10:00:00.123"}
        write_archive(folder / f"{day}.h5", layers(*wrong), run=run)
    return folder


@pytest.mark.spec("RPT-96")
def test_a_matrix_has_a_column_for_each_target_and_says_what_changed(runs: Path, tmp_path: Path) -> None:
    days = [runs / f"{day}.h5" for day in ("mon", "tue", "wed")]
    matrix = tensorcap.report(runs / "ref.h5", days, tmp_path / "m.html")
    assert isinstance(matrix, Matrix)
    assert (
        matrix.verdict
        == f"1 of 3 targets computes what the reference does; the first that does not is {days[1]}."
    )
    assert [column.is_green for column in matrix.targets] == [True, False, False]
    assert [column.suspects for column in matrix.targets] == [(), ("layers.1.fc",), ("layers.2.fc",)]
    assert [column.versions for column in matrix.targets] == ["torch 2.8", "torch 2.9", "torch 2.9"]
    assert matrix.targets[1].started == "2026-01-06T10:00:00"
    assert [column.changes for column in matrix.targets] == [
        "",
        "Since the run before: 1 result is no longer green (0/layers.1.fc/output first).",
        "Since the run before: 1 result is no longer green (0/layers.2.fc/output first); "
        "1 result is no longer wrong (0/layers.1.fc/output first).",
    ]
    cells = {key: [(c.error, c.is_green) if c else None for c in row] for key, row in matrix.rows}
    assert cells == {
        "0/layers.0.fc/output": [(0, True), (0, True), (0, True)],
        "0/layers.1.fc/output": [(0, True), (1, False), (0, True)],
        "0/layers.2.fc/output": [(0, True), (0, True), (1, False)],
    }
    page = Reader((tmp_path / "m.html").read_text(encoding="utf-8"))
    assert [tag for tag, _ in page.tags if tag in ("script", "img", "link")] == []
    assert page.text.count("Since the run before") == 2
    assert html_of(matrix) == (tmp_path / "m.html").read_text(encoding="utf-8")


@pytest.mark.spec("RPT-96")
def test_a_history_is_made_of_saved_comparisons_or_of_targets_and_not_of_both(
    runs: Path, tmp_path: Path
) -> None:
    from tensorcap.reports.results import save_result

    for day in ("mon", "tue"):
        save_result(tmp_path / f"{day}.json", tensorcap.compare(runs / "ref.h5", runs / f"{day}.h5"))
    both = [tmp_path / "mon.json", tmp_path / "tue.json"]
    matrix = tensorcap.report(both[0], both[1:], tmp_path / "m.md", markdown=True)
    assert isinstance(matrix, Matrix)
    assert [column.exit_status for column in matrix.targets] == [0, 1]
    text = (tmp_path / "m.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) < 60
    assert "7 identical" in text
    assert "6 identical, 1 diverged" in text
    with pytest.raises(UsageError, match="is a verification or a saved comparison"):
        tensorcap.report(runs / "ref.h5", [runs / "mon.h5", both[0]], tmp_path / "n.html")


@pytest.mark.spec("RPT-96")
def test_results_that_are_green_and_err_least_have_no_row_if_there_are_many(tmp_path: Path) -> None:
    values = {f"0/layers.{n}.fc/output": np.full(4, n + 1.0) for n in range(310)}
    ours = write_archive(tmp_path / "ref.h5", values)
    values["0/layers.309.fc/output"] = np.full(4, 9.0)
    theirs = write_archive(tmp_path / "tgt.h5", values)
    matrix = tensorcap.report(ours, [theirs, ours], tmp_path / "m.html")
    assert isinstance(matrix, Matrix)
    assert (len(matrix.rows), matrix.left_out) == (300, 10)
    assert matrix.rows[-1][0] == "0/layers.309.fc/output"


@pytest.mark.spec("RPT-97")
def test_plots_for_papers_are_written_into_a_new_folder(runs: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    tensorcap.report(runs / "ref.h5", runs / "tue.h5", tmp_path / "plots", png=True)
    files = sorted(path.name for path in (tmp_path / "plots").iterdir())
    assert files == ["errors.png", "layers.png", "tensor_1_0_layers.1.fc_output.png"]
    for name in files:
        data = (tmp_path / "plots" / name).read_bytes()
        width, _ = struct.unpack(">II", data[16:24])
        assert width == 2025  # 6.75 inches at 300 dpi
    with pytest.raises(WriteError, match="is not empty"):
        tensorcap.report(runs / "ref.h5", runs / "tue.h5", tmp_path / "plots", png=True)
    days = [runs / "mon.h5", runs / "tue.h5"]
    with pytest.raises(UsageError, match="plots are of one target"):
        tensorcap.report(runs / "ref.h5", days, tmp_path / "more", png=True)


@pytest.mark.spec("RPT-140")
def test_without_anything_to_draw_no_folder_is_made(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    ours = write_archive(tmp_path / "ref.h5", {"0/a/output": np.ones(3)})
    theirs = write_archive(tmp_path / "tgt.h5", {"0/b/output": np.ones(3)})
    with pytest.raises(WriteError, match="plots: is not written: no result was measured") as raised:
        tensorcap.report(ours, theirs, tmp_path / "plots", mapping="none", png=True)
    assert "\n" not in str(raised.value)
    assert not (tmp_path / "plots").exists()


@pytest.mark.spec("RPT-97")
def test_values_that_are_not_finite_and_scalars_can_be_plotted(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    ours = write_archive(
        tmp_path / "ref.h5", {"0/a/output": np.ones(()), "0/b/output": np.full((2, 3), np.nan)}
    )
    theirs = write_archive(tmp_path / "tgt.h5", {"0/a/output": np.zeros(()), "0/b/output": np.ones((2, 3))})
    tensorcap.report(ours, theirs, tmp_path / "plots", png=True)
    assert {path.name[:8] for path in (tmp_path / "plots").iterdir()} == {"errors.p", "tensor_1", "tensor_2"}
