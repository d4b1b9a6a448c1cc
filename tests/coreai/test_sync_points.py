"""Sync points of real conversions: correct ones accuse nobody, wrong ones the operation that is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("coreai_torch")
pytest.importorskip("transformers")

from coreai_torch.debugging.torch_utils import save_intermediates

import tensorcap
from tensorcap.session import capture_workload
from tests.coreai import models
from tests.coreai.conversion import converted
from tests.coreai.entries import CORRECT, MISTAKES, Conversion


def captured(entry: Conversion, folder: Path) -> tuple[Path, Path]:
    """The runs of the reference's graph and of the conversion."""
    reference = tensorcap.Workload(entry.reference(), dict(entry.reference_inputs()))
    capture_workload(reference, folder / "ref.h5", level="export", decompositions="coreai")
    inputs = {name: x.numpy() for name, x in entry.inputs().items()}
    target = tensorcap.Workload(tensorcap.CoreAIModel(entry.source()), inputs)
    capture_workload(target, folder / "tgt.h5")
    return folder / "ref.h5", folder / "tgt.h5"


def named(name: str) -> Conversion:
    return next(entry for entry in (*CORRECT, *MISTAKES) if entry.name == name)


@pytest.mark.sampled
@pytest.mark.spec("SYN-1", "SYN-3", "SYN-11", "SYN-13")
@pytest.mark.parametrize(
    ("name", "compared", "others"),
    [
        pytest.param("llama in float32", 129, {}, id="fp32"),
        pytest.param("llama in float16", 129, {}, id="fp16"),
        pytest.param("llama with int8 weights", 129, {}, id="int8"),
        pytest.param(
            "batch norms folded",
            6,
            {
                "convolution": "the target holds the value of _native_batch_norm_legit_no_training",
                "convolution_1": "the target holds the value of _native_batch_norm_legit_no_training_1",
            },
            id="folded",
        ),
        pytest.param(
            "attention fused",
            27,
            {
                "permute_6": "the target holds the value of permute_7",
                "permute_15": "the target holds the value of permute_16",
            },
            id="attention",
        ),
    ],
)
def test_a_correct_conversion_accuses_nobody(
    name: str, compared: int, others: dict[str, str], tmp_path: Path
) -> None:
    points = tensorcap.sync_points(*captured(named(name), tmp_path))
    assert points.exit_status == 0
    assert points.compared == compared
    assert points.failure_sources == []
    assert {p.node: p.reason for p in points.points if p.status == "holds another value"} == others
    assert {p.status for p in points.points} <= {
        "pass",
        "holds another value",
        "no target value",
        "no reference value",
        "not mapped",
    }


@pytest.mark.sampled
@pytest.mark.spec("SYN-1", "SYN-21", "SYN-31")
@pytest.mark.parametrize(
    ("name", "band"),
    [
        pytest.param("gelu by tanh", "green", id="activation"),
        pytest.param("softmax over queries", "red", id="softmax"),
        pytest.param("scores scaled by the width of the model", "red", id="scale"),
        pytest.param("int8 rows with the scale of the tensor", "red", id="quantisation"),
    ],
)
def test_the_failure_source_is_the_wrong_operation_at_its_line(name: str, band: str, tmp_path: Path) -> None:
    """The tanh for erf of a GELU is 87 dB: green by its band, and a mistake."""
    mistake = next(entry for entry in MISTAKES if entry.name == name)
    points = tensorcap.sync_points(*captured(mistake, tmp_path))
    (source,) = points.failure_sources
    assert points.exit_status == 1
    assert source.node in (*mistake.guilty.counterparts, *mistake.guilty.carriers)
    assert source.module == mistake.guilty.module
    assert source.band == band
    if mistake.kind in ("activation", "softmax_axis"):  # those of others are called by torch's own layers
        assert source.source.endswith(f"{mistake.guilty.line.file.name}:{mistake.guilty.line.number}")


@pytest.mark.slow
@pytest.mark.spec("SYN-14", "SYN-20")
def test_one_program_in_two_precisions_joins_by_nodes(tmp_path: Path) -> None:
    paths = []
    inputs = {name: x.numpy() for name, x in models.make_inputs("mlp").items()}
    for precision in ("fp32", "fp16"):
        paths.append(tmp_path / f"{precision}.h5")
        model = tensorcap.CoreAIModel(models.make("mlp"), precision=precision)
        capture_workload(tensorcap.Workload(model, inputs), paths[-1])
    points = tensorcap.sync_points(*paths)
    assert (points.exit_status, points.settings["precision"]) == (0, ("fp32", "fp16"))
    assert {point.node for point in points.points if point.status == "pass"} >= {"addmm", "gelu", "addmm_6"}
    lost = {point.target_node for point in points.points if point.status != "pass"}
    assert lost == {"native_layer_norm", "native_layer_norm_1"}
    assert points.bands.name == "16-bit floats"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")  # of torch's own modules of programs
@pytest.mark.spec("SYN-1", "SYN-13", "SYN-21")
@pytest.mark.parametrize(
    ("name", "status", "sources"),
    [
        pytest.param("llama in float32", 0, [], id="right"),
        pytest.param("gelu by tanh", 1, ["gelu_1"], id="wrong"),
    ],
)
def test_apples_own_folder_is_a_reference(name: str, status: int, sources: list[str], tmp_path: Path) -> None:
    """It names no modules and says of no node what it is computed from; the target's run does."""
    entry = named(name)
    program = entry.reference_program()
    inputs = tuple(entry.reference_inputs().values())
    written = save_intermediates(program, inputs, tmp_path, coreai_program=converted(program))
    points = tensorcap.sync_points(Path(written).parent, captured(entry, tmp_path)[1])
    assert points.exit_status == status
    assert [point.node for point in points.failure_sources] == sources
    sites = {point.module for point in points.points if point.status == "pass"}
    assert sites >= ({"model.layers.0.mlp", "lm_head"} if status == 0 else {"blocks.0.mix"})
