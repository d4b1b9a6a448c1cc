"""Whether all commands end with 0 for a right port, and none does for a wrong one."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

from tensorcap.comparison import compare
from tensorcap.localization import bisect_archives, bisect_live, localize
from tensorcap.port_verification import verify
from tensorcap.reports.next_step import Sides, after_localization
from tensorcap.rerun import replay
from tensorcap.session import capture_workload
from tensorcap.workload import Workload
from tests.localization.llama import llama, narrow, workload

if TYPE_CHECKING:
    from torch import Tensor


def model() -> Any:
    """A Llama with weights that are not so large that errors grow without bounds."""
    made = llama()
    for parameter in made.parameters():
        parameter.data.mul_(0.5 if parameter.ndim == 2 else 1.0)
    return made


def with_a_weak_mlp(port: Any) -> Any:
    """A layer whose own code adds less of its MLP's result than it should."""
    layer = port.model.layers[1]
    right = layer.forward

    def forward(*args: Any, **kwargs: Any) -> Tensor:
        results: list[Tensor] = []
        handle = layer.mlp.register_forward_hook(lambda _, __, result: results.append(result))
        made: Tensor = right(*args, **kwargs)
        handle.remove()
        return made - 0.6 * results[0]

    layer.forward = forward
    return port


@pytest.mark.slow
@pytest.mark.spec("LCL-6", "CMP-51", "VER-40")
@pytest.mark.parametrize("is_right", [pytest.param(True, id="right"), pytest.param(False, id="wrong")])
def test_all_commands_agree_on_what_ends_with_0(tmp_path: Path, is_right: bool) -> None:
    trusted = workload(model())
    tested = workload(narrow(model() if is_right else with_a_weak_mlp(model())))
    reference, target = tmp_path / "ref.h5", tmp_path / "tgt.h5"
    capture_workload(trusted, reference)
    capture_workload(tested, target)
    free = compare(reference, target)
    statuses = {
        "compare": free.exit_status,
        "localize": localize(reference, target).exit_status,
        "localize by replay": localize(reference, target, reference_model=trusted).exit_status,
        "localize by injection": localize(reference, target, target_model=tested).exit_status,
        "replay": replay(reference, target, reference_model=trusted).exit_status,
        "forward replay": replay(reference, target_model=tested, reference_model=trusted).exit_status,
        "verify archives": verify(reference, target, tmp_path / "archives").exit_status,
        "verify": verify(trusted, tested, tmp_path / "models").exit_status,
        "bisect": bisect_archives(reference, target).exit_status,
        "bisect runs": bisect_live(reference, tested).exit_status,
    }
    assert statuses == dict.fromkeys(statuses, 0 if is_right else 1)
    if not is_right:
        first = free.divergence
        assert first is not None
        assert first.pair.key == "0/model.layers.1/output"


class Squares(nn.Module):
    """A norm, and the square of what is made of it: an error of the norm is twice as large there."""

    def __init__(self, eps: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm = nn.LayerNorm(64, eps=eps)
        self.up, self.down = nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(self.up(self.norm(x)).square())
        return out


def reference_of_squares() -> Workload:
    x = torch.randn(2, 24, 64, generator=torch.Generator().manual_seed(1))
    return Workload(Squares(1e-5).eval(), (x,))


@pytest.mark.spec("LCL-6")
@pytest.mark.parametrize(
    ("eps", "status"), [(2.5e-5, 1), (1.02e-5, 0)], ids=["not-the-same", "within-rounding"]
)
def test_a_setting_that_explains_what_compare_finds_is_to_be_mended(
    tmp_path: Path, eps: float, status: int
) -> None:
    """The norm errs by half of what eps differs by, 7.5e-6: within rounding, but not behind the square."""
    trusted = reference_of_squares()
    reference, target = tmp_path / "ref.h5", tmp_path / "tgt.h5"
    capture_workload(trusted, reference)
    capture_workload(Workload(Squares(eps).eval(), trusted.inputs), target)
    assert compare(reference, target).exit_status == status
    found = localize(reference, target, reference_model=trusted)
    assert (found.suspects, found.exit_status) == ((), status)
    setting = "norm: eps is 1e-5 in the reference, 2.5e-5 in the target"
    expected = f"Next: mend what is set otherwise: {setting}." if status else "Next: nothing has to be done."
    assert after_localization(found, Sides(str(reference), str(target))).line == expected
