"""A norm that a port computes in bfloat16, where the model computes it in float32: rounding, and no more."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from tensorcap.comparison import Finding, compare
from tensorcap.diagnosis import Diagnosis, Explanation
from tensorcap.localization import Evidence, EvidenceSource, localize, rank_suspects
from tensorcap.session import capture_workload
from tensorcap.workload import Workload
from tensorcap_formats.open import open_archive

WIDTH = 64


class Norm(nn.Module):
    """RMS norm, whose mean of squares is in float32, or in the dtype of what it is given."""

    def __init__(self, *, is_wide: bool) -> None:
        super().__init__()
        self.is_wide = is_wide
        self.weight = nn.Parameter(1 + 0.1 * torch.randn(WIDTH, generator=torch.Generator().manual_seed(2)))

    def forward(self, x: Tensor) -> Tensor:
        h = x.float() if self.is_wide else x
        out: Tensor = (h * torch.rsqrt(h.square().mean(-1, keepdim=True) + 1e-6)).to(x.dtype) * self.weight
        return out


def model(*, is_wide: bool = True) -> nn.Module:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for _ in range(3):
        layers += [nn.Linear(WIDTH, WIDTH), Norm(is_wide=is_wide)]
    return nn.Sequential(*layers, nn.Linear(WIDTH, 32)).eval()


@pytest.mark.spec("LCL-660")
def test_who_only_rounds_otherwise_is_named_in_a_note_and_not_accused(tmp_path: Path) -> None:
    x = torch.randn(2, 40, WIDTH, generator=torch.Generator().manual_seed(1))
    reference = Workload(model(), (x,))
    capture_workload(reference, tmp_path / "ref.h5")
    capture_workload(Workload(model(is_wide=False).bfloat16(), (x.bfloat16(),)), tmp_path / "tgt.h5")
    assert compare(tmp_path / "ref.h5", tmp_path / "tgt.h5").exit_status == 0
    found = localize(tmp_path / "ref.h5", tmp_path / "tgt.h5", reference_model=reference)
    assert [suspect.module for suspect in found.suspects] == []
    assert found.exit_status == 0
    (note,) = (note for note in found.notes if "rounds otherwise" in note or "round otherwise" in note)
    assert "nobody is accused of that" in note


@pytest.mark.spec("LCL-660")
@pytest.mark.parametrize(
    ("other", "accused"), [("ulp_share", []), ("outliers", [("1", "3")])], ids=["bits", "outliers-in-one"]
)
def test_layers_of_one_cause_are_of_rounding_if_all_of_them_are(
    tmp_path: Path, other: str, accused: list[tuple[str, ...]]
) -> None:
    x = torch.randn(2, 40, WIDTH, generator=torch.Generator().manual_seed(1))
    capture_workload(Workload(model(), (x,)), tmp_path / "ref.h5")

    def explained(module: str) -> Diagnosis:
        key = f"0/{module}/output"
        cause = Explanation("norm-precision", "in bfloat16", "", 0.1, 0.01, 0.02, 0, 5120, 9.0, {})
        return Diagnosis(key, key, "explained", 0.1, 0.001, "bfloat16", 0.0, (cause,), {}, ())

    tests = {"1": "ulp_share", "3": other}
    evidence = [
        Evidence(module, (f"0/{module}/output",), "diverged", (finding,), 0.1, None, "it is wrong")
        for module, test in tests.items()
        for finding in [Finding(test, 2.0, 1.0, "diverged", f"{test} 2, at most 1")]
    ]
    with open_archive(tmp_path / "ref.h5") as run:
        source = EvidenceSource("replay", run, run, None, tuple(evidence))
        found = rank_suspects(run, run, compare(run, run), [source], explain_weights=explained)
    assert [suspect.modules for suspect in found.suspects] == accused
    notes = [note for note in found.notes if "nobody is accused of that" in note]
    assert [note.partition(" otherwise")[0] for note in notes] == ([] if accused else ["{1,3}: round"])
