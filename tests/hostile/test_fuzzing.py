"""Hostile inputs of every reader, drawn from numbers; `make fuzz N=1000000` tries any number of them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.hostile.fuzzing.runner import command_outcome, read_all
from tests.hostile.fuzzing.seeds import SEEDS, available, write_archive

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", available())
def test_what_inputs_are_made_of_is_read(name: str, tmp_path: Path) -> None:
    seed = SEEDS[name]
    write_archive(tmp_path / "good.h5")
    write_archive(tmp_path / "other.h5", scale=2)
    seed.write(tmp_path / seed.name)
    if seed.is_archive:
        read_all(tmp_path / seed.name)
    else:
        assert command_outcome(seed, tmp_path, seed.commands[0]) in {0, 1}


@pytest.mark.slow
def test_no_hostile_input_does_what_none_may() -> None:
    command = [sys.executable, "-m", "tests.hostile.fuzzing", "--count", "20000", "--jobs", "2"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr[-8000:]
