"""Cases 01, 04, 05, 07, 10, 12 and 14: faults of other capture tools, from their public bug reports."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import nn
from torch.utils.checkpoint import checkpoint

import tensorcap

F64 = NDArray[np.float64]


def linear(layer: nn.Linear, x: F64) -> F64:
    weight: F64 = layer.weight.detach().double().numpy()
    bias: F64 = layer.bias.detach().double().numpy()
    return x @ weight.T + bias


class _Shared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2, self.fc3 = (nn.Linear(4, 4) for _ in range(3))
        self.act = nn.ReLU()
        self.act_alias = self.act

    def forward(self, x: torch.Tensor) -> Any:
        x = self.act(self.fc1(x))
        x = self.act_alias(self.fc2(x))
        return self.act(self.fc3(x))


def test_case_01_each_call_of_a_shared_module_is_a_record(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = _Shared().eval(), torch.randn(2, 4)
    with torch.no_grad(), tensorcap.capture(model, tmp_path / "a.h5"):
        model(x)
    with tensorcap.open_archive(tmp_path / "a.h5") as archive:
        outputs = [r for r in archive.records if r.key.site == "act" and r.key.slot == "output"]
        assert [r.key.text for r in outputs] == ["0/act/output", "0/act@1/output", "0/act@2/output"]
        assert [r.order for r in outputs] == sorted(r.order for r in outputs)
        h: F64 = x.double().numpy()
        for record, layer in zip(outputs, (model.fc1, model.fc2, model.fc3), strict=True):
            h = np.maximum(linear(layer, h), 0)
            np.testing.assert_allclose(archive.load(record), h, atol=1e-6)
        assert archive.run["aliases"] == {"act_alias": "act"}
        assert archive.get("0/act_alias@2/output") is archive.get("0/act@2/output")


class _InPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.act, self.out = nn.Linear(6, 6), nn.ReLU(inplace=True), nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> Any:
        h = self.fc(x)
        y = self.out(self.act(h))
        y += x
        y.mul_(2.0)
        return y


def test_case_04_what_is_written_in_place_later_does_not_change_a_record(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = _InPlace().eval(), torch.randn(4, 6)
    before: F64 = linear(model.fc, x.double().numpy())
    assert (before < 0).any()
    after = np.maximum(before, 0)
    out = linear(model.out, after)
    with torch.no_grad(), tensorcap.capture(model, tmp_path / "a.h5"):
        model(x)
    expected = {
        "0/fc/output": before,
        "0/act/input.input": before,
        "0/act/output": after,
        "0/out/output": out,
        "0/@root/output": (out + x.double().numpy()) * 2,
    }
    with tensorcap.open_archive(tmp_path / "a.h5") as archive:
        for key, values in expected.items():
            np.testing.assert_allclose(archive.load(archive.get(key)), values, atol=1e-5, err_msg=key)


class _Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q = nn.Linear(4, 4)

    def forward(
        self, hidden_states: Any, mask: Any = None, rope: Any = None, cache: Any = None, layer_idx: int = 0
    ) -> Any:
        cos, sin = rope
        return self.q(hidden_states) * cos + mask * sin


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn = _Attention()

    def forward(self, x: torch.Tensor) -> Any:
        rope = (torch.cos(x), torch.sin(x))
        return self.attn(hidden_states=x, mask=torch.ones(4), rope=rope, cache=None, layer_idx=3)


def test_case_05_keyword_arguments_are_inputs_by_name(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = _Block().eval(), torch.randn(2, 4)
    with torch.no_grad(), tensorcap.capture(model, tmp_path / "a.h5"):
        model(x)
    expected = {
        "hidden_states": x.numpy(),
        "mask": np.ones(4, np.float32),
        "rope.0": torch.cos(x).numpy(),
        "rope.1": torch.sin(x).numpy(),
    }
    with tensorcap.open_archive(tmp_path / "a.h5") as archive:
        slots = [r.key.slot for r in archive.records if r.key.site == "attn"]
        assert slots == [f"input.{name}" for name in expected] + ["output"]
        for name, values in expected.items():
            np.testing.assert_array_equal(archive.load(archive.get(f"0/attn/input.{name}")), values)
        plain = {key: value for key, value in archive.values.items() if "/attn/" in key}
        assert plain == {"0/attn/input.cache": None, "0/attn/input.layer_idx": 3}


class _Guarded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc0, self.fc1, self.fc2 = (nn.Linear(3, 3) for _ in range(3))

    def forward(self, x: torch.Tensor) -> Any:
        x = self.fc1(self.fc0(x))
        if x.shape[0] == 2:
            raise ValueError("shape guard")
        return self.fc2(x)


def test_case_10_an_exception_in_the_model_leaves_an_incomplete_archive_and_no_hook(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = _Guarded(), torch.randn(2, 3)
    with (
        pytest.raises(ValueError, match="shape guard") as caught,
        tensorcap.capture(model, tmp_path / "a.h5"),
    ):
        model(x)
    assert str(caught.value) == "shape guard"
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    fc0 = linear(model.fc0, x.double().numpy())
    with tensorcap.open_archive(tmp_path / "a.h5") as archive:
        assert not archive.is_complete
        np.testing.assert_allclose(archive.load(archive.get("0/fc0/output")), fc0, atol=1e-6)
        np.testing.assert_allclose(
            archive.load(archive.get("0/fc1/output")), linear(model.fc1, fc0), atol=1e-6
        )
        assert archive.run["error"] == {
            "type": "ValueError",
            "message": "shape guard",
            "last_point": "0/fc1",
        }
        status = {p["site"]: (p["status"], p["calls"], p.get("unfinished")) for p in archive.run["points"]}
        assert status == {
            "@root": ("captured", 1, 1),
            "fc0": ("captured", 1, None),
            "fc1": ("captured", 1, None),
            "fc2": ("never-called", 0, None),
        }
    model(torch.randn(3, 3))
    with tensorcap.open_archive(tmp_path / "a.h5") as archive:
        assert "0/fc2/output" not in archive


class _Views(nn.Module):
    def __init__(self, fused: torch.Tensor) -> None:
        super().__init__()
        self.fused = fused

    def forward(self) -> Any:
        q, k, v = torch.split(self.fused, 8, -1)
        return {"q": q, "k": k, "v": v, "kT": k.t(), "bias_expanded": torch.arange(8.0).expand(5, 8)}


@pytest.mark.parametrize("suffix", ["h5", "safetensors", "zarr"])
def test_case_12_views_and_expanded_tensors_are_written_with_their_own_bytes(
    tmp_path: Path, suffix: str
) -> None:
    torch.manual_seed(0)
    fused = torch.randn(4, 24)
    expected: F64 = fused.double().numpy().copy()
    model = _Views(fused)
    with torch.no_grad(), tensorcap.capture(model, tmp_path / f"a.{suffix}") as cap:
        model()
        fused.zero_()
    assert cap.summary is not None
    # the bytes of q, k, v, kT and bias_expanded
    assert cap.summary.stored_bytes == 4 * 8 * 3 * 4 + 8 * 4 * 4 + 5 * 8 * 4
    with tensorcap.open_archive(tmp_path / f"a.{suffix}") as archive:

        def load(name: str) -> Any:
            return archive.load(archive.get(f"0/@root/output.{name}"))

        for i, name in enumerate("qkv"):
            np.testing.assert_array_equal(load(name), expected[:, 8 * i : 8 * i + 8])
        assert load("kT").shape == (8, 4)
        np.testing.assert_array_equal(load("kT"), expected[:, 8:16].T)
        np.testing.assert_array_equal(load("bias_expanded"), np.tile(np.arange(8.0), (5, 1)))


class _Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)) for _ in range(3)
        )

    def forward(self, x: torch.Tensor) -> Any:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x


def test_case_07_what_a_backward_pass_computes_anew_is_recorded_once_in_forward_order(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = _Checkpointed(), torch.randn(2, 4, requires_grad=True)
    with tensorcap.capture(model, tmp_path / "a.h5", grads=True, inputs=False):
        model(x).sum().backward()
    with tensorcap.open_archive(tmp_path / "a.h5") as archive:
        leaves = [r.key for r in archive.records if r.key.site.count(".") == 2]
        forward = [key.text for key in leaves if key.slot == "output"]
        backward = [key.text for key in leaves if key.slot == "grad_output"]
        again = {p["site"]: p["reason"] for p in archive.run["points"] if p["site"] == "blocks.2.0"}
    assert forward == [f"0/blocks.{b}.{i}/output" for b in range(3) for i in range(3)]
    assert backward == [f"0/blocks.{b}.{i}/grad_output" for b in (2, 1, 0) for i in (2, 1, 0)]
    assert again == {"blocks.2.0": "not recorded: calls of a backward pass to compute anew, 1"}


def test_case_14_offloaded_parameters_are_those_that_the_call_sees(tmp_path: Path) -> None:
    from accelerate import cpu_offload

    torch.manual_seed(0)
    model: Any = nn.Sequential()
    model.add_module("fc1", nn.Linear(4, 4))
    model.add_module("fc2", nn.Linear(4, 4))
    model.add_module("spare", nn.ModuleDict({"never": nn.Linear(4, 4)}))
    model.forward = lambda x: model.fc2(model.fc1(x))
    before = {name: value.double().numpy().copy() for name, value in model.state_dict().items()}
    x = torch.randn(2, 4)
    cpu_offload(model, execution_device=torch.device("cpu"))
    with torch.no_grad(), tensorcap.capture(model, tmp_path / "a.h5", params=True) as cap:
        model(x)
        model(x)
    assert {p.device.type for p in model.parameters()} == {"meta"}  # offloaded again, as without us
    h = x.double().numpy() @ before["fc1.weight"].T + before["fc1.bias"]
    with tensorcap.open_archive(tmp_path / "a.h5") as archive:
        found = {r.key.text: archive.load(r) for r in archive.records}
        described = [m for m in archive.run["modules"] if m["path"] == "spare.never"]
    for site in ("fc1", "fc2"):
        for own in ("weight", "bias"):
            assert np.array_equal(found[f"0/{site}/param.{own}"], before[f"{site}.{own}"])
    assert not [key for key in found if "never" in key or ("param." in key and key.startswith("1/"))]
    np.testing.assert_allclose(found["0/fc1/output"], h, atol=1e-6)
    assert np.array_equal(found["1/fc1/output"], found["0/fc1/output"])
    assert cap.summary is not None
    reason = "meta: no data, neither before the run nor in a call of the module"
    assert cap.summary.not_capturable == {"spare.never": reason}
    assert described[0]["parameters"]["weight"]["shape"] == [4, 4]  # the shape is known all the same
