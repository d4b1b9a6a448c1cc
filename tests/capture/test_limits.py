"""Limits: steps, calls, bytes, and parts of tensors; what they leave out is accounted for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import tensorcap
from tensorcap.recording import parse_size, parse_steps
from tensorcap_formats.errors import CaptureError, UsageError


class Looped(nn.Module):
    """Calls one module three times a forward, another one in the first forward only."""

    def __init__(self) -> None:
        super().__init__()
        self.step, self.first = nn.Linear(4, 4), nn.Linear(4, 4)
        self.forwards = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.forwards:
            x = self.first(x)
        self.forwards += 1
        for _ in range(3):
            x = self.step(x)
        return x


def capture(path: Path | None, model: nn.Module, forwards: int = 1, **options: Any) -> tensorcap.Capture:
    with torch.no_grad(), tensorcap.capture(model, path, **options) as cap:
        for _ in range(forwards):
            model(torch.ones(1, 4))
    return cap


def keys(path: Path) -> list[str]:
    with tensorcap.open_archive(path) as archive:
        return [record.key.text for record in archive.records]


def points(path: Path) -> dict[str, dict[str, Any]]:
    with tensorcap.open_archive(path) as archive:
        assert archive.is_complete
        return {entry["site"]: entry for entry in archive.run["points"]}


@pytest.mark.spec("CAP-50")
@pytest.mark.parametrize("steps", ["1,3-", [1, range(3, 100)]], ids=["text", "numbers"])
def test_only_the_steps_asked_for_are_recorded_and_what_the_model_is_given_in_each(
    path: Path, small: Any, steps: Any
) -> None:
    capture(path, small, 5, steps=steps, only=["@root", "2"], inputs=False)
    assert keys(path) == [
        "0/@root/input.input",
        "1/@root/input.input",
        "1/2/output",
        "1/@root/output",
        "2/@root/input.input",
        "3/@root/input.input",
        "3/2/output",
        "3/@root/output",
        "4/@root/input.input",
        "4/2/output",
        "4/@root/output",
    ]


@pytest.mark.spec("CAP-50")
def test_steps_that_the_run_did_not_reach_are_told(small: Any) -> None:
    with pytest.warns(UserWarning, match=r"nothing was captured of 'steps 2-3', 'steps 9-'"):
        cap = capture(None, small, 2, steps="0,2-3,9-")
    assert cap.summary is not None
    assert cap.summary.unmatched == ("steps 2-3", "steps 9-")
    assert not cap.summary.is_whole


def test_no_step_that_was_asked_for_is_nothing_captured(path: Path, small: Any) -> None:
    with pytest.raises(CaptureError, match="nothing was captured") as caught:
        capture(path, small, 2, steps="2-")
    assert caught.value.hint == "The model was called; no record of its 2 steps fits the globs and limits."
    assert not path.exists()


@pytest.mark.spec("CAP-51")
def test_a_sample_is_of_the_first_calls_of_each_site(path: Path) -> None:
    capture(path, Looped(), 2, sample=2, inputs=False)
    assert keys(path) == [
        "0/@root/input.x",
        "0/first/output",
        "0/step/output",
        "0/step@1/output",
        "0/@root/output",
        "1/@root/input.x",
        "1/@root/output",
    ]


@pytest.mark.spec("CAP-52")
@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        pytest.param(
            {"steps": [1]},
            {"@root": ("captured", 1), "step": ("captured", 3), "first": ("excluded", 1)},
            id="steps",
        ),
        pytest.param(
            {"sample": 4},
            {"@root": ("captured", 0), "step": ("captured", 2), "first": ("captured", 0)},
            id="sample",
        ),
        pytest.param(
            # The input, 16 bytes, is that of `first` too; then the outputs of `first` and of `step`
            {"max_bytes": 48, "inputs": False},
            {"@root": ("captured", 2), "step": ("captured", 5), "first": ("captured", 0)},
            id="bytes",
        ),
    ],
)
def test_every_module_is_accounted_for_with_the_calls_that_limits_left_out(
    path: Path, limits: dict[str, Any], expected: dict[str, tuple[str, int]]
) -> None:
    capture(path, Looped(), 2, **limits)
    found = {}
    for site, entry in points(path).items():
        text = entry.get("reason", "")
        assert not text or text.startswith("not recorded: calls that the limits left out, ")
        found[site] = (entry["status"], int(text.rpartition(" ")[2]) if text else 0)
    assert found == expected


@pytest.mark.spec("CAP-53")
def test_recording_stops_before_the_limit_of_bytes_and_the_archive_is_complete(
    path: Path, small: Any
) -> None:
    # 16 bytes of input, which are those of module 0 too; 16 of its output; 16 of module 1's; 8 of module 2's
    cap = capture(path, small, 2, max_bytes=40, inputs=False)
    assert keys(path) == ["0/@root/input.input", "0/0/output"]
    with tensorcap.open_archive(path) as archive:
        assert archive.is_complete
        assert archive.run["stopped"] == {"at": "0/1/output", "max_bytes": 40}
        assert archive.run["scope"]["max_bytes"] == 40
    summary = cap.summary
    assert summary is not None
    assert (summary.stopped, summary.max_bytes, summary.is_whole) == ("0/1/output", 40, False)
    assert summary.stored_bytes == 32
    assert {site: (entry["status"], entry["calls"]) for site, entry in points(path).items()} == {
        "@root": ("captured", 1),
        "0": ("captured", 1),
        "1": ("excluded", 1),
        "2": ("excluded", 0),
    }


@pytest.mark.spec("CAP-53")
def test_a_limit_of_bytes_that_is_not_reached_stops_nothing(path: Path, small: Any) -> None:
    cap = capture(path, small, 1, max_bytes="1kB")
    with tensorcap.open_archive(path) as archive:
        assert "stopped" not in archive.run
        assert len(archive.records) == 8
    assert cap.summary is not None
    assert cap.summary.is_whole


def test_the_run_goes_on_unharmed_when_recording_has_stopped(path: Path, small: Any) -> None:
    x = torch.randn(3, 4)
    with torch.no_grad():
        expected = small(x)
        with tensorcap.capture(small, path, max_bytes=50):
            found = [small(x) for _ in range(3)]
    assert all(torch.equal(one, expected) for one in found)


class Shapes(nn.Module):
    """Hands tensors of several shapes and dtypes through children that return them."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.flat, self.low = nn.Identity(), nn.Identity(), nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.wide(x)
        self.flat(x[0, 0])
        self.low(x.transpose(0, 2).to(torch.bfloat16))
        return x


@pytest.fixture
def x() -> torch.Tensor:
    return torch.arange(24.0).reshape(2, 3, 4)


def run(path: Path, x: torch.Tensor, slices: Any, **options: Any) -> dict[str, Any]:
    model = Shapes()
    with torch.no_grad(), tensorcap.capture(model, path, slices=slices, **options):
        model(x)
    with tensorcap.open_archive(path) as archive:
        return {record.key.text: archive.load(record) for record in archive.records}


@pytest.mark.spec("CAP-54")
def test_a_slice_cuts_every_tensor_but_what_the_model_is_given(path: Path, x: torch.Tensor) -> None:
    found = run(path, x, "[..., 1:3]")
    whole = x.numpy()
    np.testing.assert_array_equal(found["0/@root/input.x"], whole)
    np.testing.assert_array_equal(found["0/@root/output"], whole[..., 1:3])
    np.testing.assert_array_equal(found["0/wide/input.input"], whole[..., 1:3])
    np.testing.assert_array_equal(found["0/flat/output"], [1.0, 2.0])
    np.testing.assert_array_equal(found["0/low/output"], whole.transpose(2, 1, 0)[..., 1:])


@pytest.mark.spec("CAP-54")
def test_the_first_matching_slice_counts_and_a_tensor_of_fewer_axes_stays_whole(
    path: Path, x: torch.Tensor
) -> None:
    found = run(path, x, ["wide=[:, -1:]", "*/input*=[:1, :1, ::2]", "*=[0:1, :, :]"])
    whole = x.numpy()
    assert found["0/wide/output"].tolist() == whole[:, 2:].tolist()
    assert found["0/wide/input.input"].tolist() == whole[:, 2:].tolist()
    assert found["0/low/input.input"].tolist() == whole.transpose(2, 1, 0)[:1, :1, ::2].tolist()
    assert found["0/low/output"].tolist() == whole.transpose(2, 1, 0)[:1].tolist()
    assert found["0/flat/output"].tolist() == [0, 1, 2, 3]


@pytest.mark.spec("CAP-54")
def test_a_slice_that_would_leave_nothing_is_a_loss_that_is_reported(path: Path, x: torch.Tensor) -> None:
    found = run(path, x, "wide=[:, 3:]")
    assert "0/wide/output" not in found
    entry = points(path)["wide"]
    assert entry["status"] == "not-capturable"
    assert entry["reason"] == "slice [:, 3:] leaves nothing of shape [2, 3, 4]"


def test_a_slice_leaves_the_model_and_its_gradients_alone(path: Path) -> None:
    model, x = nn.Linear(4, 4), torch.randn(2, 4)
    expected = model(x)
    with tensorcap.capture(model, path, slices="[:1]"):
        found = model(x)
    assert torch.equal(found, expected)
    found.sum().backward()
    assert model.weight.grad is not None
    assert torch.allclose(model.weight.grad, x.sum(0).expand(4, 4))


@pytest.mark.spec("CAP-55")
def test_the_limits_are_in_the_metadata_as_they_were_given(path: Path, x: torch.Tensor) -> None:
    run(path, x, ["wide=[:, -1:]", "[:1]"], steps="0", sample=3, max_bytes="1 MiB")
    with tensorcap.open_archive(path) as archive:
        assert archive.run["scope"] == {
            "include": [],
            "exclude": [],
            "inputs": True,
            "steps": "0",
            "sample": 3,
            "max_bytes": 1_048_576,
            "slices": ["wide=[:, -1:]", "[:1]"],
        }


@pytest.mark.parametrize(
    ("options", "message"),
    [
        pytest.param(
            {"steps": "1,x"}, "'x' is no step, expected numbers such as 0,1,5-9 or 5-", id="no-number"
        ),
        pytest.param({"steps": "-1"}, "'-1' is no step", id="negative"),
        pytest.param({"steps": ""}, "'' is no step", id="none"),
        pytest.param({"steps": "1,"}, "'' is no step", id="empty-part"),
        pytest.param({"steps": "9-5"}, "'9-5' ends before it begins", id="backwards"),
        pytest.param({"steps": [-1]}, "expected numbers from 0 on", id="negative-number"),
        pytest.param({"steps": [range(0, 9, 2)]}, "expected numbers from 0 on", id="range-with-a-step"),
        pytest.param({"sample": 0}, "sample 0: expected at least 1", id="no-sample"),
        pytest.param({"max_bytes": "2 apples"}, "expected bytes such as 4096, 500MB or 2GiB", id="unit"),
        pytest.param({"max_bytes": 0}, "max_bytes 0: expected at least 1", id="no-bytes"),
        pytest.param({"slices": "[0]"}, "'0' is no slice such as :64", id="integer"),
        pytest.param({"slices": "[::0]"}, "'::0' is no slice", id="step-of-nothing"),
        pytest.param({"slices": "[..., ...]"}, "has more than one '...'", id="two-ellipses"),
        pytest.param({"slices": ":64"}, "expected [..., :64] or GLOB=[:, -1:]", id="no-brackets"),
        pytest.param({"slices": "nosuch=[:1]"}, "no module matches 'nosuch'", id="unknown-glob"),
    ],
)
def test_bad_limits_are_refused_in_one_line_before_anything_runs(
    path: Path, small: Any, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(UsageError) as caught:
        capture(path, small, 1, **options)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not path.exists()


def test_a_slice_of_a_site_that_is_not_there_names_near_ones(path: Path, x: torch.Tensor) -> None:
    with pytest.raises(UsageError) as caught:
        run(path, x, "wides=[:1]")
    assert caught.value.hint == "Did you mean 'wide'?"


def test_steps_and_sizes_are_read_as_people_write_them() -> None:
    assert parse_steps("0, 1,5-9") == (range(0, 1), range(1, 2), range(5, 10))
    assert 10**15 in parse_steps("5-")[0]
    assert [parse_size(text) for text in ("2GiB", "500 MB", "1.5kib", "7", "7B")] == [
        2_147_483_648,
        500_000_000,
        1536,
        7,
        7,
    ]
