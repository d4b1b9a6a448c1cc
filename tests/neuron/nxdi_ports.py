"""Six models of Hugging Face with random weights, and NxD Inference's ports of them: `reference_X`, `port_X`.

Needs transformers 4.57 and sources of NxDI, which `--neuron-src` names.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from importlib import import_module
from typing import Any, Final

import torch
import transformers

import tensorcap

LENGTH: Final = 32  # of the graph that a port runs, to which it pads
_SIZES: Final = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 256,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
    "initializer_range": 0.2,
}
_EXPERTS: Final = {"num_experts_per_tok": 2}
_SETTINGS: Final[dict[str, dict[str, Any]]] = {  # of each model beside its sizes
    "Llama": {"rms_norm_eps": 1e-5},
    "Qwen2": {},
    "Qwen3": {},
    "Mistral": {"sliding_window": None},
    "Mixtral": {**_EXPERTS, "num_local_experts": 4, "sliding_window": None},
    "Qwen3Moe": {**_EXPERTS, "num_experts": 4, "moe_intermediate_size": 64, "norm_topk_prob": True},
}
_PACKAGES: Final = {"Qwen3Moe": "qwen3_moe"}


def _inputs(padding: int = 0) -> dict[str, torch.Tensor]:
    """Two prompts of twelve tokens, the second with so many of padding behind it."""
    ids = torch.randint(3, 256, (2, 12), generator=torch.Generator().manual_seed(5))
    mask = torch.ones_like(ids)
    mask[1, 12 - padding :] = 0
    positions = (mask.cumsum(1) - 1).masked_fill(mask == 0, 1)
    return {"input_ids": ids * mask, "attention_mask": mask, "position_ids": positions}


def _model(name: str) -> Any:
    """The reference, with weights in which a norm or a bias that is left out shows."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**_SIZES, **_SETTINGS[name])
    kind: Any = transformers.AutoModelForCausalLM
    model = kind.from_config(config, attn_implementation="eager").float().eval()
    for path, parameter in model.named_parameters():
        if path.endswith("bias"):
            parameter.data.normal_(0, 0.2)
        if path.endswith("norm.weight"):
            parameter.data.uniform_(0.5, 1.5)
    return model


def _reference(name: str, padding: int = 0) -> Callable[[], tensorcap.Workload]:
    return lambda: tensorcap.Workload(_model(name), {**_inputs(padding), "use_cache": False})


def _application(name: str, **changes: Any) -> Any:
    """NxDI's application, of the checkpoint of the reference; changes are of its configuration."""
    package = _PACKAGES.get(name, name.lower())
    models = "neuronx_distributed_inference.models"
    modeling = import_module(f"{models}.{package}.modeling_{package}")
    settings = import_module(f"{models}.config")
    load = import_module("neuronx_distributed_inference.utils.hf_adapter").load_pretrained_config
    has_experts = "num_experts_per_tok" in _SETTINGS[name]
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    neuron = getattr(settings, "MoENeuronConfig" if has_experts else "NeuronConfig")(
        tp_degree=ranks,
        world_size=ranks,
        batch_size=2,
        seq_len=LENGTH,
        max_context_length=LENGTH,
        torch_dtype=torch.float32,
        on_cpu=True,
        logical_nc_config=1,
    )
    with tempfile.TemporaryDirectory() as folder:
        _model(name).save_pretrained(folder)
        config = getattr(modeling, f"{name}InferenceConfig")(neuron, load_config=load(folder), **changes)
        application = getattr(modeling, f"Neuron{name}ForCausalLM")(folder, config)
        application.to_cpu()
    return application


def _port(name: str, padding: int = 0) -> Callable[[], tensorcap.Workload]:
    return lambda: tensorcap.Workload(_application(name), _inputs(padding))


reference_Llama, port_Llama = _reference("Llama"), _port("Llama")  # noqa: N816 # as the models are called
reference_Qwen2, port_Qwen2 = _reference("Qwen2"), _port("Qwen2")  # noqa: N816
reference_Qwen3, port_Qwen3 = _reference("Qwen3"), _port("Qwen3")  # noqa: N816
reference_Mistral, port_Mistral = _reference("Mistral"), _port("Mistral")  # noqa: N816
reference_Mixtral, port_Mixtral = _reference("Mixtral"), _port("Mixtral")  # noqa: N816
reference_Qwen3Moe, port_Qwen3Moe = _reference("Qwen3Moe"), _port("Qwen3Moe")  # noqa: N816
reference_padded, port_padded = _reference("Mixtral", 4), _port("Mixtral", 4)


def wrong_epsilon() -> tensorcap.Workload:
    """A port of Llama of which one norm has another epsilon."""
    workload = port_Llama()
    norm = workload.model.context_encoding_model.model.layers[1].post_attention_layernorm
    norm.variance_epsilon = 1e-2
    return workload


def wrong_heads() -> tensorcap.Workload:
    """A port of Qwen3 in a layer of which keys are normed with the scale of queries."""
    workload = port_Qwen3()
    attention = workload.model.context_encoding_model.model.layers[0].self_attn
    attention.k_layernorm.weight.data.copy_(attention.q_layernorm.weight.data)
    return workload
