"""Watching functions of transformers: the same keys in two precisions, right values, nothing left behind."""

from __future__ import annotations

import hashlib
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import numpy as np
import pytest
import torch

import tensorcap

GEMMA = "transformers.models.gemma3.modeling_gemma3"
LLAMA = "transformers.models.llama.modeling_llama"
MIXTRAL = "transformers.models.mixtral.modeling_mixtral"
SIZES: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "vocab_size": 40,
    "pad_token_id": 0,
    "head_dim": 4,
    "attn_implementation": "eager",
}


def slots(path: Path, site: str) -> list[str]:
    return [r.key.slot for r in tensorcap.open_archive(path).records if r.key.site == site]


def linear(x: torch.Tensor, weight: torch.Tensor) -> np.ndarray[Any, Any]:
    product: np.ndarray[Any, Any] = x.double().numpy() @ weight.detach().double().numpy().T
    return product


def softmax(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    e = np.exp(x - x.max(-1, keepdims=True))
    result: np.ndarray[Any, Any] = e / e.sum(-1, keepdims=True)
    return result


def build(kind: str, **further: Any) -> Any:
    import transformers

    namespace: Any = transformers
    config = getattr(namespace, f"{kind}TextConfig" if kind == "Gemma3" else f"{kind}Config")
    return getattr(namespace, f"{kind}ForCausalLM")(config(**SIZES, **further)).eval()


def gemma() -> Any:
    return build("Gemma3", sliding_window=4)


def llama() -> Any:
    return build("Llama")


def mixtral() -> Any:
    return build("Mixtral", num_local_experts=4)


def fingerprint(*names: str) -> dict[str, str]:
    """The bytes of the source files and of what Python compiled them to."""
    found = {}
    for name in names:
        file = Path(inspect.getfile(sys.modules[name]))
        for path in (file, *file.parent.glob(f"__pycache__/{file.stem}.*")):
            found[path.name] = hashlib.sha256(path.read_bytes()).hexdigest()
    return found


def functions(*names: str) -> dict[str, Any]:
    """The code of every function and method of the modules."""
    found = {}
    for name in names:
        for owner in (sys.modules[name], *vars(sys.modules[name]).values()):
            for key, value in vars(owner).items() if isinstance(owner, (type, ModuleType)) else ():
                if isinstance(value, FunctionType):
                    found[f"{owner.__name__}.{key}"] = value.__code__
    return found


TRANSFORMERS = [
    pytest.param(
        gemma,
        f"{GEMMA}:Gemma3MLP.forward:down_proj",
        "model.layers.1.mlp:Gemma3MLP.forward",
        ["down_proj", "return"],
        id="Gemma3MLP",
    ),
    pytest.param(
        gemma,
        f"{GEMMA}:Gemma3RMSNorm.forward:output",
        "model.layers.0.self_attn.q_norm:Gemma3RMSNorm.forward",
        ["output", "output:2", "return"],
        id="Gemma3RMSNorm",
    ),
    pytest.param(
        llama,
        f"{LLAMA}:LlamaAttention.forward:query_states,attn_output",
        "model.layers.0.self_attn:LlamaAttention.forward",
        [
            "query_states",
            "query_states:2",
            *(f"attn_output{n}" for n in ("", ":2", ":3")),
            "return.0",
            "return.1",
        ],
        id="LlamaAttention",
    ),
    pytest.param(
        mixtral,
        f"{MIXTRAL}:MixtralTopKRouter.forward:router_probs,router_top_value,router_indices",
        "model.layers.1.mlp.gate:MixtralTopKRouter.forward",
        [
            *("router_probs", "router_top_value", "router_indices", "router_top_value:2"),
            *("return.0", "return.1", "return.2"),
        ],
        id="MixtralTopKRouter",
    ),
    pytest.param(
        llama,
        f"{LLAMA}:eager_attention_forward:attn_weights",
        "model.layers.1.self_attn:eager_attention_forward",
        ["attn_weights", "attn_weights:2", "attn_weights:3", "attn_weights:4", "return.0", "return.1"],
        id="eager_attention_forward",
    ),
]


@pytest.mark.spec("CAP-30", "CAP-34")
@pytest.mark.parametrize(("make", "watch", "site", "expected"), TRANSFORMERS)
def test_transformers_are_watched_in_two_precisions_and_left_as_they_were(
    tmp_path: Path, make: Callable[[], Any], watch: str, site: str, expected: list[str]
) -> None:
    ids = torch.tensor([[5, 6, 7, 8, 9, 10]])
    model = make()
    name = watch.partition(":")[0]
    before, code_before = fingerprint(name), functions(name)
    keys = []
    for dtype in (torch.float32, torch.bfloat16):
        path = tmp_path / f"{dtype}.h5"
        model.to(dtype)
        with torch.no_grad():
            plain = model(ids).logits
            with tensorcap.capture(model, path, watch=watch):
                assert torch.equal(model(ids).logits, plain)
        assert slots(path, site) == expected
        keys.append([record.key for record in tensorcap.open_archive(path).records])
    assert keys[0] == keys[1]
    assert fingerprint(name) == before
    code_after = functions(name)
    assert code_after.keys() == code_before.keys()
    assert all(code_after[key] is code for key, code in code_before.items())


def test_watched_variables_of_transformers_equal_a_computation_of_our_own(path: Path) -> None:
    ids = torch.tensor([[5, 6, 7, 8, 9, 10]])
    for make, watch, inside, inputs in (
        (gemma, f"{GEMMA}:Gemma3MLP.forward:down_proj", "mlp:Gemma3MLP.forward", "mlp/input.x"),
        (
            gemma,
            f"{GEMMA}:Gemma3RMSNorm.forward:output",
            "self_attn.q_norm:Gemma3RMSNorm.forward",
            "self_attn.q_norm/input.x",
        ),
        (
            mixtral,
            f"{MIXTRAL}:MixtralTopKRouter.forward:*",
            "mlp.gate:MixtralTopKRouter.forward",
            "mlp.gate/input.hidden_states",
        ),
    ):
        model = make()
        with torch.no_grad(), tensorcap.capture(model, path, watch=watch):
            model(ids)
        archive = tensorcap.open_archive(path)

        def get(key: str, archive: Any = archive) -> np.ndarray[Any, Any]:
            array: np.ndarray[Any, Any] = archive.read(archive.get(f"0/model.layers.1.{key}"))
            return array.astype("f8")

        layer: Any = model.get_submodule("model.layers.1")
        x = torch.from_numpy(get(inputs))
        if "MLP" in watch:
            gate = torch.from_numpy(linear(x, layer.mlp.gate_proj.weight))
            cube = gate + 0.044715 * gate**3
            gelu = gate / 2 * (1 + torch.tanh((2 / torch.pi) ** 0.5 * cube))
            up = torch.from_numpy(linear(x, layer.mlp.up_proj.weight))
            expected = {"down_proj": linear(gelu * up, layer.mlp.down_proj.weight)}
        elif "Norm" in watch:
            norm = (x / (x**2).mean(-1, keepdim=True).add(1e-6).sqrt()).numpy()
            weight = layer.self_attn.q_norm.weight.detach().double().numpy()
            expected = {"output": norm, "output:2": norm * (1 + weight)}
        else:
            x = x.reshape(-1, 16)
            probabilities = softmax(linear(x, layer.mlp.gate.weight))
            best = np.sort(probabilities)[:, :-3:-1]
            expected = {
                "router_probs": probabilities,
                "router_top_value": best,
                "router_indices": np.argsort(probabilities)[:, :-3:-1],
                "router_top_value:2": best / best.sum(-1, keepdims=True),
            }
        for slot, value in expected.items():
            np.testing.assert_allclose(get(f"{inside}/{slot}"), value, rtol=1e-5, atol=1e-7, err_msg=slot)


def test_scores_and_probabilities_of_attention_equal_a_float64_computation(path: Path) -> None:
    model = llama()
    ids = torch.tensor([[5, 6, 7, 8, 9, 10]])
    watch = f"{LLAMA}:eager_attention_forward:query,key,value,attn_weights"
    with torch.no_grad(), tensorcap.capture(model, path, watch=watch):
        model(ids)
    archive = tensorcap.open_archive(path)
    for layer in range(2):
        site = f"0/model.layers.{layer}.self_attn:eager_attention_forward"
        found = {
            slot: archive.read(archive.get(f"{site}/{slot}")).astype("f8")
            for slot in ("query", "key", "value", "attn_weights", "attn_weights:3", "return.0")
        }
        key, value = (np.repeat(found[name], 2, axis=1) for name in ("key", "value"))
        scores = found["query"] @ key.swapaxes(2, 3) / 2  # the head size is 4
        probabilities = softmax(np.where(np.tri(6, dtype=bool), scores, -np.inf))
        assert np.abs(scores).max() > 1e-4
        assert np.abs(found["attn_weights"] - scores).max() < 1e-6
        assert np.abs(found["attn_weights:3"] - probabilities).max() < 1e-6
        assert np.abs(found["return.0"] - (probabilities @ value).swapaxes(1, 2)).max() < 1e-6
