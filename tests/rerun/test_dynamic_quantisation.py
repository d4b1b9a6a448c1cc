"""Models quantised by `quantize_dynamic`: right ones accuse nobody, and a mistake beside it is accused."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import BertConfig, BertModel

from tensorcap import preflight
from tensorcap.comparison import compare
from tensorcap.localization import localize
from tensorcap.session import capture_workload
from tensorcap.workload import Workload
from tensorcap_formats.open import open_archive

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]
IDS = torch.randint(0, 99, (2, 12), generator=torch.Generator().manual_seed(1))
Mistake = Callable[[Any], None]


def model() -> BertModel:
    torch.manual_seed(0)
    sizes: Any = {"hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 128}
    bert = BertModel(BertConfig(vocab_size=99, num_hidden_layers=2, **sizes))
    bert.train(False)
    for module in bert.modules():
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.bias, 0, 0.1)
    return bert


def quantised(change: Mistake | None = None) -> nn.Module:
    port = copy.deepcopy(model())
    if change is not None:
        with torch.no_grad():
            change(port)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        quantise: Any = torch.ao.quantization.quantize_dynamic
        result: nn.Module = quantise(port, {nn.Linear}, dtype=torch.qint8)
    return result


def archives(folder: Path, target: nn.Module, **options: Any) -> tuple[Path, Path, Workload]:
    paths = folder / "reference.h5", folder / "target.h5"
    workload = Workload(model(), {"input_ids": IDS})
    capture_workload(workload, paths[0], **options)
    capture_workload(Workload(target, {"input_ids": IDS}), paths[1], **options)
    return *paths, workload


@pytest.mark.spec("CAP-190", "POL-180", "POL-181")
@pytest.mark.parametrize("params", [None, True])
def test_a_model_that_is_quantised_rightly_accuses_nobody(tmp_path: Path, params: bool | None) -> None:
    reference, target, workload = archives(tmp_path, quantised(), params=params)
    result = compare(reference, target)
    assert (result.exit_status, set(result.counts)) == (0, {"identical", "within-rounding"})
    assert localize(reference, target).suspects == ()
    assert localize(reference, target, reference_model=workload).suspects == ()
    texts = [item.target for item in preflight(reference, target).items if item.kind == "modules"]
    assert any("qint8 weights, inputs rounded to 7 bits at each call" in str(text) for text in texts)


@pytest.mark.spec("CAP-190")
def test_packed_weights_are_recorded_as_what_the_module_multiplies_with(tmp_path: Path) -> None:
    port = quantised()
    _, path, _ = archives(tmp_path, port, params=True)
    query: Any = port.get_submodule("encoder.layer.1.attention.self.query")
    with open_archive(path) as archive:
        record = archive.get("0/encoder.layer.1.attention.self.query/param.weight")
        assert torch.equal(torch.from_numpy(archive.load(record)), query.weight().dequantize())
        module = archive.info.modules[record.key.site]
    assert (module.parameters["weight"].dtype, module.parameters["bias"].dtype) == ("qint8", "float32")
    assert (module.settings["one_scale"], module.settings["input_bits"]) == (True, 7)


def wrong_scale(port: Any) -> None:
    port.encoder.layer[1].attention.self.query.weight.mul_(1.1)


def other_layer(port: Any) -> None:
    port.encoder.layer[1].output.dense.weight.copy_(port.encoder.layer[0].output.dense.weight)


def no_bias(port: Any) -> None:
    port.encoder.layer[1].attention.output.dense.bias = None


@pytest.mark.spec("POL-180")
@pytest.mark.parametrize(
    ("mistake", "guilty"),
    [
        pytest.param(wrong_scale, "attention.self.query", id="a wrong scale"),
        pytest.param(other_layer, "output.dense", id="the weight of another layer"),
        pytest.param(no_bias, "attention.output.dense", id="no bias"),
    ],
)
def test_a_mistake_beside_quantisation_is_accused_alone(
    tmp_path: Path, mistake: Mistake, guilty: str
) -> None:
    reference, target, workload = archives(tmp_path, quantised(mistake))
    assert compare(reference, target).exit_status == 1
    suspects = localize(reference, target, reference_model=workload).suspects
    assert [suspect.module for suspect in suspects] == [f"encoder.layer.1.{guilty}"]
