"""Assets from disk under capture: their modules, lines and operations, and what one in release mode lacks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

pytest.importorskip("coreai_torch")

from coreai_torch.debugging.inspector import MissingValue

import tensorcap
from tensorcap.adapters.coreai import tap
from tensorcap.adapters.coreai.output_order import OrderedInspector, ResultType, find_order
from tensorcap.adapters.coreai.runtime_log import without_runtime_log
from tensorcap.runs import Graph
from tensorcap.session import capture_workload
from tensorcap_formats.errors import ReadError, UsageError

HERE = Path(__file__)
ROOT = HERE.parents[2]


class Gated(torch.nn.Module):
    """The first half of a layer gates the second; the two largest of the products are returned."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(8)
        self.up = torch.nn.Linear(8, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, 8) to (batch, 2)."""
        first, second = self.up(self.norm(x)).split(8, -1)  # line: split
        return torch.topk(torch.nn.functional.gelu(first) * second, 2).values


class Stack(torch.nn.Module):
    """Two of them in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList([Gated(), torch.nn.Linear(2, 8), Gated()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, 8) to (batch, 2)."""
        for block in self.blocks:
            x = block(x)
        return x


class Counting(torch.nn.Module):
    """A sum over calls, in a buffer."""

    total: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(2, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(2, 8) to (2, 8)."""
        self.total.add_(x)
        doubled: torch.Tensor = self.total * 2
        return doubled


def line_of(text: str) -> int:
    (number,) = (i for i, line in enumerate(HERE.read_text().splitlines(), 1) if line.endswith(text))
    return number


def inputs() -> np.ndarray[Any, Any]:
    return np.random.default_rng(0).standard_normal((2, 8)).astype(np.float32)


def made() -> Stack:
    torch.manual_seed(0)
    return Stack().eval()


def saved(folder: Path, **settings: Any) -> tensorcap.CoreAIModel:
    """The asset of a conversion of the stack."""
    model = tensorcap.CoreAIModel(made(), **settings)
    model(inputs())
    model.save(folder / "net.aimodel")
    return tensorcap.CoreAIModel(folder / "net.aimodel")


def capture(model: Any, path: Path, **options: Any) -> Any:
    return capture_workload(tensorcap.Workload(model, {"x": inputs()}), path, **options)


@pytest.fixture(scope="module")
def captured(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Archives of the reference, a conversion, and the asset that the same conversion was saved to."""
    folder = tmp_path_factory.mktemp("assets")
    paths = {name: folder / f"{name}.h5" for name in ("reference", "conversion", "asset")}
    x = torch.from_numpy(inputs())
    workload = tensorcap.Workload(made(), {"x": x})
    capture_workload(workload, paths["reference"], level="export", decompositions="coreai")
    capture(tensorcap.CoreAIModel(made()), paths["conversion"])
    capture(saved(folder), paths["asset"])
    return paths


@pytest.mark.slow
@pytest.mark.spec("CAI-12", "CAI-40")
def test_an_assets_operations_lie_in_its_own_instances_of_modules(captured: dict[str, Path]) -> None:
    with tensorcap.open_archive(captured["asset"]) as archive:
        assert {site: module.class_name for site, module in archive.info.modules.items()} == {
            "@root": "Stack",
            "Gated-1": "Gated",
            "Linear-2": "Linear",
            "Gated-2": "Gated",
            "Gated-1.LayerNorm-1": "LayerNorm",
            "Gated-1.Linear-1": "Linear",
            "Gated-2.LayerNorm-2": "LayerNorm",
            "Gated-2.Linear-3": "Linear",
        }
        keys = [record.key.text for record in archive.records]
        assert keys[:4] == [
            "0/@root/input.x",
            "0/Gated-1.Linear-1:permute/output",
            "0/Gated-1.Linear-1:addmm/output",
            "0/Gated-1:split_with_sizes/output.0",
        ]
        assert {"0/Gated-2:topk_1/output.0", "0/@root/output"} <= set(keys)
        assert {row.module for row in archive.info.operation_map} == {""}
        assert archive.info.settings["mode"] == "debug"
        assert archive.info.dtype == "float32"


@pytest.mark.slow
@pytest.mark.spec("CAI-40")
def test_an_asset_holds_the_same_bits_as_the_conversion_and_pairs_with_the_reference(
    captured: dict[str, Path],
) -> None:
    with (
        tensorcap.open_archive(captured["asset"]) as asset,
        tensorcap.open_archive(captured["conversion"]) as conversion,
    ):
        of_asset = [asset.read(record).tobytes() for record in asset.records]
        assert of_asset == [conversion.read(record).tobytes() for record in conversion.records]
    comparison = tensorcap.compare(captured["reference"], captured["asset"])
    compared = [pair.key for pair in comparison.pairs if pair.reference and pair.target]
    assert "0/blocks.2:topk_1/output.0" in compared
    assert "0/blocks.0.up:addmm/output" in compared
    assert comparison.exit_status == 0


@pytest.mark.slow
@pytest.mark.spec("CAI-41")
@pytest.mark.parametrize(
    ("name", "where", "op", "function"),
    [
        pytest.param("conversion", "0/blocks.2:gelu_1", "aten.gelu.default", "forward", id="conversion"),
        pytest.param("asset", "0/Gated-2:gelu_1", "coreai.gelu", None, id="asset"),
    ],
)
def test_an_operation_has_the_facts_of_its_node(
    name: str, where: str, op: str, function: str | None, captured: dict[str, Path]
) -> None:
    with tensorcap.open_archive(captured[name]) as archive:
        graph = Graph.of(archive)
        node = graph.node(f"{where}/output")
        assert (node.op, node.class_name, node.function) == (op, "Gated", function)
        assert str(node.file).rpartition("/")[2] == "test_asset_runs.py"
        assert node.line == line_of("# line: split") + 1
        split = graph.node(where.replace("gelu", "split_with_sizes"))
        assert split.line == line_of("# line: split")
        assert [value.name for value in split.outputs] == ["output.0", "output.1"]


@pytest.mark.slow
@pytest.mark.spec("CAI-41")
def test_a_conversions_operation_names_what_it_was_given(captured: dict[str, Path]) -> None:
    with tensorcap.open_archive(captured["conversion"]) as archive:
        graph = Graph.of(archive)
        product = graph.node("0/blocks.0:mul")
        assert [(value.name, value.key) for value in product.inputs] == [
            ("self", "0/blocks.0:gelu/output"),
            ("other", "0/blocks.0:split_with_sizes/output.1"),
        ]
        assert graph.node("0/blocks.0:topk").arguments["k"] == 2
        (weight,) = graph.node("0/blocks.0.up:permute").inputs
        assert weight.parameter == "blocks.0.up.weight"
        bias, rows, _ = graph.node("0/blocks.0.up:addmm").inputs
        assert bias.parameter == "blocks.0.up.bias"
        assert rows.note == "no target value: no operation of the compiled program is mapped to it"


@pytest.mark.slow
@pytest.mark.spec("CAI-42")
def test_the_halves_of_a_split_are_those_of_torch(captured: dict[str, Path]) -> None:
    net = made()
    with torch.no_grad():
        gated = net.blocks[0]
        halves = gated.up(gated.norm(torch.from_numpy(inputs()))).numpy()  # type: ignore[operator]
    for name, site in (("conversion", "blocks.0"), ("asset", "Gated-1")):
        with tensorcap.open_archive(captured[name]) as archive:
            for i, half in enumerate((halves[:, :8], halves[:, 8:])):
                value = archive.read(archive.get(f"0/{site}:split_with_sizes/output.{i}"))
                np.testing.assert_allclose(value, half, rtol=0, atol=1e-5)


WHOLE = np.arange(12, dtype=np.float32).reshape(2, 6)
LEFT, RIGHT = np.ascontiguousarray(WHOLE[:, :3]), np.ascontiguousarray(WHOLE[:, 3:])
HALF = ResultType((2, 3), "f")


@pytest.mark.spec("CAI-42")
@pytest.mark.parametrize(
    ("arrays", "types", "given", "order"),
    [
        pytest.param([RIGHT, LEFT], [HALF, HALF], [np.array([3, 3]), WHOLE], [1, 0], id="parts"),
        pytest.param([LEFT, RIGHT], [HALF, HALF], [WHOLE], [0, 1], id="parts in order"),
        pytest.param([RIGHT, LEFT], [HALF, HALF], [], None, id="no input"),
        pytest.param([RIGHT, LEFT + 1], [HALF, HALF], [WHOLE], None, id="no parts of it"),
        pytest.param([LEFT, LEFT], [HALF, HALF], [], [0, 1], id="the same bits"),
        pytest.param(
            [np.zeros((2, 3), np.int32), LEFT], [HALF, ResultType((2, 3), "i")], [], [1, 0], id="types"
        ),
        pytest.param(
            [np.zeros((2, 3), np.int32), LEFT.astype(ml_dtypes.bfloat16)],
            [HALF, ResultType((2, 3), "i")],
            [],
            [1, 0],
            id="bfloat16",
        ),
        pytest.param([LEFT], [HALF, HALF], [WHOLE], None, id="too few"),
        pytest.param([WHOLE[1:], WHOLE[:1]], [ResultType((1, 6), "f")] * 2, [WHOLE], [1, 0], id="along rows"),
    ],
)
def test_an_order_is_found_by_types_or_by_the_input_that_is_taken_apart(
    arrays: Any, types: Any, given: Any, order: Any
) -> None:
    assert find_order(arrays, types, given) == order


@pytest.mark.slow
@pytest.mark.spec("CAI-42")
def test_outputs_in_no_known_order_have_no_value(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tensorcap.adapters.coreai.output_order.find_order", lambda *_: None)
    capture(tensorcap.CoreAIModel(made()), tmp_path / "tgt.h5")
    with tensorcap.open_archive(tmp_path / "tgt.h5") as archive:
        lost = {p.site: (p.slots, p.reason) for p in archive.info.points if p.status == "not-capturable"}
        assert "0/blocks.0:split_with_sizes/output.0" not in archive
    reason = "no target value: the runtime gives the outputs of the operation in no known order"
    assert lost["blocks.0:split_with_sizes"] == (("output.0", "output.1"), reason)


@pytest.mark.slow
@pytest.mark.spec("CAI-13", "CAI-40")
def test_a_release_mode_asset_has_inputs_and_outputs_alone_and_says_so(tmp_path: Path) -> None:
    capture(saved(tmp_path, mode="release"), tmp_path / "tgt.h5")
    with tensorcap.open_archive(tmp_path / "tgt.h5") as archive:
        assert [record.key.text for record in archive.records] == ["0/@root/input.x", "0/@root/output"]
        assert archive.info.settings["mode"] == "release"
        (note,) = archive.info.notes
    assert note.startswith("the asset was converted in release mode: which node of the model each operation")
    assert "the values of no operations" in note


@pytest.mark.spec("CAI-14")
@pytest.mark.parametrize(
    ("explanation", "reason"),
    [
        pytest.param(
            MissingValue.Explanation(3, MissingValue.Reason.NO_PRODUCER_FOUND),
            "no target value: no operation of the compiled program is mapped to it",
            id="lost",
        ),
        pytest.param(
            MissingValue.Explanation(3, MissingValue.Reason.MERGED_INTO_ANOTHER_OPERATION, (3, 4, 5), 5),
            "no target value: computed in one kernel with 2 other operations, of which operation 5, that of "
            "mul_11, has the value",
            id="fused",
        ),
        pytest.param(
            MissingValue.Explanation(3, MissingValue.Reason.MERGED_INTO_ANOTHER_OPERATION, (3, 6), 6),
            "no target value: computed in one kernel with 1 other operation, of which operation 6 has the "
            "value",
            id="fused with one of no node",
        ),
    ],
)
def test_why_a_value_is_missing_is_what_the_inspector_explains(
    explanation: MissingValue.Explanation, reason: str
) -> None:
    assert tap._reason(explanation, {5: "mul_11"}) == reason


@pytest.mark.slow
@pytest.mark.spec("CAI-14")
def test_a_program_without_a_value_is_captured_as_a_whole(tmp_path: Path) -> None:
    summary = capture(tensorcap.CoreAIModel(made()), tmp_path / "tgt.h5").summary
    reason = "no target value: no operation of the compiled program is mapped to it"
    assert summary.fused == {
        "blocks.0.norm:native_layer_norm/output.0": reason,
        "blocks.2.norm:native_layer_norm_1/output.0": reason,
    }
    assert (summary.not_capturable, summary.exit_status) == ({}, 0)


@pytest.mark.slow
@pytest.mark.spec("CAI-43")
def test_outputs_of_the_two_runs_that_differ_are_a_note(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        OrderedInspector,
        "last_outputs",
        property(lambda self: {name: array + 1 for name, array in self._last_outputs.items()}),
    )
    capture(tensorcap.CoreAIModel(made()), tmp_path / "tgt.h5")
    with tensorcap.open_archive(tmp_path / "tgt.h5") as archive:
        (note,) = archive.info.notes
    assert note == (
        "the values of operations are of a second run, whose outputs are not equal to those that are "
        "recorded: getitem_12"
    )


@pytest.mark.slow
@pytest.mark.spec("CAI-50")
def test_a_function_that_keeps_state_is_refused_by_the_name_of_the_state() -> None:
    model = tensorcap.CoreAIModel(Counting().eval())
    with pytest.raises(
        UsageError, match=r"'main' keeps state between calls \(b_total\), expected one without"
    ):
        model(inputs())


@pytest.mark.slow
@pytest.mark.spec("CAI-51")
def test_inputs_of_other_shapes_are_refused_with_what_to_do() -> None:
    model = tensorcap.CoreAIModel(made())
    model(inputs())
    message = r"Stack: input x: found float32\[3, 8\], expected float32\[2, 8\]"
    with pytest.raises(UsageError, match=message) as caught:
        model(np.zeros((3, 8), np.float32))
    assert (
        caught.value.hint
        == "It was converted for the shapes of its first inputs; make a CoreAIModel for each."
    )


@pytest.mark.slow
@pytest.mark.spec("CAI-51")
def test_an_axis_of_any_length_takes_any() -> None:
    batch = torch.export.Dim("batch", min=2, max=64)
    x = torch.from_numpy(inputs())
    program = torch.export.export(made(), (x,), dynamic_shapes=({0: batch},), strict=False)
    model = tensorcap.CoreAIModel(program)
    assert next(iter(model(np.zeros((3, 8), np.float32)).values())).shape == (3, 2)
    with pytest.raises(UsageError, match=r"found float32\[3, 9\], expected float32\[any, 8\]"):
        model(np.zeros((3, 9), np.float32))


@pytest.mark.slow
@pytest.mark.spec("CAI-52")
def test_a_damaged_asset_is_refused_and_ends_no_process(tmp_path: Path) -> None:
    asset = saved(tmp_path).source
    program = asset / "main.mlirb"
    whole = program.read_bytes()
    program.write_bytes(whole[:-100])
    with pytest.raises(
        ReadError, match=r"main\.mlirb: is damaged: found another SHA-256 than main\.hash has"
    ):
        tensorcap.CoreAIModel(asset)(inputs())
    program.write_bytes(b"weights")
    with pytest.raises(ReadError, match=r"main\.mlirb: found b'weig', expected MLIR bytecode"):
        tensorcap.CoreAIModel(asset)(inputs())


@pytest.mark.slow
@pytest.mark.spec("CAI-20")
def test_an_asset_takes_no_precision_and_no_mode(tmp_path: Path) -> None:
    path = saved(tmp_path).source
    with pytest.raises(UsageError, match="precision fp16: an asset has the precision it was converted in"):
        tensorcap.CoreAIModel(path, precision="fp16")(inputs())
    with pytest.raises(UsageError, match="mode release: an asset has the mode it was converted in"):
        tensorcap.CoreAIModel(path, mode="release")(inputs())


@pytest.mark.slow
@pytest.mark.spec("CAI-53")
def test_a_conversion_is_saved_after_a_run_to_a_new_folder_alone(tmp_path: Path) -> None:
    model = tensorcap.CoreAIModel(made())
    with pytest.raises(UsageError, match="was not converted yet, expected a run before"):
        model.save(tmp_path / "net.aimodel")
    asset = saved(tmp_path)
    with pytest.raises(
        UsageError, match=r"found something that is there, expected a new folder NAME\.aimodel"
    ):
        model.save(tmp_path / "net.aimodel")
    with pytest.raises(UsageError, match=r"found the suffix '\.h5', expected a new folder"):
        model.save(tmp_path / "net.h5")
    with pytest.raises(UsageError, match=r"there is nothing to keep, since .* is an asset already"):
        asset.save(tmp_path / "other.aimodel")


@pytest.mark.spec("CAI-45")
@pytest.mark.parametrize(
    ("written", "passed_on"),
    [
        pytest.param([b"ODIE [default]: Loading function 'main'\n"], b"", id="alone"),
        pytest.param([b"mine\nODIE [default]: Loading\nmine too\n"], b"mine\nmine too\n", id="between"),
        pytest.param([b"half OD", b"IE [info]: x\n", b"rest"], b"half rest", id="in pieces"),
        pytest.param([b"ODIN\n", b"O"], b"ODIN\nO", id="other words"),
        pytest.param([b"ODIE [error]: cut"], b"ODIE [error]: cut", id="no end"),
    ],
)
def test_only_lines_of_the_runtime_are_held_back(
    written: list[bytes], passed_on: bytes, capfd: pytest.CaptureFixture[str]
) -> None:
    with without_runtime_log():
        for text in written:
            os.write(2, text)
    os.write(2, b"|after")
    assert capfd.readouterr().err.encode() == passed_on + b"|after"


@pytest.mark.slow
@pytest.mark.spec("CAI-45")
def test_a_run_leaves_the_users_own_output_and_adds_none(tmp_path: Path) -> None:
    saved(tmp_path)
    script = (
        "import os, numpy, tensorcap\n"
        "model = tensorcap.CoreAIModel('net.aimodel')\n"
        "os.write(2, b'before\\n')\n"
        "with tensorcap.capture(model, 'tgt.h5'):\n"
        "    model(numpy.zeros((2, 8), numpy.float32))\n"
        "os.write(2, b'after\\n')\n"
    )
    paths = os.pathsep.join(str(ROOT / part) for part in (".", "formats", "cli"))
    done = subprocess.run(
        [sys.executable, "-W", "error:coreai-torch has only been validated", "-c", script],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        check=True,
    )
    assert (done.stdout, done.stderr) == (b"", b"before\nafter\n")


@pytest.mark.slow
@pytest.mark.spec("CAI-11")
def test_each_run_under_capture_is_a_step_and_notes_are_told_once(tmp_path: Path) -> None:
    model = saved(tmp_path, mode="release")
    with tensorcap.capture(model, tmp_path / "tgt.h5"):
        first, second = model(inputs()), model(inputs() * 2)
    assert not np.array_equal(*(next(iter(each.values())) for each in (first, second)))
    with tensorcap.open_archive(tmp_path / "tgt.h5") as archive:
        assert archive.info.steps == 2
        assert len(archive.info.notes) == 1


@pytest.mark.slow
def test_the_model_is_as_before(tmp_path: Path) -> None:
    net = made()
    sizes = [1, 2]  # which an export replaces
    vars(net)["sizes"] = sizes
    capture(tensorcap.CoreAIModel(net), tmp_path / "tgt.h5")
    assert vars(net)["sizes"] is sizes
