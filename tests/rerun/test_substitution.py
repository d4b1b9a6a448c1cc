"""Archived tensors stand in the place of a model's own, which are recorded first."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import tensorcap
from tensorcap.adapters import adapter_for
from tensorcap.adapters.edits import CallMutation
from tensorcap.recording import Substitution
from tensorcap.workload import Workload
from tensorcap_formats.errors import TensorNotFoundError, UsageError
from tensorcap_formats.keys import Key
from tensorcap_formats.open import open_archive
from tests.rerun.conftest import Archived, slot_of

Substituted = Callable[..., Any]
ONES = np.ones((1, 2), np.float32)
X = torch.tensor([[1.0, -2.0]])


class Twice(nn.Module):
    """Calls one module twice: once as usual, once by keyword."""

    def __init__(self) -> None:
        super().__init__()
        self.act = nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first: torch.Tensor = self.act(x)
        second: torch.Tensor = self.act(input=first + 1)
        return first * 100 + second


class Taking(nn.Module):
    """Gives its argument, whatever it is, to the module in it."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Any) -> Any:
        return self.inner(x)


class Echo(nn.Module):
    def forward(self, x: Any) -> Any:
        self.seen = x
        return x


def inner(array: np.ndarray[Any, Any], slot: str = "input.x") -> dict[str, np.ndarray[Any, Any]]:
    return {f"0/inner/{slot}": array}


@pytest.mark.spec("INJ-2")
def test_each_call_gets_its_own_tensor_and_the_natural_one_is_recorded(
    archived: Archived, substituted: Substituted
) -> None:
    archive = archived({"0/act/input.input": 7 * ONES, "0/act@1/input.input": 9 * ONES})
    result, cap = substituted(Twice(), Substitution(archive), X)
    assert torch.equal(result, torch.full((1, 2), 709.0))
    with open_archive(cap.path) as out:
        assert out.load(out.get("0/act/input.input")).tolist() == [[1.0, -2.0]]
        assert out.load(out.get("0/act@1/input.input")).tolist() == [[8.0, 8.0]]


@pytest.mark.spec("INJ-1")
def test_only_chosen_calls_and_steps_are_replaced(archived: Archived, tmp_path: Path) -> None:
    keys = [f"{step}/act{call}/input.input" for step in (0, 1) for call in ("", "@1")]
    archive = archived(dict.fromkeys(keys, 7 * ONES))
    substitution = Substitution(archive, steps="1", calls=[1])
    model = Twice()
    with torch.no_grad(), tensorcap.capture(model, tmp_path / "out.h5", substitution=substitution):
        first, second = model(X), model(X)
    assert torch.equal(first, X * 100 + X + 1)
    assert torch.equal(second, X * 100 + 7)
    assert [slot.describe()["calls"] for slot in substitution.slots] == [{"1": "1"}]


@pytest.mark.spec("INJ-1")
def test_results_are_replaced_where_globs_say_so_and_arguments_then_are_not(
    archived: Archived, substituted: Substituted
) -> None:
    archive = archived({"0/act/input.input": 7 * ONES, "0/act/output": 5 * ONES})
    substitution = Substitution(archive, outputs="act")
    result, cap = substituted(Twice(), substitution, X)
    assert torch.equal(result, torch.full((1, 2), 506.0))
    with open_archive(cap.path) as out:
        assert out.load(out.get("0/act/output")).tolist() == [[1.0, -2.0]]
        assert out.load(out.get("0/act@1/input.input")).tolist() == [[6.0, 6.0]]


@pytest.mark.spec("INJ-1")
def test_what_cannot_be_chosen_is_refused(archived: Archived, tmp_path: Path) -> None:
    archive = archived({"0/act/input.input": ONES, "rank1/0/other/input.x": ONES})
    with pytest.raises(TensorNotFoundError, match="no tensor 'axt'"):
        Substitution(archive, inputs="axt")
    with pytest.raises(UsageError, match="is of another rank than 0"):
        Substitution(archive)
    with pytest.raises(UsageError, match="holds no inputs"):
        Substitution(archive, inputs="act", steps="5")
    with pytest.raises(UsageError, match="none of its 1 sites is a module of the model: act"):
        tensorcap.capture(
            Echo(), tmp_path / "o.h5", substitution=Substitution(archive, inputs="act")
        ).__enter__()
    with tensorcap.capture(Twice(), tmp_path / "stats.h5", stats_only=True) as cap:
        cap._model(X)
    with open_archive(tmp_path / "stats.h5") as stats, pytest.raises(UsageError, match="only its statistics"):
        Substitution(stats)


Pair = namedtuple("Pair", "one two")


@dataclass
class Held:
    x: Any
    flag: bool = True


@pytest.mark.spec("INJ-3")
@pytest.mark.parametrize(
    ("value", "name", "get"),
    [
        ((X, 1), "0", lambda v: v[0]),
        ([X, None], "0", lambda v: v[0]),
        ({"a": [X]}, "a.0", lambda v: v["a"][0]),
        (OrderedDict(a=X), "a", lambda v: v["a"]),
        (Pair(1, X), "two", lambda v: v.two),
        (Held((X,)), "x.0", lambda v: v.x[0]),
    ],
)
def test_leaves_are_exchanged_and_what_holds_them_is_copied(
    archived: Archived, substituted: Substituted, value: Any, name: str, get: Callable[[Any], Any]
) -> None:
    model = Taking(Echo())
    result, _ = substituted(model, Substitution(archived(inner(7 * ONES, f"input.x.{name}"))), value)
    assert type(result) is type(value)
    assert get(result).tolist() == [[7.0, 7.0]]
    assert get(value) is X
    assert X.tolist() == [[1.0, -2.0]]


class Cache:
    def __init__(self) -> None:
        self.keys = X.clone()


@pytest.mark.spec("INJ-3", "INJ-21")
def test_what_an_object_holds_stays_as_it_is_and_is_reported(
    archived: Archived, substituted: Substituted
) -> None:
    cache, substitution = Cache(), Substitution(archived(inner(7 * ONES, "input.x.keys")))
    result, _ = substituted(Taking(Echo()), substitution, cache)
    assert result is cache
    assert torch.equal(cache.keys, X)
    (slot,) = substitution.slots
    assert slot.describe() == {
        "site": "inner",
        "slot": "input.x.keys",
        "status": "left",
        "injected": 0,
        "archived": 1,
        "reason": "an object holds it that the model goes on writing to, such as a cache",
    }


@pytest.mark.spec("INJ-4")
def test_each_injection_is_a_copy_with_the_strides_of_the_natural_tensor(
    archived: Archived, tmp_path: Path
) -> None:
    class Writing(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            assert x.stride() == (1, 3)
            return x.add_(1)

    model = Taking(Writing())
    transposed = torch.zeros(2, 3).T
    wanted = np.arange(6, dtype=np.float32).reshape(3, 2)
    archive = archived({"0/inner/input.x": wanted, "1/inner/input.x": wanted})
    with torch.no_grad(), tensorcap.capture(model, tmp_path / "o.h5", substitution=Substitution(archive)):
        first, second = model(transposed), model(transposed)
    assert first.tolist() == second.tolist() == (wanted + 1).tolist()
    assert transposed.tolist() == (wanted + 1).tolist()  # what the call wrote, as without an injection


@pytest.mark.spec("INJ-4")
def test_a_tensor_that_is_handed_over_twice_stays_one(archived: Archived, substituted: Substituted) -> None:
    class Same(nn.Module):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> bool:
            return x is y

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Same()

        def forward(self, x: torch.Tensor) -> bool:
            return bool(self.inner(x, x))

    equal = archived({"0/inner/input.x": ONES, "0/inner/input.y": ONES})
    assert substituted(Both(), Substitution(equal), X)[0] is True
    unlike = archived({"0/inner/input.x": ONES, "0/inner/input.y": 2 * ONES})
    assert substituted(Both(), Substitution(unlike), X)[0] is False


@pytest.mark.spec("INJ-4")
def test_gradients_go_on_to_the_natural_tensor(archived: Archived, tmp_path: Path) -> None:
    class Squared(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x**2

    model, x = Taking(Squared()), X.clone().requires_grad_()
    substitution = Substitution(archived(inner(7 * ONES)))
    with tensorcap.capture(model, tmp_path / "out.h5", substitution=substitution):
        model(x * 3).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [[42.0, 42.0]]  # 3 * 2 * 7


LEAST = float(np.finfo(np.float32).min)


@pytest.mark.spec("INJ-5")
@pytest.mark.parametrize(
    ("values", "natural", "found", "cast"),
    [
        ([1 / 3], torch.bfloat16, [0.333984375], "float32 to bfloat16"),
        (
            [0.0, LEAST],
            torch.bfloat16,
            [0.0, float(torch.finfo(torch.bfloat16).min)],
            "float32 to bfloat16, mask sentinels to -3.38953e+38",
        ),
        ([0.0, -1e9], torch.float16, [0.0, -65504.0], "float32 to float16, mask sentinels to -65504"),
        ([0.0, -np.inf], torch.float16, [0.0, -np.inf], "float32 to float16"),
        ([0.0, LEAST], torch.bool, [True, False], "float32 to bool, as a mask"),
        (np.array([True, False]), torch.float16, [0.0, -65504.0], "bool to float16, as a mask"),
        (np.array([3, -1], np.int64), torch.int32, [3, -1], "int64 to int32"),
        (np.array([1, 0], np.int32), torch.bool, [True, False], "int32 to bool"),
        (np.array([True, False]), torch.int64, [1, 0], "bool to int64"),
    ],
)
def test_values_take_the_natural_dtype_and_the_cast_is_kept(
    archived: Archived,
    substituted: Substituted,
    values: Any,
    natural: torch.dtype,
    found: list[Any],
    cast: str,
) -> None:
    array = values if isinstance(values, np.ndarray) else np.array(values, np.float32)
    substitution = Substitution(archived(inner(array)))
    result, cap = substituted(Taking(Echo()), substitution, torch.zeros(len(array), dtype=natural))
    assert result.dtype == natural
    assert result.tolist() == found
    with open_archive(cap.path) as out:
        (slot,) = out.run["injected"]["slots"]
    assert slot["casts"] == {cast: 1}


@pytest.mark.spec("INJ-5")
@pytest.mark.parametrize(
    ("array", "own", "found"),
    [
        pytest.param(np.array([0, 1], np.float32), torch.tensor([False, False]), [False, True], id="ones"),
        pytest.param(
            np.array([0, 0], np.float32), torch.tensor([False, False]), [False, False], id="no-padding"
        ),
        pytest.param(np.zeros(2, np.float32), torch.tensor([True, True]), [True, True], id="all-attend"),
        pytest.param(np.array([False, True]), torch.tensor([0.0, 1.0]), [0.0, 1.0], id="true-is-1"),
        pytest.param(np.array([False, False]), torch.zeros(2), [0.0, 0.0], id="none-is-true"),
    ],
)
def test_masks_of_ones_and_zeros_are_read_as_the_models_own_are(
    archived: Archived, substituted: Substituted, array: Any, own: torch.Tensor, found: list[Any]
) -> None:
    result, _ = substituted(Taking(Echo()), Substitution(archived(inner(array))), own)
    assert (result.dtype, result.tolist()) == (own.dtype, found)


@pytest.mark.spec("INJ-5")
@pytest.mark.parametrize(
    ("array", "natural", "message"),
    [
        (np.array([70000.0], np.float32), torch.float16, "70000 is beyond the range of float16"),
        (np.array([300]), torch.int8, "whole numbers of int64 to int8 change"),
        (np.array([2]), torch.bool, "whole numbers of int64 to bool change"),
        (np.array([-1]), torch.uint8, "whole numbers of int64 to uint8 change"),
        (np.array([1.0], np.float32), torch.int64, "float32 in the archive, int64 in the model"),
        (np.array([0.5], np.float32), torch.bool, "float32 in the archive, bool in the model"),
        (np.array([1]), torch.float32, "int64 in the archive, float32 in the model"),
    ],
)
def test_values_that_do_not_fit_are_an_error(
    archived: Archived, substituted: Substituted, array: Any, natural: torch.dtype, message: str
) -> None:
    with pytest.raises(UsageError, match=f"0/inner/input.x: does not fit: {message}"):
        substituted(Taking(Echo()), Substitution(archived(inner(array))), torch.zeros(1, dtype=natural))


@pytest.mark.spec("INJ-6")
@pytest.mark.parametrize(
    ("archived_shape", "shape", "step"),
    [
        ((1, 3, 4), (3, 4), "unsqueeze 0"),
        ((3, 4), (1, 3, 4), "squeeze 0"),
        ((2, 4, 3), (2, 3, 4), "transpose 1 2"),
        ((2, 3), (2, 4), None),
        ((12,), (3, 4), None),
    ],
)
def test_another_shape_names_both_and_the_step_that_would_fit(
    archived: Archived,
    substituted: Substituted,
    archived_shape: tuple[int, ...],
    shape: tuple[int, ...],
    step: str | None,
) -> None:
    archive = archived(inner(np.zeros(archived_shape, np.float32)))
    with pytest.raises(UsageError) as caught:
        substituted(Taking(Echo()), Substitution(archive), torch.zeros(shape))
    told = f"0/inner/input.x: does not fit: {list(archived_shape)} in the archive, {list(shape)} in the model"
    assert told in str(caught.value)
    assert caught.value.hint == (step and f"A mapping with the step {step!r} would make it fit.")


@pytest.mark.spec("INJ-6")
def test_an_error_that_the_model_catches_is_raised_in_the_end(
    archived: Archived, substituted: Substituted
) -> None:
    class Careless(Taking):
        def forward(self, x: Any) -> Any:
            try:
                return self.inner(x)
            except ValueError:
                return x

    archive = archived(inner(np.zeros(3, np.float32)))
    with pytest.raises(UsageError, match="does not fit"):
        substituted(Careless(Echo()), Substitution(archive), X)


@pytest.mark.spec("INJ-7")
def test_a_model_has_no_trace_of_it_also_after_an_error(archived: Archived, substituted: Substituted) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.TransformerEncoderLayer(2, 1, 4, batch_first=True)).eval()
    x = torch.randn(1, 3, 2)
    with torch.no_grad():
        before = model(x)
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    shapes = {name: sorted(vars(module)) for name, module in model.named_modules()}
    forwards = {type(module): type(module).forward for module in model.modules()}
    good, bad = np.ones((1, 3, 2), np.float32), np.ones((1, 5, 2), np.float32)
    substituted(model, Substitution(archived({"0/0/input.input": good, "0/1/input.src": good})), x)
    with pytest.raises(UsageError):
        substituted(model, Substitution(archived({"0/1/input.src": bad})), x)
    with torch.no_grad():
        assert torch.equal(model(x), before)
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())
    assert {name: sorted(vars(module)) for name, module in model.named_modules()} == shapes
    assert {type(module): type(module).forward for module in model.modules()} == forwards
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


@pytest.mark.spec("INJ-2")
def test_a_fused_layer_and_a_forward_that_is_called_directly_take_part(
    archived: Archived, substituted: Substituted
) -> None:
    class Direct(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Echo()

        def forward(self, x: torch.Tensor) -> Any:
            return self.inner.forward(x=x)

    result, _ = substituted(Direct(), Substitution(archived(inner(7 * ONES))), X)
    assert result.tolist() == [[7.0, 7.0]]
    fused = Taking(nn.TransformerEncoderLayer(2, 1, 4, batch_first=True)).eval()
    wanted = torch.randn(1, 3, 2)
    torch.backends.mha.set_fastpath_enabled(False)  # a hook has the layer computed in parts
    with torch.no_grad():
        expected = fused(wanted)
    torch.backends.mha.set_fastpath_enabled(True)
    found, _ = substituted(
        fused, Substitution(archived(inner(wanted.numpy(), "input.src"))), torch.zeros(1, 3, 2)
    )
    assert torch.equal(found, expected)


@pytest.mark.spec("CAP-72")
def test_a_fused_layer_whose_call_is_made_again_is_computed_in_parts(archived: Archived) -> None:
    model = Taking(nn.TransformerEncoderLayer(2, 2, 4, batch_first=True)).eval()
    x, given = torch.randn(1, 3, 2), np.ones((1, 3, 2), np.float32)
    tensors = {"0/inner/input.src": x.numpy(), "0/inner.norm2/output": given}  # a kernel ignores the second
    substitution = Substitution(archived(tensors), keys=set(tensors))
    rerun = adapter_for(model).rerun(
        Workload(model, (x,)), substitution, "inner", Key.parse("0/inner/output")
    )
    assert rerun is not None
    made = rerun.run(CallMutation())
    assert made is not None
    assert made.tolist() == given.tolist()


@pytest.mark.spec("INJ-21")
def test_each_slot_ends_in_exactly_one_way(archived: Archived, substituted: Substituted) -> None:
    class Some(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.idle, self.two = Echo(), Echo(), nn.Bilinear(2, 2, 2)

        def forward(self, x: torch.Tensor) -> Any:
            return self.two(self.one(x), x)

    archive = archived(
        {
            "0/one/input.x": ONES,
            "0/one@1/input.x": ONES,
            "0/idle/input.x": ONES,
            "0/two/input.input1": ONES,
            "0/two/input.gone": ONES,
            "0/missing/input.x": ONES,
        }
    )
    substitution = Substitution(archive)
    _, cap = substituted(Some(), substitution, X)
    told = {f"{s.site}/{s.slot}": (s.status, s.count, s.archived) for s in substitution.slots}
    assert told == {
        "one/input.x": ("injected", 1, 2),
        "idle/input.x": ("never-called", 0, 1),
        "two/input.input1": ("injected", 1, 1),
        "two/input.gone": ("left", 0, 1),
        "missing/input.x": ("never-called", 0, 1),
        "two/input.input2": ("not-in-archive", 0, 0),
    }
    assert slot_of(substitution, "two", "input.input2").absent == ["0/two/input.input2"]
    assert slot_of(substitution, "missing", "input.x").reason == "the model has no such module"
    with open_archive(cap.path) as out:
        assert out.run["injected"] == substitution.describe()


def test_level_export_runs_a_graph_in_which_nothing_is_substituted(
    archived: Archived, tmp_path: Path
) -> None:
    substitution = Substitution(archived(inner(ONES)))
    cap = tensorcap.capture(Taking(Echo()), tmp_path / "o.h5", level="export", substitution=substitution)
    with pytest.raises(UsageError, match="level export"):
        cap.__enter__()
