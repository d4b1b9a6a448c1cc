"""What may be imported when, and what each package offers."""

from __future__ import annotations

import ast
import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import click
import pytest

import tensorcap
from tensorcap_cli.main import main

ROOT = Path(__file__).parents[1]
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
        *(pytest.param([name, "--help"], id=name) for name in main.list_commands(click.Context(main))),
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


def test_the_library_loads_nothing_before_it_is_used() -> None:
    assert not loaded_by("import tensorcap") & (HEAVY | {"click", "tensorcap_cli", "tensorcap_formats"})


def test_comparing_archives_loads_no_adapters() -> None:
    code = (
        "import tensorcap\n"
        "for name in ('compare', 'open_archive', 'align', 'diagnose', 'preflight', 'convert', 'check'):\n"
        "    getattr(tensorcap, name)\n"
        "import sys\n"
        "assert not [name for name in sys.modules if name.startswith('tensorcap.adapters')]"
    )
    assert "tensorcap" in loaded_by(code)


def test_a_verb_loads_no_framework() -> None:
    loaded = loaded_by("import tensorcap\nfor name in tensorcap.__all__: getattr(tensorcap, name)")
    assert not loaded & {"click", "rich", "tensorcap_cli", "torch", "transformers"}


VERBS = (  # of the command line; `tcap import` is a keyword of Python, and `ls`, `show` and `tree` print
    "align bisect calibrate capture check compare convert diagnose divergence inject localize merge plan "
    "preflight recover replay report sensitivity sync_points verify view"
)


def test_the_face_has_every_verb_of_the_command_line() -> None:
    commands = {name.replace("-", "_") for name in main.list_commands(click.Context(main))}
    assert commands - {"equivalence", "export", "import", "ls", "max", "show", "tree"} == set(VERBS.split())
    assert {*VERBS.split(), "open_archive", "probe"} <= set(tensorcap.__all__) == set(dir(tensorcap))


def test_importing_all_modules_replaces_no_verb() -> None:
    code = (
        "import importlib, pkgutil, warnings\n"
        "warnings.simplefilter('ignore')\n"
        "import tensorcap\n"
        "for module in pkgutil.walk_packages(tensorcap.__path__, 'tensorcap.', onerror=print):\n"
        "    try: importlib.import_module(module.name)\n"
        "    except ImportError: pass\n"  # of a framework that is not installed
        f"for name in {VERBS.split()} + ['open_archive', 'probe']:\n"
        "    verb = getattr(tensorcap, name)\n"
        "    assert callable(verb) and verb.__doc__ and not hasattr(verb, '__path__'), name\n"
        "try: tensorcap.compare('no.h5', 'no.h5')\n"
        "except tensorcap.TensorcapError: pass\n"
    )
    assert "tensorcap" in loaded_by(code)


def test_type_checkers_see_what_the_face_loads() -> None:
    tree = ast.parse((ROOT / "tensorcap" / "__init__.py").read_text())
    seen = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("tensorcap"):
            for alias in node.names:
                name = alias.asname or alias.name
                seen[name] = f"{node.module}:{alias.name}" if alias.asname else node.module
    assert seen == tensorcap._PLACES
    assert list(tensorcap.__all__) == sorted(seen)


@pytest.mark.parametrize("name", ["tensorcap_cli", "tensorcap_formats"])
def test_exported_names_are_sorted_and_are_all_there_is(name: str) -> None:
    package = importlib.import_module(name)
    assert list(package.__all__) == sorted(package.__all__)
    public = {
        found
        for found, value in vars(package).items()
        if not found.startswith("_") and not isinstance(value, ModuleType)
    }
    assert public - {"annotations"} == set(package.__all__)
