"""Stage 2: the tests of all components, run, and R of each."""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from tensorcap.equivalence import component_files
from tensorcap.equivalence.component_files import TENSORS, TESTS
from tensorcap.equivalence.component_result import PRECISE, ComponentResult, read_results, stage2_content
from tensorcap.equivalence.experiment import Experiment
from tensorcap.equivalence.models import python
from tensorcap.equivalence.stage import Stage, StageResult
from tensorcap.wording import counted, some
from tensorcap_formats.errors import CaptureError, UsageError, missing_package
from tensorcap_formats.progress import Progress

FILE: Final = "results/stage2.json"
PLOTS: Final = "results/plots"
_ENDED: Final = (0, 1)  # statuses of pytest: all passed, some failed
_NO_TESTS: Final = 5


def run_components(experiment: Experiment, progress: Progress) -> StageResult:
    """Run the tests, and write `stage2.json`, with a picture of each component if they are asked for."""
    progress.stage("testing the components")
    results = run_tests(experiment, TENSORS, plots=PLOTS if experiment.settings.run.plots else "")
    experiment.write_json(FILE, stage2_content(results))
    plots = sorted((experiment.folder / PLOTS).glob("*.png")) if experiment.settings.run.plots else []
    names = [str(path.relative_to(experiment.folder)) for path in plots]
    failed = [one for one in results if not one.passed]
    figures = {"passed": len(results) - len(failed), "failed": len(failed), "total": len(results)}
    return StageResult(
        "failed" if failed or not results else "passed",
        tuple(_words(experiment, results)),
        (FILE, *names),
        figures=figures,
    )


def run_tests(experiment: Experiment, tensors: str, *, plots: str = "") -> tuple[ComponentResult, ...]:
    """Run the tests in a process of their own, and read their results.

    Args:
        experiment: The experiment.
        tensors: The name of the folder of the tensors that are tested.
        plots: The name of the folder of plots; "" for none.

    Raises:
        MissingPackageError: pytest is not installed.
        UsageError: There is no test.
        CaptureError: pytest could not run.
    """
    with tempfile.TemporaryDirectory(prefix="tensorcap-") as folder:
        path = Path(folder) / "results.json"
        options = ["--component-results", str(path), "--component-tensors", tensors]
        if plots:
            options += ["--component-plots", str((experiment.folder / plots).absolute())]
        tests = (experiment.folder / TESTS).absolute()
        command = [
            *(python(experiment), "-m", "pytest", str(tests), "-q", "--rootdir", str(tests)),
            *("-c", str(Path(folder) / "pytest.ini"), "--import-mode", "importlib"),
            *("-p", "no:cacheprovider", "-p", "tensorcap.equivalence.component_plugin", *options),
        ]
        (Path(folder) / "pytest.ini").write_text("[pytest]\n", encoding="utf-8")
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode == _NO_TESTS:
            raise UsageError(f"{tests}: holds no test", hint="Remove the folder to have them written anew.")
        if done.returncode not in _ENDED or not path.is_file():
            if "No module named pytest" in done.stderr:
                raise missing_package("testing components", "pytest", extra="equivalence")
            lines = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]
            raise CaptureError(f"{tests}: pytest ended with {done.returncode}: {lines[-1] if lines else ''}")
        content = json.loads(path.read_text(encoding="utf-8"))
    return read_results(content, str(tests))


def _words(experiment: Experiment, results: Sequence[ComponentResult]) -> list[str]:
    failed = [one for one in results if not one.passed]
    ratios = [one.ratio for one in results if one.ratio is not None]
    tau_r = experiment.settings.limits.tau_r
    most = f", the largest R {max(ratios):.4g}" if ratios else ""
    words = [f"{len(results) - len(failed)} of {counted(len(results), 'component')} pass{most}."]
    above = [one for one in results if one.passed and one.ratio is not None and one.ratio >= tau_r]
    for verdict in dict.fromkeys(one.verdict for one in above):
        words.append(f"{some([one.component for one in above if one.verdict == verdict])}: {verdict}.")
    for one in failed[:_SHOWN]:
        ratio = "no R" if one.ratio is None else f"R {one.ratio:.4g}"
        words.append(f"{one.component}: {ratio}: {one.error or one.verdict}.")
    if len(failed) > _SHOWN:
        words.append(f"And {len(failed) - _SHOWN} more that failed.")
    precise = [one.component for one in results if one.ratio is not None and 0 < one.ratio < PRECISE]
    if precise:
        words.append(
            f"Rounded less than the source in that precision, by itself no mistake: {some(precise)}."
        )
    known = experiment.read_json(component_files.COMPONENTS, stage="component-tests")["tested"]
    missing = [one["site"] for one in known if one["site"] not in {result.component for result in results}]
    if missing:
        words.append(f"Without a result, as their tests were taken out or skipped: {some(missing)}.")
    return words


_SHOWN: Final = 5

STAGE: Final = Stage(
    2,
    "components",
    "R of each component",
    run_components,
    (FILE, f"{PLOTS}/*.png"),
    needs=(component_files.STAGE,),
    settings=("limits.tau_r", "run.dtype", "run.reference_dtype", "run.plots"),
    then=("localize", "patch"),
    when_failed="tcap equivalence localize names the component to begin with.",
)
