from __future__ import annotations

import contextlib
import gc
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tensorcap
from tensorcap_formats.errors import CaptureError, UsageError


def keys(path: Path) -> list[str]:
    with tensorcap.open_archive(path) as archive:
        return [record.key.text for record in archive.records]


def points(path: Path) -> dict[str, tuple[Any, ...]]:
    with tensorcap.open_archive(path) as archive:
        return {
            p["site"] + "".join(f"/{s}" for s in p.get("slots", ())): (
                p["status"],
                p["calls"],
                p.get("reason"),
            )
            for p in archive.run["points"]
        }


class Loop(nn.Module):
    """Calls one child as often as it is told, and another never."""

    def __init__(self) -> None:
        super().__init__()
        self.step = nn.Linear(2, 2)
        self.spare = nn.Linear(2, 2)
        self.items = nn.ModuleList([nn.ReLU()])

    def forward(self, x: torch.Tensor, times: int = 1) -> Any:
        for _ in range(times):
            x = self.items[0](self.step(x))
        return x


def test_records_stand_in_execution_order(path: Path, small: Any) -> None:
    with torch.no_grad(), tensorcap.capture(small, path):
        small(torch.ones(1, 4))
    assert keys(path) == [
        "0/@root/input.input",
        "0/0/input.input",
        "0/0/output",
        "0/1/input.input",
        "0/1/output",
        "0/2/input.input",
        "0/2/output",
        "0/@root/output",
    ]


def test_a_step_is_a_forward_and_a_call_counts_within_it(path: Path) -> None:
    model = Loop()
    x = torch.ones(1, 2)
    with torch.no_grad(), tensorcap.capture(model, path, only="step", inputs=False) as cap:
        model.step(x)  # outside the model, so of the coming step
        model(x, times=2)
        model(x)
        model(x)
        model.step(x)  # outside the model again, so of the step before
    assert [k for k in keys(path) if "step" in k] == [
        "0/step/output",
        "0/step@1/output",
        "0/step@2/output",
        "1/step/output",
        "2/step/output",
        "2/step@1/output",
    ]
    assert cap.summary is not None
    assert cap.summary.steps == 3


def test_a_model_that_calls_itself_is_one_step(path: Path) -> None:
    class Recursive(nn.Module):
        def forward(self, x: torch.Tensor, depth: int = 0) -> Any:
            return self(x, depth + 1) + 1 if depth < 2 else x

    model = Recursive()
    with tensorcap.capture(model, path, exclude="*/input*"):
        model(torch.zeros(1))
        model(torch.zeros(1))
    assert [k for k in keys(path) if k.endswith("output")] == [
        "0/@root@2/output",
        "0/@root@1/output",
        "0/@root/output",
        "1/@root@2/output",
        "1/@root@1/output",
        "1/@root/output",
    ]


def test_an_exception_that_the_model_catches_leaves_steps_and_calls_right(path: Path) -> None:
    class Flaky(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Inner()

        def forward(self, x: torch.Tensor) -> Any:
            try:
                return self.inner(x, fail=True)
            except ValueError:
                return self.inner(x)

    class Inner(nn.Module):
        def forward(self, x: torch.Tensor, fail: bool = False) -> Any:
            if fail:
                raise ValueError
            return x + 1

    model = Flaky()
    with tensorcap.capture(model, path, inputs=False):
        model(torch.zeros(1))
        model(torch.zeros(1))
    assert [k for k in keys(path) if k.endswith("output")] == [
        "0/inner@1/output",
        "0/@root/output",
        "1/inner@1/output",
        "1/@root/output",
    ]
    assert points(path)["inner"] == ("captured", 4, None)


def test_a_failed_call_of_a_module_is_not_taken_for_the_call_around_it(path: Path) -> None:
    class Recursive(nn.Module):
        def forward(self, x: torch.Tensor, depth: int = 0) -> Any:
            if depth == 1:
                raise ValueError
            with contextlib.suppress(ValueError):
                self(x * 10, depth + 1)
            return x + 1

    model = Recursive()
    with tensorcap.capture(model, path):
        model(torch.zeros(1))
    assert keys(path) == ["0/@root/input.x", "0/@root@1/input.x", "0/@root/output"]
    assert points(path) == {"@root": ("captured", 2, None)}


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt], ids=["exception", "interrupt"])
def test_a_forward_that_failed_is_a_step_of_its_own(path: Path, error: type[BaseException]) -> None:
    class Fails(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Identity()

        def forward(self, x: torch.Tensor, fail: bool) -> Any:
            x = self.first(x)
            if fail:
                raise error
            return x

    model = Fails()
    with tensorcap.capture(model, path, inputs=False):
        with pytest.raises(error):
            model(torch.zeros(1), True)
        model(torch.zeros(1), False)
        model(torch.zeros(1), False)
    assert [k for k in keys(path) if k.endswith("output")] == [
        "0/first/output",
        "1/first/output",
        "1/@root/output",
        "2/first/output",
        "2/@root/output",
    ]


@pytest.mark.spec("ARC-71")
def test_each_point_ends_in_one_of_four_ways(path: Path) -> None:
    model = Loop()
    with torch.no_grad(), tensorcap.capture(model, path, exclude="items.0") as cap:
        model(torch.ones(1, 2), times=3)
    assert points(path) == {
        "@root": ("captured", 1, None),
        "step": ("captured", 3, None),
        "spare": ("never-called", 0, None),
        "items": ("never-called", 0, "has no forward of its own"),
        "items.0": ("excluded", 0, None),
    }
    assert cap.summary is not None
    assert cap.summary.never_called == ("spare",)
    assert cap.summary.excluded == ("items.0",)


def test_inputs_of_the_model_itself_are_always_recorded(path: Path, small: Any) -> None:
    with torch.no_grad(), tensorcap.capture(small, path, only="2", inputs=False):
        small(torch.ones(1, 4))
    assert keys(path) == ["0/@root/input.input", "0/2/output"]


@pytest.mark.parametrize(
    ("include", "exclude", "expected"),
    [
        pytest.param(
            ["1", "2"], [], ["0/1/input.input", "0/1/output", "0/2/input.input", "0/2/output"], id="sites"
        ),
        pytest.param(
            "*/output", ["2"], ["0/0/output", "0/1/output", "0/@root/output"], id="slots-but-a-site"
        ),
        pytest.param(["0/1/*"], ["*/input*"], ["0/1/output"], id="exclude-wins"),
        pytest.param(
            ["0", "0/2/output"], [], ["0/0/input.input", "0/0/output", "0/2/output"], id="site-or-key"
        ),
    ],
)
def test_globs_choose_sites_and_slots(
    path: Path, small: Any, include: Any, exclude: Any, expected: list[str]
) -> None:
    with torch.no_grad(), tensorcap.capture(small, path, only=include, exclude=exclude):
        small(torch.ones(1, 4))
    assert [k for k in keys(path) if k != "0/@root/input.input"] == expected


@pytest.mark.parametrize(
    ("glob", "hint"),
    [
        pytest.param("@roots", "Did you mean '@root'?", id="site"),
        pytest.param("0/@roots/output", "Did you mean '@root'?", id="site-in-a-key"),
        pytest.param("ReLU", None, id="nothing-near"),
        pytest.param("x.1/output", "A glob for keys begins with the step: '*/x.1/output'.", id="no-step"),
    ],
)
def test_a_glob_that_matches_no_module_is_refused_before_anything_is_hooked(
    path: Path, small: Any, hooks: Callable[[nn.Module], int], glob: str, hint: str | None
) -> None:
    with (
        pytest.raises(UsageError, match=r"Sequential: no module matches") as caught,
        tensorcap.capture(small, path, only=["2", glob]),
    ):
        pytest.fail("the block was entered")
    assert caught.value.hint == hint
    assert hooks(small) == 0
    assert not list(path.parent.iterdir())


def test_an_include_glob_of_which_nothing_was_captured_is_reported(path: Path) -> None:
    model = Loop()
    with (
        pytest.warns(UserWarning, match=r"^nothing was captured of 'spare', '7/\*'$") as told,
        torch.no_grad(),
        tensorcap.capture(model, path, only=["step", "spare", "7/*"]) as cap,
    ):
        model(torch.ones(1, 2))
    assert told[0].filename == __file__
    assert cap.summary is not None
    assert cap.summary.unmatched == ("spare", "7/*")


def test_nothing_captured_is_an_error_and_leaves_no_archive(path: Path, small: Any) -> None:
    with pytest.raises(CaptureError, match="nothing was captured, of 4 modules: 4 never-called"):  # noqa: SIM117
        with tensorcap.capture(small, path):
            pass
    assert not list(path.parent.iterdir())


@pytest.mark.parametrize(
    ("calls", "include", "hint"),
    [
        pytest.param(
            0,
            [],
            "Call the model in the block; what torch.compile made before the block is not seen.",
            id="not-called",
        ),
        pytest.param(
            1, "5/*", "The model was called; no record of its only step, 0, fits the globs.", id="one-step"
        ),
        pytest.param(
            2, "5/*", "The model was called; no record of its 2 steps fits the globs.", id="two-steps"
        ),
    ],
)
def test_the_hint_says_why_nothing_was_captured(
    path: Path, small: Any, calls: int, include: Any, hint: str
) -> None:
    def run() -> None:
        with torch.no_grad(), tensorcap.capture(small, path, only=include):
            for _ in range(calls):
                small(torch.ones(1, 4))

    with pytest.raises(CaptureError) as caught:
        run()
    assert caught.value.hint == hint


def test_inputs_of_the_model_alone_are_nothing_captured(path: Path) -> None:
    model = Loop()
    with pytest.raises(CaptureError), tensorcap.capture(model, path, only="spare"):
        model(torch.ones(1, 2))
    assert not list(path.parent.iterdir())


def test_pause_leaves_forwards_out_and_they_count_as_no_steps(path: Path, small: Any) -> None:
    x = torch.ones(1, 4)
    with torch.no_grad(), tensorcap.capture(small, path, only="@root", inputs=False) as cap:
        cap.pause()
        small(x)
        cap.resume()
        small(x * 2)
        with cap.paused():
            small(x * 3)
        small(x * 4)
    with tensorcap.open_archive(path) as archive:
        inputs = [archive.load(r)[0, 0] for r in archive.records if r.key.slot == "input.input"]
        assert inputs == [2, 4]
        assert archive.run["steps"] == 2


def test_a_pause_within_a_forward_leaves_the_count_right(path: Path) -> None:
    class Pausing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Identity(), nn.Identity()

        def forward(self, x: torch.Tensor) -> Any:
            x = self.a(x)
            cap.pause()
            x = self.b(x)
            cap.resume()
            return x

    model = Pausing()
    with tensorcap.capture(model, path, inputs=False) as cap:
        model(torch.ones(1))
        model(torch.ones(1))
    assert [k for k in keys(path) if k.endswith("output")] == [
        "0/a/output",
        "0/@root/output",
        "1/a/output",
        "1/@root/output",
    ]


def test_a_second_capture_of_the_same_model_is_refused(
    tmp_path: Path, small: Any, hooks: Callable[[nn.Module], int]
) -> None:
    with torch.no_grad(), tensorcap.capture(small, tmp_path / "a.h5"):
        with (
            pytest.raises(UsageError, match="is under capture already"),
            tensorcap.capture(small, tmp_path / "b.h5"),
        ):
            pytest.fail("the block was entered")
        small(torch.ones(1, 4))
    assert not (tmp_path / "b.h5").exists()
    assert hooks(small) == 0
    with torch.no_grad(), tensorcap.capture(small, tmp_path / "b.h5"):
        small(torch.ones(1, 4))


def test_a_model_of_no_known_framework_is_refused(path: Path) -> None:
    with pytest.raises(
        UsageError,
        match="no adapter for dict, expected a model of: coreai, executorch, flax, jax, max, onnx, torch",
    ):
        tensorcap.capture({}, path)


def test_nothing_keeps_a_tensor_or_a_graph_alive(path: Path, small: Any) -> None:
    kept: list[weakref.ref[Any]] = []
    for module in small.modules():
        module.register_forward_hook(lambda module, args, output: kept.append(weakref.ref(output)))
    with tensorcap.capture(small, path):
        output = small(torch.ones(1, 4, requires_grad=True))
        assert output.grad_fn is not None
        del output
        gc.collect()
        assert [reference() for reference in kept] == [None] * 4


def test_gradients_flow_as_without_capture(path: Path, small: Any) -> None:
    x = torch.ones(1, 4, requires_grad=True)
    small(x).sum().backward()
    expected = x.grad
    x.grad = None
    with tensorcap.capture(small, path):
        small(x).sum().backward()
    assert x.grad is not None
    assert expected is not None
    assert torch.equal(x.grad, expected)


def test_hooks_of_others_have_run_before_ours_see_a_value(path: Path, small: Any) -> None:
    small[0].register_forward_pre_hook(lambda module, args: (args[0] * 0 + 5,))
    small[0].register_forward_hook(lambda module, args, output: output * 0 + 7)
    with torch.no_grad(), tensorcap.capture(small, path):
        small(torch.ones(1, 4))
    with tensorcap.open_archive(path) as archive:
        assert archive.load(archive.get("0/0/input.input")).tolist() == [[5] * 4]
        assert archive.load(archive.get("0/0/output")).tolist() == [[7] * 4]
    assert (len(small[0]._forward_hooks), len(small[0]._forward_pre_hooks)) == (1, 1)


def test_a_mode_of_the_user_does_not_see_the_hooks(path: Path, small: Any) -> None:
    from torch.utils._python_dispatch import TorchDispatchMode

    class Counting(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch has not annotated it
        def __init__(self) -> None:
            super().__init__()  # type: ignore[no-untyped-call]  # as above
            self.names: list[str] = []

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.names.append(str(func))
            return func(*args, **(kwargs or {}))

    x = torch.ones(4, 2).t().expand(2, 4)  # not contiguous: recording it takes a copy
    model = nn.Linear(4, 2)
    with torch.no_grad():
        with Counting() as plain:
            model(x)
        with tensorcap.capture(model, path), Counting() as seen:
            model(x)
    assert seen.names == plain.names


def test_threads_do_not_mix_up_each_others_calls(path: Path) -> None:
    first_is_in, second_is_in, first_is_out = threading.Event(), threading.Event(), threading.Event()

    class Overlapping(nn.Module):
        def forward(self, x: torch.Tensor) -> Any:
            if x == 1:
                first_is_in.set()
                second_is_in.wait(20)
            else:
                second_is_in.set()
                first_is_out.wait(20)
            return x * 2

    class Holder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.child = Overlapping()

    def run_second() -> None:
        first_is_in.wait(20)
        model.child(torch.full((1,), 2.0))

    model = Holder()
    with tensorcap.capture(model, path):
        thread = threading.Thread(target=run_second)
        thread.start()
        model.child(torch.full((1,), 1.0))
        first_is_out.set()
        thread.join()
    with tensorcap.open_archive(path) as archive:
        found = {r.key.text: archive.load(r).tolist() for r in archive.records}
    assert found == {
        "0/child/input.x": [1],
        "0/child@1/input.x": [2],
        "0/child/output": [2],
        "0/child@1/output": [4],
    }


def test_threads_that_run_the_model_at_once_have_a_step_each(path: Path) -> None:
    class Meeting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.child = nn.Identity()

        def forward(self, x: torch.Tensor) -> Any:
            for _ in range(3):
                both_are_in.wait(20)
                x = self.child(x)
            return x

    model, both_are_in = Meeting(), threading.Barrier(2)
    with tensorcap.capture(model, path) as cap:
        threads = [threading.Thread(target=model, args=(torch.full((1,), value),)) for value in (1.0, 2.0)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert cap.summary is not None
    assert (cap.summary.tensors, cap.summary.steps, cap.summary.not_capturable) == (16, 2, {})
    with tensorcap.open_archive(path) as archive:
        found = {r.key.text: archive.load(r).item() for r in archive.records}
    for step in (0, 1):
        values = {value for key, value in found.items() if key.startswith(f"{step}/")}
        assert len(values) == 1
        assert {f"{step}/child/output", f"{step}/child@1/output", f"{step}/child@2/output"} <= found.keys()


def test_token_ids_are_hashed(path: Path) -> None:
    model = nn.Embedding(10, 2)
    with torch.no_grad(), tensorcap.capture(model, path):
        model(torch.tensor([[1, 2]], dtype=torch.int32))
    with tensorcap.open_archive(path) as archive:
        assert archive.run["inputs"] == {
            "0/@root/input.input": {
                # sha256sum of 0100000000000000 0200000000000000
                "sha256": "0c730b69905c5ef7a4ca5269f72365400bde2dd2c04eaf9bbb3d1c4a265a0131",
                "shape": [1, 2],
                "dtype": "int32",
            }
        }


def test_statistics_alone_can_be_kept(path: Path, small: Any) -> None:
    with torch.no_grad(), tensorcap.capture(small, path, stats_only=True) as cap:
        small(torch.ones(1, 4))
    assert cap.summary is not None
    assert (cap.summary.tensors, cap.summary.stored_bytes) == (8, 0)
    with tensorcap.open_archive(path) as archive:
        record = archive.get("0/0/input.input")
        assert not record.stored
        assert record.statistics is not None
        assert (record.statistics.minimum, record.statistics.mean, record.statistics.l2) == (1, 1, 2)
        with pytest.raises(UsageError, match="only its statistics were kept"):
            archive.read(record)


def test_a_dry_run_counts_and_writes_nothing(
    tmp_path: Path, small: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with torch.no_grad(), tensorcap.capture(small, None, inputs=False) as cap:
        small(torch.ones(1, 4))
    assert [(r.key.text, r.dtype.name, r.shape, r.nbytes) for r in cap.tally.records] == [
        ("0/@root/input.input", "float32", (1, 4), 16),
        ("0/0/output", "float32", (1, 4), 16),
        ("0/1/output", "float32", (1, 4), 16),
        ("0/2/output", "float32", (1, 2), 8),
        ("0/@root/output", "float32", (1, 2), 8),
    ]
    assert not list(tmp_path.iterdir())


@pytest.mark.spec("NAM-2")
def test_names_of_modules_and_fields_are_escaped(path: Path) -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.add_module("a/b c", nn.Identity())

        def forward(self, *values: Any, **more: Any) -> Any:
            self.get_submodule("a/b c")(values[0])
            return {"x/../y": values[1], 0: more["z"]}

    model = Named()
    with tensorcap.capture(model, path):
        model(torch.ones(1), torch.ones(2), z=torch.ones(3))
    assert keys(path) == [
        "0/@root/input.args.0",
        "0/@root/input.args.1",
        "0/@root/input.z",
        "0/a%2Fb%20c/input.input",
        "0/a%2Fb%20c/output",
        "0/@root/output.x%2F..%2Fy",
        "0/@root/output.0",
    ]


def test_progress_receives_the_model_as_a_stage_and_counts_its_tensors(path: Path, small: Any) -> None:
    class Stages:
        def __init__(self) -> None:
            self.texts: list[str] = []
            self.counts: list[tuple[int, int | None]] = []

        def stage(self, text: str) -> None:
            self.texts.append(text)

        def advance(self, done: int, total: int | None) -> None:
            self.counts.append((done, total))

    progress = Stages()
    with tensorcap.capture(small, path, only="2", inputs=False, progress=progress) as cap:
        small(torch.ones(1, 4))
    assert cap.summary is not None
    assert progress.texts == [
        f"capturing {type(small).__module__}.Sequential from "
        f"{nn.modules.container.__file__} in float32 on cpu"
    ]
    assert progress.counts == [(1, None), (2, None)]
