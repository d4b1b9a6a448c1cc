"""What objects show of themselves in a notebook and in a log."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import tensorcap
from tests.reports.test_page import Reader, layers
from tests.support.archives import write_archive


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("pair")
    run = {"model": {"class": "zoo.<b>Stack"}, "dtype": "float32"}
    return write_archive(folder / "ref.h5", layers(), run=run), write_archive(folder / "tgt.h5", layers(1))


def shown(value: object) -> Reader:
    """A card as a browser sees it: short, whole, and without anything that runs or loads."""
    text = value._repr_html_()  # type: ignore[attr-defined] # the protocol of IPython
    assert len(text) < 8000
    page = Reader(text)
    assert {tag for tag, _ in page.tags} <= {"div", "b", "bdi", "br", "span", "table", "tr", "th", "td"}
    assert len(repr(value).splitlines()) == 1
    assert len(repr(value)) < 400
    return page


@pytest.mark.spec("RPT-95")
def test_an_archive_and_a_record_show_what_they_hold(pair: tuple[Path, Path]) -> None:
    with tensorcap.open_archive(pair[0]) as archive:
        text = shown(archive).text
        assert f"{pair[0]}: hdf5, 7 tensors" in text
        assert "<b>Stack" in text  # as text, not as markup
        assert "0/layers.0.fc/output" in text
        assert repr(archive) == f"<Archive {pair[0]}: hdf5, 7 tensors, <b>Stack float32>"
        record = archive.get("0/layers.0.fc/output")
        assert "0/layers.0.fc/output: float32 [4, 16]" in shown(record).text
        assert repr(record) == "<Record 0/layers.0.fc/output: float32 [4, 16]>"


@pytest.mark.spec("RPT-95")
def test_results_show_their_verdict(pair: tuple[Path, Path]) -> None:
    comparison = tensorcap.compare(*pair)
    text = shown(comparison).text
    assert "Not the same, first in layers.1.fc at 0/layers.1.fc/output" in text
    assert "7 of 7 compared: 6 identical, 1 diverged" in text
    assert "0/layers.1.fc/outputdiverged1" in text  # its row: twice the reference is a relative error of 1
    assert repr(comparison).endswith(
        "7 of 7 compared, not the same, first in layers.1.fc at 0/layers.1.fc/output>"
    )
    same = tensorcap.compare(pair[0], pair[0])
    assert "No divergence" in shown(same).text
    localization = tensorcap.localize(*pair)
    assert shown(localization).text.startswith("layers.1.fc is suspected")
    assert repr(localization) == "<Localization by archives: layers.1.fc accused>"


@pytest.mark.spec("RPT-95")
def test_an_alignment_shows_its_entries_and_a_long_table_how_many_more(tmp_path: Path) -> None:
    names = [f"part{letter}" for letter in "abcdefghijkl"]
    values = {f"0/{name}/output": np.arange(4.0) + at for at, name in enumerate(names)}
    ours = write_archive(tmp_path / "ref.h5", values)
    theirs = write_archive(tmp_path / "tgt.h5", values)
    with tensorcap.open_archive(ours) as reference, tensorcap.open_archive(theirs) as target:
        aligned = tensorcap.align(reference, target)
        assert "12 of 12 reference tensors mapped" in shown(aligned).text
        assert "… 4 more" in shown(aligned.alignment).text
        assert repr(aligned.alignment) == "<Alignment: 12 entries, 0 left over>"
        assert "… 4 more" in shown(reference).text
