"""What a node computes with, in words: names of what it takes, its attributes, and small constants."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

import onnx
from onnx import AttributeProto, TensorProto, helper, numpy_helper

from tensorcap.adapters.onnx.graph import GraphNode

_SMALL: Final = 16  # elements of a constant that is told
_GRAPHS: Final = (AttributeProto.GRAPH, AttributeProto.GRAPHS)


def input_names(node: GraphNode, opsets: Mapping[str, int]) -> list[str]:
    """Names of what a node takes, as its operator's schema has them, else numbers."""
    domain = node.proto.domain
    try:
        schema = onnx.defs.get_schema(node.proto.op_type, opsets.get(domain or "ai.onnx", 1), domain)
        names = [each.name for each in schema.inputs]
    except Exception:  # of an operator that the package does not know, onnx raises an error of its own
        names = []
    count = len(node.inputs)
    if names and len(names) < node.own_inputs:  # the last one stands for several
        names = [*names[:-1], *(f"{names[-1]}.{n}" for n in range(node.own_inputs - len(names) + 1))]
    return [names[n] if n < min(len(names), node.own_inputs) else str(n) for n in range(count)]


def arguments_of(node: GraphNode) -> dict[str, Any]:
    """A node's attributes as JSON, but for graphs."""
    return {a.name: _plain(a) for a in node.proto.attribute if a.type not in _GRAPHS}


def constant_value(node: Any) -> Any:
    """The value of a Constant node: small tensors as numbers, others as type and shape."""
    return _plain(node.attribute[0]) if node.attribute else None


def _plain(attribute: Any) -> Any:
    value = helper.get_attribute_value(attribute)
    if isinstance(value, TensorProto):
        shape = list(value.dims)
        name = re.sub("^FLOAT$", "float32", TensorProto.DataType.Name(value.data_type)).lower()
        if value.data_location == TensorProto.EXTERNAL or value.data_type == TensorProto.STRING:
            return f"{name}{shape}"
        array = numpy_helper.to_array(value)
        return array.tolist() if array.size <= _SMALL and array.dtype.kind in "biuf" else f"{name}{shape}"
    if isinstance(value, bytes):
        return value.decode(errors="replace")
    if isinstance(value, list | tuple):
        return [item.decode(errors="replace") if isinstance(item, bytes) else item for item in value]
    return value if isinstance(value, int | float) else str(value)
