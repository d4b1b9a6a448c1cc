"""The entries say the truth: sources run, the right ones are right, and a mistake is where it is said."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, get_args

import numpy as np
import pytest

pytest.importorskip("coreai_torch", exc_type=ImportError)

import torch
from torch import nn
from torch.fx import Interpreter, Node

from tensorcap_formats.dtypes import Array
from tests.coreai import conversion
from tests.coreai.entries import CORRECT, MISTAKES, Conversion, Kind, Mistake, as_it_is

if TYPE_CHECKING:
    from torch.export import ExportedProgram

pytestmark = [
    pytest.mark.slow,
    # torch's own, if it copies a program to decompose it
    pytest.mark.filterwarnings("ignore:.isinstance.treespec, LeafSpec:FutureWarning"),
]

UNIT = {"float32": 2.0**-24, "float16": 2.0**-11}  # largest relative error of one rounding
UNIT_INT8 = 3 / 127 / np.sqrt(12.0)  # of a weight, whose rows have peaks of at most 3 times their size
IN_THE_SAME_OPERATIONS = [mistake for mistake in MISTAKES if mistake.kind != "rope"]
IN_A_MODULE = [mistake for mistake in MISTAKES if mistake.kind not in ("transposition", "bias")]
IN_TORCH = re.compile(r'File "[^"]*/torch/')
FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<number>\d+)')


def names(entries: Iterable[Conversion]) -> list[str]:
    return [entry.name for entry in entries]


def main_output(value: Any) -> torch.Tensor:
    return value if isinstance(value, torch.Tensor) else value.logits


@cache
def program(entry: Conversion) -> ExportedProgram:
    return entry.program()


@cache
def reference_program(model: str) -> ExportedProgram:
    return Conversion(model, model, as_it_is, "float32").program()


@cache
def plain(entry: Conversion) -> Array:
    """What the reference returns in plain torch."""
    with torch.no_grad():
        return main_output(entry.reference()(**entry.reference_inputs())).numpy()


@cache
def on_core_ai(entry: Conversion) -> Array:
    """What the conversion returns on Core AI."""
    with TemporaryDirectory() as folder:
        outputs = conversion.outputs(conversion.converted(program(entry)), entry.inputs(), Path(folder))
    (output,) = outputs.values()
    return output


def distance(one: Array, other: Array) -> float:
    """Root mean square of the difference, by that of the other; float64, no unit."""
    difference = one.astype(np.float64) - other.astype(np.float64)
    return float(np.sqrt(np.mean(difference**2) / np.mean(other.astype(np.float64) ** 2)))


def bound(entry: Conversion) -> float:
    """How far roundings move a result, as `distance` measures it.

    Of n roundings, each of a relative error up to u and independent of the others, the errors add up to
    sqrt(n) u (Higham and Mary, "A new approach to probabilistic rounding error analysis", 2019). A matrix
    product rounds each term of its sums. Weights rounded to int8 are one rounding a matrix.
    """
    operations = calls(reference_program(entry.model))
    if entry.precision == "int8":
        matrices = [
            node for node in operations if str(node.target) in ("aten.mm.default", "aten.addmm.default")
        ]
        return float(np.sqrt(np.float64(len(matrices))) * UNIT_INT8)
    return float(np.sqrt(np.float64(sum(map(roundings, operations)))) * UNIT[entry.precision])


def roundings(node: Node) -> int:
    """How often an operation rounds what becomes one element of its result; a view, never."""
    value = node.meta.get("val")
    if (
        not isinstance(value, torch.Tensor)
        or not value.is_floating_point()
        or getattr(node.target, "is_view", True)
    ):
        return 0
    operands = [x.meta["val"].shape for x in node.args if isinstance(x, Node)]
    match str(node.target):
        case "aten.mm.default" | "aten.bmm.default" | "aten.addmm.default":
            return int(operands[-1][-2])
        case "aten.convolution.default":
            return math.prod(operands[1][1:])
        case _:
            return 1


def calls(program: ExportedProgram) -> list[Node]:
    """Nodes that compute something; a conversion takes assertions out of the program that it is given."""
    assertion = torch.ops.aten._assert_tensor_metadata.default
    return [node for node in program.graph.nodes if node.op == "call_function" and node.target != assertion]


def module_of(node: Node) -> str:
    path, _ = list(node.meta["nn_module_stack"].values())[-1]
    return str(path)


class Values(Interpreter):
    """Runs a program's graph and keeps each node's first tensor."""

    def __init__(self, module: torch.fx.GraphModule) -> None:
        super().__init__(module)
        self.by_name: dict[str, torch.Tensor] = {}

    def run_node(self, node: Node) -> Any:
        value = super().run_node(node)
        first = value[0] if isinstance(value, tuple) else value
        if node.op == "call_function" and isinstance(first, torch.Tensor):
            self.by_name[node.name] = first.detach()
        return value


def values(entry: Conversion) -> dict[str, torch.Tensor]:
    running = Values(program(entry).module())
    with torch.no_grad():
        running.run(*entry.inputs().values())
    return running.by_name


def test_there_are_ten_kinds_of_mistake_and_five_correct_conversions() -> None:
    assert {mistake.kind for mistake in MISTAKES} == set(get_args(Kind))
    assert len(MISTAKES) == 10
    assert len(CORRECT) == 5
    assert len({entry.name for entry in (*MISTAKES, *CORRECT)}) == 15


@pytest.mark.parametrize("entry", CORRECT, ids=names(CORRECT))
def test_a_correct_conversion_runs_and_differs_from_plain_torch_by_roundings(entry: Conversion) -> None:
    output = on_core_ai(entry)
    assert output.shape == plain(entry).shape
    assert output.dtype == (np.float16 if entry.precision == "float16" else np.float32)
    assert distance(output, plain(entry)) <= bound(entry)


@pytest.mark.parametrize("mistake", MISTAKES, ids=names(MISTAKES))
def test_a_mistake_runs_and_reaches_the_output_beyond_roundings(mistake: Mistake) -> None:
    output, correct = on_core_ai(mistake), on_core_ai(mistake.without())
    assert np.isfinite(output).all()
    assert distance(correct, plain(mistake)) <= bound(mistake)
    assert distance(output, correct) > 5 * bound(mistake)
    assert distance(output, plain(mistake)) > 5 * bound(mistake)


@pytest.mark.parametrize("mistake", MISTAKES, ids=names(MISTAKES))
def test_the_guilty_operation_is_in_the_program_as_it_is_described(mistake: Mistake) -> None:
    guilty = mistake.guilty
    converted = {node.name: node for node in calls(program(mistake))}
    reference = {node.name: node for node in calls(reference_program(mistake.model))}
    assert str(converted[guilty.nodes[0]].target) == guilty.op
    assert {module_of(converted[name]) for name in guilty.nodes} == {guilty.module}
    assert {module_of(reference[name]) for name in guilty.counterparts} == {guilty.module}
    assert set(guilty.carriers) <= set(converted)

    frames = [line for line in str(converted[guilty.nodes[0]].stack_trace).splitlines() if FRAME.search(line)]
    innermost = FRAME.search([frame for frame in frames if not IN_TORCH.search(frame)][-1])
    assert innermost is not None
    assert (Path(innermost["file"]), int(innermost["number"])) == (guilty.line.file, guilty.line.number)


@pytest.mark.parametrize("mistake", IN_THE_SAME_OPERATIONS, ids=names(IN_THE_SAME_OPERATIONS))
def test_plain_torch_agrees_that_the_guilty_operation_is_the_first_to_differ(mistake: Mistake) -> None:
    wrong, right = program(mistake), program(mistake.without())
    assert [node.target for node in calls(wrong)] == [node.target for node in calls(right)]
    ours, theirs = values(mistake), values(mistake.without())
    first = next(name for name in ours if not torch.equal(ours[name], theirs[name]))
    assert first in mistake.guilty.nodes


@pytest.mark.parametrize("mistake", IN_A_MODULE, ids=names(IN_A_MODULE))
def test_the_module_alone_is_wrong(mistake: Mistake) -> None:
    source, right = mistake.source(), mistake.without().source()
    assert isinstance(source, nn.Module)
    assert isinstance(right, nn.Module)
    with torch.no_grad():
        wrong_output = main_output(source(**mistake.inputs()))
        source.set_submodule(mistake.guilty.module, right.get_submodule(mistake.guilty.module))
        cured_output = main_output(source(**mistake.inputs()))
        right_output = main_output(right(**mistake.inputs()))
    assert torch.equal(cured_output, right_output)
    assert not torch.equal(wrong_output, right_output)
