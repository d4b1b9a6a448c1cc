"""A gate: a number, what it has to be, and whether it is."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

from tensorcap.wording import number_and_limit

Relation = Literal["below", "at least", "more than", "at most"]
_HOLDS: Final[Mapping[Relation, Callable[[float, float], bool]]] = {
    "below": operator.lt,
    "at least": operator.ge,
    "more than": operator.gt,
    "at most": operator.le,
}


@dataclass(frozen=True, slots=True)
class Gate:
    """A gate of a stage.

    Attributes:
        name: What is measured.
        value: The number; None if there is none, which passes no gate.
        relation: How it has to lie to the limit.
        limit: The limit.

    Example:
        >>> Gate("R p95", 1.04, "below", 1.2).text
        'R p95 is 1.04, expected below 1.2: passed'
        >>> Gate("R p95", None, "below", 1.2).passed, Gate("R p95", float("nan"), "below", 1.2).passed
        (False, False)
    """

    name: str
    value: float | None
    relation: Relation
    limit: float

    @property
    def passed(self) -> bool:
        """Whether the number is there and lies as it has to."""
        return self.value is not None and _HOLDS[self.relation](self.value, self.limit)

    @property
    def text(self) -> str:
        """The gate as a sentence without its end."""
        number = math.nan if self.value is None else self.value
        shown, limit = number_and_limit(number, self.limit, 4)
        value = "has no number" if self.value is None else f"is {shown}"
        verdict = "passed" if self.passed else "failed"
        return f"{self.name} {value}, expected {self.relation} {limit}: {verdict}"

    def to_json(self) -> dict[str, Any]:
        """The members of a gate in a file of a stage."""
        return {
            "name": self.name,
            "value": self.value,
            "relation": self.relation,
            "limit": self.limit,
            "passed": self.passed,
        }
