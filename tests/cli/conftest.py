"""Real archives, and two ways to run real commands."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from tensorcap_cli.main import main
from tensorcap_formats.dtypes import Array
from tests.support.archives import write_archive

ROOT = Path(__file__).parents[2]
Tcap = Callable[..., Result]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder of the commands."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def write(folder: Path) -> Callable[..., Path]:
    """Write an archive of numpy arrays by key text."""

    def run(name: str, tensors: Mapping[str, Array], **options: Any) -> Path:
        return write_archive(folder / name, tensors, **options)

    return run


@pytest.fixture
def tcap(folder: Path) -> Tcap:
    """Run a command in this process."""

    def run(*arguments: str, status: int = 0) -> Result:
        result = CliRunner().invoke(main, list(arguments), prog_name="tcap", catch_exceptions=False)
        assert result.exit_code == status, result.output
        return result

    return run


@pytest.fixture
def tcap_json(tcap: Tcap) -> Callable[..., Any]:
    """Run a command with --json, and read what it prints."""

    def run(*arguments: str, status: int = 0) -> Any:
        return json.loads(tcap(*arguments, "--json", status=status).stdout)

    return run


@pytest.fixture
def shell(folder: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run a line of bash in which `tcap` is a process of its own."""

    def run(line: str) -> subprocess.CompletedProcess[str]:
        paths = os.pathsep.join(str(ROOT / part) for part in (".", "formats", "cli"))
        script = f'set -o pipefail\ntcap() {{ "{sys.executable}" -m tensorcap_cli "$@"; }}\n{line}'
        return subprocess.run(
            ["bash", "-c", script],
            capture_output=True,
            text=True,
            timeout=600,
            env={**os.environ, "PYTHONPATH": paths},
        )

    return run
