"""The graph of operations that a model is exported to, whose nodes can be computed one by one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from tensorcap_formats.dtypes import Array
from tensorcap_formats.run_info import ExportedNode

Value = Array | Sequence[Array] | None  # what an operation returns: a tensor, or several
Read = Callable[[str], Value]


class OperationGraph(Protocol):
    """An exported graph."""

    @property
    def nodes(self) -> Sequence[ExportedNode]:
        """Its operations, in execution order."""

    @property
    def given(self) -> Sequence[str]:
        """Names of the model's inputs."""

    def compute(self, name: str, read: Read, changed: Mapping[str, Any] | None = None) -> Value:
        """Run the operation of a node.

        Args:
            name: The node.
            read: Gives the value of a node that it takes, by name; inputs and weights are the model's own.
            changed: Arguments by name that it gets in the place of its own.

        Raises:
            Exception: Whatever the operation raises for such values.
        """
