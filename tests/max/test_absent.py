"""What is said where there is no MAX, or none that is understood."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tensorcap.session import Recipe
from tensorcap_formats.errors import UsageError

ROOT = Path(__file__).parents[2]
HIDDEN = (
    "import sys\n"
    "class Hides:\n"
    "    def find_spec(name, *_):\n"
    "        if name == 'max': raise ModuleNotFoundError(name=name)\n"
    "sys.meta_path.insert(0, Hides)\n"
)


@pytest.mark.spec("MAX-22")
@pytest.mark.parametrize(
    "command",
    [
        "capture max port.py:target --dry-run",
        "verify port.py:target a.h5 -o r",
        "inject max:model --prompt Hi -o own.h5",
        "bisect max:model --prompt Hi",
    ],
)
def test_a_workload_that_needs_it_is_a_line_too(tmp_path: Path, command: str) -> None:
    (tmp_path / "port.py").write_text("from max.nn import Linear\n")
    code = f"{HIDDEN}from tensorcap_cli.main import main\nmain({command.split()!r})\n"
    paths = os.pathsep.join(str(ROOT / part) for part in (".", "formats", "cli"))
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1] == "Hint: Install it with: pip install 'tensorcap[max]'"
    assert "needs the package 'max', which is not installed" in done.stderr.splitlines()[-2]


@pytest.mark.spec("MAX-22")
@pytest.mark.parametrize(
    ("files", "said"),
    [
        pytest.param({}, "needs the package 'max', which is not installed", id="absent"),
        pytest.param({"max.py": ""}, "max: No module named 'max.driver'", id="somebody-elses"),
        pytest.param(
            {"max/__init__.py": "", "max/driver.py": "class CPU: pass"}, "expected Modular MAX", id="other"
        ),
    ],
)
def test_the_command_to_install_it_is_named_in_a_line(
    tmp_path: Path, files: dict[str, str], said: str
) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    # without files, as where no finder has such a package
    hide = f"sys.path.insert(0, {str(tmp_path)!r})" if files else "sys.meta_path.insert(0, Hides)"
    code = (
        "import sys\n"
        "class Hides:\n"
        "    def find_spec(name, *_):\n"
        "        if name == 'max': raise ModuleNotFoundError(name=name)\n"
        f"{hide}\n"
        "from tensorcap.adapters.protocol import adapter_named\n"
        "from tensorcap_formats.errors import MissingPackageError\n"
        "try: adapter_named('max')\n"
        "except MissingPackageError as e: print(e, '|', e.hint)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=dict(os.environ)
    )
    assert said in done.stdout
    assert "pip install 'tensorcap[max]'" in done.stdout
    assert done.stdout.count("\n") == 1


@pytest.mark.spec("MAX-100")
@pytest.mark.parametrize(
    ("text", "path", "framework", "kind", "runs_archived_inputs"),
    [
        pytest.param("max:org/name", "org/name", "max", "file", True, id="id"),
        pytest.param("max:port.py:target", "port.py:target", "max", "function", False, id="function"),
        pytest.param("max:", "max:", None, "huggingface", True, id="no-path"),
        pytest.param("maximal/name", "maximal/name", None, "huggingface", True, id="another-name"),
    ],
)
def test_a_prefix_says_whose_model_a_path_is_of(
    text: str, path: str, framework: str | None, kind: str, runs_archived_inputs: bool
) -> None:
    recipe = Recipe.named(text, {"seed": 0})
    assert (recipe.path, recipe.framework, recipe.kind) == (path, framework, kind)
    assert recipe.runs_archived_inputs is runs_archived_inputs


@pytest.mark.spec("MAX-100")
def test_a_prefix_of_another_framework_than_the_commands_is_refused() -> None:
    with pytest.raises(UsageError, match="max:org/name: a model of max, expected one of torch"):
        Recipe.named("max:org/name", {}, "torch")
