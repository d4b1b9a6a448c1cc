"""What hooks cannot see: it is told, the run is left as it is, and `eager` puts it out of the way."""

from __future__ import annotations

import copy
import pickle
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import tensorcap
from tensorcap.session import capture_workload
from tensorcap.workload import Workload
from tensorcap_formats.errors import CaptureError, UsageError

COMPILED = "inside a compiled graph (torch.compile); --eager runs it as plain code"
IN_PARTS = (
    "TransformerEncoderLayer is computed in parts, so that they are captured, and not by torch's fused "
    "kernel, whose values may be others by rounding, and at padded positions"
)


def values(path: Path) -> dict[str, Any]:
    with tensorcap.open_archive(path) as archive:
        return {r.key.text: archive.load(r) for r in archive.records}


def lost(cap: Any) -> dict[str, str]:
    assert cap.summary is not None
    return dict(cap.summary.not_capturable)


class Parts(nn.Module):
    """Compiled in each way that there is: a module in place, a wrapped one, a forward, a method."""

    def __init__(self) -> None:
        super().__init__()
        self.in_place, self.forwarded, self.inside = (nn.Sequential(nn.Linear(4, 4)) for _ in range(3))
        self.wrapped: Any = nn.Sequential(nn.Linear(4, 4))

    def part(self, x: torch.Tensor) -> Any:
        return self.inside(x)

    def forward(self, x: torch.Tensor) -> Any:
        return self.part(self.forwarded(self.wrapped(self.in_place(x))))

    def compiled(self) -> Any:
        self.in_place.compile(backend="eager")
        self.wrapped = torch.compile(self.wrapped, backend="eager")
        self.forwarded.forward = torch.compile(self.forwarded.forward, backend="eager")  # type: ignore[method-assign]
        self.part = torch.compile(self.part, backend="eager")  # type: ignore[method-assign]
        return self


@pytest.fixture(autouse=True)
def _forget_compiled_code() -> Iterator[None]:
    yield
    torch.compiler.reset()


@pytest.mark.spec("CAP-70")
@pytest.mark.parametrize("before", [False, True], ids=["compiled-in-the-block", "compiled-before"])
def test_eager_captures_all_of_a_compiled_model_as_if_it_were_not(tmp_path: Path, before: bool) -> None:
    plain = Parts().eval()
    x = torch.ones(2, 4)
    with torch.no_grad(), tensorcap.capture(plain, tmp_path / "plain.h5"):
        plain(x)
    model = copy.deepcopy(plain).compiled()
    with torch.no_grad():
        if before:
            model(x)
        with tensorcap.capture(model, tmp_path / "eager.h5", eager=True) as cap:
            model(x)
    assert lost(cap) == {}
    assert cap.summary is not None
    assert cap.summary.never_called == ()
    expected, found = values(tmp_path / "plain.h5"), values(tmp_path / "eager.h5")
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        assert np.array_equal(found[key], value), key


@pytest.mark.spec("CAP-70")
def test_after_an_eager_capture_compiled_code_runs_again(path: Path) -> None:
    graphs = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    model = torch.compile(nn.Sequential(nn.Linear(2, 2)), backend=backend)
    with torch.no_grad():
        with tensorcap.capture(model, path, eager=True):
            model(torch.ones(1, 2))
        assert graphs == []
        with pytest.raises(ValueError, match="out"), tensorcap.capture(model, path, eager=True):
            raise ValueError("out")
        model(torch.ones(1, 2))
    assert len(graphs) == 1
    assert torch.backends.mha.get_fastpath_enabled()


@pytest.mark.spec("CAP-70")
def test_a_torch_that_cannot_run_compiled_code_plainly_is_refused(
    path: Path, small: Any, hooks: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(torch.compiler, "set_stance")
    with (
        pytest.raises(UsageError, match=r"has no torch.compiler.set_stance, expected 2.6 or newer"),
        tensorcap.capture(small, path, eager=True),
    ):
        pytest.fail("the block was entered")
    assert hooks(small) == 0


@pytest.mark.spec("CAP-70")
def test_a_model_that_is_compiled_as_a_whole_says_how_it_can_be_captured(path: Path) -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    model.compile(backend="eager")
    with pytest.raises(CaptureError) as caught, torch.no_grad(), tensorcap.capture(model, path):
        model(torch.ones(1, 2))
    assert caught.value.hint == f"Not capturable: {COMPILED}."


@pytest.mark.spec("CAP-71")
def test_a_traced_module_is_not_capturable_and_says_what_to_do(path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that tracing will go
        traced: Any = torch.jit.trace(nn.Sequential(nn.Linear(2, 2)), torch.ones(1, 2))  # type: ignore[no-untyped-call]
    model = nn.Sequential(traced, nn.ReLU())
    with torch.no_grad(), tensorcap.capture(model, path, params=True) as cap:
        model(torch.ones(1, 2))
    reason = "scripted or traced (torch.jit); capture the module that it was made from"
    assert lost(cap) == {"0": reason, "0.0": reason}
    assert np.array_equal(values(path)["0/0.0/param.weight"], traced.state_dict()["0.weight"].numpy())


def encoder(dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, dtype=dtype, **options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that a layer is not of the kind for nested tensors
        return nn.TransformerEncoder(layer, 2).eval()


PADDED = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
X = torch.linspace(-1, 1, 2 * 5 * 32).reshape(2, 5, 32)


@pytest.fixture
def kernel_runs(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows by one with each run of the kernel."""
    kernel, runs = torch._transformer_encoder_layer_fwd, []

    def counted(*args: Any) -> Any:
        runs.append(1)
        return kernel(*args)

    monkeypatch.setattr(torch, "_transformer_encoder_layer_fwd", counted)
    return runs


@pytest.mark.spec("CAP-72")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("mask", [None, PADDED], ids=["whole", "padded"])
@pytest.mark.parametrize("norm_first", [False, True], ids=["post-norm", "pre-norm"])
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_fused_layer_is_captured_in_parts(
    path: Path, kernel_runs: list[int], dtype: torch.dtype, mask: Any, norm_first: bool, hooks: Any
) -> None:
    model, x = encoder(dtype, norm_first=norm_first), X.to(dtype)
    with torch.no_grad():
        fused = model(x, src_key_padding_mask=mask)
        assert len(kernel_runs) == 2  # of two layers
        with tensorcap.capture(model, path) as cap:
            output = model(x, src_key_padding_mask=mask)
        assert len(kernel_runs) == 2
        assert torch.equal(model(x, src_key_padding_mask=mask), fused)  # by the kernel again
    assert len(kernel_runs) == 4
    assert hooks(model) == 0
    assert lost(cap) == {}
    assert cap.summary is not None
    assert IN_PARTS in cap.summary.notes
    seen = slice(None) if mask is None else ~mask
    limit = 1e-5 if dtype is torch.float32 else 0.05
    torch.testing.assert_close(output[seen], fused[seen], rtol=limit, atol=limit)
    assert np.array_equal(values(path)["0/@root/output"], output.float().numpy())
    inner = [name for name, m in model.layers[1].named_modules() if name.startswith(("linear", "norm"))]
    assert {f"0/layers.1.{name}/output" for name in inner} <= values(path).keys()


@pytest.mark.spec("CAP-72")
def test_parts_of_a_layer_are_what_its_weights_make(path: Path) -> None:
    model = encoder()
    with torch.no_grad(), tensorcap.capture(model, path):
        model(X)
    found = values(path)
    weight, bias = (p.detach().numpy() for p in model.layers[0].linear1.parameters())
    np.testing.assert_allclose(
        found["0/layers.0.linear1/output"],
        found["0/layers.0.norm1/output"] @ weight.T + bias,
        rtol=1e-4,
        atol=1e-5,
    )


@pytest.mark.spec("CAP-72")
def test_at_level_op_a_layer_is_computed_in_parts_too(path: Path, kernel_runs: list[int]) -> None:
    model = encoder()
    with torch.no_grad(), tensorcap.capture(model, path, level="op", ops_in="layers.1") as cap:
        model(X)
    with tensorcap.open_archive(path) as archive:
        ops = {r.key.site.partition(":")[0] for r in archive.records if ":" in r.key.site}
    assert {"layers.1.linear1", "layers.1.norm2"} <= ops
    assert (kernel_runs, lost(cap)) == ([], {})


@pytest.mark.spec("CAP-72")
@pytest.mark.parametrize("model", [nn.MultiheadAttention(32, 4, batch_first=True), nn.Linear(32, 32)])
def test_without_such_a_layer_kernels_of_torch_are_left_as_they_are(path: Path, model: Any) -> None:
    x = (X, X, X) if isinstance(model, nn.MultiheadAttention) else (X,)
    model.eval()
    with torch.no_grad(), tensorcap.capture(model, path) as cap:
        assert torch.backends.mha.get_fastpath_enabled()
        model(*x)
    assert cap.summary is not None
    assert IN_PARTS not in cap.summary.notes


@pytest.mark.spec("CAP-72")
def test_gradients_of_a_layer_are_the_same_under_a_reentrant_checkpoint(tmp_path: Path) -> None:
    found = {}
    for name in ("plain", "reentrant"):
        model = encoder(dropout=0.0).layers[0].train()
        run: Any = model
        if name == "reentrant":
            run = lambda x, m=model: checkpoint(m, x, use_reentrant=True)  # noqa: E731
        with tensorcap.capture(model, tmp_path / f"{name}.h5", grads=True):
            run(X.clone().requires_grad_()).square().sum().backward()
        found[name] = {k: v for k, v in values(tmp_path / f"{name}.h5").items() if "grad_" in k}
    assert found["plain"].keys() == found["reentrant"].keys()
    assert len(found["plain"]) > 20
    for key, value in found["plain"].items():
        np.testing.assert_allclose(found["reentrant"][key], value, rtol=1e-4, atol=1e-5, err_msg=key)


@pytest.mark.spec("CAP-72")
def test_a_hook_of_somebody_else_in_a_layer_is_called(path: Path) -> None:
    model = encoder()
    model.layers[0].linear1.register_forward_hook(lambda module, args, output: output * 0)
    with torch.no_grad(), tensorcap.capture(model, path):
        model(X)
    found = values(path)
    assert not found["0/layers.0.linear1/output"].any()
    assert found["0/layers.1.linear1/output"].any()


@pytest.mark.spec("CAP-72")
def test_torch_computes_layers_as_before_after_an_error(path: Path) -> None:
    model = encoder()
    with pytest.raises(ValueError, match="out"), tensorcap.capture(model, path):
        raise ValueError("out")
    assert torch.backends.mha.get_fastpath_enabled()


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["deepcopy", "pickle"]
)
def test_a_copy_of_a_fused_layer_is_not_under_capture(path: Path, copied: Any) -> None:
    model = encoder()
    with torch.no_grad(), tensorcap.capture(model, path):
        other = copied(model)
        assert torch.equal(other(X), model(X))
    assert {k.partition("/")[0] for k in values(path)} == {"0"}
    assert "tensorcap" not in {type(vars(m).get("forward")).__module__ for m in other.modules()}


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("how", ["script", "trace", "compile"])
def test_a_fused_layer_is_scripted_traced_and_compiled_in_the_block_as_without_it(
    path: Path, how: str, hooks: Any
) -> None:
    model = encoder().layers[0]
    makes: dict[str, Any] = {
        "script": torch.jit.script,
        "trace": lambda m: torch.jit.trace(m, X, check_trace=False),  # type: ignore[no-untyped-call]
        "compile": lambda m: torch.compile(m, backend="eager"),
    }
    with torch.no_grad():
        fused = model(X)
        with tensorcap.capture(model, path):
            expected = model(X)
            # scripted code asks nobody, and takes the kernel
            assert torch.equal(makes[how](model)(X), fused if how == "script" else expected)
            model(X)
    assert hooks(model) == 0
    assert np.array_equal(values(path)["1/@root/output"], expected.numpy())


@pytest.mark.spec("CAP-73")
def test_attention_whose_scores_no_module_returns_is_noted(tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaModel

    class Own(nn.Module):
        def forward(self, x: torch.Tensor) -> Any:
            return nn.functional.scaled_dot_product_attention(x, x, x)

    def notes(model: Any, *args: Any) -> Any:
        with torch.no_grad(), tensorcap.capture(model, tmp_path / "a.h5") as cap:
            model(*args)
        assert cap.summary is not None
        with tensorcap.open_archive(tmp_path / "a.h5") as archive:
            assert list(cap.summary.notes) == archive.run.get("notes", [])
        return list(cap.summary.notes)

    sizes: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
    config = LlamaConfig(vocab_size=32, num_attention_heads=2, num_key_value_heads=1, **sizes)
    tokens = torch.tensor([[1, 2]])
    plain = "its scores are in no module's output; --level op records what goes into it"
    config._attn_implementation = "sdpa"
    advice = f"{plain}, attn_implementation=eager computes them openly"
    assert notes(LlamaModel(config), tokens) == [f"attention is fused (sdpa): {advice}"]
    config._attn_implementation = "eager"
    assert notes(LlamaModel(config), tokens) == []
    assert notes(Own(), X) == [f"attention is fused (Own): {plain}"]
    assert notes(encoder(), X) == [IN_PARTS, f"attention is fused (MultiheadAttention): {plain}"]
    assert notes(nn.Linear(32, 2), X) == []


@pytest.mark.spec("CAP-75")
def test_modules_that_an_exported_graph_computes_itself_are_noted(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(32, 8), nn.ReLU(), nn.Linear(8, 2)).eval()
    exported = torch.export.export(model, (X,)).module()
    with torch.no_grad(), tensorcap.capture(exported, tmp_path / "a.h5") as cap:
        exported(X)
    assert cap.summary is not None
    assert list(cap.summary.notes) == [
        "an exported or traced graph computes 0, 2 itself: these modules are not called, and nothing of them "
        "is captured; capture the model that the graph was made from, or take --level op"
    ]
    traced = torch.fx.symbolic_trace(model)  # which calls its modules
    with torch.no_grad(), tensorcap.capture(traced, tmp_path / "b.h5") as cap:
        traced(X)
    assert cap.summary is not None
    assert cap.summary.notes == ()


class Odd(nn.Module):
    """Takes and returns tensors of every kind."""

    def forward(self, **values: Any) -> Any:
        return values


def odd_values() -> dict[str, Any]:
    from torch._subclasses import FakeTensorMode

    with warnings.catch_warnings(), FakeTensorMode():
        fake = torch.ones(2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that some of these will go, or are new
        return {
            "complex": torch.tensor([1 + 2j]),
            "fake": fake,
            "jagged": torch.nested.nested_tensor([torch.ones(1), torch.ones(2)], layout=torch.jagged),
            "masked": torch.masked.masked_tensor(torch.ones(2), torch.tensor([True, False])),
            "meta": torch.ones(2, device="meta"),
            "nested": torch.nested.nested_tensor([torch.ones(1), torch.ones(2)]),
            "quantised": torch.quantize_per_tensor(torch.ones(2), 0.5, 0, torch.qint8),
            "rows": torch.eye(2).to_sparse_csr(),
            "sparse": torch.eye(2).to_sparse(),
        }


@pytest.mark.spec("CAP-74")
@pytest.mark.parametrize("grads", [False, True], ids=["forward", "grads"])
def test_a_tensor_without_dense_values_is_refused_by_name_and_the_run_goes_on(
    path: Path, grads: bool
) -> None:
    given = odd_values()
    model = Odd()
    with tensorcap.capture(model, path, grads=grads) as cap:
        output = model(**given)
    assert output.keys() == given.keys()
    assert all(output[name] is given[name] for name in given)
    found = {k: v for k, v in lost(cap).items() if "grad_" not in k}
    names = {
        "fake": "torch._subclasses.fake_tensor.FakeTensor",
        "jagged": "torch.nested._internal.nested_tensor.NestedTensor",
        "masked": "torch.masked.maskedtensor.core.MaskedTensor",
    }
    reasons = {name: f"a {cls} holds no plain values" for name, cls in names.items()} | {
        "meta": "on the meta device, without values",
        "nested": "a nested tensor",
        "rows": "layout sparse_csr",
        "sparse": "layout sparse_coo",
    }
    for side in ("input", "output"):
        for name, reason in reasons.items():
            assert found.pop(f"@root/{side}.{name}") == reason
    assert found == {}
    assert values(path)["0/@root/output.complex"].tolist() == [1 + 2j]
    assert values(path)["0/@root/output.quantised"].tolist() == [1.0, 1.0]  # CAP-331


@pytest.mark.spec("CAP-74")
def test_a_model_on_the_meta_device_captures_nothing_and_says_why(path: Path) -> None:
    model = nn.Sequential(nn.Linear(2, 2, device="meta"))
    with pytest.raises(CaptureError) as caught, tensorcap.capture(model, path, params=True):
        model(torch.ones(1, 2, device="meta"))
    assert "on the meta device, without values" in str(caught.value.hint)
    assert not path.exists()


@pytest.mark.spec("CAP-74")
def test_gradients_inside_a_function_transform_are_reported_and_stay_right(path: Path) -> None:
    model = nn.Linear(2, 1)
    parameters = dict(model.named_parameters())

    def loss(parameters: Any, x: torch.Tensor) -> Any:
        return torch.func.functional_call(model, parameters, (x,)).sum()

    expected = torch.func.grad(loss)(parameters, torch.ones(1, 2))
    with tensorcap.capture(model, path, grads=True, only="*/*") as cap:
        model(torch.ones(1, 2)).sum().backward()
        found = torch.func.grad(loss)(parameters, torch.ones(1, 2))
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    reason = "inside a function transform (vmap, grad, …)"
    assert (lost(cap)["@root/output"], lost(cap)["@root/grad_output"]) == (reason, reason)


@pytest.mark.parametrize("when", ["before", "after"])
def test_an_error_of_a_users_hook_is_the_users(path: Path, small: Any, hooks: Any, when: str) -> None:
    def fail(*args: Any) -> None:
        raise LookupError("of the user")

    handle = (
        small[2].register_forward_pre_hook(fail) if when == "before" else small[2].register_forward_hook(fail)
    )
    with (
        pytest.raises(LookupError, match="of the user"),
        torch.no_grad(),
        tensorcap.capture(small, path, inputs=False) as cap,
    ):
        small(torch.ones(1, 4))
    handle.remove()
    assert hooks(small) == 0
    assert [k for k in values(path) if k.endswith("output")] == ["0/0/output", "0/1/output"]
    assert cap.summary is not None
    assert not cap.summary.is_complete
    assert cap.summary.unfinished == {"@root": 1} | ({} if when == "before" else {"2": 1})


def test_two_threads_may_train_replicas_of_layers_at_once(path: Path) -> None:
    model: Any = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Identity()).double()
    model[0].weight.data.fill_(3)
    barrier = threading.Barrier(2)

    def run(value: float) -> None:
        barrier.wait()
        for _ in range(20):
            torch.autograd.grad(
                model(torch.full((1, 1), value, dtype=torch.float64)) * value, model[0].weight
            )

    with tensorcap.capture(model, path, grads=True) as cap:
        threads = [threading.Thread(target=run, args=(value,)) for value in (1.0, 10.0)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert lost(cap) == {}
    found = values(path)
    assert len([k for k in found if k.endswith("/0/grad_output")]) == 40
    for step in range(40):  # the gradient of each step is that of its own input
        assert found[f"{step}/0/grad_output"].item() == found[f"{step}/0/input.input"].item()


class Layers(nn.Module):
    """Two linear layers, the first of which may be compiled by itself."""

    def __init__(self, *, is_compiled: bool) -> None:
        super().__init__()
        first: Any = nn.Sequential(nn.Linear(4, 4), nn.GELU())
        layer: Any = torch.compile(first, backend="eager") if is_compiled else first
        self.layers = nn.ModuleList([layer])
        self.head = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> Any:
        for layer in self.layers:
            x = layer(x)
        return self.head(x).sum()


@pytest.mark.spec("CAP-170")
@pytest.mark.parametrize("part", ["a-layer", "the-model"])
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"eager": True}, id="eager"),
        pytest.param({"params": True, "eager": True}, id="params"),
        pytest.param({"grads": True, "eager": True}, id="grads"),
        pytest.param({"level": "op", "eager": True}, id="op"),
        pytest.param({"level": "export"}, id="export"),
    ],
)
def test_a_compiled_model_has_the_keys_of_the_plain_one(
    tmp_path: Path, part: str, options: dict[str, Any]
) -> None:
    keys = []
    for is_compiled in (False, True):
        torch.manual_seed(0)
        model: Any = Layers(is_compiled=is_compiled and part == "a-layer").eval()
        if is_compiled and part == "the-model":
            model = torch.compile(model, backend="eager")
        file = tmp_path / f"{is_compiled}.h5"
        capture_workload(Workload(model, {"x": torch.ones(3, 4)}), file, **options)
        with tensorcap.open_archive(file) as archive:
            keys.append([record.key.text for record in archive.records])
            assert {m["path"]: m["class"].rpartition(".")[2] for m in archive.run["modules"]} == {
                "": "Layers",
                "layers": "ModuleList",
                "layers.0": "Sequential",
                "layers.0.0": "Linear",
                "layers.0.1": "GELU",
                "head": "Linear",
            }
    assert keys[0] == keys[1]
    assert len(keys[0]) >= 6
