"""What two archives say of the layers that cost most: the error that each quantised layer makes itself.

How much of it reaches the output they do not say; runs with layers exchanged do.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tensorcap.comparison import POLICY, measure_layers
from tensorcap_formats.errors import UsageError
from tensorcap_formats.json_values import json_value
from tensorcap_formats.keys import Key
from tensorcap_formats.open import Source, opened_both


@dataclass(frozen=True, slots=True)
class LayerOwnError:
    """The error that a quantised layer makes itself.

    Attributes:
        name: Its site.
        own: The largest of its calls, relative to the reference's result of the same input, no unit.
        predicted: The same, as its rounding predicts.
        text: The numbers of its weight in words.
    """

    name: str
    own: float
    predicted: float
    text: str


@dataclass(frozen=True, slots=True)
class ArchiveSensitivity:
    """The quantised layers of a target by their own errors, the largest first."""

    layers: tuple[LayerOwnError, ...]

    @property
    def exit_status(self) -> int:
        """0: nothing is judged."""
        return 0

    def to_json(self) -> dict[str, Any]:
        """The members that `tcap sensitivity --json` prints, as JSON values."""
        return {
            "format": "tensorcap-archive-sensitivity",
            "version": 1,
            "layers": json_value(self.layers),
            "exit_status": self.exit_status,
        }


def archive_sensitivity(reference: Source, target: Source) -> ArchiveSensitivity:
    """Rank the quantised layers of a target by the error that each makes itself (POL-281).

    Args:
        reference: The trusted archive, with parameters, inputs and results of layers.
        target: The archive under test, likewise.

    Raises:
        UsageError: They do not hold weights, inputs and results of a quantised layer.
        ReadError: One of the archives cannot be read.
    """
    with opened_both(reference, target) as (trusted, tested):
        precision = POLICY.precision_of_runs(trusted.info, tested.info)
        layers = measure_layers(trusted, tested, precision)
        worst: dict[str, LayerOwnError] = {}
        for key, error in layers.results.items():
            name = Key.parse(key).site
            if name not in worst or error.own > worst[name].own:
                worst[name] = LayerOwnError(name, error.own, error.predicted, error.text)
        if not worst:
            raise UsageError(
                f"{tested.path}: holds no quantised layer with its weight, input and result",
                hint="Capture both runs with --params, or give the two models, which are run then.",
            )
    return ArchiveSensitivity(tuple(sorted(worst.values(), key=lambda layer: -layer.own)))
