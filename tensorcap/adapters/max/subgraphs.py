"""Subgraphs: parts of a graph that are traced once and called for several modules."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from tensorcap.adapters.max.engine import Graph, is_subgraph, ops
from tensorcap.adapters.max.trace import Tracing
from tensorcap.workload.patch import replaced


@contextmanager
def subgraphs(current: Callable[[], Tracing | None]) -> Iterator[None]:
    """Have tracings told of subgraphs that are made and called in the block.

    Args:
        current: Gives the tracing of the graph that is made now.
    """

    def with_outputs(original: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(original)
        def output(graph: Graph, *outputs: Any) -> None:
            tracing = current() if is_subgraph(graph) else None
            if tracing is not None:
                tracing.ended(graph, outputs)
            original(graph, *outputs)

        return output

    def with_calls(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def call(graph: Graph, *args: Any, prefix: str = "", **options: Any) -> Any:
            tracing = current()
            if tracing is None:
                return original(graph, *args, prefix=prefix, **options)
            return tracing.called(
                graph, args, prefix, lambda given: original(graph, *given, prefix=prefix, **options)
            )

        return call

    with ExitStack() as stack:
        stack.enter_context(replaced(Graph, "output", with_outputs))
        stack.enter_context(replaced(ops, "call", with_calls))
        yield
