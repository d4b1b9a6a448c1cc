"""Values that the range of a low precision cuts accuse the module whose result was cut, twin or not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tensorcap.comparison import compare
from tensorcap.diagnosis import diagnose
from tensorcap.localization import localize
from tensorcap.session import capture_workload
from tensorcap.workload import Workload

RNG = np.random.default_rng(0)
STREAM = RNG.standard_normal((2, 12, 64))
LARGE = STREAM + 0.0
LARGE[..., 7] = 4.1e4
SUM = LARGE + LARGE  # 82,000 in channel 7
CUT = np.minimum(SUM, 64512.0)


class Block(nn.Module):
    def __init__(self, massive: float) -> None:
        super().__init__()
        self.norm, self.up = nn.LayerNorm(32), nn.Linear(32, 32)
        with torch.no_grad():
            self.up.bias[7] = massive
            self.norm.weight[7] = 0.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.up(self.norm(x))
        limit = torch.finfo(x.dtype).max - 1000
        return torch.clamp(x, -limit, limit)


def blocks(massive: float, dtype: torch.dtype) -> Workload:
    torch.manual_seed(0)
    model = nn.Sequential(*[Block(m) for m in (0.0, massive, massive, 0.0)], nn.Linear(32, 8)).eval()
    inputs = torch.randn(2, 12, 32)
    return Workload(model.to(dtype), {"input": inputs.to(dtype)})


@pytest.mark.spec("POL-140")
@pytest.mark.parametrize("way", ["replay", "archives"])
def test_the_block_whose_sum_is_cut_is_accused_alone(way: str, tmp_path: Path) -> None:
    capture_workload(blocks(4.1e4, torch.float32), tmp_path / "ref.h5")
    capture_workload(blocks(4.1e4, torch.float16), tmp_path / "tgt.h5")
    model: Any = {"reference_model": blocks(4.1e4, torch.float32)} if way == "replay" else {}
    localization = localize(tmp_path / "ref.h5", tmp_path / "tgt.h5", **model)
    assert localization.exit_status == 1
    assert [suspect.module for suspect in localization.suspects] == ["2"]
    assert localization.suspects[0].cause == "saturated"


@pytest.mark.spec("POL-140")
def test_what_stays_within_the_range_accuses_nobody(tmp_path: Path) -> None:
    capture_workload(blocks(3.1e4, torch.float32), tmp_path / "ref.h5")
    capture_workload(blocks(3.1e4, torch.float16), tmp_path / "tgt.h5")
    assert compare(tmp_path / "ref.h5", tmp_path / "tgt.h5").exit_status == 0


@pytest.mark.spec("POL-140")
@pytest.mark.parametrize(
    ("reference", "target", "is_cut"),
    [
        pytest.param(SUM, CUT, True, id="sum"),
        pytest.param(-SUM, -CUT, True, id="negative"),
        pytest.param(SUM, np.minimum(SUM, 65504.0), True, id="largest-value"),
        pytest.param(LARGE * 1.55, LARGE * 1.55, False, id="within"),
        pytest.param(
            np.where(STREAM > 0, STREAM, -1e9), np.where(STREAM > 0, STREAM, -65504), False, id="mask"
        ),
        pytest.param(SUM, np.minimum(SUM, 5e4), False, id="another-limit"),
    ],
)
def test_only_values_at_the_limit_of_the_precision_are_cut(
    make_archive: Any, reference: Any, target: Any, is_cut: bool
) -> None:
    sides = make_archive({"x": reference.astype(np.float32)}), make_archive({"x": target.astype(np.float16)})
    (pair,) = compare(*sides).pairs
    assert ("range" in {finding.test for finding in pair.findings}) == is_cut


@pytest.mark.spec("POL-140")
def test_what_is_handed_on_or_computed_from_cut_values_is_not_cut_again(make_archive: Any) -> None:
    keys = ("0/a/input.x", "0/a/output", "0/b/input.x", "0/b.c/input.x", "0/b/output")
    ours, theirs = (
        make_archive({key: side.astype(dtype) for key, side in zip(keys, sides, strict=True)})
        for dtype, sides in (
            (np.float32, (LARGE, SUM, SUM, SUM, SUM * 1.01)),
            (np.float16, (LARGE, CUT, CUT, CUT, CUT)),
        )
    )
    cut = [p.key for p in compare(ours, theirs).pairs if any(f.test == "range" for f in p.findings)]
    assert cut == ["0/a/output"]


@pytest.mark.spec("POL-163")
@pytest.mark.parametrize(
    ("size", "error", "is_below"),
    [
        pytest.param(5e-7, 0.0, True, id="below"),
        pytest.param(5e-3, 0.0, False, id="above"),
        pytest.param(5e-6, 0.3, False, id="larger-error"),
    ],
)
def test_values_below_the_range_are_named_as_that(
    make_archive: Any, size: float, error: float, is_below: bool
) -> None:
    values = size * RNG.standard_normal((4, 256))
    sides = values.astype(np.float32), ((1 + error) * values).astype(np.float16)
    archives = [make_archive({"0/a/input.x": side, "0/a/output": side}) for side in sides]
    texts = [
        (pair.key, finding.text)
        for pair in compare(*archives).pairs
        for finding in pair.findings
        if finding.test == "range"
    ]
    words = "below 6.1e-05: float16 holds these with fewer bits, or none"
    assert [(key, words in text) for key, text in texts] == ([("0/a/input.x", True)] if is_below else [])


@pytest.mark.spec("DIA-110")
@pytest.mark.parametrize(
    ("target", "kind"), [(CUT, "saturated"), (np.where(SUM > 65520, np.inf, SUM), "overflow")]
)
def test_the_range_is_named_as_the_cause(make_archive: Any, target: Any, kind: str) -> None:
    sides = make_archive({"x": SUM.astype(np.float32)}), make_archive({"x": target.astype(np.float16)})
    explanation = diagnose(*sides, "x").explanations[0]
    assert explanation.kind == kind
    assert explanation.text.startswith("float16 holds at most 65504, and what is larger in the reference is")
