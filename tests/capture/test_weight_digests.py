"""What a capture says of parameters, buffers and settings of modules without recording their values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xxhash
from torch import nn

import tensorcap
from tensorcap_formats.run_info import ModuleInfo, TensorInfo
from tensorcap_formats.statistics import Statistics


def capture(model: nn.Module, path: Path, x: torch.Tensor | None = None, **options: Any) -> None:
    with torch.no_grad(), tensorcap.capture(model, path, **options):
        model(torch.ones(1, 2) if x is None else x)


def module(path: Path, site: str) -> ModuleInfo:
    with tensorcap.open_archive(path) as archive:
        return archive.info.modules[site]


def parameter(path: Path, site: str, name: str = "weight") -> TensorInfo:
    return module(path, site).parameters[name]


def pair_of_layers() -> Any:
    return nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)).eval()


@pytest.mark.spec("CAP-67")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_parameters_have_digests_and_statistics_without_being_records(path: Path, dtype: torch.dtype) -> None:
    model = pair_of_layers()
    model[0].weight.data = torch.tensor([[3.0, -4.0], [0.0, float("inf")]])
    model = model.to(dtype)
    capture(model, path, torch.ones(1, 2, dtype=dtype))
    found = parameter(path, "0")
    raw = model[0].weight.detach().view(torch.uint8).numpy().tobytes()
    assert found.digest == f"xxh3_128:{xxhash.xxh3_128_hexdigest(raw)}"
    assert found.statistics == Statistics(-4.0, 3.0, -1 / 3, 5.0, nan=0, posinf=1, neginf=0, zeros=1)
    with tensorcap.open_archive(path) as archive:
        assert not [r for r in archive.records if r.key.slot.startswith(("param", "buffer"))]
        assert archive.info.modules["1"].buffers["running_var"].statistics == Statistics(
            1.0, 1.0, 1.0, np.sqrt(2).item(), nan=0, posinf=0, neginf=0, zeros=0
        )


@pytest.mark.spec("CAP-67")
def test_a_large_parameter_is_hashed_as_if_at_once(path: Path) -> None:
    model = nn.Linear(1000, 700, bias=False)
    model.weight.data = model.weight.data.reshape(1000, 700).T  # strided: bytes are those in C order
    capture(model, path, torch.ones(1, 1000))
    values = np.ascontiguousarray(model.weight.detach().numpy())
    found = parameter(path, "@root")
    assert found.digest == f"xxh3_128:{xxhash.xxh3_128_hexdigest(values.tobytes())}"
    assert found.statistics is not None
    assert found.statistics.maximum == values.max()
    assert found.statistics.mean == pytest.approx(values.mean(dtype=np.float64), rel=1e-12)


@pytest.mark.spec("CAP-67")
def test_digests_are_of_the_values_before_the_run(path: Path) -> None:
    model = pair_of_layers().train()
    capture(model, path, torch.tensor([[1.0, 2.0], [5.0, -3.0]]))
    assert model[1].running_mean.abs().sum() > 0
    found = module(path, "1").buffers["running_mean"].statistics
    assert found is not None
    assert (found.minimum, found.maximum, found.zeros) == (0.0, 0.0, 2)


@pytest.mark.spec("CAP-67")
def test_parameters_are_left_out_or_recorded_as_records_if_that_is_asked_for(tmp_path: Path) -> None:
    capture(pair_of_layers(), tmp_path / "none.h5", params=False)
    assert parameter(tmp_path / "none.h5", "0") == TensorInfo((2, 2), "float32")
    capture(pair_of_layers(), tmp_path / "values.h5", params=True)
    assert parameter(tmp_path / "values.h5", "0").digest == ""
    with tensorcap.open_archive(tmp_path / "values.h5") as archive:
        assert archive.get("0/0/param.weight").stored


@pytest.mark.spec("CAP-67")
def test_what_has_no_plain_values_has_no_digest(path: Path) -> None:
    class Sparse(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("table", torch.eye(3).to_sparse())
            self.register_parameter("late", nn.Parameter(torch.empty(2, device="meta")))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + 1

    capture(Sparse(), path)
    found = module(path, "@root")
    assert found.buffers["table"] == TensorInfo((3, 3), "float32")
    assert found.parameters["late"] == TensorInfo((2,), "float32")


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale, self.kind, self.window, self.limit = 0.125, "local", (3, 5), float("inf")
        self.is_causal, self._hidden, self.names = True, 7, ["a"]

    def extra_repr(self) -> str:
        return "(4,), eps=1e-06, shape=(2, 3), scale=9, name=hf_abcdefghijklmnop"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale


@pytest.mark.spec("ARC-73")
def test_settings_of_modules_are_their_plain_attributes_and_what_they_print(path: Path) -> None:
    capture(nn.Sequential(nn.LeakyReLU(0.25), Scaled(), nn.GELU("tanh")), path)
    assert module(path, "0").settings == {"negative_slope": 0.25, "inplace": False}
    assert module(path, "1").settings == {
        "scale": 0.125,
        "kind": "local",
        "window": [3, 5],
        "limit": "inf",
        "is_causal": True,
        "eps": 1e-06,
        "shape": [2, 3],
        "name": "[hidden]",
    }
    assert module(path, "2").settings == {"approximate": "tanh"}


@pytest.mark.spec("ARC-73")
def test_a_module_whose_printed_form_fails_is_described_all_the_same(path: Path) -> None:
    class Broken(Scaled):
        def extra_repr(self) -> str:
            raise RuntimeError("not yet loaded")

    capture(Broken(), path)
    assert module(path, "@root").settings["scale"] == 0.125


@pytest.mark.spec("ARC-73")
def test_the_class_of_a_weight_that_stands_for_other_values_is_described(path: Path) -> None:
    class Int8Weight(torch.Tensor):
        pass

    model = nn.Linear(2, 2)
    model.register_buffer("packed", torch.ones(2).as_subclass(Int8Weight))
    capture(model, path)
    assert module(path, "@root").buffers["packed"].class_name.endswith("Int8Weight")
    assert parameter(path, "@root").class_name == ""


@pytest.mark.spec("LCL-23")
def test_localize_names_a_weight_of_another_layer_before_any_tensor(tmp_path: Path) -> None:
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))
    x = torch.randn(4, 8)
    capture(model, tmp_path / "ref.h5", x)
    capture(model, tmp_path / "same.h5", x)
    model[1].load_state_dict(model[2].state_dict())
    capture(model, tmp_path / "tgt.h5", x)
    green = tensorcap.localize(tmp_path / "ref.h5", tmp_path / "same.h5")
    assert not [note for note in green.notes if note.startswith("Before any tensor")]
    first = tensorcap.localize(tmp_path / "ref.h5", tmp_path / "tgt.h5").notes[0]
    assert first.startswith(
        "Before any tensor: parameters 1.weight. 2 of 6 parameters are not the same numbers"
    )
    assert "1.weight holds what 2.weight holds in the reference" in first
