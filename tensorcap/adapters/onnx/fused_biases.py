"""Biases that fused operators add to what they are given: nodes of their own, as the module before has it.

Optimisers take the bias of a Linear into what follows, as a `SkipLayerNormalization` or a `BiasGelu`, so that
no value of the graph is the Linear's result. With a node for the sum it is one; the results are the same but
for rounding.
"""

from __future__ import annotations

from collections.abc import Callable
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


def separate_biases(model: Any, is_constant: Callable[[str], bool]) -> Any:
    """Add the bias of fused operators by nodes of their own; the model itself if there are none.

    Args:
        model: The model.
        is_constant: Whether a value is a weight or a constant.
    """
    nodes: list[Any] = []
    for node in model.graph.node:
        place, op = _BIASES.get(node.op_type, (0, "")) if node.domain == _MICROSOFT else (0, "")
        bias = node.input[place] if op and place < len(node.input) else ""
        if not bias or not is_constant(bias):
            nodes.append(node)
            continue
        biased = f"{node.input[0]}_biased_{len(nodes)}"
        own = onnx.NodeProto.FromString(node.SerializeToString())
        own.op_type, own.input[0] = op, biased
        del own.input[place:]
        nodes += [helper.make_node("Add", [node.input[0], bias], [biased], f"{node.name}_bias"), own]
    if len(nodes) == len(model.graph.node):
        return model
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    nodes = [onnx.NodeProto.FromString(node.SerializeToString()) for node in nodes]
    del copy.graph.node[:]
    copy.graph.node.extend(nodes)
    return copy
