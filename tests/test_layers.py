"""What may be imported when, and what each package offers."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("tensorcap", "tensorcap_cli", "tensorcap_formats")
HEAVY = {
    "cattrs",
    "h5py",
    "llvmlite",
    "numba",
    "numpy",
    "rich",
    "safetensors",
    "tomlkit",
    "torch",
    "transformers",
    "zarr",
}


def loaded_by(code: str) -> set[str]:
    """Root packages that a new interpreter has loaded after the code."""
    script = (
        f"import json, sys\n{code}\nprint(json.dumps(sorted({{n.partition('.')[0] for n in sys.modules}})))"
    )
    paths = os.pathsep.join(str(ROOT / part) for part in (".", "formats", "cli"))
    found = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        check=True,
        timeout=600,
        env={**os.environ, "PYTHONPATH": paths},
    )
    return set(json.loads(found.stdout.splitlines()[-1]))


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param(["--help"], id="help"),
        *(
            pytest.param([name, "--help"], id=name)
            for name in (
                "align",
                "bisect",
                "calibrate",
                "check",
                "compare",
                "convert",
                "diagnose",
                "inject",
                "ls",
                "preflight",
                "recover",
                "show",
                "tree",
                "verify",
            )
        ),
        pytest.param(["capture", "torch", "--help"], id="capture-torch"),
        pytest.param(["capture", "script", "--help"], id="capture-script"),
        pytest.param(["compare"], id="wrong-usage"),
    ],
)
def test_help_loads_nothing_heavy(arguments: list[str]) -> None:
    code = f"from tensorcap_cli.main import main\ntry: main({arguments!r})\nexcept SystemExit: pass"
    assert not loaded_by(code) & HEAVY


def test_formats_load_numpy_alone() -> None:
    loaded = loaded_by("import tensorcap_formats")
    assert not loaded & (HEAVY - {"numpy"} | {"click", "tensorcap"})


def test_comparing_loads_no_framework_and_no_table_printer(tmp_path: Path) -> None:
    code = (
        "import numpy as np\n"
        f"np.savez({str(tmp_path / 'a.npz')!r}, a=np.ones(2))\n"
        "from tensorcap_cli.main import main\n"
        f"try: main(['compare', *[{str(tmp_path / 'a.npz')!r}] * 2])\n"
        "except SystemExit as ended: assert not ended.code\n"
    )
    assert not loaded_by(code) & {"numba", "rich", "torch", "transformers"}


def test_the_library_loads_no_framework() -> None:
    loaded = loaded_by("import tensorcap")
    assert not loaded & (HEAVY - {"numpy"} | {"click", "tensorcap_cli"})


@pytest.mark.parametrize("name", PACKAGES)
def test_exported_names_are_sorted_and_are_all_there_is(name: str) -> None:
    package = importlib.import_module(name)
    assert list(package.__all__) == sorted(package.__all__)
    public = {
        found
        for found, value in vars(package).items()
        if not found.startswith("_") and not isinstance(value, ModuleType)
    }
    assert public - {"annotations"} == set(package.__all__)
