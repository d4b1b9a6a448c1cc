"""One layer that is laid out otherwise than all others: it is the mistake, and sets no layout.

Ports of Llama of transformers with random weights: fused query, key and value, and linear layers with
transposed weights, as GPT-2 has them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from torch import Tensor, nn  # noqa: E402 - after the check that it is there
from torch.nn import functional as F  # noqa: E402, N812 - as everybody calls it
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb  # noqa: E402

import tensorcap  # noqa: E402
from tensorcap.comparison import Comparison  # noqa: E402
from tensorcap_formats.archive import Archive  # noqa: E402
from tensorcap_formats.errors import CorruptArchiveError  # noqa: E402
from tensorcap_formats.records import Record  # noqa: E402
from tests.rewrites.llama import HEAD, IDS, model  # noqa: E402


class Fused(nn.Module):
    """The attention of Llama with one projection, whose rows are parts in an order."""

    def __init__(self, attention: Any, rows: str, code: str = "qkv") -> None:
        super().__init__()
        parts = {"q": attention.q_proj, "k": attention.k_proj, "v": attention.v_proj}
        self.qkv_proj = nn.Linear(1, 1, bias=False)
        self.qkv_proj.weight = nn.Parameter(torch.cat([parts[part].weight for part in rows]).detach().clone())
        self.o_proj, self.code = attention.o_proj, code
        self.sizes = [parts[part].weight.shape[0] for part in code]

    def forward(
        self, hidden_states: Tensor, position_embeddings: Any = None, **_: Any
    ) -> tuple[Tensor, None]:
        parts = dict(zip(self.code, self.qkv_proj(hidden_states).split(self.sizes, -1), strict=True))
        q, k, v = (parts[part].unflatten(-1, (-1, HEAD)).transpose(1, 2) for part in "qkv")
        q, k = apply_rotary_pos_emb(q, k, *position_embeddings)
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(mixed.transpose(1, 2).flatten(2)), None


class Conv1D(nn.Module):
    """A linear layer that holds its weight transposed, or not though it computes so."""

    def __init__(self, linear: nn.Linear, *, is_turned: bool = True) -> None:
        super().__init__()
        weight = linear.weight.detach()
        self.weight = nn.Parameter((weight.T if is_turned else weight).clone())

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x @ self.weight
        return out


def fused(rows: list[str], code: str = "qkv") -> Any:
    port = model()
    for layer, order in zip(port.model.layers, rows, strict=True):
        layer.self_attn = Fused(layer.self_attn, order, code)
    return port


def transposed(*, without: int | None = None) -> Any:
    port = model()
    for i, layer in enumerate(port.model.layers):
        layer.self_attn.o_proj = Conv1D(layer.self_attn.o_proj, is_turned=i != without)
    return port


def captured(tmp_path: Path, port: Any, *, params: bool) -> Comparison:
    for name, run in (("r.h5", model()), ("t.h5", port)):
        with tensorcap.capture(run, tmp_path / name, params=params), torch.no_grad():
            run(input_ids=IDS, use_cache=False)
    return tensorcap.compare(tmp_path / "r.h5", tmp_path / "t.h5")


def red_parameters(comparison: Comparison) -> set[str]:
    return {pair.key for pair in comparison.pairs if "/param." in pair.key and pair.status == "diverged"}


@pytest.mark.spec("ALN-130")
@pytest.mark.parametrize("params", [True, False], ids=["with-weights", "results-alone"])
@pytest.mark.parametrize("layer", [0, 1])
def test_the_layer_with_another_order_of_parts_is_wrong_and_no_other(
    tmp_path: Path, layer: int, params: bool
) -> None:
    rows = ["qkv"] * 3
    rows[layer] = "kqv"
    comparison = captured(tmp_path, fused(rows), params=params)
    assert comparison.divergence is not None
    assert comparison.divergence.module == f"model.layers.{layer}.self_attn.q_proj"
    wrong = {f"0/model.layers.{layer}.self_attn.{part}_proj/param.weight" for part in "qk"}
    assert red_parameters(comparison) == (wrong if params else set())
    pair = next(p for p in comparison.pairs if p.key == f"0/model.layers.{layer}.self_attn.q_proj/output")
    assert pair.origin is not None
    assert pair.origin.steps == ("split 2 64,32,32",)
    told = f"model.layers.{layer}.self_attn.qkv_proj would agree in the order k_proj, q_proj, v_proj"
    assert told in pair.origin.reason


@pytest.mark.spec("ALN-130", "ALN-36")
def test_an_order_that_all_layers_have_is_theirs(tmp_path: Path) -> None:
    comparison = captured(tmp_path, fused(["kqv"] * 3, "kqv"), params=True)
    assert comparison.exit_status == 0
    assert red_parameters(comparison) == set()


@pytest.mark.spec("ALN-43")
@pytest.mark.parametrize("layer", [0, 1, 2])
def test_the_weight_that_is_not_transposed_as_all_others_is_wrong(tmp_path: Path, layer: int) -> None:
    comparison = captured(tmp_path, transposed(without=layer), params=True)
    assert red_parameters(comparison) == {f"0/model.layers.{layer}.self_attn.o_proj/param.weight"}
    assert comparison.divergence is not None
    assert comparison.divergence.module == f"model.layers.{layer}.self_attn.o_proj"


@pytest.mark.spec("ALN-43")
def test_weights_that_all_layers_have_transposed_agree(tmp_path: Path) -> None:
    assert captured(tmp_path, transposed(), params=True).exit_status == 0


@pytest.mark.spec("ALN-43")
def test_a_layer_that_cannot_be_read_leaves_the_layout_of_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = Archive.read

    def read(archive: Archive, record: Record) -> Any:
        if record.key.text == "0/model.layers.1.self_attn.o_proj/param.weight":
            raise CorruptArchiveError(f"{archive.path}: {record.key.text}: ends early")
        return whole(archive, record)

    monkeypatch.setattr(Archive, "read", read)
    comparison = captured(tmp_path, transposed(), params=True)
    steps = {pair.key: pair.origin.steps for pair in comparison.pairs if pair.origin}
    assert steps["0/model.layers.0.self_attn.o_proj/param.weight"] == ("transpose 0 1",)
