"""A run of a JAX model: calls of modules in code that is compiled or not, values by name, variables."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from flax import linen, nnx
from jax import numpy as jnp

import tensorcap
from tensorcap.adapters import adapter_for
from tensorcap.session import capture_workload
from tensorcap.workload import archived_inputs
from tensorcap_formats.archive import Archive
from tensorcap_formats.dtypes import Array, decode
from tensorcap_formats.errors import UsageError
from tensorcap_formats.open import open_archive

X = np.array([[1.0, -2.0], [3.0, 0.5]], np.float32)
W = np.array([[2.0, 1.0], [0.0, -1.0]], np.float32)  # [in, out]


class Layer(nnx.Module):
    def __init__(self, factor: float = 1.0) -> None:
        self.kernel = nnx.Param(jnp.asarray(W * factor))
        self.scale = factor

    def __call__(self, x: Any, *, shift: float = 0.0) -> Any:
        return tensorcap.probe("product", x @ self.kernel[...]) + shift


class Double(Layer):
    def __call__(self, x: Any, *, shift: float = 0.0) -> Any:
        return 2 * super().__call__(x, shift=shift)


class Net(nnx.Module):
    def __init__(self, *, is_compiled: bool = False) -> None:
        self.layers = nnx.List([Layer(), Layer(0.5)])
        self.tied = self.layers[0]
        self.last = Double()
        self.never = Layer()
        self.norm = nnx.BatchNorm(2, use_running_average=False, rngs=nnx.Rngs(0))
        self.is_compiled = is_compiled

    def __call__(self, x: Any) -> dict[str, Any]:
        for layer in self.layers:
            x = nnx.jit(lambda module, value: module(value))(layer, x) if self.is_compiled else layer(x)
        return {"x": self.norm(self.last(x, shift=1.0)), "shape": x.shape}


def captured(path: Path, model: Any, given: Any = None, **options: Any) -> Archive:
    workload = (
        model if isinstance(model, tensorcap.Workload) else tensorcap.Workload(model, given or {"x": X})
    )
    capture_workload(workload, path / "run.h5", **options)
    return open_archive(path / "run.h5")


def value(archive: Archive, key: str) -> Array:
    record = archive.get(key)
    return decode(archive.read(record), record.dtype)


@pytest.mark.spec("JAX-1", "JAX-2", "JAX-3")
@pytest.mark.parametrize(
    "make",
    [
        pytest.param(Net, id="a module alone"),
        pytest.param(lambda: tensorcap.JaxModel(Net(), jit=False), id="not compiled"),
        pytest.param(lambda: Net(is_compiled=True), id="code that compiles parts"),
        pytest.param(
            lambda: tensorcap.JaxModel(Net(is_compiled=True), jit=False), id="parts compiled, the rest not"
        ),
    ],
)
def test_every_call_is_recorded_in_order_with_its_values(make: Callable[[], Any], tmp_path: Path) -> None:
    with captured(tmp_path, make()) as archive:
        first, second = X @ W, X @ W @ (W / 2)
        expected = {
            "0/@root/input.x": X,
            "0/layers.0/input.x": X,
            "0/probe:product/value": first,
            "0/layers.0/output": first,
            "0/layers.1/input.x": first,
            "0/probe:product@1/value": second,
            "0/layers.1/output": second,
            "0/last/input.x": second,
            "0/probe:product@2/value": second @ W,
            "0/last/output": 2 * (second @ W + 1),
            "0/norm/input.x": 2 * (second @ W + 1),
        }
        in_order = sorted((r for r in archive.records), key=lambda r: r.order)
        assert [r.key.text for r in in_order][: len(expected)] == list(expected)
        for key, array in expected.items():
            np.testing.assert_allclose(value(archive, key), array, rtol=1e-6, err_msg=key)
        assert archive.values["0/last/input.shift"] == 1.0
        assert archive.values["0/@root/output.shape.0"] == 2
        assert archive.values["0/probe:product@2/module"] == "last"  # and the base class's part is no call
        assert not any(r.key.call for r in archive.records if r.key.site == "last")
        points = {point["site"]: point for point in archive.run["points"]}
        assert points["never"]["status"] == "never-called"
        assert "one by one" in points["layers"]["reason"]
        assert archive.run["aliases"] == {"tied": "layers.0"}


@pytest.mark.spec("JAX-4", "JAX-9")
def test_a_capture_leaves_the_model_as_it_was_and_changes_no_result(tmp_path: Path) -> None:
    model = Net()
    plain = nnx.jit(lambda module, x: module(x)["x"])(Net(), X)
    before = [dict(vars(module)) for _, module in nnx.iter_modules(model)]
    call = vars(Layer)["__call__"]
    with captured(tmp_path, model) as archive:
        np.testing.assert_array_equal(value(archive, "0/@root/output.x"), np.asarray(plain))
        control = {entry["slot"]: entry for entry in archive.run["control"]}
        assert control["output.x"]["identical"]
    assert vars(Layer)["__call__"] is call
    after = [dict(vars(module)) for _, module in nnx.iter_modules(model)]
    assert [list(attributes) for attributes in after] == [list(attributes) for attributes in before]
    # a run updates what batch norms have seen once, not twice because of the control: from 0, by 1 %
    given = 2 * (X @ W @ (W / 2) @ W + 1)
    np.testing.assert_allclose(model.norm.mean[...], given.mean(0) / 100, rtol=1e-5)


@pytest.mark.spec("JAX-4")
def test_what_was_compiled_before_is_captured_and_runs_without_a_capture_after_it(tmp_path: Path) -> None:
    calls = []

    @jax.jit
    def compiled(x: Any) -> Any:
        calls.append(1)
        return tensorcap.probe("sum", x.sum())

    model = tensorcap.JaxModel(lambda x: compiled(x) * 2, jit=False)
    compiled(X)
    for name in ("a.h5", "b.h5"):  # of which neither has what was compiled for the other
        with tensorcap.capture(model, tmp_path / name):
            model(X)
            model(X)
        with open_archive(tmp_path / name) as archive:
            assert archive.run["steps"] == 2
            assert value(archive, "1/probe:sum/value") == X.sum()
    traced = len(calls)
    compiled(X)
    assert len(calls) == traced  # by what was compiled before the capture


@pytest.mark.spec("JAX-3")
def test_loops_branches_and_vectorised_code_are_calls_by_number(tmp_path: Path) -> None:
    def function(x: Any) -> Any:
        def body(carry: Any, factor: Any) -> tuple[Any, None]:
            return tensorcap.JaxModel.tap("looped", carry * factor), None

        x, _ = jax.lax.scan(body, x, jnp.array([2.0, 3.0, 5.0]))
        x = jax.lax.while_loop(lambda y: y.sum() < 1000, lambda y: tensorcap.JaxModel.tap("grown", y * 2), x)
        x = jax.lax.cond(x.sum() > 0, lambda y: tensorcap.JaxModel.tap("positive", y), lambda y: y, x)
        return jax.vmap(lambda row: tensorcap.JaxModel.tap("rows", -row))(x)

    with captured(tmp_path, tensorcap.JaxModel(function)) as archive:
        for call, factor in enumerate((2, 6, 30)):
            np.testing.assert_array_equal(
                value(archive, f"0/looped{f'@{call}' * (call > 0)}/output"), X * factor
            )
        grown = [r for r in archive.records if r.key.site == "grown"]
        assert len(grown) == 4  # 30 times the sum, 2.5, doubled until it is 1000
        np.testing.assert_array_equal(value(archive, "0/positive/output"), X * 480)
        np.testing.assert_array_equal(value(archive, "0/rows@1/output"), -X[1] * 480)


class Vectorised(nnx.Module):
    def __init__(self) -> None:
        self.layer = Layer()

    def __call__(self, x: Any) -> Any:
        return jax.vmap(self.layer)(x)


@pytest.mark.spec("JAX-3")
def test_a_vectorised_module_has_a_call_for_each_element_with_its_own_result(tmp_path: Path) -> None:
    with captured(tmp_path, Vectorised()) as archive:
        for call, row in enumerate(X):
            site = f"0/layer{f'@{call}' * (call > 0)}"
            np.testing.assert_array_equal(value(archive, f"{site}/input.x"), row)
            np.testing.assert_allclose(value(archive, f"{site}/output"), row @ W, rtol=1e-6)


class Dense(linen.Module):
    @linen.compact
    def __call__(self, x: Any, *, train: bool = False) -> Any:
        x = linen.Dense(2, name="inner")(x)
        return linen.Dropout(0.5, deterministic=not train)(x)


class LinenNet(linen.Module):
    def setup(self) -> None:
        self.blocks = [Dense(), Dense()]
        self.norm = linen.BatchNorm(use_running_average=True)

    def __call__(self, x: Any, *, train: bool = False) -> Any:
        for block in self.blocks:
            x = block(x, train=train)
        return self.norm(x)


@pytest.mark.spec("JAX-1", "JAX-2", "JAX-5")
def test_linen_modules_are_captured_by_flax_interceptors(tmp_path: Path) -> None:
    module = LinenNet()
    variables = module.init(jax.random.key(0), X)
    with captured(
        tmp_path, tensorcap.JaxModel(module, variables), {"x": X, "train": False}, params=True
    ) as archive:
        kernel = np.asarray(variables["params"]["blocks_0"]["inner"]["kernel"])
        np.testing.assert_allclose(value(archive, "0/blocks_0.inner/output"), X @ kernel, rtol=1e-6)
        np.testing.assert_array_equal(value(archive, "0/blocks_0.inner/param.kernel"), kernel)
        np.testing.assert_array_equal(value(archive, "0/norm/buffer.mean"), np.zeros(2))
        assert archive.values["0/blocks_1/input.train"] is False
        assert archive.get("0/blocks_1.Dropout_0/output").shape == (2, 2)  # which has no parameters
        classes = {entry["path"]: entry["class"] for entry in archive.run["modules"]}
        assert classes["blocks_1.Dropout_0"] == "flax.linen.stochastic.Dropout"
        assert classes["blocks_0"].endswith("Dense")


@pytest.mark.spec("JAX-5", "JAX-6")
def test_variables_versions_and_settings_are_kept(tmp_path: Path) -> None:
    with captured(tmp_path, Net(), params=True) as archive:
        np.testing.assert_array_equal(value(archive, "0/layers.1/param.kernel"), W / 2)
        assert archive.get("0/norm/buffer.var").shape == (2,)
        framework = archive.run["framework"]
        assert (framework["name"], framework["version"]) == ("jax", jax.__version__)
        assert framework["settings"]["jit"] is True
        modules = {entry["path"]: entry for entry in archive.run["modules"]}
        assert modules["layers.1"]["settings"]["scale"] == 0.5
        assert modules["norm"]["settings"]["epsilon"] == 1e-5
        assert modules["layers.0"]["parameters"]["kernel"] == {"shape": [2, 2], "dtype": "float32"}
        assert modules["norm"]["training"]
        assert archive.run["dtype"] == "float32"
        assert "class Layer" in str(archive.run["sources"])
    with captured(tmp_path, Net()) as archive:
        digested = {entry["path"]: entry for entry in archive.run["modules"]}["layers.0"]["parameters"][
            "kernel"
        ]
        assert digested["digest"]
        assert digested["statistics"]["maximum"] == 2.0


@pytest.mark.spec("JAX-5")
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float8_e4m3fn", "int32", "bool", "int4"])
def test_every_dtype_is_kept_bit_for_bit(dtype: str, tmp_path: Path) -> None:
    own = jnp.asarray([[1, 0], [1, 1]], dtype)
    with captured(
        tmp_path, tensorcap.JaxModel(lambda x, y: (x, y.astype(dtype))), {"x": X, "y": own}
    ) as archive:
        record = archive.get("0/@root/output.1")
        assert record.dtype.name == dtype
        np.testing.assert_array_equal(decode(archive.read(record), record.dtype), [[1, 0], [1, 1]])


@pytest.mark.spec("JAX-5")
def test_a_random_key_is_lost_with_its_reason(tmp_path: Path) -> None:
    model = tensorcap.JaxModel(lambda x, key: x + jax.random.normal(key, x.shape))
    with captured(tmp_path, model, {"x": X, "key": jax.random.key(0)}) as archive:
        lost = [point for point in archive.run["points"] if "slots" in point]
        assert lost[0]["slots"] == ["input.key"]
        assert "key" in lost[0]["reason"]


@pytest.mark.spec("JAX-3")
def test_a_paused_capture_and_a_failed_run_keep_what_there_is(tmp_path: Path) -> None:
    model = Net()
    with tensorcap.capture(model, tmp_path / "a.h5") as capture:
        model(X)
        with capture.paused():
            model(X)
        model(X + 1)
    with open_archive(tmp_path / "a.h5") as archive:
        assert archive.run["steps"] == 2
        np.testing.assert_array_equal(value(archive, "1/@root/input.x"), X + 1)

    def failing(x: Any) -> Any:
        tensorcap.JaxModel.tap("first", x)
        raise ZeroDivisionError("planted")

    with pytest.raises(ZeroDivisionError, match="planted"):
        captured(tmp_path, tensorcap.JaxModel(failing, jit=False))
    with open_archive(tmp_path / "run.h5") as archive:
        assert not archive.is_complete
        np.testing.assert_array_equal(value(archive, "0/first/output"), X)


@pytest.mark.spec("JAX-7")
@pytest.mark.parametrize(
    ("make", "message"),
    [
        pytest.param(lambda: tensorcap.JaxModel(3), "a int cannot be called", id="no function"),
        pytest.param(
            lambda: tensorcap.JaxModel(LinenNet()), "a Linen module without variables", id="no variables"
        ),
        pytest.param(lambda: tensorcap.JaxModel(Net(), {}), "has its own variables", id="two variables"),
        pytest.param(lambda: tensorcap.JaxModel.tap("", 1), "the path is ''", id="no path"),
    ],
)
def test_models_that_are_none_are_refused(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        make()


@pytest.mark.spec("JAX-7")
@pytest.mark.parametrize(
    "options",
    [{"level": "op"}, {"grads": True}, {"watch": "json:dumps:*"}, {"level": "export"}],
    ids=["ops", "gradients", "watched functions", "exported graphs"],
)
def test_what_jax_does_not_give_is_refused_before_anything_runs(
    options: dict[str, Any], tmp_path: Path
) -> None:
    with pytest.raises(UsageError):
        captured(tmp_path, Net(), **options)
    assert not (tmp_path / "run.h5").exists()


@pytest.mark.spec("JAX-6")
def test_filters_keep_what_is_asked_for(tmp_path: Path) -> None:
    with captured(tmp_path, Net(), only="layers.1", inputs=False) as archive:
        assert {r.key.text for r in archive.records} == {"0/@root/input.x", "0/layers.1/output"}
    with captured(tmp_path, Net(), only="layers.*", slices="[:1]") as archive:
        assert archive.get("0/layers.0/output").shape == (1, 2)


def test_tensors_of_torch_keep_their_dtype_or_are_cast() -> None:
    torch = pytest.importorskip("torch")
    half = torch.tensor([1.0, -2.5], dtype=torch.bfloat16)
    model = tensorcap.JaxModel(lambda x: x * 1)
    assert model(half).dtype == jnp.bfloat16
    workload = tensorcap.Workload(model, {"x": torch.tensor([1.0, 3.0])})
    prepared: Any = adapter_for(model).prepare(workload, input_dtype="bfloat16")
    assert prepared.inputs["x"].dtype == jnp.bfloat16
    assert prepared.inputs["x"].tolist() == [1.0, 3.0]


@pytest.mark.spec("JAX-1")
def test_constants_that_are_equal_and_not_the_same_are_compiled_apart() -> None:
    model = tensorcap.JaxModel(lambda x, zero: jnp.copysign(x, zero))
    ones = np.ones(2, np.float32)
    assert [model(ones, zero).tolist() for zero in (0.0, -0.0, 0.0)] == [[1, 1], [-1, -1], [1, 1]]
    typed = tensorcap.JaxModel(lambda x, one: x + isinstance(one, bool))
    assert [float(typed(ones, one)[0]) for one in (1, True)] == [1, 2]
    assert len(model.compiled) == len(typed.compiled) == 2


class Sign(nnx.Module):
    def __init__(self) -> None:
        self.zero = 0.0

    def __call__(self, x: Any) -> Any:
        return jnp.copysign(x, self.zero)


@pytest.mark.spec("JAX-1")
def test_an_attribute_that_is_equal_and_not_the_same_is_compiled_anew() -> None:
    module = Sign()
    model = tensorcap.JaxModel(module)
    assert model(X[:1, :1]).tolist() == [[1]]
    module.zero = -0.0
    assert model(X[:1, :1]).tolist() == [[-1]]


@pytest.mark.spec("JAX-1")
@pytest.mark.parametrize("is_torch", [False, True], ids=["numpy", "torch"])
def test_nested_inputs_of_a_run_function_are_kept_and_given_again(is_torch: bool, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")

    def make(value: float) -> Any:
        array = np.full((2, 2), value, np.float32)
        return torch.from_numpy(array) if is_torch else array

    def run(model: Any, batch: Any, rope: Any, mode: str) -> None:
        model(batch["x"] * rope[0] if mode == "scaled" else batch["x"])

    def workload(value: float) -> tensorcap.Workload:
        inputs = {"batch": {"x": make(value)}, "rope": (make(2.0), 3), "mode": "scaled"}
        return tensorcap.Workload(tensorcap.JaxModel(lambda x: x + 1), inputs, run)

    with captured(tmp_path, workload(5.0)) as archive:
        assert {r.key.text: archive.load(r)[0, 0] for r in archive.records} == {
            "0/@root/given.batch.x": 5,
            "0/@root/given.rope.0": 2,
            "0/@root/input.x": 10,
            "0/@root/output": 11,
        }
        again = adapter_for(workload(0.0).model).prepare(workload(0.0), inputs=archived_inputs(archive))
    inputs: Any = again.inputs
    assert float(inputs["batch"]["x"][0, 0]) == 5
    assert inputs["rope"][1] == 3


@pytest.mark.spec("JAX-1")
def test_numbers_for_a_run_function_are_kept_and_given_again(tmp_path: Path) -> None:
    def run(model: Any, x: Any, count: int, factors: Any, groups: Any, mode: str) -> None:
        model(x * count * factors[0])

    def workload(count: int, factors: Any) -> tensorcap.Workload:
        inputs = {"x": X, "count": count, "factors": factors, "groups": [[1, 2], [3]], "mode": "sum"}
        return tensorcap.Workload(tensorcap.JaxModel(lambda x: x + 1), inputs, run)

    with captured(tmp_path, workload(2, (0.5, 4.0))) as archive:
        archived = archived_inputs(archive)
    assert set(archived) == {"x", "count", "factors"}  # of groups there is no array
    again: Any = adapter_for(workload(7, (1.0, 1.0)).model).prepare(workload(7, (1.0, 1.0)), inputs=archived)
    given = dict(again.inputs)
    assert np.array_equal(given.pop("x"), X)
    assert given == {"count": 2, "factors": (0.5, 4.0), "groups": [[1, 2], [3]], "mode": "sum"}
    with pytest.raises(UsageError, match="input 'count' of the archive is none of the workload's: x"):
        adapter_for(again.model).prepare(replace(again, inputs={"x": X}), inputs=archived)
