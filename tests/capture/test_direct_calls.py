"""Calls of `forward` that go past `__call__` are recorded as the others are."""

from __future__ import annotations

import copy
import functools
import inspect
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import tensorcap

X = torch.tensor([[1.0, -2.0]])


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(2, 3)
        self.down = nn.Linear(3, 2)

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        y: torch.Tensor = self.down(torch.relu(self.up(x)))
        return y * scale


class Model(nn.Module):
    """Calls one of its modules by `forward`, as wrappers of adapters do."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = Mlp()
        self.norm = nn.LayerNorm(2)

    def forward(self, x: torch.Tensor) -> Any:
        return self.norm(self.mlp.forward(x, scale=2.0))


class Inheriting(Mlp):
    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return super().forward(x, scale=scale) + 1


class Recursive(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor, depth: int = 2) -> Any:
        return self.layer(x) if depth == 0 else self.forward(x, depth - 1)


def keys(path: Path) -> list[str]:
    with tensorcap.open_archive(path) as archive:
        return [r.key.text for r in archive.records]


def load(path: Path, key: str) -> torch.Tensor:
    with tensorcap.open_archive(path) as archive:
        return torch.from_numpy(archive.load(archive.get(key)).copy())


def point(path: Path, site: str) -> dict[str, Any]:
    with tensorcap.open_archive(path) as archive:
        found: dict[str, Any] = next(p for p in archive.run["points"] if p["site"] == site)
        return found


def is_as_written(*classes: type) -> bool:
    """Whether `forward` is the function that stands in the source."""
    return all(vars(c)["forward"].__code__.co_filename == inspect.getfile(c) for c in classes)


@pytest.mark.spec("CAP-94")
def test_a_direct_call_is_recorded_with_what_it_is_given_and_returns(path: Path) -> None:
    model = Model().eval()
    with torch.no_grad():
        h = torch.relu(X @ model.mlp.up.weight.T + model.mlp.up.bias)
        inner = (h @ model.mlp.down.weight.T + model.mlp.down.bias) * 2.0
        plain = model(X)
        with tensorcap.capture(model, path):
            assert torch.equal(model(X), plain)
    assert keys(path) == [
        "0/@root/input.x",
        "0/mlp/input.x",
        "0/mlp.up/input.input",
        "0/mlp.up/output",
        "0/mlp.down/input.input",
        "0/mlp.down/output",
        "0/mlp/output",
        "0/norm/input.input",
        "0/norm/output",
        "0/@root/output",
    ]
    assert torch.equal(load(path, "0/mlp/input.x"), X)
    torch.testing.assert_close(load(path, "0/mlp/output"), inner)
    with tensorcap.open_archive(path) as archive:
        assert archive.values["0/mlp/input.scale"] == 2.0


@pytest.mark.spec("CAP-94")
def test_each_direct_call_of_the_model_is_a_step(path: Path) -> None:
    model = Model().eval()
    with torch.no_grad(), tensorcap.capture(model, path) as cap:
        for factor in (1, 2, 3):
            (model.forward if factor != 2 else model)(X * factor)
    assert cap.summary is not None
    assert cap.summary.steps == 3
    assert [load(path, f"{i}/@root/input.x").tolist() for i in range(3)] == [
        [[1.0, -2.0]],
        [[2.0, -4.0]],
        [[3.0, -6.0]],
    ]
    assert point(path, "@root") == {"site": "@root", "status": "captured", "calls": 3}


def test_what_a_subclass_passes_to_its_base_class_is_one_call(path: Path) -> None:
    model = nn.Sequential(Inheriting(), Mlp()).eval()  # both classes are looked at
    with torch.no_grad(), tensorcap.capture(model, path):
        plain = model[0](X)
        model[0].forward(X)
    assert torch.equal(load(path, "0/0/output"), plain)
    assert torch.equal(load(path, "0/0@1/output"), plain)
    assert point(path, "0")["calls"] == 2
    assert is_as_written(Mlp, Inheriting)


@pytest.mark.parametrize("method", ["__call__", "forward"])
def test_a_model_that_calls_its_own_forward_stays_in_its_step(path: Path, method: str) -> None:
    model = Recursive().eval()
    with torch.no_grad(), tensorcap.capture(model, path):
        getattr(model, method)(X)
        getattr(model, method)(X)
    found = [key for key in keys(path) if key.endswith("output")]
    assert found[:4] == ["0/layer/output", "0/@root@2/output", "0/@root@1/output", "0/@root/output"]
    assert found[4:] == ["1/layer/output", "1/@root@2/output", "1/@root@1/output", "1/@root/output"]


def test_a_method_between_call_and_forward_makes_no_second_call(path: Path) -> None:
    model = Model().eval()

    def new_forward(module: Any, *args: Any, **kwargs: Any) -> Any:  # as accelerate's hooks do it
        return module._old_forward(*args, **kwargs)

    with torch.no_grad(), tensorcap.capture(model, path):
        norm: Any = model.norm
        norm._old_forward = norm.forward
        norm.forward = functools.update_wrapper(functools.partial(new_forward, norm), norm._old_forward)
        model(X)
    assert point(path, "norm") == {"site": "norm", "status": "captured", "calls": 1}
    with torch.no_grad():
        assert torch.isfinite(model(X)).all()  # what it kept passes on


class Failing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.layer(x)
        raise ZeroDivisionError


def test_a_direct_call_that_fails_is_reported_and_leaves_the_class_as_it_was(path: Path) -> None:
    model = Failing()
    with torch.no_grad(), tensorcap.capture(model, path):
        with pytest.raises(ZeroDivisionError):
            model.forward(X)
        with pytest.raises(ZeroDivisionError):
            model.forward(X)
    assert point(path, "@root")["unfinished"] == 2
    assert keys(path)[-1] == "1/layer/output"
    with pytest.raises(ZeroDivisionError), tensorcap.capture(model, path):
        model.forward(X)
    assert is_as_written(Failing, nn.Linear)


def test_two_captures_that_share_classes_may_end_in_any_order(tmp_path: Path) -> None:
    models = [Model().eval(), Model().eval()]
    captures = [tensorcap.capture(m, tmp_path / f"{i}.h5") for i, m in enumerate(models)]
    with torch.no_grad():
        for cap, model in zip(captures, models, strict=True):
            cap.__enter__()
            model(X)
        captures[0].__exit__(None, None, None)
        models[0](X)
        models[1](X)
        captures[1].__exit__(None, None, None)
    assert point(tmp_path / "0.h5", "mlp")["calls"] == 1
    assert point(tmp_path / "1.h5", "mlp")["calls"] == 2
    assert is_as_written(Model, Mlp, nn.LayerNorm, nn.Linear)


def test_a_module_under_two_captures_is_recorded_in_both(tmp_path: Path) -> None:
    model = Model().eval()
    with (
        torch.no_grad(),
        tensorcap.capture(model, tmp_path / "all.h5"),
        tensorcap.capture(model.mlp, tmp_path / "mlp.h5"),
    ):
        model(X)
    assert torch.equal(load(tmp_path / "all.h5", "0/mlp/output"), load(tmp_path / "mlp.h5", "0/@root/output"))


def test_forward_looks_as_it_did(path: Path) -> None:
    model = Model()
    signature, spec = inspect.signature(model.mlp.forward), inspect.getfullargspec(model.mlp.forward)
    source, text = inspect.getsource(Mlp.forward), Mlp.forward.__qualname__
    with torch.no_grad(), tensorcap.capture(model, path):
        model(X)
        assert inspect.signature(model.mlp.forward) == signature
        assert inspect.getfullargspec(model.mlp.forward) == spec
        assert inspect.getsource(Mlp.forward) == source
        assert Mlp.forward.__qualname__ == text


def test_a_copy_and_a_pickle_hold_nothing_of_ours_and_are_not_recorded(path: Path) -> None:
    model = Model().eval()
    with torch.no_grad(), tensorcap.capture(model, path):
        model(X)
        data = pickle.dumps((model, model.mlp.forward))
        copy.deepcopy(model).mlp.forward(X)
        pickle.loads(data)[0].mlp.forward(X)
    assert b"tensorcap" not in data
    assert point(path, "mlp")["calls"] == 1


def test_a_forward_that_somebody_sets_in_the_block_stays(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Mlp, "forward", Mlp.forward)  # set back in the end
    model, original = Model().eval(), Mlp.forward

    def patched(self: Any, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return original(self, x, scale=scale) + 1

    with torch.no_grad():
        plain = model(X)
        with tensorcap.capture(model, path):
            model(X)
            Mlp.forward = patched  # type: ignore[method-assign]
            assert not torch.equal(model.mlp.forward(X, scale=2.0), load_mlp(model))
    assert Mlp.forward is patched
    assert not torch.equal(model.mlp.forward(X), plain)


def load_mlp(model: Model) -> torch.Tensor:
    h = torch.relu(X @ model.mlp.up.weight.T + model.mlp.up.bias)
    return (h @ model.mlp.down.weight.T + model.mlp.down.bias) * 2.0


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mlp = Mlp()

    def forward(self, x: torch.Tensor) -> Any:
        return checkpoint(self.mlp.forward, x, use_reentrant=False)


def test_what_a_backward_computes_anew_by_forward_is_not_recorded(path: Path) -> None:
    model = Checkpointed()
    with tensorcap.capture(model, path):
        model(X.clone().requires_grad_()).sum().backward()
    assert point(path, "mlp")["calls"] == 1
    assert "anew, 1" in point(path, "mlp")["reason"]


@pytest.mark.spec("CAP-94")
def test_a_module_with_a_forward_of_its_own_is_not_seen_to_be_called_directly(path: Path) -> None:
    model = Model().eval()
    mlp: Any = model.mlp
    mlp.forward = mlp.forward
    with torch.no_grad(), tensorcap.capture(model, path):
        model(X)
    assert point(path, "mlp")["status"] == "never-called"


def test_a_compiler_sees_the_forward_as_it_was(path: Path) -> None:
    model = Model().eval()
    with torch.no_grad():
        plain = model(X)
        with tensorcap.capture(model, path):
            model(X)
            compiled = torch.compile(model, backend="eager", fullgraph=True)
            assert torch.equal(compiled(X), plain)
    torch._dynamo.reset()


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize(
    ("make", "level"),
    [
        pytest.param(torch.jit.script, "module", id="script"),
        pytest.param(torch.jit.script, "op", id="script-op"),
        pytest.param(
            functools.partial(torch.jit.trace, example_inputs=X, check_trace=False), "module", id="trace"
        ),
        pytest.param(torch.fx.symbolic_trace, "module", id="fx"),
        pytest.param(torch.fx.symbolic_trace, "op", id="fx-op"),
    ],
)
def test_a_model_is_scripted_and_traced_in_the_block_as_without_it(
    path: Path, make: Callable[[nn.Module], Any], hooks: Callable[[nn.Module], int], level: Any
) -> None:
    model = nn.Sequential(Mlp(), Mlp()).eval()
    with torch.no_grad():
        plain = model(X)
        with tensorcap.capture(model, path, level=level):
            model(X)
            made = make(model)
            assert torch.equal(made(X), plain)
            model(X * 2)
    assert hooks(model) == 0
    assert is_as_written(Mlp)
    assert torch.equal(load(path, "0/@root/output"), plain)
    assert load(path, "1/@root/input.input").tolist() == [[2.0, -4.0]]
    assert point(path, "@root")["calls"] == 2
