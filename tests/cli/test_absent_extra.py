"""Core AI's packages that are absent, or of another release, are named with what to install."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

ROOT = Path(__file__).parents[2]
ARGUMENTS = ["capture", "coreai", "x.aimodel", "--inputs", "ones", "-o", "x.h5"]
RUN = f"from tensorcap_cli.main import main; main({ARGUMENTS})"


def capture(before: str, folder: Path) -> tuple[int, list[str]]:
    """Run `tcap capture coreai` after some code; its exit status, and the lines that it prints."""
    paths = os.pathsep.join(str(ROOT / part) for part in (".", "formats", "cli"))
    done = subprocess.run(
        [sys.executable, "-c", f"{before}\n{RUN}"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout == ""
    return done.returncode, done.stderr.splitlines()


@pytest.mark.slow
@pytest.mark.spec("CAI-54")
@pytest.mark.parametrize("package", ["coreai", "torch"])
def test_an_absent_extra_is_named(package: str, tmp_path: Path) -> None:
    assert capture(f"import sys; sys.modules[{package!r}] = None", tmp_path) == (
        2,
        [
            f"Error: capturing a coreai model needs the package '{package}', which is not installed",
            "Hint: Install it with: pip install 'tensorcap[coreai]'",
        ],
    )


@pytest.mark.slow
@pytest.mark.spec("CAI-54")
def test_another_release_is_named_with_the_one_that_is_known(tmp_path: Path) -> None:
    before = (
        "import importlib.metadata as m, sys, types\n"
        "sys.modules.setdefault('coreai', types.ModuleType('coreai'))\n"
        "known = m.version\n"
        "m.version = lambda name: '0.5.0' if name == 'coreai-torch' else known(name)\n"
    )
    assert capture(before, tmp_path) == (
        2,
        [
            "Error: coreai-torch 0.5.0: expected 0.4.3, whose operation maps are known",
            "Hint: Install it with: pip install 'coreai-torch==0.4.3'",
        ],
    )
