"""Activations that a quantiser left to the range of what follows: nodes of their own, as the source has them.

A ReLU behind a product is written as a range that begins at 0, and a ReLU6 as one from 0 to 6: what rounds
the result cuts it. So no value of the graph is what the activation makes. With a node for the cut there is
one; the numbers behind it are the same.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import onnx
from onnx import helper, numpy_helper

from tensorcap.adapters.onnx.quantisation import number_limits

if TYPE_CHECKING:
    from tensorcap.adapters.onnx.graph import OnnxGraph

CUT: Final = "tensorcap.cut"  # metadata of a node that was added
_MAKERS: Final = ("Conv", "ConvTranspose", "MatMul", "Gemm", "Add")
_CLAMP: Final = re.compile(r"hardtanh|clip|clamp|relu6", re.IGNORECASE)  # in the name of what one made
_RELU6: Final = (0.0, 6.0)
_SAME: Final = 1e-6  # of the largest end, relative
_FLOATS: Final = ("float32", "float16")
_LIMITS_AS_INPUTS: Final = 11  # version of the operators from which on Clip takes its ends as inputs


def separate_cuts(model: Any, graph: OnnxGraph) -> Any:
    """Give results of products that a range cuts a node that does it; the model itself if there are none.

    It is `Relu` before a range that begins at 0; `Clip` to the range if that is a ReLU6's, or if the name of
    the value says that a clamp made it.

    Args:
        model: The model.
        graph: Its constants.
    """
    makers = {name: node for node in model.graph.node for name in node.output}
    takers: dict[str, list[Any]] = {}
    for node in model.graph.node:
        for name in dict.fromkeys(node.input):
            takers.setdefault(name, []).append(node)
    version = max((each.version for each in model.opset_import if each.domain in ("", "ai.onnx")), default=1)
    outputs = {output.name for output in model.graph.output}
    cuts: dict[str, tuple[float, ...]] = {}
    for name, nodes in takers.items():
        found = {_cut_of(node, graph) for node in nodes} if name in makers else set()
        if len(found) != 1 or not _may_have_activation(makers[name], graph) or name in outputs:
            continue
        (cut,) = found
        if cut is None:
            continue
        low, high = cut
        is_relu6 = np.allclose(cut, _RELU6, rtol=0, atol=_SAME * _RELU6[1])
        if (is_relu6 or _CLAMP.search(name)) and version >= _LIMITS_AS_INPUTS:
            cuts[name] = low, high
        elif low == 0:
            cuts[name] = ()
    return _with_cuts(model, graph, takers, makers, cuts) if cuts else model


def _may_have_activation(maker: Any, graph: OnnxGraph) -> bool:
    """Whether a node is a product, or adds something other than one number."""
    is_shift = maker.op_type == "Add" and any(
        graph.is_constant(name) and math.prod(graph.shape_of(name)) == 1 for name in maker.input
    )
    return maker.op_type in _MAKERS and not is_shift


def _cut_of(node: Any, graph: OnnxGraph) -> tuple[float, float] | None:
    """The ends of the range that a node rounds to; None if it does not, or not with one constant step."""
    taken = list(node.input)
    if node.op_type != "QuantizeLinear" or len(taken) < 3 or not all(map(graph.is_constant, taken[1:3])):
        return None
    step, zero = (graph.floats(name) for name in taken[1:3])
    limits = number_limits(graph.number_format(taken[2]))
    if step.size != 1 or zero.size != 1 or not limits or graph.number_format(taken[1]) not in _FLOATS:
        return None
    low, high = ((limit - float(zero.reshape(()))) * float(step.reshape(())) for limit in limits)
    return low, high


def _with_cuts(
    model: Any,
    graph: OnnxGraph,
    takers: Mapping[str, list[Any]],
    makers: Mapping[str, Any],
    cuts: Mapping[str, tuple[float, ...]],
) -> Any:
    """A model with nodes that cut values: to the ends that are said, or at 0."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    for node in copy.graph.node:
        if node.op_type == "QuantizeLinear" and node.input[0] in cuts:
            node.input[0] = f"{node.input[0]}_cut"
    nodes = []
    for node in copy.graph.node:
        nodes.append(onnx.NodeProto.FromString(node.SerializeToString()))
        nodes += [_cutter(name, makers[name], cuts[name]) for name in node.output if name in cuts]
    del copy.graph.node[:]
    copy.graph.node.extend(nodes)
    for name, ends in cuts.items():
        dtype = graph.elements(takers[name][0].input[1]).dtype
        copy.graph.initializer.extend(
            numpy_helper.from_array(np.asarray(end, dtype), end_name)
            for end, end_name in zip(ends, _end_names(name), strict=False)
        )
    return copy


def _cutter(name: str, maker: Any, ends: tuple[float, ...]) -> Any:
    op = "Clip" if ends else "Relu"
    node = helper.make_node(
        op, [name, *(_end_names(name) if ends else ())], [f"{name}_cut"], f"{maker.name}_cut"
    )
    node.metadata_props.add(key=CUT, value=name)
    return node


def _end_names(name: str) -> Iterator[str]:
    yield from (f"{name}_cut_low", f"{name}_cut_high")
