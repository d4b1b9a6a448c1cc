"""Tests are collected if an optional package is absent, but for those that need it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from conftest import NEEDED_BY

ROOT = Path(__file__).parents[1]
COLLECT = """
import sys
for name in sys.argv[1:]:
    sys.modules[name] = None
import pytest
sys.exit(pytest.main(["--collect-only", "-q", "-p", "xdist", "-p", "no:cacheprovider"]))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "absent",
    [["torch", "transformers"], ["transformers"], ["zarr", "gguf", "onnx"], ["max", "coreai_torch"]],
    ids="-".join,
)
def test_all_else_is_collected_if_a_package_is_absent(absent: list[str]) -> None:
    # A package that is also a plugin of pytest (zarr) would be imported before it can be hidden.
    environment = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(
        [sys.executable, "-c", COLLECT, *absent], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert "tests/test_specs.py::" in done.stdout


def test_what_needs_a_package_is_there() -> None:
    paths = {path for paths in NEEDED_BY.values() for path in paths}
    assert {path for path in paths if not (ROOT / path).exists()} == set()
