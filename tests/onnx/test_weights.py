"""Weights in few bits in each form that quantisers write: recorded as the floats that they stand for."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import StringStringEntryProto, TensorProto, helper

import tensorcap
from tensorcap.adapters.onnx.graph import OnnxGraph
from tensorcap.adapters.onnx.quantisation import find_grids
from tensorcap.adapters.onnx.scopes import Scopes
from tensorcap.session import capture_workload
from tensorcap_formats.archive import Archive
from tensorcap_formats.dtypes import Array
from tensorcap_formats.open import open_archive
from tests.onnx.graphs import model, save

MS = "com.microsoft"
DRAW = np.random.default_rng(5)
Q = DRAW.integers(-127, 128, (4, 3)).astype(np.int8)  # [inputs, outputs]
S = np.array([0.5, 0.25, 0.125], np.float32)
Z = np.array([1, -2, 3], np.int8)
W = ((Q.astype(np.float64) - Z) * S).T  # [outputs, inputs]
X = np.array([[1.0, -2.0, 0.5, 3.0], [0.0, 1.0, -1.0, 2.0]], np.float32)
ONE = np.float32(0.5)


def captured(folder: Path, nodes: Any, weights: Any, x: Array = X, **options: Any) -> Archive:
    kind = helper.np_dtype_to_tensor_dtype(x.dtype)
    made = model(nodes, [("x", kind, list(x.shape))], [nodes[-1].output[0]], weights, opset=21)
    made.opset_import.append(helper.make_opsetid(MS, 1))
    made.ir_version = 10
    path = save(made, folder / "net.onnx")
    capture_workload(
        tensorcap.Workload(tensorcap.OnnxModel(path), {"x": x}), folder / "run.h5", params=True, **options
    )
    return open_archive(folder / "run.h5")


def read(archive: Archive, key: str) -> Array:
    return archive.read(archive.get(key))


def node(op: str, inputs: Any, outputs: Any, name: str, **attributes: Any) -> Any:
    return helper.make_node(op, inputs, outputs, name, **attributes)


DEQUANTISED = {"fc.weight_quantized": Q, "s": S, "z": Z}
FORMS = {
    "QDQ": (
        [
            node("DequantizeLinear", ["fc.weight_quantized", "s", "z"], ["w"], "d", axis=1),
            node("MatMul", ["x", "w"], ["/fc/y"], "/fc/MatMul"),
        ],
        DEQUANTISED,
    ),
    "rounded in the graph": (
        [
            node("QuantizeLinear", ["fc.weight", "s", "z"], ["q"], "q", axis=1),
            node("DequantizeLinear", ["q", "s", "z"], ["w"], "d", axis=1),
            node("MatMul", ["x", "w"], ["/fc/y"], "/fc/MatMul"),
        ],
        {"fc.weight": (W.T + 0.4 * S).astype(np.float32), "s": S, "z": Z},
    ),
    "QDQ, transposed": (
        [
            node("DequantizeLinear", ["fc.weight_quantized", "s", "z"], ["w"], "d", axis=0),
            node("Transpose", ["w"], ["t"], "t", perm=[1, 0]),
            node("MatMul", ["x", "t"], ["/fc/y"], "/fc/MatMul"),
        ],
        {**DEQUANTISED, "fc.weight_quantized": np.ascontiguousarray(Q.T)},
    ),
    "Gemm": (
        [
            node("DequantizeLinear", ["fc.weight_quantized", "s", "z"], ["w"], "d", axis=0),
            node("Gemm", ["x", "w"], ["/fc/y"], "/fc/Gemm", transB=1),
        ],
        {**DEQUANTISED, "fc.weight_quantized": np.ascontiguousarray(Q.T)},
    ),
    "MatMulInteger": (
        [
            node("DynamicQuantizeLinear", ["x"], ["q", "qs", "qz"], "/act/q"),
            node("MatMulInteger", ["q", "onnx::MatMul_1", "qz", "z"], ["/fc/i"], "/fc/MatMulInteger"),
            node("Mul", ["qs", "s"], ["/fc/f"], "/fc/Mul"),
            node("Cast", ["/fc/i"], ["/fc/c"], "/fc/Cast", to=TensorProto.FLOAT),
            node("Mul", ["/fc/c", "/fc/f"], ["/fc/y"], "/fc/Mul_1"),
        ],
        {"onnx::MatMul_1": Q, "s": S, "z": Z},
    ),
    "QLinearMatMul": (
        [
            node("QuantizeLinear", ["x", "xs", "xz"], ["q"], "/act/q"),
            node("QLinearMatMul", ["q", "xs", "xz", "onnx::MatMul_1", "s", "z", "ys", "yz"], ["i"], "/fc/M"),
            node("DequantizeLinear", ["i", "ys", "yz"], ["/fc/y"], "/fc/d"),
        ],
        {
            "onnx::MatMul_1": Q,
            "s": S,
            "z": Z,
            "xs": np.float32(0.05),
            "xz": np.int8(0),
            "ys": np.float32(1),
            "yz": np.int8(0),
        },
    ),
}


@pytest.mark.spec("ONX-40")
@pytest.mark.parametrize("form", FORMS)
def test_a_weight_is_what_its_numbers_stand_for(form: str, tmp_path: Path) -> None:
    with captured(tmp_path, *FORMS[form]) as archive:
        np.testing.assert_array_equal(read(archive, "0/fc/param.weight"), W)
        np.testing.assert_array_equal(read(archive, "0/fc/param.weight_step"), S[:, None])
        np.testing.assert_array_equal(read(archive, "0/fc/param.weight_zero"), Z[:, None])
        module = archive.info.modules["fc"]
        assert module.settings["dequantised"] == ["weight"]
        assert module.settings["numbers"] == {"weight": "int8"}
        names = {r.key.slot for r in archive.records if r.key.slot.startswith("param.")}
        assert names == {"param.weight", "param.weight_step", "param.weight_zero"}


@pytest.mark.spec("ONX-40")
def test_a_weight_that_is_rounded_as_inputs_are_is_one(tmp_path: Path) -> None:
    """`DynamicQuantizeLinear` of a constant: a step of a 255th of the range with 0; more than 4 KiB."""
    weight = np.linspace(-1.5, 3.6, 40 * 40).reshape(40, 40).astype(np.float32)  # range 5.1, step 0.02
    nodes = [
        node("DynamicQuantizeLinear", ["x"], ["q", "qs", "qz"], "/act/q"),
        node("DynamicQuantizeLinear", ["fc.weight"], ["w", "ws", "wz"], "/fc/w"),
        node("MatMulInteger", ["q", "w", "qz", "wz"], ["/fc/i"], "/fc/MatMulInteger"),
        node("Cast", ["/fc/i"], ["/fc/c"], "/fc/Cast", to=TensorProto.FLOAT),
        node("Mul", ["qs", "ws"], ["/fc/f"], "/fc/Mul"),
        node("Mul", ["/fc/c", "/fc/f"], ["/fc/y"], "/fc/Mul_1"),
    ]
    with captured(tmp_path, nodes, {"fc.weight": weight}, np.ones((2, 40), np.float32)) as archive:
        assert archive.info.modules["fc"].settings["numbers"] == {"weight": "uint8"}
        np.testing.assert_allclose(read(archive, "0/fc/param.weight_step"), [[0.02]], rtol=1e-6)
        np.testing.assert_array_equal(read(archive, "0/fc/param.weight_zero"), [[75]])
        np.testing.assert_allclose(read(archive, "0/fc/param.weight"), weight.T, atol=0.01001)


INTEGERS = [
    node("DynamicQuantizeLinear", ["x"], ["q", "qs", "qz"], "norm_QuantizeLinear"),
    node("MatMulInteger", ["q", "val_7_quantized", "qz", "val_7_zero_point"], ["i"], "node_linear_quant"),
    node("Cast", ["i"], ["c"], "i_cast", to=TensorProto.FLOAT),
    node("Mul", ["qs", "val_7_scale"], ["f"], "node_linear_quant_scales_mul"),
    node("Mul", ["c", "f"], ["y"], "node_linear_quant_output_scale_mul"),
]
OF_VALUE: dict[str, Any] = {"val_7_quantized": Q, "val_7_scale": S, "val_7_zero_point": Z}


@pytest.mark.spec("ONX-3")
@pytest.mark.parametrize("known_by", ["bias", "source"])
def test_nodes_that_a_quantiser_puts_in_lie_in_the_module_of_its_product(
    known_by: str, tmp_path: Path
) -> None:
    """They have no scope: only the bias is added by a node that has one, or the exporter wrote a source."""
    nodes, weights = [type(each).FromString(each.SerializeToString()) for each in INTEGERS], dict(OF_VALUE)
    behind = node("Mul", ["y", "y"], ["out"], "node_mul")
    if known_by == "bias":
        behind, weights["net.fc.bias"] = node("Add", ["y", "net.fc.bias"], ["out"], "node_linear"), S
    made = model([*nodes, behind], [("x", TensorProto.FLOAT, [2, 4])], ["out"], weights, opset=21)
    if known_by == "source":
        value = helper.make_tensor_value_info("val_7", TensorProto.FLOAT, [4, 3])
        entry = {"key": "pkg.onnxscript.optimizer.folded_from", "value": "['net.fc.weight']"}
        value.metadata_props.append(StringStringEntryProto(**entry))
        made.graph.value_info.append(value)
    made.ir_version = 10
    scopes = Scopes(OnnxGraph(Path(save(made, tmp_path / "net.onnx"))))
    assert {scope.calls[-1].path for scope in scopes.nodes[: len(nodes)]} == {"net.fc"}
    assert scopes.quantised["net.fc"]["weight"].steps == "val_7_scale"


@pytest.mark.spec("ONX-9", "ONX-40")
def test_a_fused_attention_has_the_weights_of_query_key_and_value(tmp_path: Path) -> None:
    """`QAttention`: those of the three lie one behind the other along the outputs, each with own steps."""
    draw = np.random.default_rng(7)
    numbers = draw.integers(-127, 128, (4, 12)).astype(np.int8)
    steps = draw.uniform(0.1, 1, 12).astype(np.float32)
    bias = draw.standard_normal(12).astype(np.float32)
    nodes = [
        node("DynamicQuantizeLinear", ["x"], ["q", "qs", "qz"], "x_q"),
        node(
            "QAttention",
            ["q", "w_quantized", "b", "qs", "w_scale", "", "qz", "w_zero_point"],
            ["/enc/self/Reshape_output_0"],
            "Attention_0_quant",
            domain=MS,
            num_heads=2,
        ),
    ]
    weights = {"w_quantized": numbers, "b": bias, "w_scale": steps, "w_zero_point": np.zeros(12, np.int8)}
    with captured(tmp_path, nodes, weights, np.ones((1, 2, 4), np.float32)) as archive:
        for place, name in enumerate(("query", "key", "value")):
            own = slice(4 * place, 4 * place + 4)
            site = f"0/enc.self.{name}"
            whole = (numbers.astype(np.float64) * steps).T
            np.testing.assert_allclose(read(archive, f"{site}/param.weight"), whole[own], rtol=1e-6)
            np.testing.assert_array_equal(read(archive, f"{site}/param.weight_step"), steps[own, None])
            np.testing.assert_array_equal(read(archive, f"{site}/param.bias"), bias[own])
            assert archive.info.modules[site[2:]].settings["input_bits"] == 8


@pytest.mark.spec("ONX-9", "ONX-40")
def test_what_a_fused_node_takes_is_of_the_modules_in_its_names(tmp_path: Path) -> None:
    tables = {"emb.words.weight": (5, 4), "emb.places.weight": (6, 4), "emb.types.weight": (2, 4)}
    shapes = {**tables, "emb.norm.weight": (4,), "emb.norm.bias": (4,)}
    draw = np.random.default_rng(8)
    numbers = {f"{n}_quantized": draw.integers(0, 256, s).astype(np.uint8) for n, s in shapes.items()}
    steps = {f"{n}_scale": np.float32(0.1 * (k + 1)) for k, n in enumerate(shapes)}
    zeros = {f"{n}_zero_point": np.uint8(100 + k) for k, n in enumerate(shapes)}
    made = node(
        "QEmbedLayerNormalization",
        ["x", "types", *numbers, "", *steps, *zeros],
        ["y", "mask"],
        "EmbedLayerNormalization_0_quant",
        domain=MS,
    )
    weights: dict[str, Any] = {"types": np.zeros((1, 3), np.int32), **numbers, **steps, **zeros}
    with captured(tmp_path, [made], weights, np.array([[1, 2, 3]], np.int32)) as archive:
        for number, name in enumerate(shapes):
            site, _, own = name.rpartition(".")
            wanted = (numbers[f"{name}_quantized"].astype(float) - (100 + number)) * 0.1 * (number + 1)
            np.testing.assert_allclose(read(archive, f"0/{site}/param.{own}"), wanted, rtol=1e-6)
        assert archive.info.modules["emb.norm"].settings["dequantised"] == ["weight", "bias"]


@pytest.mark.spec("ONX-43")
@pytest.mark.parametrize("op", ["BiasGelu", "SkipLayerNormalization"])
def test_the_bias_that_a_fused_node_adds_is_a_part_of_the_module_before(op: str, tmp_path: Path) -> None:
    draw = np.random.default_rng(9)
    weight, bias, gain = (draw.standard_normal(size).astype(np.float32) for size in ((4, 4), 4, 4))
    inputs = (
        ["/fc/y", "fc.bias"] if op == "BiasGelu" else ["/fc/y", "x", "norm.weight", "norm.bias", "fc.bias"]
    )
    nodes = [
        node("MatMul", ["x", "onnx::MatMul_1"], ["/fc/y"], "/fc/MatMul"),
        node(op, inputs, ["/behind/z"], "fused", domain=MS),
    ]
    weights = {"onnx::MatMul_1": weight, "fc.bias": bias, "norm.weight": gain, "norm.bias": gain}
    x = draw.standard_normal((2, 3, 4)).astype(np.float32)
    total = x.astype(np.float64) @ weight + bias
    wanted = total * (1 + np.vectorize(math.erf)(total / math.sqrt(2))) / 2
    if op != "BiasGelu":
        total_with_x = total + x
        centred = total_with_x - total_with_x.mean(-1, keepdims=True)
        wanted = centred / np.sqrt(np.square(centred).mean(-1, keepdims=True) + 1e-12) * gain + gain
    with captured(tmp_path, nodes, {k: v for k, v in weights.items() if k in str(nodes)}, x) as archive:
        np.testing.assert_allclose(read(archive, "0/fc/output"), total, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(read(archive, "0/@root/output"), wanted, rtol=1e-4, atol=1e-5)
        np.testing.assert_array_equal(read(archive, "0/fc/param.bias"), bias)


@pytest.mark.spec("ONX-43")
def test_a_residual_sum_that_a_norm_was_fused_with_lies_in_the_block_before(tmp_path: Path) -> None:
    """The last sum of a block whose next norm lies outside of it; no value of the graph has its name."""
    nodes = [
        node("Abs", ["x"], ["/net/layer.0/Abs_output_0"], "/net/layer.0/Abs"),
        node("Neg", ["/net/layer.0/Abs_output_0"], ["/net/layer.0/mlp/y"], "/net/layer.0/mlp/Neg"),
        node(
            "SkipLayerNormalization",
            ["/net/layer.0/mlp/y", "/net/layer.0/Abs_output_0", "net.norm.weight", "net.norm.bias"],
            ["/net/norm/y"],
            "SkipLayerNorm_5",
            domain=MS,
        ),
    ]
    weights = {"net.norm.weight": np.ones(4, np.float32), "net.norm.bias": np.ones(4, np.float32)}
    with captured(tmp_path, nodes, weights, X[None]) as archive:
        np.testing.assert_array_equal(read(archive, "0/net.layer.0/output"), np.zeros_like(X[None]))
        np.testing.assert_array_equal(read(archive, "0/@root/output"), np.ones_like(X[None]))


@pytest.mark.spec("ONX-3")
def test_what_was_fused_is_called_by_one_of_its_nodes_and_a_reshaped_bias_is_one(tmp_path: Path) -> None:
    nodes = [
        node("MatMul", ["x", "1"], ["m"], "/net/fc/MatMul/MatMulAddFusion_MatMul_quant"),
        node("Reshape", ["net.conv.bias", "shape"], ["b"], "bias_reshape"),
        node("Add", ["m", "b"], ["y"], "bias_add"),
    ]
    weights = {"1": W.T.astype(np.float32), "net.conv.bias": S, "shape": np.array([1, 3])}
    made = model(nodes, [("x", TensorProto.FLOAT, [2, 4])], ["y"], weights)
    scopes = Scopes(OnnxGraph(Path(save(made, tmp_path / "net.onnx"))))
    assert [scope.calls[-1].path for scope in scopes.nodes] == ["net.fc", "net.conv", "net.conv"]


@pytest.mark.spec("ONX-40")
def test_a_gemm_of_whole_numbers_has_steps_of_outputs_and_a_bias_of_products(tmp_path: Path) -> None:
    """`transB`: numbers are [outputs, inputs]. The step of the bias is that of the input times those."""
    inputs = ["q", "xs", "xz", "fc.weight_quantized", "s", "z", "fc.bias_quantized", "ys", "yz"]
    nodes = [
        node("QuantizeLinear", ["x", "xs", "xz"], ["q"], "/act/q"),
        node("QGemm", inputs, ["i"], "/fc/Gemm", transB=1, domain=MS),
        node("DequantizeLinear", ["i", "ys", "yz"], ["/fc/y"], "/fc/d"),
    ]
    bias = np.array([100, -200, 300], np.int32)
    weights = {
        "fc.weight_quantized": np.ascontiguousarray(Q.T),
        "fc.bias_quantized": bias,
        "s": S,
        "z": np.zeros(3, np.int8),
        "xs": np.float32(0.0625),
        "xz": np.int8(0),
        "ys": np.float32(1),
        "yz": np.int8(0),
    }
    with captured(tmp_path, nodes, weights) as archive:
        np.testing.assert_array_equal(read(archive, "0/fc/param.weight"), Q.T * S[:, None])
        np.testing.assert_array_equal(read(archive, "0/fc/param.bias"), bias * S * 0.0625)
        np.testing.assert_array_equal(read(archive, "0/fc/param.bias_step"), S * 0.0625)
        assert archive.info.modules["fc"].settings["numbers"] == {"weight": "int8", "bias": "int32"}


@pytest.mark.spec("ONX-40")
def test_blocks_of_four_bits_are_taken_apart(tmp_path: Path) -> None:
    numbers = DRAW.integers(0, 16, (2, 20)).astype(np.uint8)  # two blocks of 16, the second cut
    wide = np.zeros((2, 32), np.uint8)
    wide[:, :20] = numbers
    packed = (wide[:, ::2] | (wide[:, 1::2] << 4)).reshape(2, 2, 8)
    steps = np.array([[0.5, 0.25], [1.0, 0.125]], np.float32)
    nodes = [
        helper.make_node(
            "MatMulNBits",
            ["x", "b", "s"],
            ["/fc/y"],
            "/fc/MatMul_Q4",
            domain=MS,
            K=20,
            N=2,
            bits=4,
            block_size=16,
        )
    ]
    x = DRAW.standard_normal((3, 20)).astype(np.float32)
    with captured(tmp_path, nodes, {"b": packed, "s": steps.reshape(-1)}, x) as archive:
        wanted = (numbers.astype(np.float64) - 8) * np.repeat(steps, 16, axis=1)[:, :20]
        np.testing.assert_array_equal(read(archive, "0/fc/param.weight"), wanted)
        np.testing.assert_allclose(read(archive, "0/fc/output"), x @ wanted.T, rtol=1e-4, atol=1e-4)
        assert archive.info.modules["fc"].settings["numbers"] == {"weight": "uint4"}


@pytest.mark.spec("ONX-41")
def test_each_product_rounds_its_own_inputs(tmp_path: Path) -> None:
    nodes = [
        node("Abs", ["x"], ["/act/a"], "/act/Abs"),
        node("DynamicQuantizeLinear", ["/act/a"], ["q", "qs", "qz"], "/act/q"),
    ]
    for name in ("one", "two"):
        nodes += [
            node("MatMulInteger", ["q", "w", "qz"], [f"/{name}/i"], f"/{name}/M"),
            node("Mul", ["qs", "s"], [f"/{name}/f"], f"/{name}/Mul"),
            node("Cast", [f"/{name}/i"], [f"/{name}/c"], f"/{name}/Cast", to=TensorProto.FLOAT),
            node("Mul", [f"/{name}/c", f"/{name}/f"], [f"/{name}/y"], f"/{name}/Mul_1"),
        ]
    nodes.append(node("Add", ["/one/y", "/two/y"], ["y"], "Add"))
    with captured(tmp_path, nodes, {"w": Q, "s": ONE}) as archive:
        for name in ("one", "two"):
            np.testing.assert_array_equal(read(archive, f"0/{name}/input.0"), np.abs(X))
            assert archive.info.modules[name].settings["input_bits"] == 8
        np.testing.assert_array_equal(read(archive, "0/act/output"), np.abs(X))
        step = np.abs(X).max() / 255
        own = read(archive, "0/one/output") - np.abs(X) @ (Q * 0.5)
        assert np.abs(own).max() <= step / 2 * np.abs(Q * 0.5).sum(axis=0).max()


@pytest.mark.spec("ONX-41")
@pytest.mark.parametrize("is_initialiser", [True, False], ids=["initialiser", "constant"])
@pytest.mark.parametrize(
    ("form", "ends"),
    [("INT8", (-128, 127)), ("UINT16", (0, 65535)), ("UINT4", (0, 15)), ("INT4", (-8, 7))],
    ids=["int8", "uint16", "uint4", "int4"],
)
def test_a_range_is_that_of_the_numbers_of_the_zero_point(
    form: str, ends: tuple[int, int], is_initialiser: bool, tmp_path: Path
) -> None:
    zero = helper.make_tensor("z", TensorProto.DataType.Value(form), [], [3])
    nodes = [] if is_initialiser else [helper.make_node("Constant", [], ["z"], value=zero)]
    nodes += [
        node("QuantizeLinear", ["x", "s", "z"], ["/in/q"], "/in/q"),
        node("DequantizeLinear", ["/in/q", "s", "z"], ["y"], "/in/d"),
    ]
    made = model(
        nodes, [("x", TensorProto.FLOAT, [2, 4])], ["y"], {"s": np.full((), 0.5, np.float32)}, opset=21
    )
    made.graph.initializer.extend([zero] if is_initialiser else [])
    path = save(made, tmp_path / "net.onnx")
    grids = find_grids(OnnxGraph(Path(path)))
    assert grids["/in/q"].ends == [(ends[0] - 3) / 2, (ends[1] - 3) / 2]


@pytest.mark.spec("ONX-42")
def test_values_of_whole_numbers_are_floats_at_modules_and_injected_ones_are_rounded(tmp_path: Path) -> None:
    nodes = [
        node("QuantizeLinear", ["x", "step", "zero"], ["/in/q"], "/in/q"),
        node("Reshape", ["/in/q", "shape"], ["/move/r"], "/move/Reshape"),
        node("DequantizeLinear", ["/move/r", "step", "zero"], ["y"], "/out/d"),
    ]
    weights = {"step": np.float32(0.5), "zero": np.int8(3), "shape": np.array([4, 2])}
    with captured(tmp_path, nodes, weights) as archive:
        np.testing.assert_array_equal(read(archive, "0/move/input.0"), X)  # whole and half numbers
        np.testing.assert_array_equal(read(archive, "0/move/output"), X.reshape(4, 2))
    reference = tmp_path / "run.h5"
    path = tmp_path / "net.onnx"
    other = tensorcap.Workload(tensorcap.OnnxModel(path), {"x": np.zeros_like(X) + np.float32(0.7)})
    tensorcap.inject(reference, other, tmp_path / "injected.h5", inputs="move", mapping="none")
    with open_archive(tmp_path / "injected.h5") as archive:
        np.testing.assert_array_equal(read(archive, "0/@root/output"), X.reshape(4, 2))
