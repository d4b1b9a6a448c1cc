"""Record one batch of commands: what `tests.golden.run` starts in a process of its own, with a tree's code.

It reaches the code under test by the command line alone, so that it outlives any move of modules. The batch
comes as JSON on stdin. Clocks stand still, so that equal runs write equal archives, byte for byte.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

ARCHIVES: Final = (".h5", ".safetensors", ".zarr")
_TEXTS: Final = (".csv", ".json", ".md", ".toml", ".txt", ".xml")
# What is left by a hypothesis that gives experts indices beyond their number: memory that nobody has written.
_UNDEFINED: Final = re.compile(r'"index-differs": ?[^,}]+(, ?)?')
_COMPILING: Final = "compiling comparison kernels"  # once per machine and version of the kernels


class _FrozenDatetime(datetime.datetime):
    @classmethod
    def now(cls, tz: datetime.tzinfo | None = None) -> _FrozenDatetime:
        return cls(2026, 1, 1, tzinfo=tz)


def freeze_clocks() -> None:
    """Stop the clocks that run metadata is taken from; to be called before anything is imported."""
    datetime.datetime = _FrozenDatetime  # type: ignore[misc]
    time.perf_counter = lambda: 0.0


def invoke(arguments: Sequence[str], shown: Sequence[str]) -> tuple[str, str, str]:
    """Run a command in this process: its exit status or traceback, stdout and stderr.

    Args:
        arguments: The command, with the names that the tree has for options.
        shown: The same with today's names, which archives hold.
    """
    from click.testing import CliRunner

    from tensorcap_cli.main import main

    sys.argv = ["tcap", *shown]
    result = CliRunner().invoke(main, list(arguments), prog_name="tcap")
    status = str(int(result.exit_code))
    error = result.exception
    if error is not None and not isinstance(error, SystemExit):
        notes = getattr(error, "__notes__", ())
        status = "; ".join([f"{type(error).__name__}: {error}", *notes])
        traceback.print_exception(error)
    return status, result.stdout, result.stderr


def invoke_alone(arguments: Sequence[str], shown: Sequence[str]) -> tuple[str, str, str]:
    """As `invoke`, in a process of its own: for commands that fork, or run a script."""
    command = [sys.executable, "-P", __file__, "tcap", json.dumps([arguments, shown])]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return str(done.returncode), done.stdout, done.stderr


def transcript(arguments: Sequence[str], status: str, stdout: str, stderr: str) -> str:
    """A command and all that it said; JSON is laid out for diffs, and its digest keeps the layout it had."""
    errors = [line for line in stderr.splitlines() if _COMPILING not in line]
    try:
        parsed = json.loads(stdout)
    except ValueError:
        pass
    else:
        if isinstance(parsed, dict | list):
            if _UNDEFINED.search(stdout):
                stdout = re.sub(r", ?}", "}", _UNDEFINED.sub("", stdout))
                parsed = json.loads(stdout)
            digest = hashlib.sha256(stdout.encode()).hexdigest()
            stdout = f"sha256 {digest}\n{json.dumps(parsed, indent=1, ensure_ascii=False)}\n"
    return "\n".join(
        [f"$ tcap {' '.join(arguments)}", f"status {status}", "--- stdout", stdout, "--- stderr", *errors, ""]
    )


def record_files(work: Path, out: Path) -> None:
    """Write the digest of every file, copies of texts, and what archives hold as the commands tell it."""
    files = sorted(p for p in work.rglob("*") if p.is_file() and "__pycache__" not in p.parts)
    digests = {str(p.relative_to(work)): hashlib.sha256(p.read_bytes()).hexdigest() for p in files}
    (out / "files.txt").write_text("".join(f"{digest}  {name}\n" for name, digest in digests.items()))
    for name in digests:
        if Path(name).suffix in _TEXTS and not any(p.suffix == ".zarr" for p in Path(name).parents):
            (out / "files" / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(work / name, out / "files" / name)
    (out / "archives").mkdir()
    for path in sorted(p for p in work.glob("*") if p.suffix in ARCHIVES):
        for command in ("ls", "show"):
            arguments = [command, path.name, "--json"]
            text = transcript(arguments, *invoke(arguments, arguments))
            (out / "archives" / f"{path.name}.{command}.txt").write_text(text)


def record(batch: dict[str, Any], work: Path, out: Path) -> None:
    """Run the commands of a batch in the folder `work`, and write what they said and made to `out`."""
    work.mkdir(parents=True)
    out.mkdir(parents=True)
    os.chdir(work)
    sys.path.insert(0, str(work))
    sys.argv = ["tcap"]  # which archives hold
    (work / "workloads.py").write_text(batch["workloads"])
    if batch["prepare"]:
        exec(compile(batch["prepare"], "prepare", "exec"), {})
    if batch["torch"]:
        import torch

        torch.set_num_threads(1)
    for number, step in enumerate(batch["steps"]):
        print(f"{out.name} {number:03}: {' '.join(step['arguments'])}", file=sys.stderr, flush=True)
        invocation = invoke_alone if step["alone"] else invoke
        text = transcript(step["arguments"], *invocation(step["invoked"], step["arguments"]))
        (out / f"{number:03}-{step['arguments'][0].strip('-')}.txt").write_text(text)
    record_files(work, out)


def _main() -> None:
    freeze_clocks()
    if sys.argv[1] == "tcap":
        from tensorcap_cli.main import main

        arguments, shown = json.loads(sys.argv[2])
        sys.argv = ["tcap", *shown]
        main(arguments, prog_name="tcap")
    else:
        record(json.load(sys.stdin), Path(sys.argv[1]), Path(sys.argv[2]))


if __name__ == "__main__":
    _main()
