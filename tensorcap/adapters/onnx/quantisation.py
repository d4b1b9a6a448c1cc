"""What a graph holds and computes in few bits: weights as floats, and what values between nodes stand for.

Read `find_weights` first: in which forms a weight in few bits is written. `QuantisedWeight` makes floats of
one. `find_grids` has the values that are whole numbers, and `separate_quantisers` gives each product whose
inputs are rounded at each run a node of its own that rounds them. `quantised_constants` are weights that the
graph rounds itself.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import onnx
from onnx import helper, numpy_helper

from tensorcap_formats.dtypes import Array

if TYPE_CHECKING:
    from tensorcap.adapters.onnx.graph import GraphNode, OnnxGraph

_DYNAMIC: Final = "DynamicQuantizeLinear"
_INTEGERS: Final = ("MatMulInteger", "ConvInteger")  # whose sums other nodes scale
_STEPS_OF_PRODUCT: Final = 2  # that of the input, and that of the weight
_KEPT: Final = (
    "Reshape",
    "Transpose",
    "Squeeze",
    "Unsqueeze",
    "Flatten",
    "Identity",
    "Slice",
    "Gather",
    "Expand",
)
_BYTE: Final = 8  # bits
_WHOLE: Final = re.compile(r"(?P<unsigned>u?)int(?P<bits>[0-9]{1,2})")
_ZERO_PLACE: Final = 2  # of the zero point that a QuantizeLinear takes
_STATIC: Final = ("QuantizeLinear", "DequantizeLinear")
_TAKE_ROUNDED: Final = ("MatMul", "Gemm", "Conv", "ConvTranspose", "QLinearMatMul", "QLinearConv", "QGemm")
_STEPS_OF: Final[Mapping[str, tuple[int, int]]] = {  # places of step and zero point of the result
    "QuantizeLinear": (1, 2),
    "QLinearMatMul": (6, 7),
    "QLinearConv": (6, 7),
    "QGemm": (7, 8),
    "QLinearAdd": (6, 7),
    "QLinearMul": (6, 7),
    "QLinearSoftmax": (3, 4),
    "QLinearSigmoid": (3, 4),
    "QLinearLeakyRelu": (3, 4),
    "QLinearAveragePool": (3, 4),
    "QLinearGlobalAveragePool": (3, 4),
    "QLinearConcat": (0, 1),
}
_STEPS_GIVEN: Final[Mapping[str, tuple[tuple[int, int, int], ...]]] = {  # a value, its step and zero point
    "DequantizeLinear": ((0, 1, 2),),
    "QLinearMatMul": ((0, 1, 2), (3, 4, 5)),
    "QLinearConv": ((0, 1, 2),),
    "QGemm": ((0, 1, 2),),
    "QLinearAdd": ((0, 1, 2), (3, 4, 5)),
    "QLinearMul": ((0, 1, 2), (3, 4, 5)),
    "QLinearSoftmax": ((0, 1, 2),),
    "QLinearSigmoid": ((0, 1, 2),),
    "QLinearLeakyRelu": ((0, 1, 2),),
    "QLinearAveragePool": ((0, 1, 2),),
    "QLinearGlobalAveragePool": ((0, 1, 2),),
}


@dataclass(frozen=True, slots=True)
class Weight:
    """Where an operator takes a weight in few bits: places of numbers, steps and zero points.

    Attributes:
        name: What torch calls it.
        numbers: Place of the numbers.
        steps: Place of the steps; -1 if other nodes scale the result.
        zeros: Place of the zero points.
        axis: The axis that several steps are along.
    """

    name: str
    numbers: int
    steps: int
    zeros: int
    axis: int = -1


_WEIGHTS: Final[Mapping[str, tuple[Weight, ...]]] = {
    "MatMulInteger": (Weight("weight", 1, -1, 3),),
    "ConvInteger": (Weight("weight", 1, -1, 3, 0),),
    "QLinearMatMul": (Weight("weight", 3, 4, 5),),
    "QLinearConv": (Weight("weight", 3, 4, 5, 0),),
    "QGemm": (Weight("weight", 3, 4, 5),),
    "DynamicQuantizeMatMul": (Weight("weight", 1, 2, 3),),
    "MatMulIntegerToFloat": (Weight("weight", 1, 3, 5),),
    "QLinearAdd": (Weight("bias", 0, 1, 2), Weight("bias", 3, 4, 5)),
    "QEmbedLayerNormalization": tuple(Weight("", n, n + 6, n + 11) for n in range(2, 7)),
    "QAttention": (Weight("", 1, 4, 7),),
}
_BIASES: Final[
    Mapping[str, tuple[int, int, int]]
] = {  # places of numbers, of the input's step and the weight's
    "QLinearConv": (8, 1, 4),
    "QGemm": (6, 1, 4),
}
_PRODUCTS: Final = (
    "MatMul",
    "MatMulInteger",
    "QLinearMatMul",
    "DynamicQuantizeMatMul",
    "MatMulIntegerToFloat",
    "QAttention",
)
_INPUTS_ROUNDED: Final = (*_INTEGERS, "DynamicQuantizeMatMul", "MatMulIntegerToFloat", "QAttention")


@dataclass(frozen=True, slots=True)
class QuantisedWeight:
    """A weight in few bits.

    Attributes:
        name: What torch calls it; "" if that is what the node that takes it says.
        numbers: Name of its numbers.
        steps: Name of what these are multiplied by.
        zeros: Name of the numbers that stand for 0; "" if that is 0.
        axis: The axis that steps are along, if they have one axis.
        number: The format of one number: `int8`, `uint4`.
        shape: Of `[outputs, inputs]`, if the numbers are packed in blocks of a row; else empty.
        block: How many of these share a step.
        bits: Of one of these.
        is_transposed: Whether its axes are in the reverse order of those of the module's own weight.
        input_step: Name of the step of an input, which its own are times, as those of a bias; "" if of none.
        part: Which of how many equal parts of the outputs it is.
    """

    name: str
    numbers: str
    steps: str
    zeros: str
    axis: int = -1
    number: str = ""
    shape: tuple[int, ...] = ()
    block: int = 0
    bits: int = 0
    is_transposed: bool = False
    input_step: str = ""
    part: tuple[int, int] = (0, 1)

    @property
    def parts(self) -> tuple[str, ...]:
        """Names of the initialisers that it is kept in."""
        return tuple(name for name in (self.numbers, self.steps, self.zeros) if name)


@dataclass(frozen=True, slots=True)
class Floats:
    """A weight in few bits, as floats.

    Attributes:
        values: float32, in the shape that the module's own weight has.
        steps: What numbers are multiplied by, float32, one for each block along each axis.
        zeros: The numbers that stand for 0, likewise; None if that is 0.
    """

    values: Array
    steps: Array
    zeros: Array | None


def read_floats(graph: OnnxGraph, weight: QuantisedWeight) -> Floats:
    """Make floats of a weight: numbers less zero points, times their steps."""
    if weight.shape:
        return _of_blocks(graph, weight)
    numbers = graph.floats(weight.numbers)
    steps = _along(graph.floats(weight.steps), numbers.shape, weight)
    if weight.input_step:
        steps = steps * graph.floats(weight.input_step).reshape((1,) * numbers.ndim)
    zeros = _along(graph.floats(weight.zeros), numbers.shape, weight) if weight.zeros else None
    zeros = None if zeros is None or not zeros.any() else zeros
    whole = numbers if zeros is None else numbers - _spread(zeros, numbers.shape)
    values: Array = (whole * _spread(steps, numbers.shape)).astype(np.float32)
    if weight.is_transposed:
        values, steps, zeros = values.T, steps.T, None if zeros is None else zeros.T
    values, steps = (_part(side, weight) for side in (values, steps))
    zeros = None if zeros is None else _part(zeros, weight)
    zeros = None if zeros is None else np.ascontiguousarray(zeros)
    return Floats(np.ascontiguousarray(values), np.ascontiguousarray(steps), zeros)


def _part(side: Array, weight: QuantisedWeight) -> Array:
    """The part of values, steps or zero points that is the weight's, along outputs if these have several."""
    number, count = weight.part
    return side if len(side) == 1 else np.split(side, count)[number]


def _along(side: Array, shape: tuple[int, ...], weight: QuantisedWeight) -> Array:
    """Steps or zero points with an axis for each of the numbers'."""
    if side.size == 1:
        return side.reshape((1,) * len(shape))
    axis = weight.axis % max(1, len(shape))
    if side.ndim == len(shape):
        return side
    wide = [1] * len(shape)
    wide[axis] = side.size
    return side.reshape(wide)


def _spread(side: Array, shape: tuple[int, ...]) -> Array:
    """Steps or zero points, for each number."""
    for axis, (count, size) in enumerate(zip(side.shape, shape, strict=True)):
        if 1 < count < size:
            side = np.repeat(side, -(-size // count), axis=axis).take(range(size), axis=axis)
    return side


def _of_blocks(graph: OnnxGraph, weight: QuantisedWeight) -> Floats:
    """Numbers of MatMulNBits: of a row blocks of bytes, the first number in the lowest bits."""
    rows, columns = weight.shape
    count = -(-columns // weight.block)
    packed = graph.elements(weight.numbers).reshape(rows, count, -1)
    numbers = _unpacked(packed, weight.bits)[..., : weight.block].astype(np.float32)
    steps = graph.floats(weight.steps).reshape(rows, count)
    zeros = np.full((rows, count), 2 ** (weight.bits - 1), np.float32)
    if weight.zeros:
        stored = graph.elements(weight.zeros)
        zeros = graph.floats(weight.zeros).reshape(rows, -1)
        if stored.dtype == np.uint8 and weight.bits < _BYTE:
            zeros = _unpacked(stored.reshape(rows, -1), weight.bits)[:, :count].astype(np.float32)
    values = ((numbers - zeros[..., None]) * steps[..., None]).reshape(rows, -1)[:, :columns]
    if columns % weight.block:  # the last block is cut
        steps, zeros = (np.repeat(side, weight.block, axis=1)[:, :columns] for side in (steps, zeros))
    return Floats(np.ascontiguousarray(values, np.float32), np.ascontiguousarray(steps), zeros)


def _unpacked(packed: Array, bits: int) -> Array:
    """The numbers in bytes, the first in the lowest bits, along the last axis."""
    shifts = np.arange(0, _BYTE, bits, dtype=np.uint8)
    numbers: Array = (packed[..., None] >> shifts) & (2**bits - 1)
    return numbers.reshape(*packed.shape[:-1], -1)


def find_weights(graph: OnnxGraph) -> dict[tuple[int, int], QuantisedWeight]:
    """Find the weights that a graph holds in few bits, by node and the place in which it takes them.

    1. `DequantizeLinear` of constants is a weight for all that take it, transposed or cast before too.
    2. Of a `Gather` of numbers that is dequantised behind it, these are a table.
    3. `MatMulNBits` has blocks of each row; QLinear operators and those of integers have numbers, steps and
       zero points in their places; the step of `MatMulInteger` is a factor behind it.
    """
    weights: dict[tuple[int, int], QuantisedWeight] = {}
    values: dict[str, QuantisedWeight] = {}
    for node in graph.nodes:
        op = node.op.rpartition(".")[2]
        taken = node.inputs[: node.own_inputs]
        if op == "DequantizeLinear" and all(graph.is_constant(name) for name in taken if name):
            values[node.outputs[0]] = _of_dequantiser(graph, node, taken[0])
            continue
        if op in ("Transpose", "Identity", "Cast") and taken[0] in values:
            weight = values[taken[0]]
            is_reversed = op == "Transpose" and list(attributes(node).get("perm", ())) in ([], [1, 0])
            if op != "Transpose" or is_reversed:
                values[node.outputs[0]] = replace(weight, is_transposed=weight.is_transposed != is_reversed)
            continue
        for place, name in enumerate(taken):
            if name in values:
                weight = values[name]
                is_transposed = weight.is_transposed != _takes_reversed(node, op, place)
                weights[node.index, place] = replace(weight, is_transposed=is_transposed)
        weights.update(
            ((node.index, place), weight) for place, weight in _of_operator(graph, node, op, taken)
        )
    return weights


def _takes_reversed(node: GraphNode, op: str, place: int) -> bool:
    """Whether a node takes inputs along the first axis of a weight, where a module has outputs."""
    if op in ("Gemm", "QGemm"):
        return place in (1, 3) and not attributes(node).get("transB", 0)
    return op in _PRODUCTS and place != 0


def _of_dequantiser(graph: OnnxGraph, node: GraphNode, numbers: str) -> QuantisedWeight:
    steps, zeros = (node.inputs[place] if place < node.own_inputs else "" for place in (1, 2))
    axis = int(attributes(node).get("axis", 1))
    return QuantisedWeight("", numbers, steps, zeros, axis, graph.number_format(numbers))


def _of_operator(
    graph: OnnxGraph, node: GraphNode, op: str, taken: tuple[str, ...]
) -> Iterator[tuple[int, QuantisedWeight]]:
    def at(place: int) -> str:
        return taken[place] if 0 <= place < len(taken) else ""

    if op == "MatMulNBits":
        own = attributes(node)
        bits = int(own.get("bits", 4))
        in_order = not at(4)
        if all(graph.is_constant(at(place)) for place in (1, 2)) and in_order:
            shape = int(own["N"]), int(own["K"])
            yield (
                1,
                QuantisedWeight(
                    "weight", at(1), at(2), at(3), -1, f"uint{bits}", shape, int(own["block_size"]), bits
                ),
            )
        return
    if op == "Gather" and at(0) in graph.weights:
        steps, zeros = _steps_stated(graph, node.outputs[0])
        if steps:
            yield 0, QuantisedWeight("weight", at(0), steps, zeros, 0, graph.number_format(at(0)))
        return
    for form in _WEIGHTS.get(op, ()):
        numbers, zeros = at(form.numbers), at(form.zeros)
        steps = at(form.steps) if form.steps >= 0 else _factor_behind(graph, node)
        if not numbers or not steps or not all(graph.is_constant(n) for n in (numbers, steps)):
            continue
        is_transposed = _takes_reversed(node, op, form.numbers)
        axis = 0 if op == "QGemm" and not is_transposed else form.axis
        number = graph.number_format(numbers)
        yield (
            form.numbers,
            QuantisedWeight(form.name, numbers, steps, zeros, axis, number, is_transposed=is_transposed),
        )
    places = _BIASES.get(op)
    names = [at(place) for place in places or ()]
    if places and all(name and graph.is_constant(name) for name in names):
        bias, step, steps = names
        number = graph.number_format(bias)
        yield places[0], QuantisedWeight("bias", bias, steps, "", 0, number, input_step=step)


def _steps_stated(graph: OnnxGraph, value: str) -> tuple[str, str]:
    """Names of the step and the zero point that a node which takes a value has for it; "" if none has."""
    for taker in graph.takers.get(value, ()):
        for places in _STEPS_GIVEN.get(taker.op.rpartition(".")[2], ()):
            names = [taker.inputs[n] if n < taker.own_inputs else "" for n in places]
            if names[0] == value and all(graph.is_constant(name) for name in names[1:] if name):
                return names[1], names[2]
    return "", ""


def _factor_behind(graph: OnnxGraph, node: GraphNode) -> str:
    """The constant step of a weight among the factors of an integer product's result; "" if there is none."""
    for factor in _factors_behind(graph, node):
        if graph.is_constant(factor):
            return factor
    return ""


def _factors_behind(graph: OnnxGraph, node: GraphNode) -> Iterator[str]:
    """What the result of an integer product is multiplied by, cast before; factors of a product apart."""
    name = node.outputs[0]
    for _ in range(4):
        takers = graph.takers.get(name, [])
        if len(takers) != 1:
            return
        taker = takers[0]
        if taker.op == "Mul":
            other = next((each for each in taker.inputs if each != name), "")
            maker = graph.makers.get(other)
            yield from maker.inputs if maker is not None and maker.op == "Mul" else (other,)
        elif taker.op not in ("Cast", "Reshape"):
            return
        name = taker.outputs[0]


def scaling_nodes(graph: OnnxGraph, product: GraphNode) -> list[GraphNode]:
    """The nodes that make floats of an integer product: they cast it, and multiply it by both its steps.

    None of another node. The last one makes the result.
    """
    found: list[GraphNode] = []
    passed: list[GraphNode] = []
    name, steps = product.outputs[0], 0
    while product.op in _INTEGERS and steps < _STEPS_OF_PRODUCT:
        takers = graph.takers.get(name, [])
        if len(takers) != 1 or takers[0].op not in ("Cast", "Reshape", "Mul"):
            break
        passed.append(takers[0])
        if takers[0].op == "Mul":
            other = next((each for each in takers[0].inputs if each != name), "")
            maker = graph.makers.get(other)
            factors = maker.inputs if maker is not None and maker.op == "Mul" else (other,)
            if not all(graph.is_constant(each) or _is_step(graph, each) for each in factors):
                break
            found += [maker, *passed] if maker is not None and maker.op == "Mul" else passed
            passed, steps = [], steps + len(factors)
        name = takers[0].outputs[0]
    return found


def _is_step(graph: OnnxGraph, name: str) -> bool:
    maker = graph.makers.get(name)
    return maker is not None and maker.op == _DYNAMIC


def attributes(node: GraphNode) -> dict[str, Any]:
    """A node's attributes by name."""
    return {each.name: helper.get_attribute_value(each) for each in node.proto.attribute}


@dataclass(frozen=True, slots=True)
class Grid:
    """What whole numbers of a value stand for: less `zero`, times `step`.

    Attributes:
        step: What they are multiplied by.
        zero: The number that stands for 0.
        limits: The least and the largest number; none of floats in few bits.
    """

    step: float
    zero: float
    limits: tuple[int, ...] = ()

    @property
    def ends(self) -> list[float]:
        """What the least and the largest number stand for: values beyond are cut."""
        return [(limit - self.zero) * self.step for limit in self.limits]

    def floats(self, numbers: Array) -> Array:
        """The floats of numbers, float32."""
        values: Array = (numbers.astype(np.float32) - np.float32(self.zero)) * np.float32(self.step)
        return values

    def numbers(self, values: Array, dtype: Any) -> Array:
        """The nearest numbers of floats."""
        low, high = self.limits or (np.iinfo(dtype).min, np.iinfo(dtype).max)
        rounded = np.rint(values.astype(np.float64) / self.step) + self.zero
        return np.clip(rounded, low, high).astype(dtype)


def find_grids(graph: OnnxGraph) -> dict[str, Grid]:
    """The values of a graph that are whole numbers with one constant step, by name.

    It is said by the node that makes a value, or by one that takes it, or it is that of what a node moves.
    """
    grids: dict[str, Grid] = {}
    for node in graph.nodes:
        op = node.op.rpartition(".")[2]
        names = tuple(node.inputs[n] if n < node.own_inputs else "" for n in _STEPS_OF.get(op, ()))
        if op in _KEPT and node.inputs and node.inputs[0] in grids:
            grids[node.outputs[0]] = grids[node.inputs[0]]
            continue
        for name in node.outputs[:1]:
            grid = _grid(graph, *(names or _steps_stated(graph, name)))
            if grid is not None:
                grids[name] = grid
    return grids


def _grid(graph: OnnxGraph, steps: str, zeros: str = "") -> Grid | None:
    """The grid of one constant step; None if it is none."""
    if not steps or not all(graph.is_constant(name) for name in (steps, zeros) if name):
        return None
    step, zero = (graph.floats(name) if name else np.zeros(1, np.float32) for name in (steps, zeros))
    if step.size != 1 or zero.size != 1:
        return None
    limits = number_limits(graph.number_format(zeros) if zeros else "uint8")
    return Grid(float(step.reshape(())), float(zero.reshape(())), limits)


def number_limits(number_format: str) -> tuple[int, ...]:
    """The least and the largest number of a format, as 0 and 15 of `uint4`; none of floats."""
    whole = _WHOLE.fullmatch(number_format)
    if whole is None:
        return ()
    count = 1 << int(whole["bits"])
    return (0, count - 1) if whole["unsigned"] else (-count // 2, count // 2 - 1)


def own_grid(grids: Mapping[str, Grid], node: GraphNode) -> Grid | None:
    """The grid that a node itself rounds what it makes to; None if it makes floats, or moves numbers."""
    is_rounder = node.op.rpartition(".")[2] in _STEPS_OF and bool(node.outputs)
    return grids.get(node.outputs[0]) if is_rounder else None


def rounded_result(
    grids: Mapping[str, Grid], nodes: Iterable[GraphNode], rounders: Collection[int]
) -> dict[str, Any]:
    """How nodes round a result that round values after one another, as settings: steps in quadrature.

    Nothing if none does. Nodes that round inputs of products are none. The range is that of the last.
    """
    found = [own_grid(grids, node) for node in nodes if node.index not in rounders]
    own = [grid for grid in found if grid is not None]
    return _of_result(math.sqrt(sum(grid.step**2 for grid in own)), own[-1]) if own else {}


def result_grid(graph: OnnxGraph, grids: Mapping[str, Grid], names: Iterable[str]) -> dict[str, Any]:
    """How some values are rounded, as settings: by the largest step. Nothing if one of them is not."""
    found = []
    for name in names:
        maker = graph.makers.get(name)
        source = maker.inputs[0] if maker is not None and maker.op == "DequantizeLinear" else name
        found.append(grids.get(source))
    own = [grid for grid in found if grid is not None]
    widest = max(own, key=lambda grid: grid.step, default=None)
    return _of_result(widest.step, widest) if widest is not None and len(own) == len(found) else {}


def _of_result(step: float, grid: Grid) -> dict[str, Any]:
    return {"output_step": step, "output_range": grid.ends}


def rounds_inputs(graph: OnnxGraph, node: GraphNode, within: Collection[int]) -> dict[str, Any]:
    """How a product rounds its inputs, as settings of its module (`specs/capture.md`, CAP-330).

    Args:
        graph: The graph.
        node: The product.
        within: Places of the nodes of its module.
    """
    op = node.op.rpartition(".")[2]
    if op == "MatMulNBits" and attributes(node).get("accuracy_level", 0) == 4:
        return {"input_bits": 8, "input_rows": True, "input_symmetric": True}
    maker = graph.makers.get(node.inputs[0]) if node.inputs else None
    if op in _TAKE_ROUNDED and maker is not None and maker.op == "DequantizeLinear":
        maker = graph.makers.get(maker.inputs[0])
    if op == "DynamicQuantizeMatMul":
        return {"input_bits": _BYTE}
    if maker is None or maker.index not in within:
        return {}
    if op in _INPUTS_ROUNDED and maker.op == _DYNAMIC:
        return {"input_bits": _BYTE}
    grid = _grid(graph, *maker.inputs[1:3]) if maker.op == "QuantizeLinear" and op in _TAKE_ROUNDED else None
    return {"input_step": grid.step, "input_range": grid.ends} if grid is not None else {}


def input_rounders(graph: OnnxGraph) -> frozenset[int]:
    """Places of the nodes that round what products take, and nothing else does: they are parts of these."""
    rounders: set[int] = set()
    for node in reversed(graph.nodes):
        takers = [taker for name in node.outputs for taker in graph.takers.get(name, ())]
        if node.op == _DYNAMIC:
            rounders.add(node.index)
            continue
        if node.op not in _STATIC or not takers or graph.is_constant(node.inputs[0]):
            continue
        maker = graph.makers.get(node.inputs[0])
        is_source = node.op == "QuantizeLinear" or (maker is not None and maker.op == "QuantizeLinear")
        if is_source and all(t.index in rounders or t.op.rpartition(".")[2] in _TAKE_ROUNDED for t in takers):
            rounders.add(node.index)
    return frozenset(rounders)


def separate_quantisers(model: Any) -> Any:
    """Give each product nodes of its own that round its inputs; the model itself if each has such.

    So what a module is given can be replaced for it alone, though the graph rounds it once for all that take
    it. A product of whole numbers takes the numbers and the zero point of a `DynamicQuantizeLinear`, whose
    step is a factor of what the result is multiplied by.
    """
    nodes = list(model.graph.node)
    makers = {name: place for place, node in enumerate(nodes) for name in node.output}
    takers: dict[str, list[int]] = {}
    for place, node in enumerate(nodes):
        for name in dict.fromkeys(node.input):
            takers.setdefault(name, []).append(place)
    groups: dict[tuple[int, ...], list[list[int]]] = {}  # nodes that round, and by product what takes of them
    for place, node in enumerate(nodes):
        maker = makers.get(node.input[0], -1) if node.op_type in _INPUTS_ROUNDED else -1
        if maker >= 0 and nodes[maker].op_type == _DYNAMIC:
            scaling = _scaling(nodes, takers, place, nodes[maker].output[1])
            groups.setdefault((maker,), []).append([place, *scaling])
        if node.op_type == "QuantizeLinear" and node.input[0] in makers:
            groups |= _static_groups(nodes, takers, place)
    if all(len(of_one) < 2 for of_one in groups.values()):
        return model
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    separate = list(copy.graph.node)
    added: dict[int, list[Any]] = {}
    for rounders, of_one in groups.items():
        for number, places in enumerate(of_one[1:], 1):
            renamed = {name: f"{name}_{number}" for place in rounders for name in nodes[place].output if name}
            for place in rounders:
                own = onnx.NodeProto()
                own.CopyFrom(nodes[place])
                own.name = f"{own.name}_{number}"
                _rename(own, renamed)
                added.setdefault(rounders[-1], []).append(own)
            for place in places:
                _rename(separate[place], renamed, is_maker=False)
    ordered = [each for place, node in enumerate(separate) for each in (node, *added.get(place, ()))]
    ordered = [onnx.NodeProto.FromString(node.SerializeToString()) for node in ordered]
    del copy.graph.node[:]
    copy.graph.node.extend(ordered)
    return copy


def _rename(node: Any, names: Mapping[str, str], *, is_maker: bool = True) -> None:
    node.input[:] = [names.get(name, name) for name in node.input]
    if is_maker:
        node.output[:] = [names.get(name, name) for name in node.output]


def _static_groups(
    nodes: list[Any], takers: Mapping[str, list[int]], place: int
) -> dict[tuple[int, ...], list[list[int]]]:
    """The products for which a `QuantizeLinear` rounds, itself or with a `DequantizeLinear` behind it.

    Nothing, if something else takes what it makes.
    """
    behind = takers.get(nodes[place].output[0], [])
    dequantisers = [other for other in behind if nodes[other].op_type == "DequantizeLinear"]
    if len(dequantisers) == len(behind) == 1:
        last = dequantisers[0]
        products = takers.get(nodes[last].output[0], [])
        rounders: tuple[int, ...] = (place, last)
    else:
        rounders, products = (place,), behind
    if any(nodes[other].op_type not in _TAKE_ROUNDED for other in products):
        return {}
    return {rounders: [[other] for other in products]}


def _scaling(nodes: list[Any], takers: Mapping[str, list[int]], product: int, step: str) -> Iterator[int]:
    """Places of the nodes that multiply the result of an integer product by the step of its inputs."""
    results = {nodes[product].output[0]}
    for place in takers.get(nodes[product].output[0], ()):
        if nodes[place].op_type == "Cast":
            results.add(nodes[place].output[0])
    for place in takers.get(step, ()):
        behind = [place, *takers.get(nodes[place].output[0], ())]
        if nodes[place].op_type == "Mul" and any(results & set(nodes[other].input) for other in behind):
            yield place


def quantised_constants(model: Any, graph: OnnxGraph) -> dict[str, Array]:
    """The numbers of constants that a graph rounds itself, by name.

    With `DynamicQuantizeLinear` their step and zero point too.
    """
    folded: dict[str, Array] = {}
    for node in model.graph.node:
        taken = [name for name in node.input if name]
        if node.op_type == _DYNAMIC and graph.is_constant(taken[0]):
            folded |= zip(node.output, _rounded(graph.floats(taken[0])), strict=True)
            continue
        is_rounder = node.op_type == "QuantizeLinear" and len(taken) > _ZERO_PLACE
        if not is_rounder or not all(map(graph.is_constant, taken)):
            continue
        values, zeros = graph.floats(taken[0]), graph.elements(taken[_ZERO_PLACE])
        own = {each.name: helper.get_attribute_value(each) for each in node.attribute}
        limits = np.iinfo(zeros.dtype) if zeros.dtype in (np.int8, np.uint8) else None
        if (
            limits is None
            or own.get("block_size")
            or graph.number_format(taken[_ZERO_PLACE]) != zeros.dtype.name
        ):
            continue
        shape = [1] * values.ndim
        if graph.floats(taken[1]).size > 1:
            shape[int(own.get("axis", 1))] = -1
        steps, zero = (side.reshape(shape) for side in (graph.floats(taken[1]), zeros.astype(np.float32)))
        numbers = np.clip(np.rint(values / steps) + zero, limits.min, limits.max).astype(zeros.dtype)
        folded[node.output[0]] = numbers
    return folded


def _rounded(values: Array) -> tuple[Array, Array, Array]:
    """Numbers, step and zero point that the operator `DynamicQuantizeLinear` makes of values, uint8."""
    low, high = min(float(values.min(initial=0)), 0.0), max(float(values.max(initial=0)), 0.0)
    limits = np.iinfo(np.uint8)
    step = np.float32((np.float32(high) - np.float32(low)) / np.float32(limits.max)) or np.float32(1)
    zero = np.clip(np.rint(-np.float32(low) / step), limits.min, limits.max)
    numbers = np.clip(np.rint(values / step) + zero, limits.min, limits.max)
    return numbers.astype(np.uint8), np.asarray(step), np.asarray(zero, np.uint8)


def with_constants(model: Any, constants: Mapping[str, Array]) -> Any:
    """A model that holds constants in the place of the nodes that make them, as its last initialisers."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    kept = [node for node in model.graph.node if not constants.keys() & set(node.output)]
    del copy.graph.node[:]
    copy.graph.node.extend(kept)
    copy.graph.initializer.extend(numpy_helper.from_array(v, name) for name, v in constants.items())
    return copy
