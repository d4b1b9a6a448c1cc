"""The errors of a component as a picture: quantiles against quantiles, and both distributions."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Final

import numpy as np

from tensorcap.equivalence.component_result import ComponentResult
from tensorcap.equivalence.component_tensors import Tensors
from tensorcap.reports.figure import new_figure

_QUANTILES: Final = 10_000  # at most, as the method has it
_MOST_BINS: Final = 1000
_SIGMAS: Final = 5.0
_DPI: Final = 70


def plot_component(path: Path, result: ComponentResult, three: Tensors) -> None:
    """Draw the errors of the port against those of the baseline.

    On the left are quantiles of both with the line on which they are equal, on the right the densities of
    both, over five standard deviations to each side of their mean.

    Args:
        path: Of the picture; folders above it are made.
        result: What the test came to, for the title.
        three: The tensors.

    Raises:
        MissingPackageError: matplotlib is not installed.
    """
    baseline, port = (
        values[np.isfinite(values)]
        for values in ((one - three.reference).reshape(-1) for one in (three.baseline, three.port))
    )
    figure = new_figure("a plot of a component", 9, 4, extra="equivalence")
    quantiles, densities = figure.subplots(1, 2)
    state = "passed" if result.passed else "failed"
    ratio = "" if result.ratio is None else f", R {result.ratio:.4g}"
    figure.suptitle(f"{result.component}: {state}{ratio}", color="black" if result.passed else "C3")
    quantiles.set(xlabel="error of the baseline", ylabel="error of the port", title="quantiles")
    densities.set(xlabel="error", ylabel="density", title="distributions")
    if baseline.size and port.size:
        shares = np.linspace(0, 1, min(baseline.size, port.size, _QUANTILES))
        of_baseline, of_port = (np.quantile(part, shares) for part in (baseline, port))
        ends = [min(of_baseline[0], of_port[0]), max(of_baseline[-1], of_port[-1])]
        quantiles.plot(ends, ends, color="0.6", linewidth=1, label="equal")
        quantiles.plot(of_baseline, of_port, ".", markersize=3, color="C0" if result.passed else "C3")
        both = np.concatenate([baseline, port])
        middle, width = float(both.mean()), float(both.std()) * _SIGMAS
        if width and math.isfinite(width):
            bins = max(1, min(_MOST_BINS, math.isqrt(baseline.size)))
            for part, name, color in ((baseline, "baseline", "0.6"), (port, "port", "C0")):
                densities.hist(
                    part,
                    bins=bins,
                    range=(middle - width, middle + width),
                    density=True,
                    alpha=0.6,
                    label=name,
                    color=color,
                )
            densities.legend(fontsize="small")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=_DPI)
