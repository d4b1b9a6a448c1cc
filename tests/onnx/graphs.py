"""Small ONNX models, written node by node, with what they compute in float64 numpy."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from tensorcap_formats.dtypes import Array

DRAW = np.random.default_rng(3)
W1, B1, W2 = (DRAW.standard_normal(shape).astype(np.float32) for shape in ((4, 6), (6,), (6, 3)))
X = DRAW.standard_normal((2, 4)).astype(np.float32)


def model(
    nodes: Sequence[Any],
    inputs: Sequence[tuple[str, int, Sequence[Any] | None]],
    outputs: Sequence[str],
    weights: dict[str, Array],
    *,
    opset: int = 17,
) -> Any:
    graph = helper.make_graph(
        nodes,
        "main",
        [helper.make_tensor_value_info(name, kind, shape) for name, kind, shape in inputs],
        [helper.make_empty_tensor_value_info(name) for name in outputs],
        [numpy_helper.from_array(value, name) for name, value in weights.items()],
    )
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)])
    made.ir_version = 8
    return made


def mlp() -> Any:
    """Two layers, under the names that TorchScript gives: `up` has a bias, `act` is a Relu."""
    nodes = [
        helper.make_node("MatMul", ["x", "onnx::MatMul_7"], ["/net/up/MatMul_output_0"], "/net/up/MatMul"),
        helper.make_node(
            "Add", ["net.up.bias", "/net/up/MatMul_output_0"], ["/net/up/Add_output_0"], "/net/up/Add"
        ),
        helper.make_node("Relu", ["/net/up/Add_output_0"], ["/net/act/Relu_output_0"], "/net/act/Relu"),
        helper.make_node("MatMul", ["/net/act/Relu_output_0", "onnx::MatMul_8"], ["y"], "/net/down/MatMul"),
    ]
    weights = {"net.up.bias": B1, "onnx::MatMul_7": W1, "onnx::MatMul_8": W2}
    return model(nodes, [("x", TensorProto.FLOAT, ["batch", 4])], ["y"], weights)


def mlp_values(x: Array = X) -> dict[str, Array]:
    """What the model's values are, by name of the node that makes them."""
    product = x.astype(np.float64) @ W1
    total = product + B1
    relu = np.maximum(total, 0)
    return {"MatMul": product, "Add": total, "Relu": relu, "y": relu @ W2}


def save(made: Any, path: Path) -> str:
    onnx.save(made, path)
    return str(path)
