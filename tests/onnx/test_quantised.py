"""A pretrained BERT in few bits: right ones are as rounding predicts, and planted mistakes are named."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper

import tensorcap
from tensorcap.comparison import Comparison, compare
from tensorcap.localization import localize
from tensorcap.session import capture_workload
from tests.onnx.bert import MODEL, drop_mask, exchange_gelu, inputs, named, twin

quantization = pytest.importorskip("onnxruntime.quantization")
LINEAR = (
    "attention.self.query",
    "attention.self.key",
    "attention.self.value",
    "attention.output.dense",
    "intermediate.dense",
    "output.dense",
)
LAYERS = {f"encoder.layer.{n}.{name}" for n in range(3) for name in LINEAR}


class Batches(quantization.CalibrationDataReader):  # type: ignore[misc, name-defined]  # no types
    """Inputs by which ranges are measured: those of the test, and three others."""

    def __init__(self) -> None:
        self._left = iter(
            {**inputs(), "input_ids": np.random.default_rng(n).integers(1000, 20000, (2, 12))}
            for n in range(4)
        )

    def get_next(self) -> Any:
        return next(self._left, None)


def quantise(kind: str, path: Path) -> Path:
    """Write the model in few bits as ONNX Runtime's own quantiser does."""
    level = logging.getLogger().level
    logging.getLogger().setLevel(logging.ERROR)
    try:
        if kind == "embeddings and products, dynamic":
            quantization.quantize_dynamic(MODEL, path)
        elif kind == "dynamic":
            quantization.quantize_dynamic(
                MODEL,
                path,
                per_channel=True,
                weight_type=quantization.QuantType.QInt8,
                op_types_to_quantize=["MatMul"],
            )
        elif kind == "blocks":
            from onnxruntime.quantization.matmul_nbits_quantizer import MatMulNBitsQuantizer

            quantiser = MatMulNBitsQuantizer(onnx.load(MODEL), block_size=32, is_symmetric=True)
            quantiser.process()
            onnx.save(quantiser.model.model, path)
        else:
            form, _, scope = kind.partition(" ")
            quantization.quantize_static(
                MODEL,
                path,
                Batches(),
                quant_format=getattr(quantization.QuantFormat, form),
                per_channel=scope == "by channel",
                op_types_to_quantize=["MatMul"],
            )
    finally:
        logging.getLogger().setLevel(level)
    return path


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bert") / "ref.h5"
    capture_workload(trusted(), path, params=True)
    return path


def trusted() -> tensorcap.Workload:
    return tensorcap.Workload(twin(), {name: torch.from_numpy(value) for name, value in inputs().items()})


def captured(path: Path) -> Path:
    target = tensorcap.Workload(tensorcap.OnnxModel(path), inputs())
    capture_workload(target, path.with_suffix(".h5"), params=True)
    return path.with_suffix(".h5")


def texts(comparison: Comparison, test: str) -> dict[str, str]:
    return {p.key.split("/")[1]: f.text for p in comparison.pairs for f in p.findings if f.test == test}


@pytest.mark.spec("ONX-40", "ONX-41")
@pytest.mark.parametrize(
    ("kind", "numbers"),
    [
        pytest.param(
            "embeddings and products, dynamic", "int8 with a scale for the whole tensor", id="dynamic"
        ),
        pytest.param(
            "dynamic", "int8 with a scale for each row", id="dynamic, by channel", marks=pytest.mark.entries
        ),
        pytest.param("QDQ", "int8 with a scale for the whole tensor", id="QDQ", marks=pytest.mark.entries),
        pytest.param(
            "QDQ by channel",
            "int8 with a scale for each row",
            id="QDQ, by channel",
            marks=pytest.mark.entries,
        ),
        pytest.param(
            "QOperator by channel",
            "int8 with a scale for each row",
            id="QOperator, by channel",
            marks=pytest.mark.entries,
        ),
        pytest.param("blocks", "uint4 with a scale for 32 values", id="blocks", marks=pytest.mark.entries),
    ],
)
def test_right_layers_are_as_their_quantisation_predicts(
    kind: str, numbers: str, reference: Path, tmp_path: Path
) -> None:
    comparison = compare(reference, captured(quantise(kind, tmp_path / "net.onnx")))
    red = {p.key: p.status for p in comparison.pairs if p.status in ("suspect", "diverged", "unmapped")}
    assert (comparison.exit_status, red) == (0, {})
    weights = texts(comparison, "weight_rounding")
    assert weights.keys() >= LAYERS
    assert all(f"the reference's, rounded to {numbers}" in weights[layer] for layer in LAYERS)
    results = texts(comparison, "quantisation")
    assert results.keys() >= LAYERS
    assert all(f"times what rounding to {numbers} predicts" in results[layer] for layer in LAYERS)
    tables = {"embeddings.word_embeddings", "embeddings.position_embeddings"}
    assert tables <= results.keys() or not kind.startswith("embeddings")


def initialiser(made: Any, name: str) -> Any:
    return next(stored for stored in made.graph.initializer if stored.name == name)


def values(made: Any, name: str) -> Any:
    return numpy_helper.to_array(initialiser(made, name))


def put(made: Any, name: str, array: Any) -> None:
    initialiser(made, name).CopyFrom(numpy_helper.from_array(np.ascontiguousarray(array), name))


def weight_name(module: str) -> str:
    name = named(onnx.load(MODEL), f"{module}/MatMul").input[1]
    return str(name)


UP = "encoder/layer.1/intermediate/dense"
VALUE = "encoder/layer.1/attention/self/value"


def zero_point_off(made: Any) -> None:
    name = f"{weight_name(UP)}_zero_point"
    put(made, name, values(made, name) + np.int8(1))


def scales_rolled(made: Any) -> None:
    name = f"{weight_name(UP)}_scale"
    put(made, name, np.roll(values(made, name), 1))


def wrong_axis(made: Any) -> None:
    """Numbers are rounded with the scales of inputs, which then stand for outputs."""
    name = weight_name(VALUE)
    floats = values(onnx.load(MODEL), name)
    steps = np.abs(floats).max(axis=1) / 127
    put(made, f"{name}_quantized", np.clip(np.rint(floats / steps[:, None]), -128, 127).astype(np.int8))
    put(made, f"{name}_scale", steps.astype(np.float32))


def another_checkpoint(made: Any) -> None:
    for module in ("attention/self/query", "attention/self/value", "intermediate/dense", "output/dense"):
        own, other = (weight_name(f"encoder/layer.{n}/{module}") for n in (1, 2))
        for end in ("_quantized", "_scale", "_zero_point"):
            put(made, own + end, values(made, other + end))


@pytest.fixture(scope="module")
def right(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return quantise("dynamic", tmp_path_factory.mktemp("int8") / "net.onnx")


def planted(right: Path, plant: Callable[[Any], None], folder: Path) -> Path:
    made = onnx.load(right)
    plant(made)
    onnx.save(made, folder / "wrong.onnx")
    return captured(folder / "wrong.onnx")


@pytest.mark.entries
@pytest.mark.parametrize(
    ("plant", "module", "words"),
    [
        pytest.param(
            zero_point_off,
            UP,
            "its zero point is 1 off: all numbers are too small",
            id="zero point off by one",
        ),
        pytest.param(scales_rolled, UP, "its scales are those of 1 row behind", id="scales rolled"),
        pytest.param(wrong_axis, VALUE, "its scales are those of the other axis", id="wrong axis"),
        pytest.param(
            another_checkpoint,
            "encoder/layer.1/attention/self/query",
            "not the reference's, rounded to int8",
            id="a layer of another checkpoint",
        ),
    ],
)
def test_a_mistake_of_a_weight_is_named_module_first(
    plant: Callable[[Any], None], module: str, words: str, reference: Path, right: Path, tmp_path: Path
) -> None:
    comparison = compare(reference, planted(right, plant, tmp_path))
    assert comparison.exit_status == 1
    assert comparison.divergence is not None
    site = module.replace("/", ".")
    assert comparison.divergence.module == site
    assert words in texts(comparison, "weight_rounding")[site]


@pytest.mark.entries
@pytest.mark.parametrize(
    ("plant", "module"),
    [
        pytest.param(scales_rolled, UP, id="scales rolled"),
        pytest.param(exchange_gelu, "encoder/layer.1/intermediate/intermediate_act_fn", id="another gelu"),
        pytest.param(drop_mask, "encoder/layer.1/attention/self", id="no attention mask"),
    ],
)
def test_a_mistake_is_localised_in_its_module(
    plant: Callable[[Any], None], module: str, reference: Path, right: Path, tmp_path: Path
) -> None:
    target = planted(right, plant, tmp_path)
    found = localize(reference, target, reference_model=trusted())
    assert found.exit_status == 1
    assert [suspect.module for suspect in found.suspects] == [module.replace("/", ".")]


def test_mistakes_of_weights_are_all_named_in_one_model(reference: Path, right: Path, tmp_path: Path) -> None:
    def plant(made: Any) -> None:
        zero_point_off(made)
        wrong_axis(made)
        rolled, own, other = (
            weight_name(f"encoder/layer.{name}/dense") for name in ("1/output", "2/output", "0/output")
        )
        put(made, f"{rolled}_scale", np.roll(values(made, f"{rolled}_scale"), 1))
        for end in ("_quantized", "_scale", "_zero_point"):
            put(made, own + end, values(made, other + end))

    comparison = compare(reference, planted(right, plant, tmp_path))
    assert comparison.exit_status == 1
    assert comparison.divergence is not None
    assert comparison.divergence.module == VALUE.replace("/", ".")
    named_as = texts(comparison, "weight_rounding")
    wrong = {layer: text for layer, text in named_as.items() if text.startswith("not ")}
    assert wrong.keys() == {
        "encoder.layer.1.attention.self.value",
        "encoder.layer.1.intermediate.dense",
        "encoder.layer.1.output.dense",
        "encoder.layer.2.output.dense",
    }
    assert "its scales are those of the other axis" in wrong["encoder.layer.1.attention.self.value"]
    assert "its zero point is 1 off" in wrong["encoder.layer.1.intermediate.dense"]
    assert "its scales are those of 1 row behind" in wrong["encoder.layer.1.output.dense"]


@pytest.mark.spec("ALN-303")
def test_mistakes_of_operations_are_localised_in_their_modules(
    reference: Path, right: Path, tmp_path: Path
) -> None:
    def plant(made: Any) -> None:
        exchange_gelu(made)
        drop_mask(made)

    found = localize(reference, planted(right, plant, tmp_path), reference_model=trusted())
    assert found.exit_status == 1
    assert {suspect.module for suspect in found.suspects} == {
        "encoder.layer.1.attention.self",
        "encoder.layer.1.intermediate.intermediate_act_fn",
    }


@pytest.mark.entries
def test_a_right_model_has_no_suspect(reference: Path, right: Path, tmp_path: Path) -> None:
    found = localize(reference, planted(right, lambda made: None, tmp_path), reference_model=trusted())
    assert (found.exit_status, found.suspects) == (0, ())
