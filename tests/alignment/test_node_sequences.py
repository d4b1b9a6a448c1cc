"""Nodes of two graphs of one model, whose numbers shifted."""

from __future__ import annotations

import pytest

from tensorcap.alignment.node_sequences import GraphNode, pair_nodes

Shape = tuple[int, ...] | None


def nodes(*entries: tuple[str, str | None, Shape]) -> list[GraphNode]:
    """Nodes by name, module and shape."""
    return [GraphNode(name, f"{module}:{name}", module, shape) for name, module, shape in entries]


def names(reference: list[GraphNode], target: list[GraphNode]) -> dict[str, str]:
    return {ours.name: theirs.name for ours, theirs in pair_nodes(reference, target)}


@pytest.mark.spec("SYN-1", "SYN-2")
def test_one_more_node_in_another_module_shifts_the_numbers_behind_it() -> None:
    reference = nodes(("mul", "norm", (2, 8)), ("mul_1", "attn", (2, 4)), ("mul_2", "attn", (2, 4)))
    target = nodes(
        ("mul", "norm", (2, 8)),
        ("mul_1", "q_proj", (8, 8)),
        ("mul_2", "attn", (2, 4)),
        ("mul_3", "attn", (2, 4)),
    )
    assert names(reference, target) == {"mul": "mul", "mul_1": "mul_2", "mul_2": "mul_3"}


@pytest.mark.spec("SYN-2")
def test_equal_names_stay_paired_if_the_target_lacks_nodes() -> None:
    reference = nodes(*((f"add_{i}", "mlp", (2, 8)) for i in range(1, 6)))
    target = nodes(("add_2", "mlp", (2, 8)), ("add_4", "mlp", (2, 8)), ("add_5", "mlp", (2, 8)))
    assert names(reference, target) == {"add_2": "add_2", "add_4": "add_4", "add_5": "add_5"}


@pytest.mark.spec("SYN-2")
def test_one_pair_more_that_hardly_fits_moves_no_equal_names() -> None:
    reference = nodes(*((f"add_{i}", "mlp", (2, 8)) for i in range(1, 4)))
    target = nodes(("add_2", "mlp", (2, 8)), ("add_3", "mlp", (2, 8)), ("add_4", "mlp", (3, 3)))
    assert names(reference, target) == {"add_2": "add_2", "add_3": "add_3"}


@pytest.mark.spec("SYN-2")
def test_a_node_of_the_expected_number_is_paired_though_it_holds_another_shape() -> None:
    reference = nodes(("silu", "mlp", (2, 8)), ("silu_1", "mlp_1", (2, 8)))
    target = nodes(("silu", "mlp", (2, 1)), ("silu_1", "mlp_1", None))
    assert names(reference, target) == {"silu": "silu", "silu_1": "silu_1"}


@pytest.mark.spec("SYN-1")
def test_nodes_of_different_modules_are_no_partners() -> None:
    assert names(nodes(("mm", "up", (2, 8))), nodes(("mm", "down", (2, 8)))) == {}


@pytest.mark.spec("SYN-1")
def test_without_modules_operator_order_and_shape_decide() -> None:
    reference = nodes(("mul", "a", (2, 8)), ("mul_1", "b", (2, 4)), ("mul_2", "b", (4,)), ("mm", "b", (4,)))
    target = nodes(
        ("mul", None, (2, 8)), ("mul_1", None, (3, 3)), ("mul_2", None, (1, 2, 4)), ("mul_3", None, (4,))
    )
    assert names(reference, target) == {"mul": "mul", "mul_1": "mul_2", "mul_2": "mul_3"}


@pytest.mark.spec("SYN-2")
def test_a_fused_view_changes_the_shape_and_not_the_node() -> None:
    reference = nodes(("mm", "q", (16, 32)), ("mm_1", "q", (16, 32)))
    target = nodes(("mm", "q", (2, 8, 32)), ("mm_1", "q", (2, 8, 32)))
    assert names(reference, target) == {"mm": "mm", "mm_1": "mm_1"}


def test_a_number_in_the_name_of_an_operator_is_none_of_the_node() -> None:
    (node,) = nodes(("conv2d", "m", None))
    assert (node.operator, node.number) == ("conv2d", 0)
    (node,) = nodes(("_softmax_12", "m", None))
    assert (node.operator, node.number) == ("_softmax", 12)
