"""Compare models under two versions of transformers: `python -m tests.upgrades.run [NAME…] [--folder DIR]`.

1. Two environments are made in the folder, with pip, torch of `constraints.txt` and this tree: transformers
   4.57 and 5.
2. The older one saves each model (random weights, a small configuration) and its inputs; both load the
   checkpoint with `from_pretrained` and capture a run (`tcap capture torch DIR --inputs inputs.npz`).
3. The newer one runs `tcap compare` without options, `tcap localize`, and `tcap verify` of the older run
   against the model.

One line a model: exit status of all three, pairs by status, warnings, and alarms: lines of the report that a
run without a mistake must not have. Reports and archives stay in the folder. It needs some 3 GB of disk and
a package index; each environment is made once.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import venv
from collections.abc import Sequence
from pathlib import Path
from typing import Final

TREE: Final = Path(__file__).parents[2]
CACHE: Final = Path.home() / ".cache" / "tensorcap-upgrades"
VERSIONS: Final = {"old": "transformers>=4.57,<4.58", "new": "transformers>=5,<6"}
REQUIRED: Final = ("gpt2", "gemma3", "qwen3-moe", "bert", "t5", "vit")
OTHERS: Final = ("llama", "mistral", "whisper", "clip", "phi3", "deepseek-v3", "wav2vec2")
COUNTED: Final = ("identical", "match", "within-rounding", "explained")
# What a report says of a port that is wrong, or may be
ALARMS: Final = ("WARNING", "BEFORE ANY TENSOR", "FIRST DIVERGENCE", "MISSING", "WORST")


class Environment:
    """An environment of Python with tensorcap and one version of transformers.

    Args:
        folder: Where it is, or is made.
        transformers: The version, as pip takes it.
    """

    def __init__(self, folder: Path, transformers: str) -> None:
        self._bin = folder / "bin"
        if not (self._bin / "tcap").exists():
            venv.create(folder, with_pip=True)
            constraints = ["-c", str(TREE / "constraints.txt")]
            command = ["-m", "pip", "install", "--quiet", *constraints, "-e", f"{TREE}[hf]", transformers]
            self.python(*command).require()
        check = "import transformers; print(transformers.__version__)"
        self.version = self.python("-c", check).require().strip()

    def python(self, *arguments: str) -> Run:
        return Run([str(self._bin / "python"), *arguments])

    def tcap(self, *arguments: str) -> Run:
        return Run([str(self._bin / "tcap"), *arguments])


class Run:
    """One command, run in the root of this tree."""

    def __init__(self, command: Sequence[str]) -> None:
        environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
        done = subprocess.run(command, capture_output=True, text=True, cwd=TREE, env=environment, check=False)
        self.exit_status, self.text, self._errors = done.returncode, done.stdout, done.stderr
        self._command = command

    def require(self) -> str:
        """What it printed; it must have ended with 0."""
        if self.exit_status:
            raise SystemExit(f"{' '.join(self._command)} ended with {self.exit_status}:\n{self._errors}")
        return self.text


def capture(name: str, folder: Path, environments: dict[str, Environment]) -> None:
    """Save a model by the older version, and capture it under both."""
    checkpoint = folder / name
    if not (checkpoint / "inputs.npz").exists():
        environments["old"].python("-m", "tests.upgrades.models", str(folder), name).require()
    for side, environment in environments.items():
        inputs, archive = checkpoint / "inputs.npz", checkpoint / f"{side}.h5"
        arguments = ["capture", "torch", str(checkpoint), "--inputs", str(inputs), "-o", str(archive)]
        environment.tcap(*arguments).require()


def examine(name: str, folder: Path, environment: Environment) -> tuple[bool, str]:
    """Compare, localize and verify; whether all is green without an alarm, and the line."""
    checkpoint = folder / name
    sides = [str(checkpoint / "old.h5"), str(checkpoint / "new.h5")]
    report = checkpoint / "verify"
    inputs = ["--inputs", str(checkpoint / "inputs.npz"), "-o", str(report), "--force"]
    runs = {
        "compare": environment.tcap("compare", *sides),
        "localize": environment.tcap("localize", *sides),
        "verify": environment.tcap("verify", sides[0], str(checkpoint), *inputs),
    }
    for command, run in runs.items():
        (checkpoint / f"{command}.txt").write_text(run.text)
    result = json.loads(environment.tcap("compare", *sides, "--json").text)
    counts, lines = result["counts"], runs["compare"].text.splitlines()
    alarms = [line for line in lines if line.startswith(ALARMS)]
    pairs = ", ".join(f"{counts[status]} {status}" for status in COUNTED if counts.get(status))
    rest = sum(counts.values()) - sum(counts.get(status, 0) for status in COUNTED)
    rest -= counts.get("missing-in-reference", 0)
    statuses = " ".join(f"{command} {run.exit_status}" for command, run in runs.items())
    remarks = f"{len(result['warnings'])} warnings, {len(alarms)} alarms"
    line = f"{name:12} {statuses}  {pairs}, {rest} other; {remarks}"
    return not alarms and not rest and not any(run.exit_status for run in runs.values()), line


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"models; by default {' '.join(REQUIRED)}")
    parser.add_argument("--all", action="store_true", help=f"these too: {' '.join(OTHERS)}")
    parser.add_argument(
        "--folder", type=Path, default=CACHE, metavar="DIR", help=f"environments and runs ({CACHE})"
    )
    options = parser.parse_args()
    folder = options.folder.absolute()
    environments = {side: Environment(folder / side, wanted) for side, wanted in VERSIONS.items()}
    print("transformers", " against ".join(one.version for one in environments.values()), flush=True)
    are_right = []
    for name in options.names or (*REQUIRED, *(OTHERS if options.all else ())):
        capture(name, folder / "models", environments)
        is_right, line = examine(name, folder / "models", environments["new"])
        are_right.append(is_right)
        print(line, flush=True)
    return 0 if all(are_right) else 1


if __name__ == "__main__":
    sys.exit(main())
