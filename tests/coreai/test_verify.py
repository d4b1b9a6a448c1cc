"""Verifications of conversions to Core AI: the mistake is named, and a correct conversion is not accused."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

pytest.importorskip("coreai_torch")
pytest.importorskip("transformers")

import tensorcap
from tensorcap.localization import Localization, Verification, localize
from tensorcap.port_verification import verify
from tensorcap.rerun import replay
from tensorcap.session import capture_workload
from tests.coreai import conversion
from tests.coreai.entries import CORRECT, MISTAKES, MODELS, Conversion, Line, Mistake

GELU, *_ = MISTAKES


def names(entries: Sequence[Conversion]) -> list[str]:
    return [entry.name for entry in entries]


def reference_of(entry: Conversion) -> tensorcap.Workload:
    return tensorcap.Workload(entry.reference(), entry.reference_inputs())


def target_of(entry: Conversion) -> tensorcap.Workload:
    inputs = {name: x.numpy() for name, x in entry.inputs().items()}
    return tensorcap.Workload(tensorcap.CoreAIModel(entry.source()), inputs)


def verified(entry: Conversion, folder: Path) -> Verification:
    return verify(reference_of(entry), target_of(entry), folder / "report")


@pytest.mark.sampled
@pytest.mark.filterwarnings(
    "ignore::FutureWarning", "ignore::UserWarning"
)  # of torch's and Core AI's own code
@pytest.mark.spec("RPL-150", "VER-80")
@pytest.mark.parametrize("mistake", MISTAKES, ids=names(MISTAKES))
def test_the_guilty_operation_is_named_first(mistake: Mistake, tmp_path: Path) -> None:
    verification = verified(mistake, tmp_path)
    operation = verification.suspects[0].operation
    assert operation is not None
    guilty = mistake.guilty
    assert operation.place.node in {*guilty.nodes, *guilty.counterparts, *guilty.carriers}
    assert verification.exit_status == 1


@pytest.mark.sampled
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.spec("RPL-151", "RPL-152")
@pytest.mark.parametrize("entry", CORRECT, ids=names(CORRECT))
def test_a_correct_conversion_is_not_accused(entry: Conversion, tmp_path: Path) -> None:
    verification = verified(entry, tmp_path)
    assert [suspect.name for suspect in verification.suspects] == []
    if entry.precision != "int8":
        assert verification.exit_status == 0
    else:
        text = "Weights are rounded to int8 with a scale for each column, of 15 modules"
        assert any(text in line for line in verification.summary)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.spec("SYN-20", "SYN-40")
def test_a_value_that_the_target_did_not_compute_with_is_no_missing_one(tmp_path: Path) -> None:
    """The convolutions of the converted net hold the values of the norms behind them."""
    folded = next(entry for entry in CORRECT if entry.name == "batch norms folded")
    verification = verified(folded, tmp_path)
    points = json.loads((verification.path / "sync-points.json").read_text())["points"]
    reason = "left out of the comparison: the target did not compute with that value"
    statuses = {point["node"]: (point["status"], point["reason"]) for point in points}
    assert statuses["convolution"] == statuses["convolution_1"] == ("excluded", reason)
    assert statuses["permute"] == ("no reference value", "a view of the parameter head.weight")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.spec("VER-81", "DIA-280", "CAI-140")
def test_a_planted_gelu_by_tanh_is_named_with_its_lines_and_its_operation(tmp_path: Path) -> None:
    verification = verified(GELU, tmp_path)
    (suspect,) = verification.suspects
    operation = suspect.operation
    assert operation is not None
    reference = Line(MODELS, "x + self.down(functional.gelu(h))")
    assert (suspect.name, operation.place.op, operation.place.module) == (
        "blocks.1:gelu_1",
        "aten.gelu.default",
        "blocks.1",
    )
    assert (Path(operation.place.file), operation.place.line) == (reference.file, reference.number)
    assert (Path(operation.target_file), operation.target_line) == (
        GELU.guilty.line.file,
        GELU.guilty.line.number,
    )
    assert operation.target_op == "coreai.gelu"
    assert suspect.cause == "activation"
    text = (tmp_path / "report" / "summary.txt").read_text()
    line = f"aten.gelu.default at models.py:{reference.number} in the reference; in the target coreai.gelu #"
    assert line in text
    assert "nothing can be put in the place of their values" in text


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.spec("LCL-150", "RPL-150")
def test_archives_are_localized_with_the_reference_model_and_without(tmp_path: Path) -> None:
    reference, target = tmp_path / "ref.h5", tmp_path / "tgt.h5"
    capture_workload(reference_of(GELU), reference, level="export", decompositions="coreai")
    capture_workload(target_of(GELU), target)

    def first(localization: Localization) -> str:
        return localization.suspects[0].module

    known = localize(reference, target, reference_model=reference_of(GELU), target_model=target_of(GELU))
    assert (known.by, first(known)) == ("replay", "blocks.1:gelu_1")
    assert any("No injection: the operations of coreai are compiled" in note for note in known.notes)
    assert localize(reference, target).by == "archives"
    replayed = replay(reference, target, reference_model=reference_of(GELU))
    assert [own.key for own in replayed.bad] == ["0/blocks.1:gelu_1/output"]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.spec("CAI-140", "DIA-280")
@pytest.mark.parametrize("entry", MISTAKES[:2], ids=names(MISTAKES[:2]))
def test_a_mistake_in_an_asset_from_a_file_is_named_without_its_graph(entry: Mistake, tmp_path: Path) -> None:
    conversion.converted(entry.program()).save_asset(tmp_path / "net.aimodel")
    model = tensorcap.CoreAIModel(str(tmp_path / "net.aimodel"))
    target = tensorcap.Workload(model, {name: x.numpy() for name, x in entry.inputs().items()})
    verification = verify(reference_of(entry), target, tmp_path / "report")
    (suspect,) = verification.suspects
    assert suspect.operation is not None
    assert suspect.operation.place.node in entry.guilty.nodes
    assert suspect.cause == entry.kind.replace("_", "-")
