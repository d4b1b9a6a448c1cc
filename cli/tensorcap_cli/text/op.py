"""What a run says of an op, or of a probe, for people: where it stands, what goes in, where it goes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from tensorcap.wording import one_line
from tensorcap_cli.text.output import class_text, cut

if TYPE_CHECKING:
    from tensorcap.runs import Graph, Node, Value
    from tensorcap_formats.archive import Archive
    from tensorcap_formats.records import Record

_LONGEST: Final = 60  # characters of an argument
_TAKERS: Final = 3


def place_lines(archive: Archive, record: Record) -> Iterator[str]:
    """Say what is known of the place within a module that a record is of, a line each."""
    from tensorcap.runs import Graph, passed_in
    from tensorcap_formats.errors import TensorNotFoundError

    key = record.key
    if key.is_bare or ":" not in key.site:
        return
    try:
        graph = Graph.of(archive)
        node = graph.node(key.where)
    except TensorNotFoundError:
        point = key.site.partition(":")[2]
        yield f"{point} in {passed_in(archive, key)}"
        return
    yield from _node_lines(graph, node, key.text)


def _node_lines(graph: Graph, node: Node, text: str) -> Iterator[str]:
    of_class = f" ({class_text(node.class_name)})" if node.class_name else ""
    call = f", call {node.module_call}" if node.module_call else ""
    yield f"{node.op} in {node.module or '@root'}{of_class}{call}"
    if node.file:
        function = f" in {node.function}" if node.function else ""
        yield f"at {one_line(node.file)}:{node.line}{function}"
    for value in node.inputs:
        yield f"from {value.name}: {value_text(value)}"
    arguments = [f"{name}={cut(repr(value), _LONGEST)}" for name, value in node.arguments.items()]
    if arguments:
        yield one_line(f"with {', '.join(arguments)}")
    for value in node.outputs:
        if f"{node.where}/{value.name}" == text and value.view is not None:
            yield f"a view: {value_text(value)}"
    takers = [taker.where for taker in graph.consumers(text)]
    if takers:
        yield f"into {', '.join(takers[:_TAKERS])}{', …' if len(takers) > _TAKERS else ''}"


def value_text(value: Value) -> str:
    """Where the values of an argument are."""
    if value.note:
        return value.note
    if value.number is not None:
        return repr(value.number)
    name = value.key if value.key is not None else f"parameter {value.parameter}"
    if value.view is None:
        return one_line(name)
    return one_line(
        f"{list(value.view.shape)} of {name}, strides {list(value.view.strides)}, offset {value.view.offset}"
    )
