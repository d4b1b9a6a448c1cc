"""A hook with NxDI's signature writes what a look-alike of its application hands out."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tensorcap.adapters.neuron import tensor_capture_hook
from tensorcap_formats.archive import Archive
from tensorcap_formats.errors import CaptureError, UsageError
from tensorcap_formats.open import open_archive

SETTINGS = {"tp_degree": 8, "on_cpu": False, "quantize_clamp_bound": float("inf"), "buckets": [1, 2]}
ZEROS = torch.zeros(1, dtype=torch.bfloat16)
PADDING = torch.full((1,), float("nan"), dtype=torch.bfloat16)


class DemoForCausalLM:
    """Calls the hook as NxDI's applications do: with itself and the tensors behind tokens and logits."""

    def __init__(self, **capture: Any) -> None:
        settings: dict[str, Any] = {"modules_to_capture": [], "capture_inputs": False}
        config = SimpleNamespace(**settings | {"max_intermediate_tensors": None} | capture)
        self.config = SimpleNamespace()
        self.neuron_config = SimpleNamespace(tensor_capture_config=config, **SETTINGS)

    def run(self, hook: Callable[..., None], *tensors: torch.Tensor) -> None:
        hook(self, list(tensors))


def keys(archive: Archive) -> list[str]:
    return sorted(record.key.text for record in archive.records)


@pytest.mark.spec("NRN-80")
def test_names_come_from_the_order_of_the_configuration(tmp_path: Path) -> None:
    application = DemoForCausalLM(
        modules_to_capture=["layers.0.mlp", "norm"], capture_inputs=True, max_intermediate_tensors=3
    )
    mlp, argument, norm = torch.arange(6.0).reshape(1, 3, 2), torch.ones(1, 3, 2), torch.full((1, 3, 2), 2.0)
    scores = torch.tensor([3], dtype=torch.int32)
    with tensor_capture_hook(tmp_path / "tgt.h5", manual_names=["scores"]) as hook:
        application.run(hook, mlp, argument, norm, ZEROS, scores, ZEROS, PADDING)
        application.run(
            hook, mlp[:, :1].bfloat16(), argument[:, :1], norm[:, :1], ZEROS, scores, ZEROS, PADDING
        )
    with open_archive(tmp_path / "tgt.h5") as archive:
        assert keys(archive) == [
            f"{step}/{rest}"
            for step in (0, 1)
            for rest in (
                "layers.0.mlp/input.0",
                "layers.0.mlp/output",
                "norm/output",
                "probe:manual_tensor_1/value",
                "probe:scores/value",
            )
        ]
        assert archive.read(archive.get("0/layers.0.mlp/output")).tolist() == mlp.tolist()
        assert archive.get("1/layers.0.mlp/output").dtype.name == "bfloat16"
        assert archive.info.phases == ("prefill", "decode")
        assert archive.info.framework == "neuron"
        assert archive.info.model_class.endswith("DemoForCausalLM")
        assert archive.info.settings == {"on_cpu": False, "quantize_clamp_bound": "inf", "tp_degree": 8}
        assert not archive.is_ordered
        lost = [point for point in archive.info.points if point.status == "not-capturable"]
        assert [(point.site, point.slots) for point in lost] == [("norm", ("input.0",))]


@pytest.mark.spec("NRN-80")
def test_a_second_prompt_is_prefill_and_other_runs_can_be_left_out(tmp_path: Path) -> None:
    application = DemoForCausalLM(modules_to_capture=["norm"])
    with tensor_capture_hook(tmp_path / "tgt.h5", capture_indices=[2, 3]) as hook:
        for tokens in (4, 1, 6, 1):
            application.run(hook, torch.ones(1, tokens, 2))
    with open_archive(tmp_path / "tgt.h5") as archive:
        assert keys(archive) == ["1/norm/output", "2/norm/output"]
        assert archive.info.phases == ("prefill", "decode", "prefill", "decode")


@pytest.mark.spec("NRN-80")
def test_a_model_of_images_and_text_has_its_configuration_in_the_text(tmp_path: Path) -> None:
    application = DemoForCausalLM(modules_to_capture=["norm"])
    outer = SimpleNamespace(
        text_config=SimpleNamespace(neuron_config=application.neuron_config),
        neuron_config=SimpleNamespace(tensor_capture_config=None),
    )
    with tensor_capture_hook(tmp_path / "tgt.h5") as hook:
        hook(outer, [torch.ones(1, 2, 2)])
    assert keys(open_archive(tmp_path / "tgt.h5")) == ["0/norm/output"]


@pytest.mark.spec("NRN-80")
def test_inputs_are_those_of_the_run_that_follows_as_the_graph_had_them(tmp_path: Path) -> None:
    application = DemoForCausalLM(modules_to_capture=["norm"])
    application.config = SimpleNamespace(pad_token_id=9)
    ids, mask, positions = torch.tensor([[5, 6, 7]]), torch.ones(1, 3).long(), torch.arange(3)[None]
    with tensor_capture_hook(tmp_path / "tgt.h5", capture_indices=[1, 2]) as hook:
        for tokens, bucket in ((ids, 4), (ids[:, :1], 1), (ids[:, 1:2], 1)):
            hook.record_inputs(application, [tokens, mask, positions, None, torch.empty(0)])
            application.run(hook, torch.ones(1, bucket, 2))
    with open_archive(tmp_path / "tgt.h5") as archive:
        assert keys(archive) == [
            f"{step}/{rest}"
            for step in (0, 1)
            for rest in (
                "@root/input.attention_mask",
                "@root/input.input_ids",
                "@root/input.position_ids",
                "norm/output",
            )
        ]
        values = {r.key.text: archive.read(r).tolist() for r in archive.records}
        assert values["0/@root/input.input_ids"] == [[5, 6, 7, 9]]
        assert values["0/@root/input.attention_mask"] == [[1, 1, 1, 0]]
        assert values["0/@root/input.position_ids"] == [[0, 1, 2, 1]]
        assert values["1/@root/input.input_ids"] == [[5]]


@pytest.mark.spec("NRN-80")
def test_tensors_without_certain_names_are_refused(tmp_path: Path) -> None:
    hook = tensor_capture_hook(tmp_path / "tgt.h5")
    with pytest.raises(CaptureError, match="handed out 2 tensors, expected 1"):
        DemoForCausalLM(modules_to_capture=["norm"]).run(hook, ZEROS, ZEROS)
    with pytest.raises(UsageError, match="has no tensor_capture_config"):
        hook(SimpleNamespace(neuron_config=SimpleNamespace()), [])
    with pytest.raises(CaptureError, match="handed out no tensor in 0 runs"):
        hook.close()


@pytest.mark.spec("NRN-80")
def test_an_error_within_leaves_an_incomplete_archive(tmp_path: Path) -> None:
    application = DemoForCausalLM(modules_to_capture=["norm"])

    def fail() -> None:
        with tensor_capture_hook(tmp_path / "tgt.h5") as hook:
            application.run(hook, torch.ones(1, 2, 2))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert not open_archive(tmp_path / "tgt.h5").is_complete


@pytest.mark.spec("NRN-80")
def test_the_hook_imports_nothing_of_neuron() -> None:
    code = (
        "import sys, tensorcap.adapters.neuron\n"
        "roots = {name.partition('.')[0] for name in sys.modules}\n"
        "print(sorted(root for root in roots if 'neuron' in root or root in ('torch_xla', 'nki', 'h5py')))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
