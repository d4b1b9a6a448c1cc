"""Sums that fused operators make with what they are given: nodes of their own, in the modules that have them.

Optimisers take the bias of a Linear into what follows, as a `BiasGelu` or a `SkipLayerNormalization`, and the
residual sum of a block into the norm of the next one. So no value of the graph is the Linear's result, and
the block's is made within another module. With nodes for the sums each has its own; all results are the same
but for rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final

import onnx
from onnx import helper

_MICROSOFT: Final = "com.microsoft"
_BIASES: Final = {  # operator: place of the bias, and what it is without one
    "SkipLayerNormalization": (4, "SkipLayerNormalization"),
    "SkipSimplifiedLayerNormalization": (3, "SkipSimplifiedLayerNormalization"),
    "BiasGelu": (1, "Gelu"),
    "FastGelu": (1, "FastGelu"),
}
_NORMS: Final = {  # operators of ONNX's own domain that do the rest
    "SkipLayerNormalization": "LayerNormalization",
    "SkipSimplifiedLayerNormalization": "SimplifiedLayerNormalization",
}
_EPSILON: Final = 1e-12  # of a fused norm that says none
_SUM: Final = 3  # place of the residual sum among its results


def separate_sums(model: Any, is_constant: Callable[[str], bool]) -> Any:
    """Make the sums of fused operators by nodes of their own; the model itself if there are none.

    1. A bias that is added to the first argument.
    2. The sum of a norm's first two arguments.

    Args:
        model: The model.
        is_constant: Whether a value is a weight or a constant.
    """
    nodes = [own for at, node in enumerate(model.graph.node) for own in _separated(node, at, is_constant)]
    if len(nodes) == len(model.graph.node):
        return model
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    nodes = [onnx.NodeProto.FromString(node.SerializeToString()) for node in nodes]
    del copy.graph.node[:]
    copy.graph.node.extend(nodes)
    return copy


def _separated(node: Any, at: int, is_constant: Callable[[str], bool]) -> Iterator[Any]:
    """The nodes in the place of one, the `at`th: it, if it has no such sum."""
    own = node
    place, op = _BIASES.get(node.op_type, (0, "")) if node.domain == _MICROSOFT else (0, "")
    bias = node.input[place] if op and place < len(node.input) else ""
    if bias and is_constant(bias):
        biased = f"{node.input[0]}_biased_{at}"
        yield helper.make_node("Add", [node.input[0], bias], [biased], f"{node.name}_bias")
        own = onnx.NodeProto.FromString(node.SerializeToString())
        own.op_type, own.input[0] = op, biased
        del own.input[place:]
    results = list(own.output)
    has_bias = place < len(own.input) and own.input[place]
    if op in _NORMS and not any(results[1:_SUM]) and not has_bias:
        total = results[_SUM] if len(results) > _SUM and results[_SUM] else f"sum_{results[0]}"
        yield helper.make_node("Add", own.input[:2], [total], f"sum_{node.name}")
        given = {attribute.name: attribute.f for attribute in own.attribute}
        yield helper.make_node(
            _NORMS[op],
            [total, *own.input[2:place]],
            results[:1],
            node.name,
            epsilon=given.get("epsilon", _EPSILON),
        )
    else:
        yield own
