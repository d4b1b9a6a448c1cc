"""What the generated tests of components use, and the plugin of pytest that gathers their typed results.

A test asks for its component, reads tensors, compares them, and asserts that it passed; `compare` notes a
`ComponentResult` among the test's properties, which the plugin writes into a file when all tests are over.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import pytest

from tensorcap.equivalence.component_files import COMPONENTS, TENSORS
from tensorcap.equivalence.component_result import ComponentResult, judge, stage2_content
from tensorcap.equivalence.component_tensors import EPSILONS, ComponentTensors, Tensors, open_tensors
from tensorcap.equivalence.experiment import Experiment
from tensorcap.metrics import ThreeTensors, compare_three
from tensorcap.reports.equivalence import write_stage
from tensorcap_formats.errors import TensorcapError

PROPERTY: Final = "tensorcap-component"
_RESULTS: Final[pytest.StashKey[list[ComponentResult]]] = pytest.StashKey()


@dataclass
class ComponentTest:
    """The test of one component.

    Attributes:
        result: What it came to so far.
        tau_r: What R has to be below.
    """

    result: ComponentResult
    tau_r: float
    _tensors: ComponentTensors
    _settings: tuple[float, str, float]  # the reference's rounding, the precision under test, extra roundings
    _plot: Path | None = None
    _messages: list[str] = field(default_factory=list)

    def tensors(self, key: str) -> Tensors:
        """The reference, the baseline and the port of a result: float64 of one shape.

        Raises:
            TensorcapError: One of them is not there, or cannot be read.
        """
        return self._tensors.read(key)

    def compare(self, three: Tensors, *, tau_r: float | None = None) -> ThreeTensors:
        """Compare the three tensors of a result; of several results the one with the largest R counts.

        Args:
            three: The tensors, of one shape.
            tau_r: Another limit of R, for this one alone.

        Raises:
            UsageError: The shapes differ.
        """
        epsilon, dtype, roundings = self._settings
        compared = compare_three(*three, epsilon=epsilon)
        passed, limit, verdict = judge(
            compared,
            self.tau_r if tau_r is None else tau_r,
            dtype,
            roundings,
            is_put_off=self._tensors.share > 0,
        )
        if not passed:
            self._messages.append(f"R-ratio = {compared.ratio:.4f}  (threshold={limit:.3g}): {verdict}")
        known = self.result
        is_first = known.ratio is None
        if is_first or (not passed, compared.ratio) >= (not known.passed, known.ratio):
            self.result = replace(
                known,
                ratio=compared.ratio,
                limit=limit,
                passed=passed and (is_first or known.passed),
                verdict=verdict,
                bc=compared.bhattacharyya,
                sigma_ratio=compared.sigma_ratio,
                elements=compared.elements,
                metrics=compared.metrics,
            )
            if self._plot is not None:
                from tensorcap.equivalence.component_plot import plot_component

                plot_component(self._plot, self.result, three)
        return compared

    def assert_passed(self) -> None:
        """Assert that all that was compared passed.

        Raises:
            AssertionError: It did not, or nothing was compared.
        """
        if self.result.ratio is None:
            raise AssertionError(f"[FAIL] {self.result.component}: nothing was compared")
        if self._messages:
            raise AssertionError(f"[FAIL] {self.result.component}: {'; '.join(self._messages)}")


class ComponentTests:
    """Makes the test of a component, by its name; for a fixture of `tests/conftest.py`."""

    def __init__(
        self,
        experiment: Experiment,
        tensors: ComponentTensors,
        plots: Path | None,
        *,
        is_patched: bool = False,
    ) -> None:
        self._is_patched = is_patched
        self._experiment, self._tensors, self._plots = experiment, tensors, plots
        self._known = {
            one["site"]: one for one in experiment.read_json(COMPONENTS, stage="components")["tested"]
        }

    def start(self, name: str, request: Any) -> ComponentTest:
        """Start the test of a component, and note it among the properties of the test that asks for it.

        Args:
            name: Its site in the source.
            request: The fixture `request` of the test.

        A patched port may lack a module that the port has: the test of that is skipped.
        """
        keys = self._known.get(name, {}).get("results", [])
        if self._is_patched and not any(self._tensors.has(key) for key in keys):
            pytest.skip(f"{name}: the patched port has no counterpart")
        run, limits = self._experiment.settings.run, self._experiment.settings.limits
        known = self._known.get(name, {})
        plot = None if self._plots is None else self._plots / f"{known.get('number', 0):03d}_{name}.png"
        epsilon = EPSILONS.get(run.reference_dtype or run.dtype, EPSILONS["float32"])
        test = ComponentTest(
            ComponentResult(name, known.get("kind", ""), known.get("place")),
            limits.tau_r,
            self._tensors,
            (min(epsilon, EPSILONS["float32"]), run.dtype, known.get("extra_roundings", 0.0)),
            plot,
        )
        request.node.user_properties.append((PROPERTY, test))
        return test


@contextmanager
def component_tests(folder: Path, config: pytest.Config) -> Iterator[ComponentTests]:
    """Open the tensors of an experiment for its tests, until the block ends.

    Args:
        folder: The experiment's.
        config: Of pytest; its options say whose tensors are tested, and where plots go.
    """
    experiment = Experiment.open(folder)
    name = config.getoption("component_tensors", None) or TENSORS
    plots = config.getoption("component_plots", None)
    run = experiment.settings.run
    share = 0.0 if run.reference_dtype else EPSILONS[run.dtype]
    with open_tensors(experiment.folder / name, share=share) as tensors:
        place = None if plots is None else Path(plots)
        yield ComponentTests(experiment, tensors, place, is_patched=name != TENSORS)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options that the stage gives."""
    group = parser.getgroup("components of tcap equivalence")
    group.addoption("--component-results", metavar="FILE", help="Write results as a stage 2 file.")
    group.addoption("--component-tensors", metavar="DIR", help="Whose tensors are tested, in the experiment.")
    group.addoption("--component-plots", metavar="DIR", help="Write a QQ plot and a histogram of each.")


def pytest_configure(config: pytest.Config) -> None:
    """Begin the list of results."""
    results: list[ComponentResult] = []
    config.stash[_RESULTS] = results


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
    """Note the result of a test that was called, or could not be."""
    report = yield
    if call.when == "call" or (call.when == "setup" and report.outcome != "passed"):
        started = [test.result for _, test in item.user_properties if isinstance(test, ComponentTest)]
        item.user_properties = [pair for pair in item.user_properties if pair[0] != PROPERTY]
        error = "" if call.excinfo is None else _error(call.excinfo.value)
        if report.outcome != "skipped":
            for result in started or [ComponentResult(item.name)]:
                item.config.stash[_RESULTS].append(_finished(result, report.outcome, error))
    return report


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Write the results."""
    path = session.config.getoption("component_results")
    if path:
        results: list[ComponentResult] = session.config.stash[_RESULTS]
        write_stage(path, stage2_content(results))


def _finished(result: ComponentResult, outcome: str, error: str) -> ComponentResult:
    """A result with what pytest says of its test: one that broke, or compared nothing, has not passed."""
    if outcome == "passed" and result.ratio is not None:
        return result
    if outcome == "passed":
        return replace(result, passed=False, error="nothing was compared")
    return replace(result, passed=False, error=error)


def _error(error: BaseException) -> str:
    """What an exception says, in a line; nothing of a comparison that failed, whose R says it."""
    if isinstance(error, AssertionError) and str(error).startswith("[FAIL]"):
        return ""
    text = " ".join(str(error).split())
    return text if isinstance(error, TensorcapError) else f"{type(error).__name__}: {text}"
