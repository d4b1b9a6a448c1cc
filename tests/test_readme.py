"""Every fence of the README is run, in one folder from top to bottom, and prints what it says."""

import doctest
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FENCES = re.findall(r"```(\w*)\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
UNEQUAL = {  # expected exit statuses
    "compare ref.h5 port.h5": 1,
    "compare ref.h5::0/@root/output.logits": 0,
    "compare ref.h5 own.h5": 1,
    "sync-points graph.h5 coreai.h5": 1,
    "bisect ref.h5 --target-model examples/rewritten.py:wrong": 1,
}


def steps(fence: str) -> list[tuple[str, str]]:
    """The commands of a console fence, each with the output that follows it."""
    parts = re.split(r"(?m)^\$ ", fence)[1:]
    return [(part.partition("\n")[0], part.partition("\n")[2]) for part in parts]


def test_no_fence_is_left_out() -> None:
    others = [fence for kind, fence in FENCES if kind not in ("console", "python")]
    assert [fence.split()[:2] for fence in others] == [
        ["make", "demo"],  # which CI runs
        ["tcap", "verify"],  # tests/max/test_decoder.py
        ["tcap", "verify"],  # tests/max/test_pipelines.py
        ["tcap", "capture"],  # tests/onnx/test_pretrained.py
        ["tcap", "capture"],  # tests/jax/test_ports.py
        ["tcap", "capture"],  # tests/executorch/test_capturing.py
        ["eval", '"$(_TCAP_COMPLETE=bash_source'],  # tests/cli/test_terminal.py
    ]


@pytest.mark.slow
def test_readme_commands_run_as_printed(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    run(tmp_path, [(kind, fence) for kind, fence in FENCES if not is_of_core_ai(fence)])


@pytest.mark.slow
def test_readme_commands_of_core_ai_run_as_printed(tmp_path: Path) -> None:
    pytest.importorskip("coreai_torch")
    fences = [(kind, fence) for kind, fence in FENCES if is_of_core_ai(fence)]
    assert len(fences) == 1
    run(tmp_path, fences)


def is_of_core_ai(fence: str) -> bool:
    return "tcap capture coreai" in fence


def run(folder: Path, fences: list[tuple[str, str]]) -> None:
    """Run Python and commands in a folder, and hold their output against what stands below them."""
    (folder / "examples").symlink_to(ROOT / "examples")
    paths = os.pathsep.join(str(ROOT / part) for part in (".", "formats", "cli"))
    environment = {**os.environ, "PYTHONPATH": paths, "COLUMNS": "200"}
    checker = doctest.OutputChecker()
    for kind, fence in fences:
        if kind == "python":
            subprocess.run([sys.executable, "-c", fence], cwd=folder, env=environment, check=True)
        if kind != "console":
            continue
        for command, expected in steps(fence):
            program, *arguments = shlex.split(command)
            assert program == "tcap"
            done = subprocess.run(
                [sys.executable, "-m", "tensorcap_cli", *arguments],
                cwd=folder,
                env=environment,
                capture_output=True,
                text=True,
                check=False,
            )
            status = next((s for start, s in UNEQUAL.items() if " ".join(arguments).startswith(start)), 0)
            assert done.returncode == status, f"{command}\n{done.stdout}{done.stderr}"
            flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
            assert checker.check_output(expected, done.stdout, flags), f"{command}\n{done.stdout}"
