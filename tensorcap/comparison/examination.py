"""The examination of a comparison: preflight, error locations, logits, routing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from tensorcap.comparison.exchanged_operations import ExchangedOperations
from tensorcap.comparison.preflight import Preflight
from tensorcap.metrics import Location, LogitDifference, RoutingDifference


@dataclass(frozen=True, slots=True)
class Examination:
    """Results of an examination beside the metrics of the pairs, by key text of the pair.

    Attributes:
        preflight: Differences apart from the tensors; None for two records that were named.
        classes: Class of the module of each site of the reference.
        sources: Source line of the op that computed a record, as `modeling_llama.py:189 in forward`.
        locations: Where the error lies.
        logits: Distributions over the vocabulary compared.
        routing: Choices of experts compared.
        exchanged: Operations that the target runs in the place of others, where results begin to differ.
        notes: What was not examined, and why, a sentence each.
    """

    preflight: Preflight | None = None
    classes: Mapping[str, str] = field(default_factory=dict)
    sources: Mapping[str, str] = field(default_factory=dict)
    locations: Mapping[str, Location] = field(default_factory=dict)
    logits: Mapping[str, LogitDifference] = field(default_factory=dict)
    routing: Mapping[str, RoutingDifference] = field(default_factory=dict)
    exchanged: tuple[ExchangedOperations, ...] = ()
    notes: tuple[str, ...] = ()
