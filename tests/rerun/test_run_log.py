"""What a search keeps of its runs: read again after a break, whatever of it was written."""

from __future__ import annotations

from pathlib import Path

import pytest

from tensorcap.rerun import RunLog
from tensorcap_formats.errors import UsageError

ABOUT = {"layers": ["a", "b"]}


def log(path: Path) -> RunLog:
    return RunLog(path, "bisection", ABOUT)


@pytest.mark.spec("BIS-15", "SEN-9")
@pytest.mark.parametrize("written", ["", '{"layers": ["a"'], ids=["nothing", "half a line"])
def test_a_search_that_was_killed_before_its_first_run_begins_anew(tmp_path: Path, written: str) -> None:
    path = tmp_path / "state"
    path.write_text(written)
    state = log(path)
    assert state.load(dict) == []
    state.add({"cut": "x"})
    assert path.read_text() == '{"layers": ["a", "b"]}\n{"cut": "x"}\n'
    assert log(path).load(dict) == [{"cut": "x"}]


@pytest.mark.spec("BIS-15")
def test_a_file_that_is_no_state_is_refused_and_kept(tmp_path: Path) -> None:
    path = tmp_path / "state"
    for written in ("half a line of something", "[]\n{", '{"layers": []}\n'):
        path.write_text(written)
        with pytest.raises(UsageError, match=r"is no state of a bisection|is of another search"):
            log(path).load(dict)
        assert path.read_text() == written


def test_a_state_in_no_folder_is_refused_before_runs_are_made(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="there is no folder"):
        log(tmp_path / "none" / "state").load(dict)
