"""A target that is fed its prompt in chunks: its own errors by replay and by injection, as in whole steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tensorcap.localization import localize
from tensorcap.session import capture_workload
from tensorcap.workload import Workload

IDS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6], [5, 3, 5, 8, 9, 7, 9, 3]])


class Mixer(nn.Module):
    """Each token gets the sum of those before it; the state is kept from call to call."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.state, self.factor = torch.zeros(2, 1, 6), factor

    def forward(self, x: Any) -> Any:
        sums = self.state + torch.cumsum(x, 1)
        self.state = sums[:, -1:]
        return sums * self.factor


class Model(nn.Module):
    def __init__(self, factor: float = 1.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.first = nn.Embedding(10, 6), nn.Linear(6, 6)
        self.mixer, self.head = Mixer(factor), nn.Linear(6, 10)

    def forward(self, input_ids: Any) -> Any:
        return self.head(self.mixer(torch.tanh(self.first(self.embed(input_ids)))))


def fed(chunks: tuple[int, ...], factor: float = 1.0) -> Workload:
    def run(model: Any, input_ids: Any) -> Any:
        model.mixer.state = torch.zeros(2, 1, 6)
        return torch.cat([model(input_ids=part) for part in input_ids.split(chunks, 1)], 1)

    return Workload(Model(factor), {"input_ids": IDS}, run=run)


@pytest.mark.spec("ALN-307")
@pytest.mark.parametrize(
    ("reference", "target", "factor", "guilty"),
    [((2, 6), (8,), 1.0, []), ((3, 3, 2), (4, 2, 2), 1.25, ["mixer"]), ((8,), (3, 4, 1), 1.25, ["mixer"])],
    ids=str,
)
def test_who_is_accused_does_not_depend_on_chunks(
    tmp_path: Path, reference: tuple[int, ...], target: tuple[int, ...], factor: float, guilty: list[str]
) -> None:
    capture_workload(fed(reference), tmp_path / "ref.h5")
    capture_workload(fed(target, factor), tmp_path / "port.h5")
    localization = localize(
        tmp_path / "ref.h5",
        tmp_path / "port.h5",
        reference_model=fed(reference),
        target_model=fed(target, factor),
    )
    assert [suspect.module for suspect in localization.suspects] == guilty
    assert not any("No replay" in note or "No injection" in note for note in localization.notes)
