"""A port that was fed the same sequences with their padding on the other side, under other names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tensorcap.comparison import compare
from tensorcap.localization import localize
from tensorcap.session import capture_workload
from tensorcap.workload import Workload

WIDTH, LENGTH, PADDED = 16, 9, 4
MATCHED = (
    "14 tokens are on both sides; the reference has 0 more and 4 of padding; the target has 0 more and 4 of "
    "padding"
)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.up, self.act, self.down = nn.Linear(WIDTH, 24), nn.ReLU(), nn.Linear(24, WIDTH)

    def forward(self, x: Tensor, keep: Tensor) -> Tensor:
        y = self.norm(x)
        scores = self.query(y) @ self.key(y).mT / 4
        x = x + scores.masked_fill(~keep, -1e9).softmax(-1) @ self.value(y)
        out: Tensor = x + self.down(self.act(self.up(x)))
        return out


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.places = nn.Embedding(50, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, 50)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        keep = attention_mask.bool()[:, None] & torch.ones(LENGTH, LENGTH).tril().bool()
        x = self.table(input_ids) + self.places((attention_mask.cumsum(1) - 1).clamp(min=0))
        for layer in self.layers:
            x = layer(x, keep)
        out: Tensor = self.head(x)
        return out


class Port(nn.Module):
    """The model under other names."""

    def __init__(self) -> None:
        super().__init__()
        inner = Model()
        self.tok, self.pos, self.h, self.out = inner.table, inner.places, inner.layers, inner.head

    def forward(self, ids: Tensor, pad: Tensor) -> Tensor:
        keep = pad.bool()[:, None] & torch.ones(ids.shape[1], ids.shape[1]).tril().bool()
        x = self.tok(ids) + self.pos((pad.cumsum(1) - 1).clamp(min=0))
        for layer in self.h:
            x = layer(x, keep)
        out: Tensor = self.out(x)
        return out


def fed() -> tuple[Tensor, Tensor]:
    """Two sequences, the second padded on the left."""
    ids = torch.randint(3, 50, (2, LENGTH), generator=torch.Generator().manual_seed(1))
    mask = torch.ones(2, LENGTH, dtype=torch.int64)
    ids[1, :PADDED], mask[1, :PADDED] = 0, 0
    return ids, mask


def reference() -> Workload:
    ids, mask = fed()
    return Workload(Model().eval(), {"input_ids": ids, "attention_mask": mask})


def port_inputs() -> dict[str, Tensor]:
    """The same two, the second padded on the right."""
    ids, mask = (one.clone() for one in fed())
    ids[1], mask[1] = ids[1].roll(-PADDED), mask[1].roll(-PADDED)
    return {"ids": ids, "pad": mask}


def port(act: nn.Module | None = None, inputs: dict[str, Tensor] | None = None) -> Workload:
    made: Any = Port().eval()
    if act is not None:
        made.h[1].act = act
    return Workload(made, port_inputs() if inputs is None else inputs)


def in_bfloat16(workload: Workload) -> Workload:
    workload.model.bfloat16()
    return workload


def captured(folder: Path, target: Workload) -> tuple[Path, Path]:
    paths = folder / "ref.h5", folder / "tgt.h5"
    capture_workload(reference(), paths[0])
    capture_workload(target, paths[1])
    return paths


@pytest.mark.spec("ALN-320", "ALN-70")
def test_padding_on_the_other_side_is_no_difference(tmp_path: Path) -> None:
    comparison = compare(*captured(tmp_path, port()))
    assert comparison.exit_status == 0
    assert comparison.mapping is not None
    assert list(comparison.mapping.tokens) == [MATCHED]


@pytest.mark.spec("ALN-320", "RPL-220")
@pytest.mark.parametrize("way", ["replay", "injection", "map"])
def test_padding_on_the_other_side_accuses_nobody(tmp_path: Path, way: str) -> None:
    paths = captured(tmp_path, port())
    is_injected = way == "injection"
    (tmp_path / "map.toml").write_text('[tokens]\nstep = "match_tokens"\n')
    found = localize(
        *paths,
        reference_model=None if is_injected else reference(),
        target_model=port() if is_injected else None,
        mapping=tmp_path / "map.toml" if way == "map" else None,
    )
    assert [suspect.module for suspect in found.suspects] == []
    assert found.exit_status == 0


@pytest.mark.spec("ALN-320", "RPL-220")
def test_padding_on_the_other_side_accuses_nobody_in_bfloat16(tmp_path: Path) -> None:
    found = localize(*captured(tmp_path, in_bfloat16(port())), reference_model=reference())
    assert [suspect.module for suspect in found.suspects] == []
    assert found.exit_status == 0
    spoilt = localize(*captured(tmp_path, in_bfloat16(port(nn.GELU()))), reference_model=reference())
    assert [suspect.module for suspect in spoilt.suspects] == ["layers.1.act"]


@pytest.mark.spec("RPL-220")
def test_a_mistake_is_found_by_the_tokens_that_both_have(tmp_path: Path) -> None:
    found = localize(*captured(tmp_path, port(nn.GELU())), reference_model=reference())
    assert [suspect.module for suspect in found.suspects] == ["layers.1.act"]
    assert found.suspects[0].diagnosis is not None
    assert "gelu" in found.suspects[0].diagnosis.text
    assert found.exit_status == 1


@pytest.mark.spec("ALN-320")
def test_other_sequences_on_the_other_side_are_a_difference(tmp_path: Path) -> None:
    inputs = port_inputs()
    inputs["ids"][1, 0] += 1
    comparison = compare(*captured(tmp_path, port(inputs=inputs)))
    assert comparison.exit_status == 1


@pytest.mark.spec("ALN-41")
def test_a_padded_row_alone_under_other_names_is_that_row(tmp_path: Path) -> None:
    alone = {name: one[1:, : LENGTH - PADDED] for name, one in port_inputs().items()}
    paths = captured(tmp_path, port(inputs=alone))
    comparison = compare(*paths)
    assert comparison.exit_status == 0
    assert comparison.mapping is not None
    assert "row 1 of the reference's batch of 2, positions 4 to 8 of 9" in comparison.mapping.tokens[0]
