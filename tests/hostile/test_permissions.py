"""What a user may not enter or read is named, in folders of every kind, and makes no comparison green."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.hostile.permissions import FOLDERS, Attempt

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def attempts(tmp_path_factory: pytest.TempPathFactory) -> list[Attempt]:
    folder = tmp_path_factory.mktemp("permissions") / "folder"
    done = subprocess.run(
        [sys.executable, "-m", "tests.hostile.permissions", str(folder)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    found = json.loads(done.stdout)
    if found is None:
        pytest.skip("nothing keeps root from reading here")
    return [Attempt(**one) for one in found]


@pytest.mark.spec("ARC-86", "CMP-51")
@pytest.mark.parametrize("name", FOLDERS)
def test_what_may_not_be_read_is_named_and_never_green(name: str, attempts: list[Attempt]) -> None:
    of_container = [one for one in attempts if one.container == name]
    assert any(one.mode == 0o444 for one in of_container)
    assert any(one.status == 3 and "Permission denied" in one.output for one in of_container)
    for one in of_container:
        assert not one.fault, one
        if one.status == 3:
            assert "Permission denied" in one.output, one
        if one.command.startswith("compare") and one.status == 0:  # it was nothing that is read of a tensor
            assert "2 of 2 reference tensors compared: 2 identical" in one.output, one


def test_an_output_that_may_not_be_written_is_named_in_one_line(attempts: list[Attempt]) -> None:
    writing = [one for one in attempts if not one.container]
    assert len(writing) == 12
    for one in writing:
        path = one.command.rpartition(" ")[2]
        assert (one.status, one.fault) == (1, ""), one
        assert one.output.endswith(f"Error: {path}: cannot be written: Permission denied\n"), one
