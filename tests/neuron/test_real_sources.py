"""NxDI's own modeling files, if `NEURON_SRC` names the folder of its sources; nothing of it is imported.

The classes are those that a reading of the sources of July 2026 gives, one file after the other.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tensorcap.source_analysis import divergence

SRC = os.environ.get("NEURON_SRC", "")
PAIRS = {
    ("deepseek/modeling_deepseek.py", "cpu", "DeepseekV3RMSNorm", "CustomRMSNorm"),
    ("gemma3/modeling_gemma3.py", "cpu", "Gemma3RMSNorm", "NeuronGemma3RMSNorm"),
    ("gpt_oss/modeling_gpt_oss.py", "cpu", "GptOssRMSNormV2Padded", "CustomRMSNormV2Padded"),
    ("llama/modeling_llama.py", "cpu", "LlamaRMSNormPadded", "LlamaCustomRMSNormPadded"),
    ("llama/modeling_llama.py", "cpu", "LlamaRMSNorm", "CustomRMSNorm"),
    ("llama4/modeling_llama4_text.py", "cpu", "LlamaRMSNormV2", "CustomRMSNorm"),
    ("mistral/modeling_mistral.py", "cpu", "MistralRMSNorm", "CustomRMSNorm"),
    ("mixtral/modeling_mixtral.py", "cpu", "MixtralRMSNorm", "CustomRMSNorm"),
    ("mllama/modeling_mllama.py", "tp-size", "LlamaRMSNorm", "CustomRMSNorm"),
    ("pixtral/modeling_pixtral_vision.py", "cpu", "LlamaRMSNorm", "CustomRMSNorm"),
    ("qwen2/modeling_qwen2.py", "cpu", "LlamaRMSNorm", "CustomRMSNorm"),
    ("qwen2_vl/modeling_qwen2_vl_text.py", "cpu", "LlamaRMSNorm", "CustomRMSNorm"),
    ("qwen3/modeling_qwen3.py", "cpu", "Qwen3RMSNorm", "CustomRMSNorm"),
    ("qwen3_moe/modeling_qwen3_moe.py", "cpu", "Qwen3MoeRMSNorm", "CustomRMSNorm"),
    ("qwen3_vl/modeling_qwen3_vl_text.py", "cpu", "LlamaRMSNorm", "CustomRMSNorm"),
}


@pytest.mark.skipif(not SRC, reason="needs NEURON_SRC, the folder of NxDI's sources")
@pytest.mark.spec("NRN-50")
def test_every_pair_of_classes_is_found_and_none_is_invented() -> None:
    files = sorted(Path(SRC).glob("**/models/**/modeling*.py"))
    assert files, f"{SRC}: holds no models"
    pairs = {
        ("/".join(Path(each.file).parts[-2:]), each.switch, each.here, each.there)
        for each in divergence(files).classes
        if "contrib" not in Path(each.file).parts
    }
    assert pairs == PAIRS
