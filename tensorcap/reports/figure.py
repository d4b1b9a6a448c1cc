"""Figures of matplotlib, an optional package, drawn without a screen."""

from __future__ import annotations

from typing import Any, Literal

from tensorcap_formats.errors import missing_package


def new_figure(
    purpose: str,
    width: float,
    height: float,
    *,
    extra: str = "report",
    layout: Literal["constrained"] | None = "constrained",
) -> Any:
    """Make an empty `matplotlib.figure.Figure`.

    Args:
        purpose: What it is for, as the beginning of a sentence, if matplotlib is missing.
        width: In inches.
        height: In inches.
        extra: The extra of tensorcap that brings matplotlib for that purpose.
        layout: What arranges it: matplotlib measures all texts to do so; None if the caller sets margins.

    Raises:
        MissingPackageError: matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "matplotlib":
            raise
        raise missing_package(purpose, "matplotlib", extra=extra) from error
    figure = Figure(figsize=(width, height), layout=layout)
    FigureCanvasAgg(figure)
    return figure
