"""Archived values in the place of an ONNX graph's own: by switches, in one session for every run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper

import tensorcap
from tensorcap.adapters.onnx import sections
from tensorcap.adapters.onnx.engine import Session
from tensorcap.session import capture_workload
from tensorcap_formats.errors import UsageError
from tensorcap_formats.open import open_archive
from tests.onnx.graphs import B1, W2, X, mlp, mlp_values, model, save
from tests.support.archives import new_archive


def workload(folder: Path, made: Any = None, *, bound: int = 1 << 30) -> tensorcap.Workload:
    path = save(mlp() if made is None else made, folder / "net.onnx")
    return tensorcap.Workload(tensorcap.OnnxModel(path, tapped_bytes=bound), {"x": X})


def with_bias(value: float) -> Any:
    """The model with another bias, which is a mistake in `net.up`."""
    made = mlp()
    for stored in made.graph.initializer:
        if stored.name == "net.up.bias":
            stored.CopyFrom(numpy_helper.from_array(B1 + np.float32(value), stored.name))
    return made


@pytest.mark.spec("ONX-20", "INJ-2")
@pytest.mark.parametrize("bound", [1 << 30, 1], ids=["one section", "a section a node"])
def test_a_result_is_replaced_for_all_that_takes_it_and_the_natural_one_is_recorded(
    bound: int, tmp_path: Path
) -> None:
    given = np.random.default_rng(5).standard_normal((2, 6)).astype(np.float32)
    with new_archive(tmp_path / "given.h5", {"0/net.up/output": given}) as source:
        tensorcap.inject(
            source, workload(tmp_path, bound=bound), tmp_path / "out.h5", outputs="net.up", mapping="none"
        )
    with open_archive(tmp_path / "out.h5") as archive:
        natural = archive.read(archive.get("0/net.up/output"))
        np.testing.assert_allclose(natural, mlp_values()["Add"], rtol=1e-5, atol=1e-6)
        relu = archive.read(archive.get("0/net.act/output"))
        assert np.array_equal(relu, np.maximum(given, 0))
        result = archive.read(archive.get("0/@root/output"))
        np.testing.assert_allclose(result, np.maximum(given, 0).astype(np.float64) @ W2, rtol=1e-5, atol=1e-6)
        assert archive.info.injected is not None


@pytest.mark.spec("ONX-20")
def test_an_argument_is_replaced_in_its_module_alone(tmp_path: Path) -> None:
    given = np.ones((2, 6), np.float32)
    with new_archive(tmp_path / "given.h5", {"0/net.act/input.0": given - 3}) as source:
        tensorcap.inject(source, workload(tmp_path), tmp_path / "out.h5", inputs="net.act", mapping="none")
    with open_archive(tmp_path / "out.h5") as archive:
        assert not archive.read(archive.get("0/net.act/output")).any()
        natural = archive.read(archive.get("0/net.act/input.0"))
        np.testing.assert_allclose(natural, mlp_values()["Add"], rtol=1e-5, atol=1e-6)


@pytest.mark.spec("INJ-7", "ONX-20")
def test_a_run_with_its_own_values_computes_the_same_bits(tmp_path: Path) -> None:
    capture_workload(workload(tmp_path), tmp_path / "own.h5", injectable=("output",))
    with open_archive(tmp_path / "own.h5") as own:
        tensorcap.inject(own, workload(tmp_path), tmp_path / "out.h5")
        with open_archive(tmp_path / "out.h5") as archive:
            assert [r.digest for r in archive.records] == [r.digest for r in own.records]


@pytest.mark.spec("ONX-20")
def test_rounded_values_in_another_order_have_switches(tmp_path: Path) -> None:
    """onnxruntime 1.32 ends the process where a transposition is between a `DequantizeLinear` and an `If`."""
    step: dict[str, Any] = {"step": np.float32(0.5), "zero": np.int8(0)}
    nodes = [
        helper.make_node("QuantizeLinear", ["x", *step], ["/net/q"], "/net/q"),
        helper.make_node("DequantizeLinear", ["/net/q", *step], ["/net/dq"], "/net/dq"),
        helper.make_node("Transpose", ["/net/dq"], ["/net/t"], "/net/Transpose", perm=[1, 0]),
        helper.make_node("Relu", ["/net/t"], ["y"], "/net/act/Relu"),
    ]
    made = model(nodes, [("x", TensorProto.FLOAT, ["batch", 4])], ["y"], step)
    given = np.full((4, 2), 7, np.float32)
    with new_archive(tmp_path / "given.h5", {"0/net.act/input.0": given}) as source:
        run = workload(tmp_path, made)
        tensorcap.inject(source, run, tmp_path / "out.h5", inputs="net.act", mapping="none")
    with open_archive(tmp_path / "out.h5") as archive:
        rounded = np.round(X.astype(np.float64).T / 0.5) * 0.5
        assert np.array_equal(archive.read(archive.get("0/net.act/input.0")), rounded)
        assert np.array_equal(archive.read(archive.get("0/net.act/output")), given)


@pytest.mark.spec("INJ-6")
def test_a_tensor_of_another_shape_does_not_fit(tmp_path: Path) -> None:
    text = r"0/net\.up/output: does not fit: \[6, 2\] in the archive, \[2, 6\]"
    source = new_archive(tmp_path / "given.h5", {"0/net.up/output": np.ones((6, 2), np.float32)})
    with source, pytest.raises(UsageError, match=text):
        tensorcap.inject(source, workload(tmp_path), tmp_path / "o.h5", outputs="net.up", mapping="none")


@pytest.mark.spec("ONX-21")
def test_a_bisection_makes_its_sessions_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    capture_workload(workload(tmp_path), tmp_path / "ref.h5")
    counted: list[str] = []

    def session(*args: Any, **options: Any) -> Any:
        counted.append(args[0])
        return Session(*args, **options)

    monkeypatch.setattr(sections, "Session", session)
    (tmp_path / "bad").mkdir()
    wrong = workload(tmp_path / "bad", with_bias(0.5))
    with open_archive(tmp_path / "ref.h5") as reference:
        bisection = tensorcap.bisect(reference, target_model=wrong)
    assert isinstance(bisection, tensorcap.LiveBisection)
    assert bisection.module == "net.up"
    assert len(bisection.runs) >= 3
    assert len(counted) == 3  # types, shapes, and that of every run


@pytest.mark.spec("ONX-21")
def test_a_replay_of_the_target_names_the_module(tmp_path: Path) -> None:
    capture_workload(workload(tmp_path), tmp_path / "ref.h5")
    (tmp_path / "bad").mkdir()
    with open_archive(tmp_path / "ref.h5") as reference:
        replay = tensorcap.replay(reference, target_model=workload(tmp_path / "bad", with_bias(0.5)))
        wrong = [e.key for e in replay.own_errors if e.status not in ("identical", "within-rounding")]
        located = tensorcap.localize(reference, target_model=workload(tmp_path / "bad", with_bias(0.5)))
    assert wrong == ["0/net.up/output"]
    assert located.suspects[0].module == "net.up"
