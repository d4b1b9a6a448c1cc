"""Tokens whose experts flip at a near tie of a router whose top-k is code of its block, in bfloat16.

Qwen3-MoE of transformers, and blocks written here that compute the same, with a linear layer for the scores
or without one.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from torch import Tensor, nn  # noqa: E402 - after the check that it is there
from torch.nn import functional as F  # noqa: E402, N812 - as everybody calls it
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM  # noqa: E402

import tensorcap  # noqa: E402
from tensorcap import Workload, compare, verify  # noqa: E402
from tensorcap.session import capture_workload  # noqa: E402

SIZE, EXPERTS, CHOSEN, LAYERS = 64, 8, 2, 4
IDS = torch.randint(0, 200, (4, 64), generator=torch.Generator().manual_seed(1))


def module_router(*, head_dim: int = 16, chosen: int = CHOSEN) -> Any:
    torch.manual_seed(0)
    make: Any = Qwen3MoeConfig
    config = make(
        vocab_size=200,
        hidden_size=SIZE,
        intermediate_size=96,
        moe_intermediate_size=48,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=head_dim,
        num_experts=EXPERTS,
        num_experts_per_tok=chosen,
        norm_topk_prob=True,
        initializer_range=0.1,
        attn_implementation="eager",
        bos_token_id=1,
        eos_token_id=2,
    )
    model: Any = Qwen3MoeForCausalLM(config)
    return model.eval()


class Mixture(nn.Module):
    """The block, with its top-k in its own code, and the scores of a linear layer or of a bare product."""

    def __init__(self, block: Any, *, has_layer: bool, is_wrong: bool) -> None:
        super().__init__()
        self.top_k, self.num_experts = CHOSEN, EXPERTS
        weight = nn.Parameter(block.gate.weight.detach().clone())
        self.gate = nn.Linear(SIZE, EXPERTS, bias=False) if has_layer else None
        if self.gate is not None:
            self.gate.weight = weight
        else:
            self.router = weight
        self.up, self.down = block.experts.gate_up_proj, block.experts.down_proj
        self.activation = F.gelu if is_wrong else F.silu

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.reshape(-1, SIZE)
        scores = F.linear(tokens, self.router) if self.gate is None else self.gate(tokens)
        weights, chosen = scores.softmax(-1, dtype=torch.float32).topk(CHOSEN, -1)
        weights = (weights / weights.sum(-1, keepdim=True)).to(x.dtype)
        out = torch.zeros_like(tokens)
        for expert in range(EXPERTS):
            rows, at = (chosen == expert).nonzero(as_tuple=True)
            gate, up = F.linear(tokens[rows], self.up[expert]).chunk(2, -1)
            made = F.linear(self.activation(gate) * up, self.down[expert])
            out.index_add_(0, rows, made * weights[rows, at, None])
        result: Tensor = out.reshape(x.shape)
        return result


def inline_router(*, has_layer: bool = True, wrong: int | None = None) -> Any:
    port = module_router()
    for i, layer in enumerate(port.model.layers):
        layer.mlp = Mixture(layer.mlp, has_layer=has_layer, is_wrong=i == wrong)
    return port.eval()


def run(port: Any) -> Workload:
    return Workload(port, {"input_ids": IDS, "use_cache": False})


@pytest.mark.slow
@pytest.mark.spec("POL-130")
@pytest.mark.parametrize(
    ("reference", "has_layer"),
    [
        pytest.param(inline_router, True, id="layers-on-both-sides"),
        pytest.param(module_router, True, id="router-and-layer"),
        pytest.param(module_router, False, id="router-and-product"),
    ],
)
def test_tokens_at_near_ties_accuse_nobody(tmp_path: Path, reference: Any, has_layer: bool) -> None:
    port = inline_router(has_layer=has_layer).to(torch.bfloat16)
    report = verify(run(reference()), run(port), tmp_path / "report")
    assert [suspect.module for suspect in report.suspects] == []
    assert report.injected is not None
    assert report.injected.exit_status == 0
    assert not any(pair.status == "diverged" for pair in report.free.pairs)


@pytest.mark.sampled
@pytest.mark.spec("POL-130")
@pytest.mark.parametrize("has_layer", [True, False])
def test_a_wrong_activation_of_experts_is_found_beside_them(tmp_path: Path, has_layer: bool) -> None:
    port = inline_router(has_layer=has_layer, wrong=1).to(torch.bfloat16)
    report = verify(run(module_router()), run(port), tmp_path / "report")
    assert [suspect.module for suspect in report.suspects] == ["model.layers.1.mlp.experts.act_fn"]


@pytest.mark.spec("POL-130")
def test_other_choices_that_are_no_near_ties_differ(tmp_path: Path) -> None:
    port = inline_router()
    port.model.layers[0].mlp.gate.weight.data = port.model.layers[0].mlp.gate.weight.data.flip(0)
    for name, model in (("r.h5", inline_router()), ("t.h5", port)):
        with tensorcap.capture(model, tmp_path / name), torch.no_grad():
            model(input_ids=IDS, use_cache=False)
    comparison = tensorcap.compare(tmp_path / "r.h5", tmp_path / "t.h5")
    assert comparison.divergence is not None
    assert comparison.divergence.module == "model.layers.0.mlp.gate"
    assert comparison.exit_status == 1


@pytest.mark.slow
@pytest.mark.spec("POL-130")
def test_a_result_with_as_many_elements_as_experts_is_no_router(tmp_path: Path) -> None:
    """The rotary table has as many channels as there are experts, each twice: its third and fourth tie."""
    paths = tmp_path / "ref.h5", tmp_path / "tgt.h5"
    for path, is_wrong in zip(paths, (False, True), strict=True):
        model = module_router(head_dim=EXPERTS, chosen=3)
        model.model.layers[1].mlp.gate.norm_topk_prob = not is_wrong
        with torch.no_grad():
            capture_workload(run(model), path)
    divergence = compare(*paths).divergence
    assert divergence is not None
    assert divergence.module == "model.layers.1.mlp.gate"
