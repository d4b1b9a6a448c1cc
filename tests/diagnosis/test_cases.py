"""Cases from public bug reports, through the command; numbered as there."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

import tensorcap
from tensorcap_cli.main import main
from tensorcap_formats.dtypes import Array
from tests.diagnosis.conftest import write_in
from tests.support.floats import to_bfloat16

Run = Callable[..., dict[str, Any]]


@pytest.fixture
def tcap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Diagnose one key of `ref.h5` and `tgt.h5`, written first where tensors are given."""
    monkeypatch.chdir(tmp_path)

    def run(
        key: str,
        reference: Mapping[str, Array] | None = None,
        target: Mapping[str, Array] | None = None,
        *,
        precision: str = "float32",
        config: Mapping[str, Any] | None = None,
        status: int = 0,
    ) -> dict[str, Any]:
        for name, tensors in (("ref.h5", reference), ("tgt.h5", target)):
            if tensors is not None:
                about = {"model": {"config": dict(config or {})}}
                write_in(tmp_path / name, tensors, precision=precision, run=about)
        arguments = ["diagnose", "ref.h5", "tgt.h5", key, "--json"]
        result = CliRunner().invoke(main, arguments, prog_name="tcap", catch_exceptions=False)
        assert result.exit_code == status, result.output
        return dict(json.loads(result.stdout))

    return run


def rms(x: Array) -> Array:
    return np.asarray(x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-6))


def softmax(z: Array) -> Array:
    e = np.exp(z - z.max(-1, keepdims=True))
    return np.asarray(e / e.sum(-1, keepdims=True))


X, W = np.random.default_rng(0).standard_normal((8, 64)), np.random.default_rng(1).standard_normal(64) * 0.3
X[:, 0] += 0.0


@pytest.mark.parametrize("with_input", [True, False])
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_case_40_a_weight_without_its_one_plus(tcap: Run, precision: str, with_input: bool) -> None:
    w = to_bfloat16(W).astype(float)
    x = to_bfloat16(X).astype(float)
    beside = {"0/norm/param.weight": w, **({"0/norm/input.x": x} if with_input else {})}
    ours, theirs = {**beside, "0/norm/output": rms(x) * (1 + w)}, {**beside, "0/norm/output": rms(x) * w}
    found = tcap("0/norm/output", ours, theirs, precision=precision)
    assert found["explanations"][0]["kind"] == "norm-without-one-plus"


def test_case_40_the_order_of_cast_and_weight_is_the_last_bit(tcap: Run) -> None:
    x, w = to_bfloat16(X).astype(float), to_bfloat16(1 + W).astype(float)
    beside = {"0/norm/param.weight": w, "0/norm/input.x": x}
    ours, theirs = (
        {**beside, "0/norm/output": to_bfloat16(rms(x)) * w},
        {**beside, "0/norm/output": rms(x) * w},
    )
    found = tcap("0/norm/output", ours, theirs, precision="bfloat16")
    assert found["explanations"][0]["kind"] == "norm-cast-order"
    assert found["explanations"][0]["after"] < 1e-4


def test_case_40_one_plus_weight_in_low_precision_is_one_channel_off(tcap: Run) -> None:
    w = to_bfloat16(np.where(np.arange(64) == 5, 15.8125, -0.5)).astype(float)  # 1 + 15.8125 is no bfloat16
    x = to_bfloat16(np.random.default_rng(2).standard_normal((256, 64))).astype(float)
    beside = {"0/norm/param.weight": w, "0/norm/input.x": x}
    ours = {**beside, "0/norm/output": rms(x) * (1 + w)}
    theirs = {**beside, "0/norm/output": rms(x) * np.where(np.arange(64) == 5, 16.75, 0.5)}
    for precision in ("float32", "bfloat16"):
        first = tcap("0/norm/output", ours, theirs, precision=precision)["explanations"][0]
        assert first["kind"] == "norm-weight-rounded"
    wide = tcap("0/norm/output", ours, theirs)["explanations"][0]
    assert wide["after"] == 0  # where a factor of 16.75 / 16.8125 of one channel would say less


@pytest.mark.spec("DIA-5")
def test_case_40_another_dtype_is_reported(tcap: Run, tmp_path: Path) -> None:
    y = rms(X)
    write_in(tmp_path / "ref.h5", {"0/norm/output": y}, precision="bfloat16", run={})
    write_in(tmp_path / "tgt.h5", {"0/norm/output": y}, precision="float32", run={})
    found = tcap("0/norm/output")
    assert found["notes"][0] == "The dtypes differ: bfloat16 in the reference, float32 in the target."
    assert found["explanations"][0]["kind"] == "not-rounded"


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_case_42_gelu_by_tanh_where_erf_is_meant(tcap: Run, precision: str) -> None:
    x = np.random.default_rng(0).standard_normal((1, 64, 64))
    x = to_bfloat16(x).astype(float)
    erf = np.vectorize(math.erf)(x / math.sqrt(2))
    ours = {"0/act/input.x": x, "0/act/output": 0.5 * x * (1 + erf)}
    tanh = np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))
    theirs = {"0/act/input.x": x, "0/act/output": 0.5 * x * (1 + tanh)}
    first = tcap("0/act/output", ours, theirs, precision=precision)["explanations"][0]
    assert (first["kind"], first["facts"]) == ("activation", {"reference": "gelu erf", "target": "gelu tanh"})
    assert first["hint"].startswith("GELU by tanh on one side and by erf on the other")


def test_case_44_softmax_before_choice_without_renormalisation(tcap: Run) -> None:
    rng = np.random.default_rng(0)
    z, experts = rng.standard_normal((5, 8)), rng.standard_normal((8, 6))
    chosen = np.argsort(-z, -1)[:, :2]
    p = np.take_along_axis(softmax(z), chosen, -1)
    right = p / p.sum(-1, keepdims=True)
    ours = {"0/mlp.gate/output.0": z, "0/mlp.gate/output.1": right}
    ours["0/mlp/output"] = np.einsum("tk,tkd->td", right, experts[chosen])
    theirs = {**ours, "0/mlp.gate/output.1": p, "0/mlp/output": np.einsum("tk,tkd->td", p, experts[chosen])}
    config = {"num_experts": 8, "num_experts_per_tok": 2}
    weights = tcap("0/mlp.gate/output.1", ours, theirs, config=config)["explanations"][0]
    assert weights["kind"] == "router-order"
    assert weights["facts"]["target"] == "softmax, top-k, not renormalised"
    block = tcap("0/mlp/output", ours, theirs, config=config)["explanations"][0]
    assert block["kind"] == "router-not-renormalised"
    again = tcap(
        "0/mlp.gate/output.1",
        ours,
        {**ours, "0/mlp.gate/output.1": softmax(np.take_along_axis(z, chosen, -1))},
    )
    assert again["status"] == "identical" or again["before"] < 1e-6  # the other order is no mistake


def test_case_44_each_token_has_a_factor_where_scores_are_not_recorded(tcap: Run) -> None:
    rng = np.random.default_rng(0)
    y, s = rng.standard_normal((16, 32)), rng.uniform(0.3, 0.8, (16, 1))
    first = tcap("0/mlp/output", {"0/mlp/output": y}, {"0/mlp/output": y * s})["explanations"][0]
    assert first["kind"] == "token-factor"
    assert first["facts"] == {
        "lowest": pytest.approx(s.min(), rel=1e-5),
        "highest": pytest.approx(s.max(), rel=1e-5),
    }
    assert "not renormalised" in first["hint"]


def test_case_46_a_tie_of_embedding_and_head_is_lost(tcap: Run, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2}
    torch.manual_seed(0)
    models = [
        transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, tie_word_embeddings=tied)).eval()
        for tied in (True, False)
    ]
    weights = {name: value for name, value in models[0].state_dict().items() if name != "lm_head.weight"}
    assert models[1].load_state_dict(weights, strict=False).missing_keys == ["lm_head.weight"]
    for name, model in zip(("ref.h5", "tgt.h5"), models, strict=True):
        with torch.no_grad(), tensorcap.capture(model, tmp_path / name, params=True):
            model(torch.tensor([[3, 7, 11, 13, 17, 19]]))
    assert tcap("0/model.norm/output")["status"] == "identical"
    found = tcap("0/lm_head/output")
    assert found["explanations"][0]["kind"] == "other-weights"
    assert "tie of embedding and head" in found["explanations"][0]["hint"]


@pytest.mark.parametrize("with_parameters", [True, False])
def test_case_46_a_bias_of_the_head_is_dropped(tcap: Run, with_parameters: bool) -> None:
    rng = np.random.default_rng(0)
    logits, bias = rng.standard_normal((1, 6, 64)), rng.standard_normal(64)
    beside = {"0/lm_head/param.bias": bias} if with_parameters else {}
    ours = {**beside, "0/lm_head/output": logits + bias}
    first = tcap("0/lm_head/output", ours, {"0/lm_head/output": logits})["explanations"][0]
    assert first["kind"] == ("bias-dropped" if with_parameters else "channel-offset")
    assert "bias was dropped" in first["hint"]


def test_case_49_another_eps_shows_in_a_row_of_small_values(tcap: Run) -> None:
    base = np.random.default_rng(0).standard_normal(512)
    base = (base - base.mean()) / base.std()
    x = np.stack([base, base * np.sqrt(1e-5)])

    def layer(eps: float) -> Array:
        return np.asarray((x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + eps))

    ours = {"0/norm/input.x": x, "0/norm/output": layer(1e-6)}
    found = tcap("0/norm/output", ours, {**ours, "0/norm/output": layer(1e-5)})
    first = found["explanations"][0]
    assert first["kind"] == "norm-eps"
    assert first["facts"]["reference"]["eps"] == pytest.approx(1e-6, rel=0.05)
    assert first["facts"]["target"]["eps"] == pytest.approx(1e-5, rel=0.05)


def test_case_50_a_begin_token_on_one_side_shifts_all_tokens(tcap: Run, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2}
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes)).eval()
    for name, tokens in (("ref.h5", [1, 5, 6, 7, 8, 9]), ("tgt.h5", [5, 6, 7, 8, 9])):
        with torch.no_grad(), tensorcap.capture(model, tmp_path / name):
            model(torch.tensor([tokens]))
    for key in ("0/@root/input.input_ids", "0/model.embed_tokens/output"):
        first = tcap(key)["explanations"][0]
        assert first["kind"] == "token-shift"
        assert first["facts"] == {"axis": 1, "before": 1, "behind": 0, "longer": "reference"}
        assert "begin token" in first["hint"]
    assert (
        tcap("0/model.layers.1/output", status=1)["status"] == "unexplained"
    )  # attention saw one token more
