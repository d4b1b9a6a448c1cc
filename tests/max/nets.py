"""Small max.nn models, elementwise so that they compile in seconds; the same shapes in all tests."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from max.driver import CPU, Buffer
from max.dtype import DType
from max.engine import InferenceSession
from max.graph import DeviceRef, Graph, TensorType, Weight, ops
from max.nn import LayerList
from max.nn.layer import Module

import tensorcap

ON_CPU = DeviceRef.CPU()
X = np.arange(8, dtype=np.float32).reshape(2, 4)
TYPES = [TensorType(DType.float32, [2, 4], ON_CPU)]


class Scale(Module):
    def __init__(self, dtype: DType = DType.float32) -> None:
        super().__init__()
        self.weight = Weight("weight", dtype, [4], ON_CPU)

    def __call__(self, x: Any) -> Any:
        return x * self.weight + 1.0


class Chain(Module):
    """x*w + 1, three times."""

    def __init__(self, dtype: DType = DType.float32) -> None:
        super().__init__()
        self.layers = LayerList([Scale(dtype) for _ in range(3)])

    def __call__(self, x: Any) -> Any:
        for layer in self.layers:
            x = layer(x)
        return x


WEIGHTS: dict[str, Any] = {f"layers.{i}.weight": np.full(4, i + 2.0, np.float32) for i in range(3)}
# x*2+1, then *3+1, then *4+1
AFTER = [2 * X + 1, 6 * X + 4, 24 * X + 17]


def chain(weights: Mapping[str, Any] = WEIGHTS) -> Chain:
    made = Chain()
    made.load_state_dict(weights, weight_alignment=1)
    return made


def with_wrong_first() -> dict[str, Any]:
    return {**WEIGHTS, "layers.0.weight": WEIGHTS["layers.0.weight"] * np.float32(1.5)}


class LastRows(Chain):
    """x*w + 1 three times, the last two of all rows but the first: of a size that is computed."""

    def __call__(self, x: Any) -> Any:
        x = self.layers[0](x)[1:]
        for layer in self.layers[1:]:
            x = layer(x)
        return x


class Pair(NamedTuple):
    high: Any
    low: Any


class Loud(Scale):
    """Calls what its class has of its base: one call all the same."""

    def __call__(self, x: Any, *, shift: Any = None, by: float = 0.0) -> Any:
        return super().__call__(x) + by if shift is None else super().__call__(x) + shift


class Split(Module):
    def __call__(self, pair: dict[str, Any]) -> Pair:
        return Pair(pair["a"] + pair["b"], pair["a"] - pair["b"])


class Stack(Module):
    """Leaves its attribute out of the names of its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.part = Scale()

    @property
    def _omit_module_attr_name(self) -> bool:
        return True

    def __call__(self, x: Any) -> Any:
        return self.part(x)


class Fused(Module):
    """Uses a child's weight and never calls the child."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = Scale()

    def __call__(self, x: Any) -> Any:
        return x * self.gate.weight


class Everything(Module):
    def __init__(self) -> None:
        super().__init__()
        self.twice = Scale()
        self.loud = Loud()
        self.split = Split()
        self.stack = Stack()
        self.fused = Fused()
        self.again = self.twice

    def __call__(self, x: Any, ids: Any, scale: float = 1.0) -> Any:
        x = self.twice(self.twice(x))
        x = self.loud(x, shift=x, by=0.5)
        high, low = self.split({"a": x, "b": ops.cast(ids, DType.float32)})
        tensorcap.probe("between", {"low": low})
        return {"sum": self.stack(high) * scale, "fused": self.fused(low)}


EVERYTHING = {
    name: np.full(4, value, np.float32)
    for name, value in (("twice.weight", 2), ("loud.weight", 3), ("part.weight", 1), ("fused.gate.weight", 5))
}
IDS = np.array([[1, 2, 3, 4], [5, 6, 7, 8]], np.int64)


def everything() -> Everything:
    made = Everything()
    made.load_state_dict(EVERYTHING, weight_alignment=1)
    return made


class Block(Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Scale(), Scale()

    def __call__(self, x: Any, by: Any) -> Any:
        return tensorcap.probe("halfway", self.second(self.first(x))) * by


class InSubgraph(Module):
    """Three blocks, traced once and called for each."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = LayerList([Block() for _ in range(3)])

    def __call__(self, x: Any) -> Any:
        by = x + 1.0
        part = self.layers[0].build_subgraph("part", [x, by], weight_prefix="layers.0.")
        for i in range(3):
            x = ops.call(part, x, by, prefix=f"layers.{i}.")[0].tensor
        return x


def in_subgraph() -> InSubgraph:
    module = InSubgraph()
    # x*w + 1, twice: with w 1 and 2 in the first block, 2 and 3 in the next
    weights = {
        f"layers.{i}.{name}.weight": np.full(4, i + at, np.float32)
        for i in range(3)
        for at, name in enumerate(("first", "second"), 1)
    }
    module.load_state_dict(weights, weight_alignment=1)
    return module


def somebody_elses(module: Module, *, runs: int = 1) -> list[list[Any]]:
    """A program that knows nothing of tensorcap: it makes, compiles and runs a graph of a module."""
    graph = Graph("theirs", module, input_types=TYPES)
    session = InferenceSession(devices=[CPU()])
    model = session.load(graph, weights_registry=module.state_dict())
    return [model(Buffer.from_numpy(X)) for _ in range(runs)]
