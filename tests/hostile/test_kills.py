"""Commands that write, killed before each of their steps in the file system; `make kills` has more."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.hostile.kill_cases import CASES, check_kills


@pytest.mark.sampled
@pytest.mark.parametrize("name", CASES)
def test_a_command_killed_before_any_of_its_steps_loses_nothing(name: str, tmp_path: Path) -> None:
    check_kills(name, CASES[name], tmp_path)
