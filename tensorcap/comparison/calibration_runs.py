"""Calibrate limits by runs of known-good ports, and write them to a file."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tensorcap.alignment import NO_MAPPING, sides
from tensorcap.comparison.calibration import (
    CALIBRATED,
    FORMAT,
    Calibration,
    CalibrationBuilder,
    check_settings,
)
from tensorcap.comparison.comparison import Comparison
from tensorcap.comparison.divergence import has_only_grown
from tensorcap.comparison.judge import LogitMeasure
from tensorcap.comparison.pipeline import compare
from tensorcap.runs import Calls
from tensorcap_formats.errors import UsageError
from tensorcap_formats.open import open_archive
from tensorcap_formats.output_path import publish_text

QUANTILE: Final = 0.99
MARGIN: Final = 1.5


@dataclass(frozen=True, slots=True)
class Calibrated:
    """The result of a calibration.

    Attributes:
        calibration: The limits.
        failing: Runs that were left out: reference, target, and the reason.
    """

    calibration: Calibration
    failing: tuple[tuple[Path, Path, str], ...]

    @property
    def exit_status(self) -> int:
        """The exit status of `tcap calibrate`: 0, as there is no result otherwise."""
        return 0

    def to_json(self) -> dict[str, Any]:
        """Convert to the members that `tcap calibrate --json` prints beside the path of the file."""
        limits = self.calibration.limits
        return {
            "precision": self.calibration.precision,
            "runs": self.calibration.runs,
            "limits": sum(len(of_kind) for of_kind in limits.values()),
            "kinds": len(limits),
            "failing": [
                {"reference": str(reference), "target": str(target), "reason": reason}
                for reference, target, reason in self.failing
            ],
        }


def calibrate(
    archives: Sequence[str | os.PathLike[str]],
    *,
    metrics: Sequence[str] = CALIBRATED,
    quantile: float = QUANTILE,
    margin: float = MARGIN,
    compute_dtype: str | None = None,
) -> Calibrated:
    """Find limits per metric and kind of module that known-good ports stay within.

    Args:
        archives: Reference, target, reference, target, … of ports that are known to be good.
        metrics: Metrics of errors to limit.
        quantile: Of the values of all tensors of a kind, 0.5 to 1.
        margin: What the quantile is multiplied by, no unit, at least 1.
        compute_dtype: What the targets computed in, if their runs do not say so.

    Returns:
        The limits, and the runs that were left out because they did not pass.

    Raises:
        UsageError: A setting makes no sense; a pair was given twice; there are too few passing runs, or
            too few samples.
        ReadError: An archive cannot be opened.
    """
    check_settings(quantile, margin, metrics)
    if len(archives) % 2:
        raise UsageError(f"{len(archives)} archives, expected pairs: REF TGT REF TGT …")
    runs = list(zip(archives[::2], archives[1::2], strict=True))
    _require_different(runs)
    builder = CalibrationBuilder(metrics)
    failing = []
    for reference, target in runs:
        with open_archive(reference) as original, open_archive(target) as tested:
            trusted, tested = sides(original, tested, None)
            comparison = compare(trusted, tested, mapping=NO_MAPPING, compute_dtype=compute_dtype)
            reason = _failure(comparison)
            if reason:
                failing.append((Path(reference), Path(target), reason))
            elif comparison.account is not None:
                logits = LogitMeasure(trusted, tested, compute_dtype)
                builder.add(comparison.pairs, Calls(trusted), comparison.account.precision, logits)
    try:
        calibration = builder.result(quantile=quantile, margin=margin)
    except UsageError as error:
        if not failing:
            raise
        left_out = "; ".join(f"{ours} against {theirs}: {reason}" for ours, theirs, reason in failing)
        raise UsageError(f"{error}; left out: {left_out}", hint=error.hint) from None
    return Calibrated(calibration, tuple(failing))


def write_calibration(calibration: Calibration, path: str | os.PathLike[str]) -> None:
    """Write limits to a file that `compare` takes.

    Raises:
        WriteError: Something else than such a file is there, or it cannot be written.
    """
    import tomlkit

    with publish_text(path, beginning=f'format="{FORMAT}"') as file:
        file.write(tomlkit.dumps(calibration.document()))


def _require_different(pairs: Sequence[tuple[str | os.PathLike[str], str | os.PathLike[str]]]) -> None:
    """Refuse a pair that was given twice: it is one known-good port, not two."""
    earlier = set()
    for reference, target in pairs:
        paths = Path(reference).resolve(), Path(target).resolve()
        if paths in earlier:
            raise UsageError(f"{reference} {target}: the pair was given twice, expected each run once")
        earlier.add(paths)


def _failure(comparison: Comparison) -> str:
    """Return why a run does not pass, or "".

    Identical runs are no evidence. A pair whose error only grew may well be good: that is what is calibrated.
    """
    for side, archive in (("reference", comparison.reference), ("target", comparison.target)):
        if not archive.is_complete:
            return f"the {side} is incomplete"
    for pair in comparison.pairs:
        if pair.is_required and not pair.is_green and not has_only_grown(pair):
            return f"{pair.key} is {pair.status}"
    if not any(pair.difference is not None for pair in comparison.pairs):
        return "nothing differs"
    if any(value.is_red for value in comparison.value_differences):
        return "a number that a module returned differs"
    return ""
