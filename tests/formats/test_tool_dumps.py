"""Files of Polygraphy, transformers' debugger, msprobe and SGLang's dumper, and what is refused of them.

Files of SGLang and msprobe are written after their sources (sglang 0.5.23, mindstudio-probe 26.2.0), whose
own dumps of a Llama were read in the making of this; those of Polygraphy likewise (0.53.6).
"""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from tensorcap.comparison import compare
from tensorcap_formats.conversion import convert
from tensorcap_formats.dtypes import Array, decode
from tensorcap_formats.errors import (
    CorruptArchiveError,
    NotAnArchiveError,
    ReadError,
    UnsafeFileError,
    UsageError,
)
from tensorcap_formats.open import open_archive
from tests.support.torch_bytes import floats, integers, write_torch

A = np.array([[1.5, -2.0], [0.25, 8.0]], np.float32)


def contents(path: Path | str) -> dict[str, Array]:
    with open_archive(path) as archive:
        return {r.key.text: decode(archive.read(r), r.dtype) for r in archive.records}


def encoded(array: Any, *, is_lazy: bool = True) -> dict[str, Any]:
    file = io.BytesIO()
    np.save(file, array)
    inner = {"array": base64.b64encode(file.getvalue()).decode(), "polygraphy_class": "ndarray"}
    return {"values": inner, "polygraphy_class": "LazyArray"} if is_lazy else inner


def results(path: Path, runs: dict[str, list[dict[str, Any]]]) -> Path:
    listed = [
        [
            runner,
            [
                {
                    "outputs": {name: encoded(array) for name, array in outputs.items()},
                    "runtime": 0.5,
                    "runner_name": runner,
                    "polygraphy_class": "IterationResult",
                }
                for outputs in iterations
            ],
        ]
        for runner, iterations in runs.items()
    ]
    path.write_text(json.dumps({"lst": listed, "polygraphy_class": "RunResults"}, indent=4))
    return path


@pytest.mark.spec("TDM-1", "TDM-2")
def test_results_of_one_iteration_have_the_names_of_the_graph(tmp_path: Path) -> None:
    outputs = {"/fc/MatMul_output_0": A, "ids": np.array([2**40, -1]), "half": A.astype(np.float16)}
    path = results(tmp_path / "out.json", {"onnxrt-runner-N0-11/29/26-23:55:57": [outputs]})
    found = contents(path)
    assert list(found) == ["/fc/MatMul_output_0", "ids", "half"]
    for name, array in outputs.items():
        np.testing.assert_array_equal(found[name], array)
        assert found[name].dtype == array.dtype
    with open_archive(path) as archive:
        assert archive.run["framework"] == {"name": "onnx"}


@pytest.mark.spec("TDM-1", "TDM-2")
def test_iterations_are_steps_in_a_file_and_in_a_folder(tmp_path: Path) -> None:
    path = results(tmp_path / "out.json", {"trt-runner-N0": [{"/y": A}, {"/y": A + 1}]})
    expected = {"0/%2Fy/output": A, "1/%2Fy/output": A + 1}
    (tmp_path / "run").mkdir()
    for i in range(2):
        results(tmp_path / f"run/{i:010}.json", {"trt-runner-N0": [{"/y": A + i}]})
    for found in (contents(path), contents(tmp_path / "run")):
        assert found.keys() == expected.keys()
        for key, array in expected.items():
            np.testing.assert_array_equal(found[key], array)


@pytest.mark.spec("TDM-1")
def test_saved_inputs_open_too(tmp_path: Path) -> None:
    path = tmp_path / "in.json"
    path.write_text(json.dumps([{"x": encoded(A, is_lazy=False)}]))
    np.testing.assert_array_equal(contents(path)["x"], A)


@pytest.mark.spec("TDM-3")
def test_of_several_runners_one_is_named_by_its_beginning(tmp_path: Path) -> None:
    runs = {
        "onnxrt-runner-N0-11/29/26-23:55:57": [{"y": A}],
        "trt-runner-N1-11/29/26-23:55:57": [{"y": A + 1}],
    }
    path = results(tmp_path / "out.json", runs)
    with pytest.raises(NotAnArchiveError, match=r"runs of onnxrt-runner-N0.*, trt-runner-N1") as error:
        open_archive(path)
    assert str(error.value.hint).endswith("out.json:onnxrt")
    np.testing.assert_array_equal(contents(f"{path}:trt")["y"], A + 1)
    with pytest.raises(NotAnArchiveError, match="no runner 'tf'"):
        open_archive(f"{path}:tf")


@pytest.mark.spec("TDM-3")
@pytest.mark.parametrize("output", ["x.h5", "x.zarr"])
def test_the_folder_of_a_runner_is_not_written_into(tmp_path: Path, output: str) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    results(folder / "0000000000.json", {"onnxrt-runner-N0": [{"y": A}], "trt-runner-N1": [{"y": A + 1}]})
    with pytest.raises(UsageError, match="is the source or overlaps with it"):
        convert(f"{folder}:onnxrt", folder / output)
    assert [path.name for path in folder.iterdir()] == ["0000000000.json"]


def test_the_hint_for_a_folder_of_several_runners_can_be_followed(tmp_path: Path) -> None:
    names = [f"{kind}-runner-N{i}-11/29/26-23:55:57" for i, kind in enumerate(("onnxrt", "trt"))]
    (tmp_path / "out").mkdir()
    for i in range(2):
        runs = {name: [{"y": A + 10 * number + i}] for number, name in enumerate(names)}
        results(tmp_path / f"out/{i:010}.json", runs)
    with pytest.raises(NotAnArchiveError) as error:
        open_archive(tmp_path / "out")
    one = str(error.value.hint).rpartition(" ")[2]
    assert one == f"{tmp_path}/out:onnxrt"
    np.testing.assert_array_equal(contents(one)["1/y/output"], A + 1)
    other = f"{tmp_path}/out:{names[1]}"
    np.testing.assert_array_equal(contents(other)["1/y/output"], A + 11)
    assert not any("same file" in text for text in compare(one, other).warnings)
    assert any("same file" in text for text in compare(one, one).warnings)
    with pytest.raises(NotAnArchiveError, match="no such file or folder"):
        open_archive(f"{tmp_path}:onnxrt")


@pytest.mark.spec("TDM-4")
@pytest.mark.parametrize(
    ("array", "message"),
    [
        pytest.param({"array": "k05V!"}, "is no base64", id="no base64"),
        pytest.param({"array": base64.b64encode(b"no numpy").decode()}, "begins with", id="no npy"),
        pytest.param(
            {"array": encoded(A)["values"]["array"][:160]}, "header claims 118 bytes", id="cut short"
        ),
        pytest.param({"array": 3}, "has no text 'array'", id="no text"),
        pytest.param([1], "expected an object", id="no object"),
    ],
)
def test_damaged_arrays_are_refused_by_name(array: Any, message: str, tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    path.write_text(json.dumps({"lst": [["r", [{"outputs": {"y": array}}]]]}))
    with pytest.raises(ReadError, match=f"'y': .*{message}|'y'.*{message}"):
        open_archive(path)


@pytest.mark.spec("TDM-4")
def test_python_objects_and_tensors_of_torch_are_not_read(tmp_path: Path) -> None:
    file, path = io.BytesIO(), tmp_path / "out.json"
    np.save(file, np.array([{}], object), allow_pickle=True)
    pickled = base64.b64encode(file.getvalue()).decode()
    path.write_text(json.dumps({"lst": [["r", [{"outputs": {"y": {"array": pickled}}}]]]}))
    with pytest.raises(UnsafeFileError, match="Python objects"):
        open_archive(path)
    outputs = {"y": encoded(A), "z": {"values": {"tensor": "UEsDBA=="}}}
    path.write_text(json.dumps({"lst": [["r", [{"outputs": outputs}]]]}))
    with open_archive(path) as archive:
        assert [r.key.text for r in archive.records] == ["y"]
        assert "torch" in archive.skipped["z"]
        assert not archive.is_complete


@pytest.mark.spec("TDM-1", "TDM-3")
def test_polygraphy_itself_writes_what_is_read(tmp_path: Path) -> None:
    comparator = pytest.importorskip("polygraphy.comparator")
    written = comparator.RunResults()
    written.add(
        [{"/y": A, "ids": np.array([3])}, {"/y": A + 1, "ids": np.array([4])}], runner_name="onnxrt-N0"
    )
    written.save(str(tmp_path / "out.json"))
    found = contents(tmp_path / "out.json")
    np.testing.assert_array_equal(found["1/%2Fy/output"], A + 1)
    np.testing.assert_array_equal(found["0/ids/output"], [3])


def tensor(array: Array, value: object) -> dict[str, Any]:
    return {"shape": f"torch.Size({list(array.shape)})", "dtype": f"torch.{array.dtype.name}", "value": value}


def tree(folder: Path, value: Callable[[Array, str], object]) -> Path:
    """A model of a block that is called once, and an activation that is called twice."""
    ids = np.array([[3, 5]])

    def call(path: str, given: Any, result: Any, *children: Any) -> dict[str, Any]:
        node = {"module_path": path, "inputs": given, "outputs": result, "children": list(children)}
        return {name: member for name, member in node.items() if member}

    act = [
        call(
            "Net.block.act",
            {"args": [tensor(A + i, value(A + i, f"a{i}"))]},
            tensor(A * i, value(A * i, "act")),
        )
        for i in range(2)
    ]
    block = call(
        "Net.block",
        {"kwargs": {"x": tensor(A, value(A, "x")), "mask": "None", "rope": [tensor(A, value(A, "r"))]}},
        None,
        *act,
    )
    root = call(
        "Net",
        {"args": [], "kwargs": {"input_ids": tensor(ids, value(ids, "ids"))}},
        {"last": tensor(A, value(A, "y"))},
        block,
    )
    path = folder / "Net_debug_tree_FULL_TENSORS.json"
    path.write_text(json.dumps(root, indent=2))
    return path


@pytest.mark.spec("TDM-10", "TDM-11")
def test_a_debug_tree_with_files_has_the_calls_of_modules_in_order(tmp_path: Path) -> None:
    def saved(array: Array, name: str) -> str:
        save_file({"data": np.ascontiguousarray(array)}, tmp_path / f"Net.{name}.safetensors")
        return f"./Net.{name}.safetensors"

    path = tree(tmp_path, saved)
    for found in (contents(path), contents(tmp_path)):
        assert list(found) == [
            "0/@root/input.input_ids",
            "0/block/input.x",
            "0/block/input.rope.0",
            "0/block.act/input.0",
            "0/block.act@1/input.0",
            "0/block.act@1/output",
            "0/@root/output.last",
        ]
        np.testing.assert_array_equal(found["0/block.act@1/output"], A)
        np.testing.assert_array_equal(found["0/@root/input.input_ids"], [[3, 5]])
    with open_archive(path) as archive:
        assert "wrote over" in archive.skipped["0/block.act/output"]
        assert archive.values["0/block/input.mask"] is None
        assert archive.run["model"]["class"] == "Net"


@pytest.mark.spec("TDM-12")
def test_printed_tensors_are_read_if_they_are_whole(tmp_path: Path) -> None:
    def printed(array: Array, name: str) -> list[str]:
        if name == "r":
            return ["tensor([[1.0000e+00, ..., 2.0000e+00]])"]
        rows = [", ".join(f"{v:.4e}" if array.dtype.kind == "f" else str(v) for v in row) for row in array]
        lines = "],\n        [".join(rows)
        return f"tensor([[{lines}]])".splitlines()

    with open_archive(tree(tmp_path, printed)) as archive:
        np.testing.assert_array_equal(archive.load(archive.get("0/block/input.x")), A)
        np.testing.assert_array_equal(archive.load(archive.get("0/@root/input.input_ids")), [[3, 5]])
        np.testing.assert_array_equal(archive.load(archive.get("0/block.act/output")), A * 0)
        assert "in part" in archive.skipped["0/block/input.rope.0"]
        assert archive.run["compute_dtype"] == "float16"
        assert "printed" in archive.run["notes"][0]


@pytest.mark.spec("TDM-12")
@pytest.mark.parametrize("shape", [(0,), (0, 3), (2, 0)], ids=str)
@pytest.mark.parametrize("dtype", ["float32", "int64", "bool"])
def test_an_empty_tensor_that_was_printed_is_read(dtype: str, shape: tuple[int, ...], tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    empty = torch.empty(shape, dtype=getattr(torch, dtype))
    root = {
        "module_path": "Net",
        "inputs": {"args": [tensor(empty.numpy(), repr(empty).splitlines())]},
        "outputs": tensor(A, repr(torch.from_numpy(A)).splitlines()),
    }
    path = tmp_path / "Net_debug_tree_FULL_TENSORS.json"
    path.write_text(json.dumps(root))
    with open_archive(path) as archive:
        record = archive.get("0/@root/input.0")
        assert (record.shape, record.dtype.name, archive.skipped) == (shape, dtype, {})


@pytest.mark.spec("TDM-12")
def test_a_damaged_print_is_a_problem_and_one_in_part_is_not(tmp_path: Path) -> None:
    printed = {"a": "tensor([1., 2.])", "b": "tensor([1., x, 2.])", "c": "tensor([1., ..., 2.])"}
    outputs = {name: tensor(np.ones(3, np.float32), [text]) for name, text in printed.items()}
    outputs["good"] = tensor(np.ones(1, np.float32), ["tensor([1.])"])
    path = tmp_path / "Net_debug_tree_FULL_TENSORS.json"
    path.write_text(json.dumps({"module_path": "Net", "outputs": outputs}))
    with open_archive(path) as archive:
        assert [r.key.text for r in archive.records] == ["0/@root/output.good"]
        assert list(archive.problems) == ["0/@root/output.a", "0/@root/output.b"]
        assert "0/@root/output.c" in archive.skipped
        assert not archive.is_complete


@pytest.mark.spec("TDM-11")
def test_files_beside_a_tree_that_it_does_not_name_are_listed(tmp_path: Path) -> None:
    def saved(array: Array, name: str) -> str:
        save_file({"data": np.ascontiguousarray(array)}, tmp_path / f"Net.{name}.safetensors")
        return f"./Net.{name}.safetensors"

    path = tree(tmp_path, saved)
    (tmp_path / "Net_debug_tree_SUMMARY.json").write_text("{}")
    save_file({"w": A}, tmp_path / "model.safetensors")
    (tmp_path / "more").mkdir()
    reason = f"{path.name} does not name it"
    for place, expected in ((tmp_path, {"model.safetensors", "more/"}), (path, set())):
        with open_archive(place) as archive:
            others = {name for name, why in archive.skipped.items() if why.endswith(reason)}
            assert others == expected


@pytest.mark.spec("TDM-13")
def test_a_summary_is_refused_with_the_file_that_has_values(tmp_path: Path) -> None:
    path = tree(tmp_path, lambda array, name: None)
    summary = path.rename(tmp_path / "Net_debug_tree_SUMMARY.json")
    with pytest.raises(NotAnArchiveError, match="is a summary") as error:
        open_archive(summary)
    assert str(error.value.hint).endswith("Net_debug_tree_FULL_TENSORS.json.")


@pytest.mark.spec("TDM-11")
@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        pytest.param({"value": "../secret.safetensors"}, UnsafeFileError, "plain file name", id="path"),
        pytest.param({"value": "./gone.safetensors"}, ReadError, "no such file", id="no file"),
        pytest.param(
            {"shape": "torch.Size([4])"}, CorruptArchiveError, r"expected float32 \[4\]", id="shape"
        ),
        pytest.param({"dtype": "torch.quint8"}, CorruptArchiveError, "is unknown", id="dtype"),
        pytest.param({"shape": "[2, 2]"}, CorruptArchiveError, "expected a text such as", id="no shape"),
    ],
)
def test_a_tree_that_contradicts_its_files_is_refused(
    change: dict[str, str], error: type[Exception], message: str, tmp_path: Path
) -> None:
    save_file({"data": A}, tmp_path / "x.safetensors")
    output = {**tensor(A, "./x.safetensors"), **change}
    path = tmp_path / "Net_debug_tree_FULL_TENSORS.json"
    path.write_text(json.dumps({"module_path": "Net", "outputs": output}))
    with pytest.raises(error, match=message):
        open_archive(path)


@pytest.mark.spec("TDM-10", "TDM-11", "TDM-12")
@pytest.mark.parametrize("use_repr", [False, True])
def test_transformers_itself_writes_what_is_read(use_repr: bool, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    debugging = pytest.importorskip("transformers.model_debugging_utils")
    before = torch._tensor_str.PRINT_OPTS.sci_mode, torch._tensor_str.PRINT_OPTS.linewidth
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Tanh()).eval()
    try:
        with debugging.model_addition_debugger_context(net, debug_path=str(tmp_path), use_repr=use_repr):
            expected = net.forward(torch.from_numpy(A)).detach().numpy()
    finally:
        torch.set_printoptions(sci_mode=before[0], linewidth=before[1])
    found = contents(tmp_path)
    # it drops results of what has modules, the model among them
    assert {"0/@root/input.0", "0/0/input.0", "0/0/output", "0/1/input.0", "0/1/output"} == found.keys()
    np.testing.assert_allclose(found["0/1/output"], expected, rtol=1e-4 if use_repr else 0)


def msprobe(folder: Path, data: dict[str, Any], parents: dict[str, Any], task: str = "tensor") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    dump = {"task": task, "level": "mix", "framework": "pytorch", "dump_data_dir": "/elsewhere", "data": data}
    (folder / "dump.json").write_text(json.dumps(dump))
    (folder / "construct.json").write_text(json.dumps(parents))
    (folder / "stack.json").write_text("{}")
    return folder


def leaf(folder: Path, name: str, *values: float, shape: tuple[int, ...] | None = None) -> dict[str, Any]:
    write_torch(folder / "dump_tensor_data" / f"{name}.pt", floats(*values, shape=shape))
    return {
        "type": "torch.Tensor",
        "dtype": "torch.float32",
        "shape": list(shape or (len(values),)),
        "data_name": f"{name}.pt",
    }


def probed(folder: Path) -> Path:
    """A module that is called twice, and a function in it and outside of it."""
    data: dict[str, Any] = {}
    for call in range(2):
        data[f"Functional.linear.{call}.forward"] = {
            "input_args": [leaf(folder, f"F.{call}.input.0", 1 + call)],
            "input_kwargs": {},
            "output": [leaf(folder, f"F.{call}.output.0", 2 + call)],
        }
        data[f"Module.model.fc.Linear.forward.{call}"] = {
            "input_args": [leaf(folder, f"M.{call}.input.0", 1 + call), None, {"type": "int", "value": 7}],
            "input_kwargs": {
                "mask": {"type": "NoneType", "value": None},
                "rope": [leaf(folder, f"M.{call}.rope", 5.0)],
            },
            "output": [leaf(folder, f"M.{call}.output.0", 2 + call), leaf(folder, f"M.{call}.output.1", 9.0)],
            "parameters": {"weight": leaf(folder, "M.weight", 3.0)} if call == 0 else {},
        }
    data["Tensor.__add__.0.forward"] = {"input_args": [], "output": [leaf(folder, "T", 6.0)]}
    data["Module.model.fc.Linear.backward.0"] = {
        "input": [leaf(folder, "B.i", 4.0)],
        "output": [leaf(folder, "B.o", 8.0)],
    }
    parents = {
        f"Functional.linear.{call}.forward": f"Module.model.fc.Linear.forward.{call}" for call in range(2)
    }
    return msprobe(folder, data, {**parents, "Tensor.__add__.0.forward": None})


@pytest.mark.spec("TDM-20", "TDM-21", "TDM-22", "TDM-24")
def test_a_dump_of_msprobe_has_modules_functions_and_gradients(tmp_path: Path) -> None:
    folder = probed(tmp_path / "dump")
    expected = {
        "0/model.fc:Functional.linear/input.0": 1,
        "0/model.fc:Functional.linear/output": 2,
        "0/model.fc/input.0": 1,
        "0/model.fc/input.rope.0": 5,
        "0/model.fc/output.0": 2,
        "0/model.fc/output.1": 9,
        "0/model.fc/param.weight": 3,
        "0/model.fc:Functional.linear@1/input.0": 2,
        "0/model.fc:Functional.linear@1/output": 3,
        "0/model.fc@1/input.0": 2,
        "0/model.fc@1/input.rope.0": 5,
        "0/model.fc@1/output.0": 3,
        "0/model.fc@1/output.1": 9,
        "0/@root:Tensor.__add__/output": 6,
        "0/model.fc/grad_input.0": 4,
        "0/model.fc/grad_output": 8,
    }
    for path in (folder, folder / "dump.json"):
        assert {key: array.item() for key, array in contents(path).items()} == expected
        assert list(contents(path)) == list(expected)
    with open_archive(folder) as archive:
        assert archive.values["0/model.fc/input.2"] == 7
        assert archive.is_complete


@pytest.mark.spec("TDM-20")
def test_steps_and_ranks_are_those_of_the_folders(tmp_path: Path) -> None:
    for step in (0, 10, 2):
        for rank in range(2):
            folder = tmp_path / f"run/step{step}/rank{rank}"
            data = {"Module.fc.Linear.forward.0": {"output": [leaf(folder, "o", step, rank)]}}
            msprobe(folder, data, {})
    found = {key: array.tolist() for key, array in contents(tmp_path / "run").items()}
    assert found == {
        f"{f'rank{rank}/' * rank}{step}/fc/output": [step, rank] for step in (0, 2, 10) for rank in range(2)
    }
    assert list(contents(tmp_path / "run/step2")) == ["0/fc/output", "rank1/0/fc/output"]


@pytest.mark.spec("TDM-20")
def test_a_file_that_is_named_is_the_one_that_is_read(tmp_path: Path) -> None:
    for name, value in (("old", 1.0), ("new", 2.0)):
        msprobe(tmp_path, {"Module.fc.Linear.forward.0": {"output": [leaf(tmp_path, name, value)]}}, {})
        if name == "old":
            (tmp_path / "dump.json").rename(tmp_path / "old.json")
    assert contents(tmp_path / "old.json")["0/fc/output"].item() == 1
    assert contents(tmp_path / "dump.json")["0/fc/output"].item() == 2


@pytest.mark.spec("TDM-20")
@pytest.mark.parametrize("other", ["rank1", "step1", "step0/proc7"])
def test_folders_beside_those_that_are_read_make_a_dump_incomplete(other: str, tmp_path: Path) -> None:
    folder = tmp_path / "run/step0/rank0"
    msprobe(folder, {"Module.fc.Linear.forward.0": {"output": [leaf(folder, "o", 1.0)]}}, {})
    (tmp_path / "run" / other).mkdir()
    with open_archive(tmp_path / "run") as archive:
        assert [r.key.text for r in archive.records] == ["0/fc/output"]
        assert (archive.is_complete, list(archive.skipped)) == (False, [other])


@pytest.mark.spec("TDM-24")
def test_gradients_of_parameters_are_read_and_unknown_members_are_listed(tmp_path: Path) -> None:
    data = {
        "Module.fc.Linear.forward.0": {
            "output": [leaf(tmp_path, "o", 1.0)],
            "hooked": [leaf(tmp_path, "h", 3.0)],
        },
        "Module.fc.Linear.parameters_grad": {"weight": [leaf(tmp_path, "g", 2.0)]},
    }
    msprobe(tmp_path, data, {})
    with open_archive(tmp_path) as archive:
        found = {r.key.text: archive.load(r).item() for r in archive.records}
        assert found == {"0/fc/output": 1, "0/fc/grad_param.weight": 2}
        assert list(archive.skipped) == ["Module.fc.Linear.forward.0.hooked"]


@pytest.mark.spec("TDM-20")
def test_processes_without_ranks_are_told_apart_by_the_user(tmp_path: Path) -> None:
    for number in (12, 34):
        folder = tmp_path / f"run/step0/proc{number}"
        msprobe(folder, {"Module.fc.Linear.forward.0": {"output": [leaf(folder, "o", number)]}}, {})
    with pytest.raises(NotAnArchiveError, match="2 processes whose ranks are not known"):
        open_archive(tmp_path / "run")
    assert contents(tmp_path / "run/step0/proc34")["0/fc/output"].item() == 34


@pytest.mark.spec("TDM-22")
def test_what_is_missing_is_said_and_makes_a_dump_incomplete(tmp_path: Path) -> None:
    folder = tmp_path / "dump"
    one = leaf(folder, "a", 1.0)
    other = {**leaf(folder, "b", 2.0), "shape": [2, 2]}
    gone = {**one, "data_name": "gone.pt"}
    msprobe(
        folder,
        {f"Module.{n}.Linear.forward.0": {"output": [o]} for n, o in (("a", one), ("b", other), ("c", gone))},
        {},
    )
    with open_archive(folder) as archive:
        assert [r.key.text for r in archive.records] == ["0/a/output"]
        assert "of shape [1], [2, 2] in dump.json" in archive.skipped["0/b/output"]
        assert "no such file" in archive.skipped["0/c/output"]
        assert not archive.is_complete


@pytest.mark.spec("TDM-22")
@pytest.mark.parametrize("name", ["../a.pt", "/etc/passwd", "", 3, "a\0"])
def test_no_name_leads_out_of_a_dump(name: object, tmp_path: Path) -> None:
    folder = tmp_path / "dump"
    one = {**leaf(folder, "a", 1.0), "data_name": name}
    msprobe(folder, {"Module.a.Linear.forward.0": {"output": [one]}}, {})
    with pytest.raises(CorruptArchiveError, match="is no name of a file"):
        open_archive(folder)


@pytest.mark.spec("TDM-23")
def test_statistics_alone_are_refused_with_how_to_have_values(tmp_path: Path) -> None:
    one = {"type": "torch.Tensor", "dtype": "torch.float32", "shape": [1], "Max": 1.0, "md5": "33df3734"}
    folder = msprobe(tmp_path / "dump", {"Module.a.Linear.forward.0": {"output": [one]}}, {}, "statistics")
    with pytest.raises(NotAnArchiveError, match="statistics of 1 tensors and no values") as error:
        open_archive(folder)
    assert "tensor" in str(error.value.hint)
    with_value = {**one, **leaf(folder, "b", 2.0)}
    msprobe(folder, {"Module.a.Linear.forward.0": {"output": [one, with_value]}}, {})
    with open_archive(folder) as archive:
        assert archive.run["notes"] == ["Of 1 tensors only statistics were kept."]


@pytest.mark.spec("TDM-30", "TDM-31", "TDM-32")
def test_files_of_sglangs_dumper_are_modules_and_probes(tmp_path: Path) -> None:
    values = {
        "step=0___rank=0___dump_index=1___name=input_ids": integers(3, 5, dtype="int64"),
        "step=0___rank=0___dump_index=10___name=non_intrusive__model.fc.inputs.x.0___layer_id=4": floats(1.0),
        "step=0___rank=0___dump_index=9___name=non_intrusive__model.fc.inputs.0": floats(2.0),
        "step=0___rank=0___dump_index=11___name=non_intrusive__model.fc.output": floats(3.0),
        "step=0___rank=0___dump_index=12___name=non_intrusive__model.fc.output": floats(4.0),
        "step=0___rank=0___dump_index=13___name=grad__non_intrusive__model.fc.output": floats(5.0),
        "step=0___rank=0___dump_index=14___name=scores___recompute_status=disabled___layer_id=3": floats(6.0),
        "step=0___rank=0___dump_index=15___name=scores___recompute_status=recomputed___layer_id=3": floats(
            6.0
        ),
        "step=1___rank=1___dump_index=1___name=non_intrusive__output": floats(7.0),
    }
    for name, own in values.items():
        write_torch(tmp_path / f"run/{name}.pt", own)
    with open_archive(tmp_path / "run") as archive:
        assert {r.key.text: archive.load(r).tolist() for r in archive.records} == {
            "0/probe:input_ids/value": [3, 5],
            "0/model.fc/input.0": [2],
            "0/model.fc/input.x.0": [1],
            "0/model.fc/output": [3],
            "0/model.fc@1/output": [4],
            "0/model.fc/grad_output": [5],
            "0/probe:layers.3.scores/value": [6],
            "rank1/1/@root/output": [7],
        }
        assert [r.key.text for r in archive.records][1:3] == ["0/model.fc/input.0", "0/model.fc/input.x.0"]
        assert list(archive.skipped.values()) == ["computed anew by a backward pass"]
        assert archive.is_complete
    (tmp_path / "run/step=0___rank=0___dump_index=16___name=bad.pt").write_bytes(b"PK\3\4 cut short")
    with open_archive(tmp_path / "run") as archive:
        assert not archive.is_complete
        assert any("name=bad" in name for name in archive.skipped)


@pytest.mark.spec("TDM-30")
def test_values_are_those_of_the_member_value(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    (tmp_path / "run").mkdir()
    meta = {"step": 0, "name": "h", "dims": "b s"}
    for index, value in enumerate((torch.ones(2), [torch.zeros(1), torch.ones(1)])):
        name = f"step=0___rank=0___dump_index={index}___name=h{index}.pt"
        torch.save({"value": value, "meta": {**meta, "offset": torch.ones(3)}}, tmp_path / "run" / name)
    assert {key: array.tolist() for key, array in contents(tmp_path / "run").items()} == {
        "0/probe:h0/value": [1, 1],
        "0/probe:h1/value.0": [0],
        "0/probe:h1/value.1": [1],
    }


@pytest.mark.spec("TDM-32")
def test_files_without_a_value_or_of_one_key_make_a_dump_incomplete(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    (tmp_path / "run").mkdir()
    name = "step=0___rank=0___dump_index={}___name=non_intrusive__m.inputs{}.pt"
    for index, below, content in (
        (0, ".0", {"value": torch.ones(1), "meta": {}}),
        (1, "", {"value": [torch.zeros(1)], "meta": {}}),
        (2, ".1", {"meta": {"step": 0}}),
    ):
        torch.save(content, tmp_path / "run" / name.format(index, below))
    with open_archive(tmp_path / "run") as archive:
        assert {r.key.text: archive.load(r).item() for r in archive.records} == {"0/m/input.0": 1}
        reasons = [archive.skipped.get(name.format(index, below)) for index, below in ((1, ""), (2, ".1"))]
        assert (archive.is_complete, reasons) == (
            False,
            ["another file has 0/m/input.0", "it has no member 'value'"],
        )
