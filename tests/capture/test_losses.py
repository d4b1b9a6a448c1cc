"""What a capture cannot record is told: calls without an end, hooks that are gone or overtaken."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import tensorcap

X = torch.ones(1, 4)


def losses(path: Path) -> dict[str, str]:
    with tensorcap.open_archive(path) as archive:
        return {
            "/".join([p["site"], *p.get("slots", ())]): p["reason"]
            for p in archive.run["points"]
            if p["status"] == "not-capturable"
        }


def keys(path: Path) -> list[str]:
    with tensorcap.open_archive(path) as archive:
        return [record.key.text for record in archive.records]


def test_a_call_that_failed_and_was_caught_is_reported(path: Path, small: Any) -> None:
    with torch.no_grad(), tensorcap.capture(small, path, inputs=False) as cap:
        small(X)
        with pytest.raises(RuntimeError):
            small(torch.ones(1, 3))
    assert cap.summary is not None
    assert cap.summary.unfinished == {"@root": 1, "0": 1}
    with tensorcap.open_archive(path) as archive:
        found = {p["site"]: (p["status"], p["calls"], p.get("unfinished")) for p in archive.run["points"]}
    assert found == {
        "@root": ("captured", 2, 1),
        "0": ("captured", 2, 1),
        "1": ("captured", 1, None),
        "2": ("captured", 1, None),
    }


def test_an_output_is_recorded_whatever_a_later_hook_makes_of_the_arguments(path: Path) -> None:
    class Named(nn.Module):
        def forward(self, *, x: torch.Tensor) -> Any:
            return x * 2

    model = nn.ModuleDict({"named": Named()})
    with tensorcap.capture(model, path):
        model["named"](x=X)
        model["named"].register_forward_pre_hook(lambda m, a, k: (a, {"x": k["x"] + 1}), with_kwargs=True)
        model["named"](x=X)  # our hook does not come after the new one yet
        model["named"](x=X)
    with tensorcap.open_archive(path) as archive:
        found = {r.key.text: archive.load(r)[0, 0] for r in archive.records}
        assert found == {
            "0/named/input.x": 1,
            "0/named/output": 2,
            "0/named@1/input.x": 1,
            "0/named@1/output": 4,
            "0/named@2/input.x": 2,
            "0/named@2/output": 4,
        }
        entry = archive.run["points"][-1]
        assert (entry["slots"], entry["calls"]) == (["input"], 1)
    reason = "a hook that was added in the block came after ours and may have changed it"
    assert losses(path) == {"named/input": reason}


def test_a_hook_that_is_added_in_the_block_has_run_before_ours(path: Path, small: Any) -> None:
    with torch.no_grad(), tensorcap.capture(small, path):
        small[0].register_forward_hook(lambda module, args, output: output * 0 + 7)
        small(X)
    with tensorcap.open_archive(path) as archive:
        assert archive.load(archive.get("0/0/output")).tolist() == [[7] * 4]
        assert archive.load(archive.get("0/1/input.input")).tolist() == [[7] * 4]
    assert losses(path) == {}


def test_a_hook_that_is_added_during_the_call_is_reported(path: Path) -> None:
    class Adding(nn.Module):
        def forward(self, x: torch.Tensor) -> Any:
            self.register_forward_hook(lambda module, args, output: output + 1)
            return x

    with tensorcap.capture(Adding(), path) as cap:
        cap._model(X)
    assert list(losses(path)) == ["@root/output"]


def test_two_captures_of_one_module_tell_nothing_of_each_other(tmp_path: Path, small: Any) -> None:
    with (
        torch.no_grad(),
        tensorcap.capture(small, tmp_path / "a.h5"),
        tensorcap.capture(small[0], tmp_path / "b.h5"),
    ):
        small(X)
        small(X)
    assert losses(tmp_path / "a.h5") == losses(tmp_path / "b.h5") == {}


def test_hooks_that_somebody_removes_are_told(path: Path, small: Any) -> None:
    with torch.no_grad(), tensorcap.capture(small, path) as cap:
        small(X)
        small[1]._forward_hooks.clear()
        small[2]._forward_hooks.clear()
        small[2]._forward_pre_hooks.clear()
        small(X)
    removed = "its hook was removed before the block ended"
    assert losses(path) == {"1/output": removed, "2/output": removed}
    assert cap.summary is not None
    assert cap.summary.unfinished == {"1": 1}


@pytest.mark.parametrize(
    ("calls", "reason"),
    [
        pytest.param(["pause"], "the capture was paused when it returned", id="paused-within"),
        pytest.param(["pause", "resume", ""], "its call began before recording did", id="resumed-within"),
    ],
)
def test_a_call_that_is_paused_in_part_is_reported(path: Path, calls: list[str], reason: str) -> None:
    class Switching(nn.Module):
        def forward(self, x: torch.Tensor, switch: str) -> Any:
            if switch:
                getattr(cap, switch)()
            return x

    model = Switching()
    with tensorcap.capture(model, path) as cap:
        for switch in calls:
            model(X, switch)
    assert losses(path) == {"@root/output": reason}


def test_a_generators_result_is_reported_lost_and_its_calls_are_of_the_same_step(path: Path) -> None:
    class Streaming(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.child = nn.Identity()

        def forward(self, x: torch.Tensor) -> Iterator[torch.Tensor]:
            yield self.child(x)

    model = Streaming()
    with tensorcap.capture(model, path, inputs=False):
        list(model(X))
    assert keys(path) == ["0/@root/input.x", "0/child/output"]
    assert losses(path) == {"@root/output": "generator is not followed: that would use it up"}


def test_a_loss_that_was_not_asked_for_is_none(path: Path) -> None:
    class Sparse(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.child = nn.Identity()

        def forward(self, x: torch.Tensor) -> Any:
            return self.child(x), x.to_sparse()

    model = Sparse()
    for include in (["child"], ["*/child/*", "*/output.0"]):
        with tensorcap.capture(model, path, only=include) as cap:
            model(X)
        assert cap.summary is not None
        assert cap.summary.not_capturable == {}


def test_modules_that_come_in_during_the_block_are_told(path: Path, small: Any) -> None:
    with torch.no_grad(), tensorcap.capture(small, path) as cap:
        small(X)
        small[0] = nn.Linear(4, 4)
        small.append(nn.Sequential(nn.ReLU()))
        small.append(small[1])  # the same module under a further name
        small(X)
    added = "added in the block, so without a hook"
    assert losses(path) == {
        "0/output": "another module took its place in the block, without a hook",
        "3": added,
        "3.0": added,
    }
    assert cap.summary is not None
    assert set(cap.summary.not_capturable) == {"0/output", "3", "3.0"}


class Compiled(nn.Module):
    """Has a child inside a compiled forward, or a compiled method, and one outside of any."""

    def __init__(self) -> None:
        super().__init__()
        self.inside, self.outside = nn.Linear(4, 4), nn.Identity()

    def forward(self, x: torch.Tensor) -> Any:
        return self.part(x)

    def part(self, x: torch.Tensor) -> Any:
        return self.inside(x)


def test_what_a_compiled_forward_holds_is_inside_a_compiled_graph(path: Path) -> None:
    model: Any = nn.Sequential(Compiled())
    model[0].forward = torch.compile(model[0].forward, backend="eager")
    with torch.no_grad():
        model(X)  # compiled before the capture, so without hooks
        with tensorcap.capture(model, path):
            model(X)
    assert keys(path) == ["0/@root/input.input", "0/0/input.x", "0/0/output", "0/@root/output"]
    compiled = "inside a compiled graph (torch.compile); --eager runs it as plain code"
    assert losses(path) == {"0.inside": compiled, "0.outside": compiled}


def test_what_a_compiled_method_may_hold_is_not_simply_never_called(path: Path) -> None:
    model: Any = Compiled()
    model.part = torch.compile(model.part, backend="eager")
    with torch.no_grad():
        model(X)
        with tensorcap.capture(model, path):
            model(X)
    doubt = "not seen to be called, or inside code that torch.compile made before"
    assert losses(path) == {"inside": doubt, "outside": doubt}


@pytest.mark.parametrize("reentrant", [False, True], ids=["saved-tensors", "reentrant"])
def test_what_a_backward_pass_computes_anew_is_no_step_and_no_call(path: Path, reentrant: bool) -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(4, 4), nn.Tanh())

        def forward(self, x: torch.Tensor) -> Any:
            return checkpoint(self.inner, x, use_reentrant=reentrant)

    model = Block()
    with tensorcap.capture(model, path, inputs=False) as cap:
        for _ in range(2):
            model(torch.ones(1, 4, requires_grad=True)).sum().backward()
    assert [key for key in keys(path) if "inner" in key] == [
        f"{step}/{site}/output" for step in (0, 1) for site in ("inner.0", "inner.1", "inner")
    ]
    assert cap.summary is not None
    assert (cap.summary.steps, cap.summary.unfinished, cap.summary.not_capturable) == (2, {}, {})
    with tensorcap.open_archive(path) as archive:
        entry = next(p for p in archive.run["points"] if p["site"] == "inner.0")
    reason = "not recorded: calls of a backward pass to compute anew, 2"
    assert entry == {"site": "inner.0", "status": "captured", "calls": 2, "reason": reason}


def test_a_model_of_which_only_parts_are_called_says_that_there_is_one_step(path: Path, small: Any) -> None:
    with torch.no_grad(), tensorcap.capture(small, path, inputs=False) as cap:
        small[2](small[0](X))
        small[2](small[0](X))
    assert keys(path)[-1] == "0/2@1/output"
    assert cap.summary is not None
    assert (cap.summary.steps, cap.summary.never_called) == (1, ("@root", "1"))
    with tensorcap.open_archive(path) as archive:
        reason = "not seen to be called itself, so that all calls are of one step"
        assert archive.run["points"][0] == {
            "site": "@root",
            "status": "never-called",
            "calls": 0,
            "reason": reason,
        }


def test_a_step_begins_anew_after_an_exception_in_the_step_before(path: Path) -> None:
    class Failing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.child = nn.Identity()

        def forward(self, x: torch.Tensor, fail: bool) -> Any:
            x = self.child(x)
            if fail:
                raise ValueError
            return x

    model = Failing()
    with tensorcap.capture(model, path, inputs=False) as cap:
        for fail in (False, True, False):
            with contextlib.suppress(ValueError):
                model(X, fail)
    assert [key for key in keys(path) if "child" in key] == [f"{step}/child/output" for step in (0, 1, 2)]
    assert cap.summary is not None
    assert cap.summary.steps == 3


def test_a_masked_array_is_reported(path: Path) -> None:
    class Masked(nn.Module):
        def forward(self, x: torch.Tensor) -> Any:
            return x, np.ma.masked_array([1.0], [True])

    with tensorcap.capture(Masked(), path) as cap:
        cap._model(X)
    assert losses(path) == {"@root/output.1": "a masked array, whose mask would be lost"}
