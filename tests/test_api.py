"""The examples of specs/api.md are run, in one process from top to bottom, and print what it says."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import tensorcap

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "specs" / "api.md").read_text()
FENCES = re.findall(r"```(\w+)\n(.*?)```", PAGE, re.DOTALL)


def test_examples_print_what_the_page_says(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    paths = os.pathsep.join(str(ROOT / part) for part in (".", "formats", "cli"))
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(code for kind, code in FENCES if kind == "python")],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "".join(text for kind, text in FENCES if kind == "text")


def test_every_function_is_on_the_page() -> None:
    functions = [name for name in tensorcap.__all__ if name.islower()]
    assert len(functions) > 15
    assert [name for name in functions if f"`{name}(" not in PAGE] == []
