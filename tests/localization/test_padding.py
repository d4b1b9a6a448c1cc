"""What a mask leaves out may be NaN: a port that never looks at its padding, and leaves NaN in it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from tensorcap.comparison import compare
from tensorcap.localization import localize
from tensorcap.session import capture_workload
from tensorcap.workload import Workload

PADDED = 3  # tokens at the start of the second sequence


def model() -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=96,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
    )
    made: Any = LlamaForCausalLM(config)
    return made.eval()


def inputs() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    mask = torch.ones(2, 12, dtype=torch.int64)
    mask[1, :PADDED] = 0
    return {"input_ids": torch.randint(0, 96, (2, 12), generator=generator), "attention_mask": mask}


def with_nan_in_padding(port: Any) -> Any:
    """Leave NaN in the padding behind every attention, and look at none of it."""

    def look_away(_: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        return args, {**kwargs, "hidden_states": kwargs["hidden_states"].nan_to_num()}

    def spoil(_: Any, __: Any, result: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        hidden = result[0].clone()
        hidden[1, :PADDED] = torch.nan
        return hidden, *result[1:]

    for layer in port.model.layers:
        layer.self_attn.register_forward_pre_hook(look_away, with_kwargs=True)
        layer.self_attn.register_forward_hook(spoil)
    return port


@pytest.fixture(params=["float32", "bfloat16"])
def port(request: Any) -> Any:
    return with_nan_in_padding(model()).to(getattr(torch, request.param))


def captured(folder: Path, port: Any) -> tuple[Path, Path]:
    paths = folder / "ref.h5", folder / "tgt.h5"
    capture_workload(Workload(model(), inputs()), paths[0])
    capture_workload(Workload(port, inputs()), paths[1])
    return paths


@pytest.mark.slow
@pytest.mark.spec("POL-160", "RPL-90")
@pytest.mark.parametrize("way", ["archives", "replay", "injection"])
def test_nan_in_padding_accuses_nobody(tmp_path: Path, port: Any, way: str) -> None:
    paths = captured(tmp_path, port)
    with torch.no_grad():
        result = port(**inputs()).logits
    assert result[1, :PADDED].isnan().all()
    assert result[1, PADDED:].isfinite().all()
    assert compare(*paths).exit_status == 0
    models: dict[str, Any] = {
        "archives": {},
        "replay": {"reference_model": Workload(model(), inputs())},
        "injection": {"target_model": Workload(port, inputs())},
    }
    found = localize(*paths, **models[way])
    assert (found.suspects, found.exit_status, found.nonfinite) == ((), 0, None)


@pytest.mark.slow
@pytest.mark.spec("POL-160", "RPL-90")
@pytest.mark.parametrize("way", ["archives", "replay", "injection"])
def test_nan_in_padding_of_the_reference_accuses_nobody(tmp_path: Path, way: str) -> None:
    reference, port = Workload(with_nan_in_padding(model()), inputs()), Workload(model(), inputs())
    paths = tmp_path / "ref.h5", tmp_path / "tgt.h5"
    capture_workload(reference, paths[0])
    capture_workload(port, paths[1])
    assert compare(*paths).exit_status == 0
    models: dict[str, Any] = {
        "archives": {},
        "replay": {"reference_model": reference},
        "injection": {"target_model": port},
    }
    found = localize(*paths, **models[way])
    assert (found.suspects, found.exit_status) == ((), 0)


@pytest.mark.slow
@pytest.mark.spec("DIA-135", "RPL-90")
def test_a_mistake_beside_nan_in_padding_is_found(tmp_path: Path, port: Any) -> None:
    port.model.layers[1].mlp.act_fn = torch.nn.GELU()
    paths = captured(tmp_path, port)
    assert compare(*paths).exit_status == 1
    found = localize(*paths, reference_model=Workload(model(), inputs()))
    assert [suspect.module for suspect in found.suspects] == ["model.layers.1.mlp.act_fn"]
    assert found.suspects[0].diagnosis is not None
    assert found.suspects[0].diagnosis.kind == "activation"


@pytest.mark.slow
@pytest.mark.spec("POL-160")
def test_nan_that_reaches_a_token_is_found(tmp_path: Path, port: Any) -> None:
    def spoil(_: Any, __: Any, result: Tensor) -> Tensor:
        result = result.clone()
        result[1, PADDED] = torch.nan
        return result

    port.model.layers[0].mlp.register_forward_hook(spoil)
    paths = captured(tmp_path, port)
    found = localize(*paths, reference_model=Workload(model(), inputs()))
    assert found.exit_status == 1
    assert found.nonfinite is not None
    assert found.suspects[0].module == "model.layers.0.mlp"


@pytest.mark.slow
@pytest.mark.spec("RPL-90")
def test_nan_that_a_mask_makes_of_padding_and_tokens_accuses_no_module(tmp_path: Path) -> None:
    seen = torch.ones(12, 12).tril().bool() & inputs()["attention_mask"].bool()[:, None]
    mask = torch.where(seen[:, None], 0.0, torch.finfo(torch.float32).min)
    ids = inputs()["input_ids"]

    def workload(dtype: torch.dtype) -> Workload:
        net = model()
        net.set_attn_implementation("eager")
        for module in (net.model.embed_tokens, net.model.norm, net.lm_head, *net.model.layers):
            module.to(dtype)
        return Workload(net, {"input_ids": ids, "attention_mask": mask.to(dtype), "use_cache": False})

    paths = tmp_path / "ref.h5", tmp_path / "tgt.h5"
    capture_workload(workload(torch.float32), paths[0])
    capture_workload(workload(torch.float16), paths[1])  # in which float32's lowest number is -inf
    found = localize(*paths, reference_model=workload(torch.float32))
    assert (found.suspects, found.exit_status) == ((), 1)
    assert found.nonfinite is not None
    assert found.nonfinite.key == "0/@root/input.attention_mask"
