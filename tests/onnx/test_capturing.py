"""A run of an ONNX model: every node, the modules that names tell, weights, and what taps change."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import tensorcap
from tensorcap.adapters import adapter_for
from tensorcap.adapters.onnx.graph import OnnxGraph
from tensorcap.adapters.onnx.scopes import ModuleCall, Scopes
from tensorcap.session import capture_workload
from tensorcap.workload import archived_inputs
from tensorcap_formats.archive import Archive
from tensorcap_formats.dtypes import Array
from tensorcap_formats.errors import UsageError
from tensorcap_formats.open import open_archive
from tests.onnx.graphs import B1, W1, X, mlp, mlp_values, model, save


def captured(
    path: Path, made: Any, inputs: dict[str, Array], *, sections: int = 1 << 30, **options: Any
) -> Archive:
    target = tensorcap.OnnxModel(save(made, path / "net.onnx"), tapped_bytes=sections)
    capture_workload(tensorcap.Workload(target, inputs), path / "run.h5", **options)
    return open_archive(path / "run.h5")


def values(archive: Archive, key: str) -> Array:
    return archive.read(archive.get(key))


@pytest.mark.spec("ONX-2", "ONX-3", "ONX-4")
@pytest.mark.parametrize("bound", [1 << 30, 1], ids=["one section", "a section a node"])
def test_every_node_is_recorded_in_its_module_with_its_values(bound: int, tmp_path: Path) -> None:
    with captured(tmp_path, mlp(), {"x": X}, sections=bound) as archive:
        expected = mlp_values()
        for key, name in {
            "0/net.up:MatMul/output": "MatMul",
            "0/net.up:Add/output": "Add",
            "0/net.up/output": "Add",
            "0/net.act:Relu/output": "Relu",
            "0/net.down/input.0": "Relu",
            "0/net/output": "y",
            "0/@root/output": "y",
        }.items():
            np.testing.assert_allclose(values(archive, key), expected[name], rtol=1e-5, atol=1e-6)
        assert archive.info.modules["net.up"].path == "net.up"
        orders = [r.key.site for r in archive.records if r.key.slot == "output"]
        assert orders.index("net.up:MatMul") < orders.index("net.act:Relu") < orders.index("@root")
        fact = archive.values["0/net.up:Add/op"]
        assert (fact["op"], fact["module"], fact["node"]) == ("Add", "net.up", "/net/up/Add")
        assert fact["inputs"][0] == {"name": "A", "parameter": "net.up.bias"}
        assert fact["inputs"][1] == {"name": "B", "record": "0/net.up:MatMul/output"}
        assert archive.run["graph"]["sections"] == (1 if bound > 1 else 4)


@pytest.mark.spec("ONX-6")
def test_what_does_not_fit_is_run_in_sections(tmp_path: Path) -> None:
    nodes = [helper.make_node("Cos", [f"t{n}"], [f"t{n + 1}"], name=f"n{n}") for n in range(6)]
    made = model(nodes, [("t0", TensorProto.FLOAT, ["n"])], ["t6"], {})
    with captured(tmp_path, made, {"t0": np.ones(1000, np.float32)}, sections=8000) as archive:
        assert archive.run["graph"]["sections"] == 3  # of two nodes of 4,000 bytes each
        wanted = 1.0
        for n in range(6):
            wanted = float(np.cos(wanted))
            np.testing.assert_allclose(
                values(archive, f"0/@root:n{n}/output"), np.full(1000, wanted), rtol=1e-5
            )


@pytest.mark.spec("ONX-6")
def test_weights_in_a_file_beside_the_model_are_not_copied_into_it(tmp_path: Path) -> None:
    made = mlp()
    onnx.save(made, tmp_path / "net.onnx", save_as_external_data=True, location="net.data", size_threshold=0)
    target = tensorcap.OnnxModel(tmp_path / "net.onnx")
    capture_workload(tensorcap.Workload(target, {"x": X}), tmp_path / "run.h5", params=True)
    with open_archive(tmp_path / "run.h5") as archive:
        np.testing.assert_allclose(values(archive, "0/@root/output"), mlp_values()["y"], rtol=1e-5, atol=1e-6)
        assert np.array_equal(values(archive, "0/net.up/param.weight"), W1)
    graph = OnnxGraph(tmp_path / "net.onnx")
    assert {w.name: w.data_location for w in graph.proto.graph.initializer} == dict.fromkeys(
        ("net.up.bias", "onnx::MatMul_7", "onnx::MatMul_8"), TensorProto.EXTERNAL
    )
    assert not any(w.raw_data for w in graph.proto.graph.initializer)


@pytest.mark.spec("ONX-6")
def test_large_weights_of_the_file_are_kept_out_of_the_graph(tmp_path: Path) -> None:
    weight = np.random.default_rng(0).standard_normal((64, 64)).astype(np.float32)
    nodes = [helper.make_node("MatMul", ["x", "w"], ["y"])]
    made = model(nodes, [("x", TensorProto.FLOAT, [1, 64])], ["y"], {"w": weight})
    x = np.ones((1, 64), np.float32)
    with captured(tmp_path, made, {"x": x}) as archive:
        np.testing.assert_allclose(
            values(archive, "0/@root/output"), x @ weight.astype(np.float64), rtol=1e-4
        )
    assert len(OnnxGraph(tmp_path / "net.onnx").proto.SerializeToString()) < 1000


@pytest.mark.spec("ONX-7")
@pytest.mark.parametrize("flag", [True, False])
def test_a_branch_is_named_and_not_entered(flag: bool, tmp_path: Path) -> None:
    def branch(name: str, op: str) -> Any:
        out = helper.make_tensor_value_info(f"{name}_y", TensorProto.FLOAT, None)
        return helper.make_graph(
            [helper.make_node(op, ["t"], [f"{name}_y"], name=f"inner_{op}")], name, [], [out]
        )

    nodes = [
        helper.make_node("Abs", ["x"], ["t"], name="abs"),
        helper.make_node(
            "If",
            ["c"],
            ["y"],
            name="choice",
            then_branch=branch("then", "Sqrt"),
            else_branch=branch("else", "Neg"),
        ),
    ]
    made = model(nodes, [("x", TensorProto.FLOAT, [4]), ("c", TensorProto.BOOL, [])], ["y"], {})
    x = np.array([1, -4, 9, -16], np.float32)
    for bound in (1 << 30, 1):
        (tmp_path / str(bound)).mkdir()
        inputs = {"x": x, "c": np.array(flag)}
        with captured(tmp_path / str(bound), made, inputs, sections=bound) as archive:
            expected = [1, 2, 3, 4] if flag else [-1, -4, -9, -16]
            assert values(archive, "0/@root:choice/output").tolist() == expected
            points = [p for p in archive.info.points if p.site == "@root:choice" and p.slots]
            assert {p.slots: p.reason for p in points} == {
                ("then_branch",): "a graph within the node, which is not entered: 1 node: inner_Sqrt",
                ("else_branch",): "a graph within the node, which is not entered: 1 node: inner_Neg",
            }


@pytest.mark.spec("ONX-8")
def test_a_run_without_taps_says_what_the_runtime_fuses(tmp_path: Path) -> None:
    with captured(tmp_path, mlp(), {"x": X}) as archive:
        graph = archive.run["graph"]
        assert (graph["nodes"], sum(graph["kernels_without_taps"].values())) == (
            4,
            2,
        )  # all but the last: a FusedGemm
        assert any(
            "computes 4 nodes in 2 kernels, of its own: 1 FusedGemm" in note for note in archive.info.notes
        )
        assert archive.info.control[0]["slot"] == "output"
        assert archive.info.control[0]["max_abs"] < 1e-5


@pytest.mark.spec("ONX-9")
def test_initialisers_are_parameters_of_the_modules_that_take_them(tmp_path: Path) -> None:
    with captured(tmp_path, mlp(), {"x": X}, params=True) as archive:
        assert np.array_equal(values(archive, "0/net.up/param.weight"), W1)
        assert np.array_equal(values(archive, "0/net.up/param.bias"), B1)
    with captured(tmp_path, mlp(), {"x": X}) as archive:
        weights = archive.info.modules["net.up"].parameters
        assert set(weights) == {"weight", "bias"}
        assert all(weight.digest for weight in weights.values())


@pytest.mark.spec("ONX-1", "ONX-10")
def test_versions_and_settings_are_kept(tmp_path: Path) -> None:
    with captured(tmp_path, mlp(), {"x": X}) as archive:
        settings = archive.info.settings
        assert archive.info.framework == "onnx"
        assert settings["opsets"] == {"ai.onnx": 17}
        assert settings["providers"] == ["CPUExecutionProvider"]
        assert settings["optimization"] == "all"
        assert archive.info.steps == 1


@pytest.mark.spec("ONX-1")
def test_an_input_that_the_model_hands_on_is_not_its_main_output(tmp_path: Path) -> None:
    made = mlp()
    made.graph.node.append(helper.make_node("Identity", ["x"], ["same"]))
    made.graph.output.insert(0, helper.make_empty_tensor_value_info("same"))
    with captured(tmp_path, made, {"x": X}) as archive:
        outputs = [r.key.slot for r in archive.records if r.key.site == "@root" and r.key.slot[:3] == "out"]
        assert outputs == ["output.y", "output.same"]


def scopes_of(path: Path, nodes: list[Any], weights: dict[str, Array]) -> Scopes:
    save(model(nodes, [("x", TensorProto.FLOAT, [4, 4])], [nodes[-1].output[0]], weights), path / "s.onnx")
    return Scopes(OnnxGraph(path / "s.onnx"))


SQUARE = np.eye(4, dtype=np.float32)


@pytest.mark.spec("ONX-3")
def test_children_of_a_sequence_have_its_name_once_and_calls_are_numbered(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["a"], "/body/body.0/MatMul"),
        helper.make_node("MatMul", ["a", "w"], ["b"], "/body/body.1/body.1.0/MatMul"),
        helper.make_node("MatMul", ["b", "w"], ["c"], "/lst.0/MatMul"),
        helper.make_node("MatMul", ["c", "w"], ["d"], "/lst.0_1/MatMul"),
    ]
    scopes = scopes_of(tmp_path, nodes, {"w": SQUARE})
    assert [scope.calls[-1] for scope in scopes.nodes] == [
        ModuleCall("body.0"),
        ModuleCall("body.1.0"),
        ModuleCall("lst.0", 0),
        ModuleCall("lst.0", 1),
    ]


@pytest.mark.spec("ONX-3")
def test_a_number_that_belongs_to_a_name_is_no_call(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("MatMul", ["x", "fc.weight"], ["a"], "/fc/MatMul"),
        helper.make_node("MatMul", ["a", "fc_1.weight"], ["b"], "/fc_1/MatMul"),
    ]
    scopes = scopes_of(tmp_path, nodes, {"fc.weight": SQUARE, "fc_1.weight": SQUARE})
    assert [scope.calls[-1] for scope in scopes.nodes] == [ModuleCall("fc"), ModuleCall("fc_1")]


@pytest.mark.spec("ONX-3")
def test_nodes_without_a_path_lie_where_their_parameters_do(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("MatMul", ["x", "1234"], ["a"], "MatMul_12"),
        helper.make_node("Add", ["a", "encoder.fc.bias"], ["b"], "Add_13"),
        helper.make_node("Relu", ["b"], ["c"], "Relu_14"),
    ]
    scopes = scopes_of(tmp_path, nodes, {"1234": SQUARE, "encoder.fc.bias": SQUARE[0]})
    assert [scope.calls[-1].path if scope.calls else "" for scope in scopes.nodes] == [
        "encoder.fc",
        "encoder.fc",
        "",
    ]
    assert scopes.parameters["encoder.fc"] == {"weight": "1234", "bias": "encoder.fc.bias"}


@pytest.mark.spec("ONX-3")
def test_a_fused_node_lies_where_most_of_its_parameters_do(tmp_path: Path) -> None:
    weights = dict.fromkeys(("out.norm.weight", "out.norm.bias", "out.dense.bias"), SQUARE[0])
    nodes = [
        helper.make_node(
            "SkipLayerNormalization", ["x", "x", *weights], ["y"], "SkipLayerNorm_5", domain="com.microsoft"
        )
    ]
    own = scopes_of(tmp_path, nodes, weights).nodes  # the bias and the sum are nodes of their own
    assert (own[0].calls[-1], own[-1].calls[-1]) == (ModuleCall("out.dense"), ModuleCall("out.norm"))


@pytest.mark.spec("ONX-3")
def test_the_name_of_a_fused_node_is_that_of_its_value(tmp_path: Path) -> None:
    nodes = [helper.make_node("Relu", ["x"], ["/layer.0/output/LayerNorm/Add_1_output_0"], "SkipLayerNorm_3")]
    scopes = scopes_of(tmp_path, nodes, {})
    assert scopes.nodes[0].calls[-1] == ModuleCall("layer.0.output.LayerNorm")


@pytest.mark.spec("ONX-4")
def test_sizes_and_masks_shared_by_layers_are_no_results(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("Abs", ["x"], ["m"], "/layer.0/attn/Abs"),  # which layer.1 takes as well
        helper.make_node("Shape", ["x"], ["s"], "/layer.0/attn/Shape"),
        helper.make_node("Add", ["x", "m"], ["a"], "/layer.0/attn/Add"),
        helper.make_node("Relu", ["a"], ["b"], "/layer.0/Relu"),
        helper.make_node("Add", ["b", "m"], ["c"], "/layer.1/attn/Add"),
        helper.make_node("Reshape", ["c", "s"], ["d"], "/layer.1/Reshape"),
    ]
    made = model(nodes, [("x", TensorProto.FLOAT, [2, 2])], ["d"], {})
    x = np.array([[1, -2], [3, -4]], np.float32)
    with captured(tmp_path, made, {"x": x}) as archive:
        outputs = [
            r.key.text for r in archive.records if r.key.site == "layer.0.attn" and "output" in r.key.slot
        ]
        assert outputs == ["0/layer.0.attn/output"]
        assert values(archive, "0/layer.0.attn/output").tolist() == [[2, 0], [6, 0]]


def test_a_large_weight_that_no_node_takes_is_none_of_the_run(tmp_path: Path) -> None:
    nodes = [helper.make_node("Neg", ["x"], ["y"], "neg")]
    made = model(nodes, [("x", TensorProto.FLOAT, [2])], ["y"], {"unused": np.zeros(5000, np.float32)})
    with captured(tmp_path, made, {"x": np.array([1, 2], np.float32)}) as archive:
        assert values(archive, "0/@root/output").tolist() == [-1, -2]


def test_a_graph_in_no_order_of_execution_is_put_in_one(tmp_path: Path) -> None:
    nodes = [helper.make_node("Neg", ["a"], ["y"]), helper.make_node("Abs", ["x"], ["a"])]
    made = model(nodes, [("x", TensorProto.FLOAT, [2])], ["y"], {})
    save(made, tmp_path / "net.onnx")
    assert [node.op for node in OnnxGraph(tmp_path / "net.onnx").nodes] == ["Abs", "Neg"]


@pytest.mark.spec("ONX-2")
def test_bfloat16_and_sequences(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("Cast", ["x"], ["b"], name="cast", to=TensorProto.BFLOAT16),
        helper.make_node("Cast", ["b"], ["f"], name="back", to=TensorProto.FLOAT),
        helper.make_node("SequenceConstruct", ["f", "x"], ["s"], name="pair"),
        helper.make_node("ConcatFromSequence", ["s"], ["y"], name="join", axis=0),
    ]
    made = model(nodes, [("x", TensorProto.FLOAT, [2])], ["y"], {})
    for bound in (1 << 30, 1):
        (tmp_path / str(bound)).mkdir()
        x = np.array([1.1, 2.0], np.float32)
        with captured(tmp_path / str(bound), made, {"x": x}, sections=bound) as archive:
            record = archive.get("0/@root:cast/output")
            assert (record.dtype.name, archive.read(record).tolist()) == ("bfloat16", [0x3F8D, 0x4000])
            assert values(archive, "0/@root:join/output").tolist() == [1.1015625, 2.0, np.float32(1.1), 2.0]
            reasons = [p.reason for p in archive.info.points if p.site == "@root:pair" and p.slots]
            assert reasons == ["it is no tensor but a sequence or a map"]


def test_constants_are_arguments(tmp_path: Path) -> None:
    two = numpy_helper.from_array(np.array([2, 2]), "two")
    nodes = [
        helper.make_node("Constant", [], ["shape"], value=two),
        helper.make_node("Reshape", ["x", "shape"], ["y"], name="view"),
    ]
    made = model(nodes, [("x", TensorProto.FLOAT, [4])], ["y"], {})
    with captured(tmp_path, made, {"x": np.arange(4, dtype=np.float32)}) as archive:
        assert archive.values["0/@root:view/op"]["arguments"] == {"shape": [2, 2]}


@pytest.mark.spec("ONX-10")
@pytest.mark.parametrize(
    ("inputs", "run", "origin"),
    [
        pytest.param({"x": X, "count": 2}, lambda net, x, count: net(x=x * count), "x", id="number"),
        pytest.param({"batch": {"x": X}}, lambda net, batch: net(x=batch["x"]), "batch.x", id="nested"),
        pytest.param({"tokens": X}, lambda net, tokens: net(x=tokens), "tokens", id="another-name"),
    ],
)
def test_a_run_function_is_given_what_it_was_given(
    inputs: dict[str, Any], run: Any, origin: str, tmp_path: Path
) -> None:
    def workload(given: dict[str, Any]) -> tensorcap.Workload:
        return tensorcap.Workload(tensorcap.OnnxModel(save(mlp(), tmp_path / "net.onnx")), given, run)

    capture_workload(workload(inputs), tmp_path / "one.h5")
    others = {name: {"x": X + 1} if name == "batch" else value + 1 for name, value in inputs.items()}
    with open_archive(tmp_path / "one.h5") as archive:
        again = adapter_for(workload(others).model).prepare(workload(others), inputs=archived_inputs(archive))
    capture_workload(again, tmp_path / "two.h5")
    with open_archive(tmp_path / "one.h5") as one, open_archive(tmp_path / "two.h5") as two:
        for text in (f"0/@root/given.{origin}", "0/@root/input.x", "0/@root/output"):
            np.testing.assert_array_equal(one.read(one.get(text)), two.read(two.get(text)))


@pytest.mark.spec("ONX-30")
def test_a_run_function_that_takes_none_of_an_archives_inputs_is_refused(tmp_path: Path) -> None:
    net = tensorcap.OnnxModel(save(mlp(), tmp_path / "net.onnx"))
    capture_workload(tensorcap.Workload(net, {"x": X}), tmp_path / "one.h5")
    other = tensorcap.Workload(net, {"ids": X, "mask": X}, lambda net, ids, mask: net(x=ids))
    with open_archive(tmp_path / "one.h5") as archive:
        given = archived_inputs(archive)
    with pytest.raises(UsageError, match=r"found the inputs x, expected ids, mask, which its run function"):
        adapter_for(net).prepare(other, inputs=given)
