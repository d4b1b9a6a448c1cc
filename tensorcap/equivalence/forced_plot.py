"""R, cosine and KL of each position as a picture; needs matplotlib, the extra `report`."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, Final

from tensorcap.equivalence.forced_decoding import ForcedComparison
from tensorcap.equivalence.logit_rows import RowMetrics
from tensorcap.reports.figure import new_figure

_COLOURS: Final = tuple(f"C{n}" for n in range(10) if n != 3)  # but red, which is for what fails
_LEAST: Final = 1e-9  # smaller values are drawn there, on log scales


def plot_forced(path: str | os.PathLike[str], result: ForcedComparison, *, title: str = "") -> None:
    """Draw the metrics of each position, a line for each prompt, with the limits of the gates.

    Positions without numbers are red crosses on the upper edge.

    Args:
        path: Where to, an image.
        result: Stages 5 and 6.
        title: Above it; what came of the gates if "".

    Raises:
        MissingPackageError: matplotlib is not installed.
    """
    limits = result.limits
    figure = new_figure(os.path.basename(path), 8, 6)
    panels = figure.subplots(3, 1, sharex=True)
    _draw(panels[0], result, lambda row: row.r_ratio, "R", result.r_limit)
    _draw(panels[1], result, lambda row: _distance(row.cosine), "1 - cosine", 1 - limits.theta_cosine)
    _draw(panels[2], result, lambda row: row.kl, "KL, nats", limits.delta_kl)
    verdict = "passed" if result.passed else "failed"
    panels[0].set_title(title or f"stages 5 and 6: {verdict}")
    panels[0].legend(loc="upper right", fontsize="x-small")
    panels[2].set_xlabel("position")
    figure.savefig(path, dpi=70)


def _distance(cosine: float | None) -> float | None:
    return None if cosine is None else 1 - cosine


def _draw(
    axes: Any,
    result: ForcedComparison,
    value: Callable[[RowMetrics], float | None],
    label: str,
    limit: float | None,
) -> None:
    for number, one in enumerate(result.prompts):
        values = [(at, value(row)) for at, row in enumerate(one.rows)]
        numbers = [(at, max(v, _LEAST)) for at, v in values if v is not None]
        colour = _COLOURS[number % len(_COLOURS)]
        axes.plot(*zip(*numbers, strict=True), ".-", color=colour, linewidth=0.8) if numbers else None
        missing = [at for at, v in values if v is None]
        top = axes.get_xaxis_transform()  # x in data, y in shares of the axes
        axes.plot(missing, [0.96] * len(missing), "x", color="C3", transform=top, markersize=4)
    if limit is not None:
        axes.axhline(limit, color="C3", linestyle="--", linewidth=0.8, label=f"limit {limit:.3g}")
    axes.set(yscale="log", ylabel=label)
    axes.grid(visible=True, alpha=0.25)
