"""Hooks on MAX while it traces graphs: on the calls of layers, and on the subgraphs that are made and called.

Both stand on the classes and functions of MAX, as MAX itself does for its own hooks, and only for a block.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from tensorcap.adapters.max.engine import Graph, Layer, is_subgraph, ops
from tensorcap.adapters.max.trace import Tracer
from tensorcap.workload import replace_attribute

CallWrapper = Callable[[Callable[..., Any], Any, tuple[Any, ...], dict[str, Any]], Any]


@contextmanager
def wrap_calls(wrapper: CallWrapper, classes: Iterable[type]) -> Iterator[Callable[[type], None]]:
    """Send the calls of layers of these classes, and of their bases, through a function until the block ends.

    Args:
        wrapper: Gets the original method, the layer and its arguments; returns what the caller gets.
        classes: The classes of the layers.

    Yields:
        A function that wraps a further class, such as one that is made in the block.
    """
    wrapped: dict[type, tuple[Any, Any]] = {}

    def wrap(cls: type) -> None:
        original = cls.__dict__.get("__call__")
        if original is not None and issubclass(cls, Layer) and cls not in wrapped:
            wrapped[cls] = original, _wrap_call(wrapper, original)
            cls.__call__ = wrapped[cls][1]  # type: ignore[method-assign] # as MAX does for its hooks

    try:
        for cls in dict.fromkeys(base for each in classes for base in each.__mro__):
            wrap(cls)
        yield wrap
    finally:
        for cls, (original, ours) in wrapped.items():
            if cls.__dict__.get("__call__") is ours:
                cls.__call__ = original  # type: ignore[method-assign]


def _wrap_call(wrapper: CallWrapper, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return wrapper(original, self, args, kwargs)

    return call


@contextmanager
def trace_subgraphs(current: Callable[[], Tracer | None]) -> Iterator[None]:
    """Report subgraphs that are made and called in the block to the tracer of their graph.

    A subgraph is a part of a graph that is traced once and called for several modules.

    Args:
        current: Returns the tracer of the graph that is made now, if there is one.
    """

    def with_outputs(original: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(original)
        def output(graph: Graph, *outputs: Any) -> None:
            tracer = current() if is_subgraph(graph) else None
            if tracer is not None:
                tracer.end_subgraph(graph, outputs)
            original(graph, *outputs)

        return output

    def with_calls(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def call(graph: Graph, *args: Any, prefix: str = "", **options: Any) -> Any:
            tracer = current()
            if tracer is None:
                return original(graph, *args, prefix=prefix, **options)
            return tracer.call_subgraph(
                graph, args, prefix, lambda values: original(graph, *values, prefix=prefix, **options)
            )

        return call

    with ExitStack() as stack:
        stack.enter_context(replace_attribute(Graph, "output", with_outputs))
        stack.enter_context(replace_attribute(ops, "call", with_calls))
        yield
