"""The capturing half in real environments of its own: torch and numpy alone, and the oldest Python."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tensorcap_formats.open import open_archive

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.slow

CAPTURE = """
import sys, torch, tensorcap
model = torch.nn.Linear(2, 1, bias=False).eval()
with torch.no_grad():
    model.weight.copy_(torch.tensor([[1.0, 2.0]]))
    with tensorcap.capture(model, sys.argv[1]):
        model(torch.tensor([[3.0, 4.0]]))
"""
WRITE = """
import sys, numpy as np
from tensorcap_formats import Key, Writer, open_archive
from tensorcap_formats.dtypes import dtype
writer = Writer(sys.argv[1])
writer.add(Key("fc", "output"), np.array([[11.0]], "<f4"), dtype("float32"), (1, 1))
writer.close()
with open_archive(sys.argv[1]) as archive:
    assert archive.load(archive.get("fc/output")).tolist() == [[11.0]]
"""


def environment(python: str, folder: Path, *packages: str) -> Path:
    """Make a virtual environment with these packages and ours, without what ours depends on."""
    subprocess.run([python, "-m", "venv", folder], check=True)
    inside = folder / "bin/python"
    pip = [str(inside), "-m", "pip", "install", "--quiet", "-c", str(ROOT / "constraints.txt")]
    subprocess.run([*pip, *packages], check=True)
    subprocess.run([*pip, "--no-deps", str(ROOT)], check=True)
    return inside


def oldest_python() -> str | None:
    """A Python 3.10, on the path or where pyenv keeps it."""
    found = shutil.which("python3.10")
    if found and subprocess.run([found, "--version"], capture_output=True, check=False).returncode == 0:
        return found
    kept = sorted(Path.home().glob(".pyenv/versions/3.10.*/bin/python3.10"))
    return str(kept[-1]) if kept else None


def test_torch_and_numpy_are_enough_to_capture(tmp_path: Path) -> None:
    python = environment(sys.executable, tmp_path / "venv", "torch", "numpy")
    subprocess.run([python, "-c", CAPTURE, tmp_path / "ref.h5"], check=True, cwd=tmp_path)
    with open_archive(tmp_path / "ref.h5") as archive:
        assert archive.algorithm == "blake2b_128"
        assert archive.load(archive.get("0/@root/output")).tolist() == [[11.0]]
        assert archive.is_complete


def test_archives_are_written_under_python_3_10(tmp_path: Path) -> None:
    oldest = oldest_python()
    if oldest is None:
        pytest.skip("no Python 3.10 on this machine")
    python = environment(oldest, tmp_path / "venv", "numpy")
    subprocess.run([python, "-c", WRITE, tmp_path / "a.h5"], check=True, cwd=tmp_path)
    with open_archive(tmp_path / "a.h5") as archive:
        assert archive.read(archive.records[0]).tolist() == [[11.0]]
