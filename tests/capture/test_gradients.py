"""Gradients and parameters; expected values by numpy or by torch.autograd.grad on a plain run, in float64."""

from __future__ import annotations

import copy
import gc
import pickle
import re
import warnings
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import tensorcap
from tensorcap.adapters.torch import gradients
from tensorcap.comparison.preflight import preflight
from tensorcap.session import capture_workload
from tensorcap_formats.errors import UsageError


def keys(path: Path, kind: str = "grad_") -> list[str]:
    with tensorcap.open_archive(path) as archive:
        return [r.key.text for r in archive.records if r.key.slot.startswith(kind)]


def values(path: Path) -> dict[str, Any]:
    with tensorcap.open_archive(path) as archive:
        return {r.key.text: archive.load(r) for r in archive.records}


def lost(cap: Any) -> dict[str, str]:
    assert cap.summary is not None
    return dict(cap.summary.not_capturable)


class Block(nn.Module):
    """A linear layer whose result is used twice: by an activation that writes in place, and beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.act = nn.Linear(3, 3), nn.ReLU(inplace=True)

    def forward(self, x: torch.Tensor) -> Any:
        h = self.fc(x)
        return self.act(h * 2) + h


@pytest.fixture
def x() -> torch.Tensor:
    return torch.tensor([[1.0, -2.0, 0.5], [0.25, 3.0, -1.0]], dtype=torch.float64)


@pytest.mark.spec("CAP-60")
def test_gradients_are_those_of_all_uses_of_a_tensor(path: Path, x: torch.Tensor) -> None:
    model = Block().double()
    with tensorcap.capture(model, path, grads=True):
        (model(x) ** 2).sum().backward()
    w, b = (p.detach().numpy() for p in model.fc.parameters())
    h = x.numpy() @ w.T + b
    y = np.maximum(2 * h, 0) + h
    dy = 2 * y
    dh = dy * np.where(h > 0, 3, 1)
    expected = {
        "0/@root/grad_output": dy,
        "0/act/grad_output": dy,
        "0/act/grad_input.input": dy * (h > 0),
        "0/fc/grad_output": dh,
        "0/fc/grad_param.weight": dh.T @ x.numpy(),
        "0/fc/grad_param.bias": dh.sum(0),
    }
    found = values(path)
    assert sorted(k for k in found if "grad_" in k) == sorted(expected)
    for key, value in expected.items():
        np.testing.assert_allclose(found[key], value, rtol=1e-13, err_msg=key)


@pytest.mark.spec("CAP-60")
def test_a_gradient_is_that_of_the_value_that_was_recorded(path: Path) -> None:
    class Overwriting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.part = nn.Identity(), nn.Identity()

        def forward(self, x: torch.Tensor) -> Any:
            y = self.first(x * 1)
            before = self.part(y[:2]).sum() * 7
            y.mul_(3)
            return y.sum() + before

    model = Overwriting()
    with tensorcap.capture(model, path, grads=True, inputs=False):
        model(torch.ones(4, requires_grad=True)).backward()
    found = values(path)
    # what follows the writing counts as far as it goes through the value from before
    assert found["0/first/grad_output"].tolist() == [10, 10, 3, 3]
    assert found["0/part/grad_output"].tolist() == [7, 7]


@pytest.mark.spec("CAP-61")
def test_a_gradient_belongs_to_the_step_and_the_call_of_its_forward(path: Path) -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Linear(1, 1, bias=False)

        def forward(self, x: torch.Tensor) -> Any:
            return self.scale(self.scale(x))

    model = Twice().double()
    model.scale.weight.data.fill_(3)
    with tensorcap.capture(model, path, grads=True, inputs=False):
        first = model(torch.ones(1, 1, dtype=torch.float64))
        second = model(torch.ones(1, 1, dtype=torch.float64) * 10)
        (second * 2).backward()
        first.backward()
    found = {k: v.item() for k, v in values(path).items() if "grad_" in k}
    assert found == {
        "1/@root/grad_output": 2,
        "1/scale@1/grad_output": 2,
        "1/scale/grad_output": 6,
        "1/scale/grad_param.weight": 2 * 2 * 3 * 10,
        "0/@root/grad_output": 1,
        "0/scale@1/grad_output": 1,
        "0/scale/grad_output": 3,
        "0/scale/grad_param.weight": 120 + 2 * 3,  # what `.grad` holds then
    }


@pytest.mark.spec("CAP-61")
def test_a_parameter_gradient_has_its_step_where_no_activation_is_recorded_too(path: Path) -> None:
    model = nn.Sequential(nn.Linear(1, 1, bias=False))
    with tensorcap.capture(model, path, grads=True, only="*/grad_param.*"):
        first = model(torch.full((1, 1), 2.0))
        model(torch.full((1, 1), 3.0))
        first.backward()
    assert keys(path) == ["0/0/grad_param.weight"]


@pytest.mark.spec("CAP-61")
def test_the_second_gradient_of_a_tensor_has_a_slot_of_its_own(path: Path) -> None:
    model = nn.Linear(1, 1, bias=False)
    with tensorcap.capture(model, path, grads=True, inputs=False):
        y = model(torch.full((1, 1), 5.0))
        y.backward(retain_graph=True)
        (y * 3).backward()
    assert {k: v.item() for k, v in values(path).items() if "grad_" in k} == {
        "0/@root/grad_output": 1,
        "0/@root/grad_param.weight": 5,
        "0/@root/grad_output:2": 3,
        "0/@root/grad_param.weight:2": 20,
    }


def test_a_double_backward_goes_through_the_same_tensors(path: Path) -> None:
    class Cube(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.square = nn.Identity()

        def forward(self, x: torch.Tensor) -> Any:
            return self.square(x * x) * x

    model = Cube()
    x = torch.tensor(2.0, requires_grad=True)
    with tensorcap.capture(model, path, grads=True, inputs=False):
        (slope,) = torch.autograd.grad(model(x), x, create_graph=True)
        torch.autograd.backward(slope)
    assert (slope.item(), x.grad.item() if x.grad is not None else None) == (12, 12)  # 3 x^2 and 6 x
    found = values(path)
    assert found["0/square/grad_output"].item() == 2  # x
    assert found["0/square/grad_output:2"].item() == 1


class Deep(nn.Module):
    """Blocks under checkpoints, one of them run twice, with a layer that two of them share."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.shared = nn.Linear(4, 4)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(4, 4), self.shared, nn.Tanh(), self.shared, nn.Dropout(0.5))
            for _ in range(2)
        )
        self.double()

    def forward(self, x: torch.Tensor) -> Any:
        for block in (*self.blocks, self.blocks[0]):
            x = x + self.run(block, x)
        return x

    def run(self, block: nn.Module, x: torch.Tensor) -> Any:
        if self.how == "plain":
            return block(x)
        if self.how == "nested":
            inner = lambda y: checkpoint(block, y, use_reentrant=True)  # noqa: E731
            return checkpoint(inner, x, use_reentrant=True)
        if self.how == "mixed":
            inner = lambda y: checkpoint(block, y, use_reentrant=False)  # noqa: E731
            return checkpoint(inner, x, use_reentrant=True)
        return checkpoint(block, x, use_reentrant=self.how == "reentrant")


@pytest.mark.spec("CAP-62")
@pytest.mark.parametrize("how", ["saved-tensors", "reentrant", "nested", "mixed"])
def test_under_checkpoints_gradients_are_those_without_and_each_comes_once(tmp_path: Path, how: str) -> None:
    def run(how: str) -> dict[str, Any]:
        torch.manual_seed(0)
        model = Deep(how)
        x = torch.randn(2, 4, dtype=torch.float64, requires_grad=True)
        path = tmp_path / f"{how}.h5"
        with tensorcap.capture(model, path, grads=True, inputs=False) as cap:
            for _ in range(2):
                model(x).square().sum().backward()
        assert lost(cap) == {}
        return {k: v for k, v in values(path).items() if "grad_" in k}

    expected, found = run("plain"), run(how)
    if how != "saved-tensors":  # each of the three parts adds to the `.grad` of what they share
        assert "1/shared/grad_param.weight:3" in found
        found = {re.sub(r":\d$", "", key): value for key, value in found.items()}  # the last one stays
    assert sorted(found) == sorted(expected)
    for key, value in expected.items():
        np.testing.assert_allclose(found[key], value, rtol=1e-12, err_msg=key)


def test_a_reentrant_checkpoint_run_twice_gives_second_gradients(path: Path) -> None:
    model: Any = Deep("reentrant")
    x = torch.ones(1, 4, dtype=torch.float64, requires_grad=True)
    with tensorcap.capture(model, path, grads=True, inputs=False):
        loss = model(x).sum()
        loss.backward(retain_graph=True)
        loss.backward()
    found = values(path)
    for key in ("0/blocks.1.0/grad_output", "0/shared@5/grad_output"):
        assert np.array_equal(found[key], found[f"{key}:2"])
        assert f"{key}:3" not in found


@pytest.mark.spec("CAP-63")
@pytest.mark.parametrize(
    ("case", "reason"),
    [
        pytest.param(
            "after", "no backward pass was seen in the block that reaches what the model returned", id="after"
        ),
        pytest.param(
            "no_grad",
            "nothing that the model returned required a gradient: under no_grad, or all is frozen",
            id="no-graph",
        ),
    ],
)
def test_gradients_that_were_asked_for_and_none_came_are_told(
    path: Path, small: Any, case: str, reason: str
) -> None:
    with tensorcap.capture(small, path, grads=True) as cap, torch.set_grad_enabled(case == "after"):
        y = small(torch.ones(1, 4))
    if case == "after":
        y.sum().backward()
    assert lost(cap) == {"@root/grad_output": reason}
    assert keys(path) == []


@pytest.mark.spec("CAP-63")
def test_modules_whose_outputs_no_gradient_reached_are_named(path: Path) -> None:
    class Aside(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused, self.halved = nn.Linear(1, 2), nn.Linear(2, 2), nn.Identity()

        def forward(self, x: torch.Tensor) -> Any:
            first, second = torch.split(self.halved(x), 1, dim=1)
            return self.used(first), self.unused(x), second

    model = Aside()
    with tensorcap.capture(model, path, grads=True, inputs=False) as cap:
        model(torch.ones(1, 2, requires_grad=True))[0].sum().backward()
    assert lost(cap) == {}
    with tensorcap.open_archive(path) as archive:
        assert archive.run["notes"] == ["no gradient came to the outputs of unused"]
    assert "0/@root/grad_output.0" in keys(path)
    assert not {"0/@root/grad_output.1", "0/@root/grad_output.2"} & {*keys(path)}


def test_the_run_is_the_same_with_and_without(path: Path, small: Any) -> None:
    x = torch.ones(2, 4, requires_grad=True)
    inputs = copy.deepcopy(x)
    other = copy.deepcopy(small)
    expected = other(x)
    expected.square().sum().backward()
    with tensorcap.capture(small, path, grads=True, params=True):
        y = small(inputs)
        y.square().sum().backward()
    assert torch.equal(y, expected)
    for ours, theirs in zip([inputs, *small.parameters()], [x, *other.parameters()], strict=True):
        assert ours.grad is not None
        assert theirs.grad is not None
        assert torch.equal(ours.grad, theirs.grad)


@pytest.mark.parametrize("fails", [False, True], ids=["as-it-should", "by-an-error"])
def test_nothing_of_ours_is_left_on_tensors(
    path: Path, small: Any, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    monkeypatch.setattr(gradients, "_HANDLES", 16)
    x = torch.ones(1, 4, requires_grad=True)
    kept: list[Any] = []

    def run() -> None:
        with tensorcap.capture(small, path, grads=True):
            kept.append(small(x))
            kept[0].sum().backward(retain_graph=True)
            for _ in range(20):  # so many graphs that what is known of those that are gone is sorted out
                small(x).sum().backward()
            if fails:
                raise ValueError

    if fails:
        with pytest.raises(ValueError):  # noqa: PT011  # raised above
            run()
    else:
        run()
    for tensor in (x, *kept):
        assert not tensor._backward_hooks
    for parameter in small.parameters():
        assert parameter._post_accumulate_grad_hooks is None
    before = path.read_bytes()
    kept[0].sum().backward()
    assert path.read_bytes() == before


def test_neither_a_tensor_nor_a_graph_is_kept(path: Path) -> None:
    kept: list[weakref.ref[Any]] = []
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
    for module in model.modules():
        module.register_forward_hook(lambda module, args, output: kept.append(weakref.ref(output)))
    with tensorcap.capture(model, path, grads=True):
        for _ in range(3):
            model(torch.ones(1, 4)).sum().backward()
        gc.collect()
        assert [reference() for reference in kept] == [None] * 12
    assert len(keys(path, "grad_output")) == 12


def test_a_copy_of_a_model_carries_no_hook_of_ours(path: Path, small: Any) -> None:
    with warnings.catch_warnings(), tensorcap.capture(small, path, grads=True, inputs=False):
        warnings.simplefilter("error")
        small(torch.ones(1, 4)).sum().backward()
        for other in (copy.deepcopy(small), pickle.loads(pickle.dumps(small))):
            other(torch.ones(1, 4)).sum().backward()
    assert [k for k in keys(path) if k.endswith(":2") or k.startswith("1/")] == []


def test_an_optimizer_that_uses_gradients_up_does_so_after_they_are_recorded(path: Path) -> None:
    model = nn.Linear(1, 1, bias=False)

    def use_up(parameter: torch.Tensor) -> None:
        parameter.grad = None

    model.weight.register_post_accumulate_grad_hook(use_up)  # type: ignore[no-untyped-call]
    with tensorcap.capture(model, path, grads=True) as cap:
        model(torch.full((1, 1), 5.0)).backward()
    assert values(path)["0/@root/grad_param.weight"].item() == 5
    assert lost(cap) == {}
    assert len(model.weight._post_accumulate_grad_hooks) == 1


def test_what_a_gradient_cannot_be_stored_as_is_reported(path: Path) -> None:
    model = nn.Embedding(4, 2, sparse=True)
    with tensorcap.capture(model, path, grads=True) as cap:
        model(torch.tensor([1, 2])).sum().backward()
    assert lost(cap) == {"@root/grad_param.weight": "layout sparse_coo"}


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        pytest.param(
            {"exclude": ["0", "@root"]}, {"2/grad_output", "2/grad_param.weight", "1/grad_output"}, id="sites"
        ),
        pytest.param({"only": "*/grad_param.*"}, {"0/grad_param.weight", "2/grad_param.weight"}, id="slots"),
        pytest.param({"only": "0", "steps": "1"}, {"0/grad_output", "0/grad_param.weight"}, id="steps"),
        pytest.param({"only": "0", "sample": 1}, {"0/grad_output", "0/grad_param.weight"}, id="sample"),
    ],
)
def test_gradients_obey_globs_and_limits(path: Path, options: dict[str, Any], expected: set[str]) -> None:
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.ReLU(), nn.Linear(2, 2, bias=False))
    with tensorcap.capture(model, path, grads=True, inputs=False, **options):
        for _ in range(2):
            model(torch.ones(1, 2)).sum().backward()
    found = [k.partition("/") for k in keys(path)]
    assert {rest for _, _, rest in found} == expected
    assert {step for step, _, _ in found} == {"steps": {"1"}, "sample": {"0"}}.get(
        next(reversed(options)), {"0", "1"}
    )


def test_a_pause_takes_gradients_out_too(path: Path, small: Any) -> None:
    with tensorcap.capture(small, path, grads=True, inputs=False) as cap:
        y = small(torch.ones(1, 4))
        with cap.paused():
            y.sum().backward(retain_graph=True)
        (y.sum() * 2).backward()
    found = values(path)
    assert found["0/@root/grad_output"].tolist() == [[2, 2]]


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight
        self.norm = nn.BatchNorm1d(3)

    def forward(self, ids: torch.Tensor) -> Any:
        return self.head(self.norm(self.embed(ids)))


@pytest.mark.spec("CAP-64")
def test_parameters_and_buffers_are_recorded_once_as_they_are_before_the_run(path: Path) -> None:
    model = Tied().train()
    before = {k: v.numpy().copy() for k, v in model.state_dict().items()}
    with torch.no_grad(), tensorcap.capture(model, path, params=True) as cap:
        model(torch.tensor([1, 2]))
        model.embed.weight.zero_()
        model(torch.tensor([3, 4]))
    found = values(path)
    held = [k for k in found if k.rpartition("/")[2].startswith(("param.", "buffer."))]
    assert held == [
        "0/embed/param.weight",
        "0/head/param.weight",
        "0/norm/param.weight",
        "0/norm/param.bias",
        "0/norm/buffer.running_mean",
        "0/norm/buffer.running_var",
        "0/norm/buffer.num_batches_tracked",
    ]
    assert [*found][: len(held)] == held  # they come first
    for key in held:
        site, slot = key.split("/")[1:]
        assert np.array_equal(found[key], before[f"{site}.{slot.partition('.')[2]}"]), key
    assert cap.summary is not None
    assert cap.summary.steps == 2
    with tensorcap.open_archive(path) as archive:
        assert archive.run["inputs"].keys() == {"0/@root/input.ids", "1/@root/input.ids"}


@pytest.mark.spec("CAP-64")
def test_the_bytes_of_a_tied_parameter_are_stored_once(tmp_path: Path) -> None:
    def stored_bytes(tied: bool) -> int:
        model = Tied()
        if not tied:
            model.head.weight = nn.Parameter(model.head.weight.detach() + 1)
        with tensorcap.capture(model, tmp_path / "a.h5", params=True, only="*/param.*", inputs=False) as cap:
            model(torch.tensor([1, 2]))
        assert cap.summary is not None
        return cap.summary.stored_bytes

    assert stored_bytes(tied=False) - stored_bytes(tied=True) == 5 * 3 * 4


@pytest.mark.spec("CAP-64")
def test_parameters_obey_globs_and_no_limit_on_steps(path: Path) -> None:
    model = Tied()
    with torch.no_grad(), tensorcap.capture(model, path, params=True, exclude="norm", steps="1"):
        model(torch.tensor([1, 2]))
        model(torch.tensor([1, 2]))
    assert keys(path, "param.") == ["0/embed/param.weight", "0/head/param.weight"]
    assert keys(path, "output") == ["1/embed/output", "1/head/output", "1/@root/output"]


@pytest.mark.spec("CAP-65")
def test_what_is_on_the_meta_device_in_the_call_too_has_no_record(path: Path) -> None:
    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(2, 2)
            self.ghost = nn.Linear(2, 2, device="meta")

        def forward(self, x: torch.Tensor) -> Any:
            return self.fc(x)

    model = Half()
    with torch.no_grad(), tensorcap.capture(model, path, params=True) as cap:
        model(torch.ones(1, 2))
    reason = "meta: no data, neither before the run nor in a call of the module"
    assert lost(cap) == {"ghost": reason}
    assert keys(path, "param.") == ["0/fc/param.weight", "0/fc/param.bias"]


@pytest.mark.spec("CAP-65")
def test_what_is_made_in_the_first_call_is_recorded_then(path: Path, hooks: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that lazy modules are new
        model: Any = nn.Sequential(nn.LazyLinear(2))
    with torch.no_grad(), tensorcap.capture(model, path, params=True) as cap:
        model(torch.ones(1, 3))
        model(torch.ones(1, 3))
    found = values(path)
    assert np.array_equal(found["0/0/param.weight"], model[0].weight.detach().numpy())
    assert keys(path, "param.") == ["0/0/param.weight", "0/0/param.bias"]
    assert lost(cap) == {}
    assert hooks(model) == 0


def test_a_preflight_tells_parameters_that_differ_by_their_values(tmp_path: Path) -> None:
    for name in ("ref", "tgt"):
        torch.manual_seed(0)
        model: Any = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        if name == "tgt":
            model[1].weight.data[0, 0] += 1
        with torch.no_grad(), tensorcap.capture(model, tmp_path / f"{name}.h5", params=True):
            model(torch.ones(1, 2))
    with (
        tensorcap.open_archive(tmp_path / "ref.h5") as reference,
        tensorcap.open_archive(tmp_path / "tgt.h5") as target,
    ):
        found = [item for item in preflight(reference, target).items if item.kind == "parameters"]
    assert [item.name for item in found] == ["0/1/param.weight"]


class Scalar(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(2, 1, bias=False)

    def forward(self, x: torch.Tensor) -> Any:
        return self.fc(x).sum()


def loss_of(model: Any, x: torch.Tensor) -> Any:
    return model(x) * 2


def own_backward(model: Any, x: torch.Tensor) -> None:
    (model(x) * 2).backward()


@pytest.mark.spec("CAP-66")
@pytest.mark.parametrize(
    ("run", "factor"),
    [
        pytest.param(None, 1, id="the-model-returns-it"),
        pytest.param(loss_of, 2, id="run-returns-it"),
        pytest.param(own_backward, 2, id="run-has-done-it"),
    ],
)
def test_a_workload_gets_a_backward_pass_from_its_loss(path: Path, run: Any, factor: float) -> None:
    model = Scalar()
    kept = model.fc.weight.grad = torch.full((1, 2), 9.0)
    workload = tensorcap.Workload(model, {"x": torch.tensor([[3.0, 4.0]])}, run)
    capture_workload(workload, path, grads=True)
    assert values(path)["0/fc/grad_param.weight"].tolist() == [[3 * factor, 4 * factor]]
    assert model.fc.weight.grad is kept
    assert kept.tolist() == [[9, 9]]


@pytest.mark.spec("CAP-66")
def test_a_workload_without_a_loss_is_told_how_to_give_one(path: Path, small: Any) -> None:
    with pytest.raises(UsageError, match="Sequential: the run gave no loss") as caught:
        capture_workload(tensorcap.Workload(small, (torch.ones(1, 4),)), path, grads=True)
    assert str(caught.value.hint).startswith("Return one (a tensor of one element) from the model")
    assert all(parameter.grad is None for parameter in small.parameters())


@pytest.mark.spec("CAP-66")
def test_a_language_model_has_its_tokens_as_labels(path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
    config = LlamaConfig(vocab_size=32, num_attention_heads=2, num_key_value_heads=1, **sizes)
    model: Any = LlamaForCausalLM(config).double()
    model.eval()
    ids = torch.tensor([[1, 5, 7, 2]])
    capture_workload(
        tensorcap.Workload(model, {"input_ids": ids, "use_cache": False}), path, grads=True, params=True
    )
    logits = model(input_ids=ids).logits
    loss = nn.functional.cross_entropy(logits[0, :-1].float(), ids[0, 1:])  # transformers takes float32
    names = [name for name, _ in model.named_parameters()]
    expected = torch.autograd.grad(loss, [*model.parameters()])
    found = values(path)
    assert len(names) == len(keys(path, "grad_param.")) == len(keys(path, "param."))
    for name, gradient in zip(names, expected, strict=True):
        site, _, own = name.rpartition(".")
        np.testing.assert_allclose(
            found[f"0/{site}/grad_param.{own}"], gradient.numpy(), rtol=1e-9, atol=1e-12, err_msg=name
        )
    assert found["0/@root/input.labels"].tolist() == ids.tolist()
    assert all(parameter.grad is None for parameter in model.parameters())
