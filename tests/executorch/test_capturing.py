"""A program of ExecuTorch, whose operators and modules are held against the model that was exported."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner, Result

import tensorcap
from tensorcap.adapters import adapter_for
from tensorcap.adapters.executorch.engine import Event
from tensorcap.adapters.executorch.tap import edge_program
from tensorcap.session import capture_workload
from tensorcap_cli.main import main
from tests.executorch import programs

pytestmark = pytest.mark.filterwarnings("ignore")  # of the exporter's own


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("reference") / "ref.h5"
    capture_workload(programs.reference(), path, params=True)
    return path


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return programs.write(tmp_path_factory.mktemp("program"))


@pytest.fixture(scope="module")
def target(program: Path) -> Path:
    model = tensorcap.ExecuTorchModel(program)
    capture_workload(
        tensorcap.Workload(model, {"x": programs.ROWS}), program.with_name("tgt.h5"), params=True
    )
    return program.with_name("tgt.h5")


def tcap(*arguments: Any) -> Result:
    return CliRunner().invoke(main, [*map(str, arguments)])


@pytest.mark.spec("EXT-1", "EXT-2", "EXT-3", "EXT-5", "EXT-7")
def test_every_node_and_module_has_its_value(target: Path) -> None:
    net = programs.Net().eval()
    seen: dict[str, torch.Tensor] = {}
    for path, module in net.named_modules():
        module.register_forward_hook(lambda _, __, output, path=path: seen.update({path: output}))
    with torch.no_grad():
        net(programs.ROWS)
    with tensorcap.open_archive(target) as archive:
        for path, value in seen.items():
            if path != "blocks":
                key = f"0/{path or '@root'}/output"
                np.testing.assert_allclose(
                    archive.load(archive.get(key)), value.numpy(), rtol=1e-4, atol=1e-5, err_msg=key
                )
        np.testing.assert_array_equal(archive.load(archive.get("0/@root/input.x")), programs.ROWS.numpy())
        np.testing.assert_array_equal(
            archive.load(archive.get("0/blocks.1/input.0")), archive.load(archive.get("0/blocks.0/output"))
        )
        weight = net.get_parameter("blocks.1.up.weight").detach().numpy()
        np.testing.assert_array_equal(archive.load(archive.get("0/blocks.1.up/param.weight")), weight)
        op = archive.values["0/blocks.0.norm:aten_native_layer_norm_default/op"]
        assert op["op"] == "aten.native_layer_norm.default"
        assert op["file"].endswith("programs.py")
        assert op["inputs"][0] == {"name": "input", "record": "0/@root/input.x"}
        assert op["inputs"][1] == {"name": "weight", "parameter": "blocks.0.norm.weight"}
        assert archive.run["graph"]["nodes"] == archive.run["graph"]["nodes_with_values"]
        assert archive.run["control"] == [{"slot": "output", "identical": True, "max_abs": 0.0}]
        orders = [r.key.site for r in archive.records if r.key.slot == "output"]
        assert (
            orders.index("blocks.0.norm")
            < orders.index("blocks.0")
            < orders.index("blocks.1")
            < orders.index("@root")
        )


@pytest.mark.spec("EXT-1", "EXT-2")
def test_a_correct_program_is_right_without_a_map(reference: Path, target: Path) -> None:
    result = tcap("compare", reference, target, "--json")
    assert result.exit_code == 0, result.output
    pairs = json.loads(result.output)["pairs"]
    compared = [pair for pair in pairs if pair["status"] in ("identical", "match", "within-rounding")]
    with tensorcap.open_archive(reference) as archive:
        assert len(compared) == len(archive.records)


@pytest.mark.spec("EXT-2", "EXT-3")
@pytest.mark.parametrize(
    ("wrong", "guilty", "text"),
    [
        pytest.param(
            {"approximate": "tanh"}, "blocks.1.act", "GELU by tanh on one side and by erf", id="gelu"
        ),
        pytest.param({"eps": 0.1}, "blocks.1.norm", "eps 0.1", id="eps"),
    ],
)
def test_a_planted_mistake_is_named(
    wrong: dict[str, Any], guilty: str, text: str, reference: Path, tmp_path: Path
) -> None:
    path = programs.write(tmp_path, **wrong)
    result = tcap("capture", "executorch", path, "--like", reference, "-o", tmp_path / "tgt.h5")
    assert result.exit_code == 0, result.output
    found = tcap("localize", reference, tmp_path / "tgt.h5")
    assert found.exit_code == 1, found.output
    assert next(line for line in found.output.splitlines() if line.startswith("1. ")).split()[1] == guilty
    assert text in found.output


@pytest.mark.spec("EXT-4", "EXT-8")
def test_within_a_delegate_only_its_result_has_a_value(program: Path) -> None:
    graph = edge_program(tensorcap.ExecuTorchModel(program))
    handles = {node.name: node.meta["debug_handle"] for node in graph.nodes}
    names = ["aten_addmm_default_4", "aten_gelu_default", "aten_addmm_default_5"]  # of up, act and down
    given, result = torch.zeros(2, 5, 16), torch.ones(2, 5, 16)
    last = [name for name, handle in handles.items() if handle == handles["aten_addmm_default_5"]][-1]
    events = [
        Event("Fully Connected (NC, F32) GEMM #1", (), "XnnpackBackend", ()),
        Event("DELEGATE_CALL", tuple(handles[name] for name in names), "", (given, result)),
        Event("native_call_unheard.out", (handles["aten_add_tensor"],), "", (result,)),
    ]
    values, reasons, left = graph.match(events)
    assert values[last, 0] is result
    assert "within XnnpackBackend" in reasons["aten_gelu_default"]
    assert ("aten_gelu_default", 0) not in values
    assert [event.name for event in left] == ["native_call_unheard.out"]


@pytest.mark.spec("EXT-6")
def test_the_command_makes_inputs_and_takes_those_of_an_archive(
    program: Path, reference: Path, tmp_path: Path
) -> None:
    np.savez(tmp_path / "in.npz", x=programs.ROWS.numpy())
    given_options: tuple[list[Any], ...] = (
        ["--inputs", tmp_path / "in.npz"],
        ["--like", reference],
        ["--inputs", "random"],
    )
    for number, options in enumerate(given_options):
        path = tmp_path / f"{number}.h5"
        result = tcap("capture", "executorch", program, *options, "-o", path)
        assert result.exit_code == 0, result.output
        with tensorcap.open_archive(path) as archive:
            given = archive.load(archive.get("0/@root/input.x"))
            assert np.array_equal(given, programs.ROWS.numpy()) == (number < 2)
            assert archive.run["framework"]["settings"]["etrecord"].endswith("net.etrecord")


@pytest.mark.spec("EXT-10")
def test_bad_input_is_refused_in_one_line(program: Path, tmp_path: Path) -> None:
    (tmp_path / "net.pte").write_bytes(program.read_bytes())
    (tmp_path / "bad.pte").write_bytes(b"no program")
    (tmp_path / "bad.etrecord").write_bytes(program.with_suffix(".etrecord").read_bytes())
    (tmp_path / "none.etrecord").write_bytes(b"no record")
    (tmp_path / "net.bin").write_bytes(b"")
    np.savez(tmp_path / "small.npz", x=np.zeros((2, 5, 15), "f4"))
    cases: tuple[tuple[list[Any], str], ...] = (
        ([tmp_path / "net.pte", "--inputs", "zeros"], "expected the ETRecord of the program"),
        (
            [tmp_path / "net.pte", "--inputs", "zeros", "--etrecord", tmp_path / "none.etrecord"],
            "is no ETRecord",
        ),
        ([tmp_path / "bad.pte", "--inputs", "zeros"], "ExecuTorch cannot run it"),
        ([tmp_path / "gone.pte", "--inputs", "zeros"], "there is no file"),
        ([tmp_path / "net.bin", "--inputs", "zeros"], "expected NAME.pte"),
        ([program], "no inputs for x"),
        ([program, "--inputs", tmp_path / "small.npz"], "expected float32[2, 5, 16]"),
    )
    for arguments, message in cases:
        result = tcap("capture", "executorch", *arguments, "-o", tmp_path / "out.h5")
        assert result.exit_code in (1, 2, 3), result.output
        assert message in result.output
        assert "Traceback" not in result.output
        assert not (tmp_path / "out.h5").exists()
    model = tensorcap.ExecuTorchModel(program)
    refused: tuple[dict[str, Any], ...] = ({"grads": True}, {"level": "export"}, {"watch": "json:dumps:*"})
    for options in refused:
        with pytest.raises(tensorcap.TensorcapError):
            capture_workload(tensorcap.Workload(model, {"x": programs.ROWS}), tmp_path / "out.h5", **options)


@pytest.mark.spec("EXT-6")
def test_a_program_of_a_function_takes_the_settings_of_the_command(program: Path) -> None:
    workload = tensorcap.Workload(tensorcap.ExecuTorchModel(program), {"x": programs.ROWS})
    adopted = adapter_for(workload.model).adopt(workload, {"etrecord": program.with_suffix(".etrecord")})
    assert adopted.model.record_path == program.with_suffix(".etrecord")
    assert adopted.inputs is workload.inputs
    made: Any = adapter_for(workload.model).adopt(workload, {"inputs": ("zeros",)}).inputs
    assert (made["x"].shape, float(np.abs(made["x"]).sum())) == ((2, 5, 16), 0.0)


class Waves(torch.nn.Module):
    """No operation of the other programs, on inputs of their shape."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.sin().cos()


class Constants(torch.nn.Module):
    """Returns what is no tensor before one."""

    def forward(self, x: torch.Tensor) -> Any:
        return 3, None, x.sin()


@pytest.mark.spec("EXT-10")
def test_a_program_that_returns_constants_runs_and_its_capture_is_refused(tmp_path: Path) -> None:
    program = programs.write(tmp_path, Constants())
    (result,) = tensorcap.ExecuTorchModel(program)(programs.ROWS).values()
    torch.testing.assert_close(result, programs.ROWS.sin())
    refused = tcap("capture", "executorch", program, "--inputs", "ones", "-o", tmp_path / "o.h5")
    assert refused.exit_code == 1, refused.output
    assert "returns 3 at 0, None at 1 beside its tensors" in refused.output
    assert "Export a model that returns its tensors alone" in refused.output
    assert not (tmp_path / "o.h5").exists()


@pytest.mark.spec("EXT-10")
def test_a_record_of_another_export_is_refused(program: Path, tmp_path: Path) -> None:
    other = programs.write(tmp_path, Waves())
    record = program.with_suffix(".etrecord")
    result = tcap(
        "capture", "executorch", other, "--inputs", "ones", "--etrecord", record, "-o", tmp_path / "o.h5"
    )
    assert result.exit_code == 1, result.output
    assert "expected the ETRecord of the export that made" in result.output
