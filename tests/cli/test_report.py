"""`tcap report` at the command line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.cli.conftest import Tcap

X = np.linspace(-1, 1, 64, dtype=np.float32).reshape(4, 16)
OURS = {"0/a/output": X, "0/b/output": X + 1}
THEIRS = {"0/a/output": X, "0/b/output": 3 * (X + 1)}


@pytest.fixture
def both(write: Callable[..., Path]) -> None:
    write("ref.h5", OURS)
    write("tgt.h5", THEIRS)


@pytest.mark.spec("RPT-1", "RPT-4")
@pytest.mark.usefixtures("both")
def test_a_page_is_written_of_archives_and_of_a_saved_comparison(
    tcap: Tcap, tcap_json: Any, folder: Path
) -> None:
    done = tcap_json("report", "ref.h5", "tgt.h5", "-o", "report.html")
    assert (done["format"], done["version"], done["kind"]) == ("tensorcap-report", 1, "html")
    assert done["bytes"] == (folder / "report.html").stat().st_size
    assert (done["suspects"], done["exit_status"]) == (["b"], 1)
    assert "2 of 2 tensors compared, 1 not green" in done["verdict"]
    assert (folder / "report.html").read_text().startswith("<!doctype html>")
    tcap("compare", "ref.h5", "tgt.h5", "--save", "result.json", status=1)
    saved = tcap_json("report", "result.json", "-o", "saved.html")
    assert (saved["suspects"], saved["next"]) == ([], "tcap localize ref.h5 tgt.h5")
    assert "2 of 2 tensors compared, 1 not green" in saved["verdict"]
    alone = tcap("report", "ref.h5", "-o", "x.html", status=2)
    assert "expected REF and TGT" in alone.stderr
    tcap("report", "no.h5", "tgt.h5", "-o", "x.html", status=3)
    assert not (folder / "x.html").exists()


@pytest.mark.spec("RPT-2")
@pytest.mark.usefixtures("both")
def test_what_is_no_report_stays_unless_forced(tcap: Tcap, folder: Path) -> None:
    other = folder / "notes.html"
    other.write_text("<!doctype html><html><p>mine")
    refused = tcap("report", "ref.h5", "tgt.h5", "-o", "notes.html", status=1)
    assert "notes.html: begins with" in refused.stderr
    assert other.read_text() == "<!doctype html><html><p>mine"
    tcap("report", "ref.h5", "tgt.h5", "-o", "notes.html", "--force")
    tcap("report", "ref.h5", "tgt.h5", "-o", "notes.html")  # a report replaces a report
    assert "tcap report" in other.read_text()
    before = (folder / "ref.h5").read_bytes()
    tcap("report", "ref.h5", "tgt.h5", "-o", "ref.h5", "--force", status=2)
    assert (folder / "ref.h5").read_bytes() == before
    (folder / "here").mkdir()
    tcap("report", "ref.h5", "tgt.h5", "-o", "here", "--force", status=1)
    tcap("report", "ref.h5", "tgt.h5", "-o", "notes.html", "--markdown", status=1)
    assert sorted(path.name for path in folder.iterdir()) == ["here", "notes.html", "ref.h5", "tgt.h5"]


@pytest.mark.spec("RPT-1")
@pytest.mark.usefixtures("both")
def test_a_folder_that_is_damaged_is_refused_in_one_line(tcap: Tcap, folder: Path) -> None:
    (folder / "out").mkdir()
    for text in ("{", "[]", json.dumps({"format": "tensorcap-verification", "reference": 1})):
        (folder / "out" / "verify.json").write_text(text)
        refused = tcap("report", "out", "-o", "x.html", status=3)
        assert refused.stderr.startswith("Error: out/verify.json: ")
    assert not (folder / "x.html").exists()
