"""A target that runs on padded inputs alone is injected in the places of the reference's tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import tensorcap
from tensorcap.port_verification import Runnable
from tensorcap.session import capture_workload
from tensorcap_formats.open import open_archive

LENGTH = 8  # of the rows that the port runs on
IDS = torch.tensor([[3, 1, 4, 1, 5], [9, 2, 6, 5, 3]])


class Mean(nn.Module):
    """A mean of what each token sees, by a mask of truth or one of numbers that are added to scores."""

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        sees = mask if mask.dtype == torch.bool else mask == 0
        weights = sees[:, 0].to(x.dtype)
        return weights @ x / weights.sum(-1, keepdim=True)


class Net(nn.Module):
    """Tokens, and a mean of those up to each, by a mask of numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 6)
        self.mean = Mean()
        self.mix = nn.Linear(6, 6)
        self.head = nn.Linear(6, 10)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        sees = torch.ones(2 * input_ids.shape[1:]).tril().bool() & attention_mask[:, None, None].bool()
        mask = torch.zeros(sees.shape).masked_fill(~sees, torch.finfo(torch.float32).min)
        return self.compute(input_ids, mask)

    def compute(self, input_ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.mix(self.mean(self.embed(input_ids), mask)))
        return logits


class Port(Net):
    """The same of one length alone, as a graph for a device is, with a mask of truth."""

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        if input_ids.shape[1] != LENGTH:
            raise RuntimeError(f"the graph is of {LENGTH} tokens")
        sees = torch.ones(LENGTH, LENGTH).tril().bool()
        return self.compute(input_ids, sees.expand(len(input_ids), 1, LENGTH, LENGTH))


Port.__module__ = "neuronx_distributed_inference.net"  # by which its adapter is found


def weighted(net: Net) -> Net:
    torch.manual_seed(0)
    for parameter in net.parameters():
        parameter.data.normal_()
    net.eval()
    return net


@pytest.fixture
def reference(tmp_path: Path) -> Path:
    inputs = {"input_ids": IDS, "attention_mask": torch.ones_like(IDS)}
    workload = tensorcap.Workload(weighted(Net()), inputs)
    capture_workload(workload, tmp_path / "ref.h5")
    return tmp_path / "ref.h5"


def padded(net: Net) -> tensorcap.Workload:
    ids = nn.functional.pad(IDS, (0, LENGTH - IDS.shape[1]))
    mask = nn.functional.pad(torch.ones_like(IDS), (0, LENGTH - IDS.shape[1]))
    return tensorcap.Workload(net, {"input_ids": ids, "attention_mask": mask})


@pytest.mark.spec("INJ-90")
def test_padding_keeps_the_values_of_the_run_without_injection(reference: Path, tmp_path: Path) -> None:
    port = weighted(Port())
    calls: list[Any] = []
    wrong = port.embed.register_forward_hook(lambda module, args, result: result + 1)
    port.mix.register_forward_hook(lambda module, args, result: calls.append((args[0].clone(), result)))
    capture_workload(padded(port), tmp_path / "tgt.h5")
    natural = calls[-1][0]
    tensorcap.inject(reference, padded(port), tmp_path / "own.h5", target=tmp_path / "tgt.h5")
    wrong.remove()
    given, result = calls[-1]
    with open_archive(reference) as archive:
        np.testing.assert_array_equal(given[:, :5].numpy(), archive.read(archive.get("0/mix/input.input")))
    torch.testing.assert_close(given[:, 5:], natural[:, 5:], rtol=0, atol=0)
    assert result.shape == (2, LENGTH, 6)
    with open_archive(tmp_path / "own.h5") as archive:
        assert archive.info.injected is not None
        masks = [slot for slot in archive.info.injected.slots if slot.slot == "input.mask"]
        assert [slot.status for slot in masks] == ["injected"]
    comparison = tensorcap.compare(reference, tmp_path / "own.h5")
    bad = {pair.key for pair in comparison.pairs if pair.status == "diverged"}
    assert bad == {"0/embed/output", "0/mean/input.x"}  # what the embedding made, and was handed on


@pytest.mark.spec("INJ-90")
def test_a_right_port_of_one_shape_is_verified(reference: Path, tmp_path: Path) -> None:
    runnable = Runnable(lambda _: (padded(weighted(Port())), {}))
    result = tensorcap.verify(reference, runnable, tmp_path / "report")
    assert result.exit_status == 0
