"""Operations that the target runs in the place of others: what traces of both sides prove, and what not."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tensorcap.alignment import sides
from tensorcap.comparison import ExchangedOperations, compare, exchanged_operations
from tensorcap_formats.open import open_archive
from tests.support.archives import write_archive

GENERATOR = np.random.default_rng(11)
X = GENERATOR.standard_normal((4, 32)).astype(np.float32)
SILU = (X / (1 + np.exp(-X.astype(np.float64)))).astype(np.float32)
GELU = (X / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (X + 0.044715 * X.astype(np.float64) ** 3)))).astype(
    np.float32
)
RELU = np.maximum(X, 0)


class Trace:
    """A run whose operations are recorded one by one, as capture has them."""

    def __init__(self) -> None:
        self.tensors: dict[str, Any] = {"0/@root/input.x": X}
        self.facts: dict[str, Any] = {}
        self.paths: dict[str, None] = {}

    def op(self, module: str, op: str, value: Any, *inputs: str, **arguments: Any) -> str:
        """Record one operation that takes tensors by key, or parameters by name; its result's key."""
        self.paths.setdefault(module)
        place, line = f"0/{module}:{op}", len(self.facts) + 10
        operands = [
            {"name": f"x{at}", "record" if "/" in text else "parameter": text}
            for at, text in enumerate(inputs)
        ]
        self.facts[f"{place}/op"] = {
            "op": op,
            "order": len(self.tensors),
            "module": module,
            "module_call": 0,
            "class": "Act",
            "file": "/lib/port.py",
            "line": line,
            "function": "forward",
            "inputs": operands,
            "arguments": arguments,
            "outputs": [{"slot": "output", "record": f"{place}/output"}],
        }
        self.tensors[f"{place}/output"] = value
        return f"{place}/output"

    def returns(self, module: str, value: Any) -> None:
        self.paths.setdefault(module)
        self.tensors[f"0/{module}/output"] = value

    def write(self, path: Path) -> Path:
        modules = [{"path": name, "class": "pkg.Act"} for name in self.paths]
        return write_archive(path, self.tensors, values=self.facts, run={"modules": modules})


@pytest.fixture
def exchanged(tmp_path: Path) -> Iterator[Any]:
    with ExitStack() as stack:

        def find(reference: Trace, target: Trace, mapping: Any = None) -> tuple[ExchangedOperations, ...]:
            ours, theirs = (
                stack.enter_context(open_archive(trace.write(tmp_path / name)))
                for trace, name in ((reference, "ref.h5"), (target, "tgt.h5"))
            )
            both = sides(ours, theirs, mapping)
            return exchanged_operations(compare(*both, mapping="none").pairs, *both)

        yield find


def activation(*ops: tuple[str, Any, Mapping[str, Any]], layers: int = 1, name: str = "act") -> Trace:
    """Layers of one activation, each of some operations, of which the last one's result is the module's."""
    trace, taken = Trace(), "0/@root/input.x"
    for layer in range(layers):
        module = f"layers.{layer}.{name}"
        for op, value, arguments in ops:
            taken = trace.op(module, op, value, taken, **arguments)
        trace.returns(module, ops[-1][1])
        taken = trace.op(f"layers.{layer}", "aten.add.Tensor", ops[-1][1] + X, taken, "0/@root/input.x")
    return trace


SILU_OP: tuple[str, Any, dict[str, Any]] = ("aten.silu.default", SILU, {})
GELU_OP: tuple[str, Any, dict[str, Any]] = ("aten.gelu.default", GELU, {"approximate": "tanh"})


@pytest.mark.spec("CMP-210")
def test_an_operation_in_the_place_of_another_is_named_with_its_line(exchanged: Any) -> None:
    (one,) = exchanged(activation(SILU_OP), activation(GELU_OP))
    assert one.text == (
        "The target ran aten.gelu(approximate='tanh') in the place of aten.silu in layers.0.act, "
        "port.py:10 in forward."
    )
    assert one.key == "0/layers.0.act/output"


@pytest.mark.spec("CMP-210")
def test_several_operations_stand_in_the_place_of_one(exchanged: Any) -> None:
    squared = ("aten.pow.Tensor_Scalar", RELU**2, {"exponent": 2})
    (one,) = exchanged(activation(SILU_OP), activation(("aten.relu.default", RELU, {}), squared))
    assert one.text == (
        "The target ran aten.relu, aten.pow.Tensor_Scalar(exponent=2) in the place of aten.silu in "
        "layers.0.act, port.py:11 in forward."
    )


@pytest.mark.spec("CMP-210")
def test_the_same_exchange_behind_the_first_is_named_with_it(exchanged: Any) -> None:
    (one,) = exchanged(activation(SILU_OP, layers=3), activation(GELU_OP, layers=3))
    assert one.modules == ("layers.0.act", "layers.1.act", "layers.2.act")
    assert "in layers.{0-2}.act, port.py:10 in" in one.text


@pytest.mark.spec("CMP-210")
def test_operations_of_many_arguments_are_told_apart_by_all_of_them(exchanged: Any) -> None:
    theirs = activation(GELU_OP, layers=2)
    for layer, number in enumerate((1, 2)):
        arguments = {"sizes": list(range(60)), "number": number, "device": "cpu"}
        theirs.facts[f"0/layers.{layer}.act:aten.gelu.default/op"]["arguments"] = arguments
    (one,) = exchanged(activation(SILU_OP, layers=2), theirs)  # the second is given other values
    assert one.modules == ("layers.0.act",)
    assert one.target[0].startswith("aten.gelu(sizes=[0, 1, 2")
    assert one.target[0].endswith("58, 59], number=1)")


@pytest.mark.spec("CMP-210")
def test_operations_that_compute_the_same_are_none(exchanged: Any) -> None:
    sigmoid: Any = ("aten.sigmoid.default", (1 / (1 + np.exp(-X))).astype(np.float32), {})
    assert exchanged(activation(SILU_OP), activation(sigmoid, ("aten.mul.Tensor", SILU, {}))) == ()


@pytest.mark.spec("CMP-210")
def test_what_is_given_other_values_proves_nothing(exchanged: Any) -> None:
    ours, theirs = activation(SILU_OP), activation(GELU_OP)
    theirs.tensors["0/@root/input.x"] = X + 1
    assert exchanged(ours, theirs) == ()


@pytest.mark.spec("CMP-210")
def test_operations_on_other_tensors_are_no_exchange(exchanged: Any) -> None:
    ours, theirs = Trace(), Trace()
    for trace in (ours, theirs):
        trace.tensors["0/@root/input.y"] = X[::-1].copy()
    ours.op("act", *SILU_OP[:2], "0/@root/input.x")
    theirs.op("act", *GELU_OP[:2], "0/@root/input.y")
    ours.returns("act", SILU)
    theirs.returns("act", GELU)
    assert exchanged(ours, theirs) == ()


@pytest.mark.spec("CMP-210")
@pytest.mark.parametrize(
    ("weights", "is_told"),
    [
        pytest.param((), False, id="not recorded"),
        pytest.param((np.full(32, 2, np.float32),) * 2, True, id="the same"),
        pytest.param((np.full(32, 2, np.float32), np.full(32, 3, np.float32)), False, id="not the same"),
    ],
)
def test_a_parameter_counts_as_what_is_taken(exchanged: Any, weights: Any, is_told: bool) -> None:
    traces = Trace(), Trace()
    for trace, op, value in zip(traces, ("aten.mul.Tensor", "aten.add.Tensor"), (2 * X, 2 + X), strict=True):
        trace.op("act", op, value, "0/@root/input.x", "act.weight")
        trace.returns("act", value)
    for trace, weight in zip(traces, weights, strict=False):
        trace.tensors["0/act/param.weight"] = weight
    assert [one.text for one in exchanged(*traces)] == (
        ["The target ran aten.add.Tensor in the place of aten.mul.Tensor in act, port.py:10 in forward."]
        if is_told
        else []
    )


@pytest.mark.spec("CMP-210")
def test_a_result_that_a_later_operation_takes_is_enough(exchanged: Any) -> None:
    """The activation is a call within a module that returns something else."""
    traces = Trace(), Trace()
    for trace, op, value in zip(traces, (SILU_OP[0], GELU_OP[0]), (SILU, GELU), strict=True):
        taken = trace.op("mlp", op, value, "0/@root/input.x")
        trace.op("mlp", "aten.mul.Tensor", value * X, taken, "0/@root/input.x")
    (one,) = exchanged(*traces)
    assert one.key == "0/mlp:aten.mul.Tensor/output"


@pytest.mark.spec("CMP-210")
def test_a_target_of_other_names_is_read_through_the_mapping(exchanged: Any, tmp_path: Path) -> None:
    mapping = tmp_path / "map.toml"
    entries = [("layers.0.act/output", "layers.0.ffn/output"), ("@root/input.x", "@root/input.x")]
    mapping.write_text(
        "".join(f'[[pair]]\nreference = "{ours}"\ntarget = "{theirs}"\n' for ours, theirs in entries)
    )
    (one,) = exchanged(activation(SILU_OP), activation(GELU_OP, name="ffn"), mapping)
    assert one.modules == ("layers.0.act",)
    assert one.key == "0/layers.0.act/output"
