from __future__ import annotations

import enum
from collections import OrderedDict, namedtuple
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import pytest

from tensorcap.recording import Kinds, Leaf, walk
from tensorcap.workload import class_name

ONE = np.ones(1)
KINDS = Kinds(tensors=(np.ndarray,))


class Color(enum.Enum):
    RED = 1


Pair = namedtuple("Pair", "first second")


@dataclass
class Output:
    logits: Any
    loss: Any = None
    unset: Any = field(init=False)


class Layer:
    def __init__(self, keys: Any) -> None:
        self.keys = keys
        self.length = 3

    @property
    def trap(self) -> None:
        raise AssertionError("a property was run")


class Held:
    def __init__(self, x: Any) -> None:
        self.x = x


class Slotted:
    __slots__ = ("missing", "x")

    def __init__(self, x: Any) -> None:
        self.x = x


class Cache:
    def __init__(self, *layers: Layer) -> None:
        self.layers = list(layers)
        self.kind = Layer


def leaves(value: object) -> dict[str, Any]:
    return {leaf.name: "T" if leaf.is_tensor else leaf.value for leaf in walk(value, KINDS)}


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        pytest.param(ONE, {"": "T"}, id="tensor"),
        pytest.param(None, {"": None}, id="none"),
        pytest.param(True, {"": True}, id="bool"),
        pytest.param(float("-inf"), {"": "-inf"}, id="infinity-as-text"),
        pytest.param(float("nan"), {"": "nan"}, id="nan-as-text"),
        pytest.param(1 << 70, {"": "0x400000000000000000"}, id="huge-int-as-text"),
        pytest.param(np.float32(0.5), {"": 0.5}, id="numpy-scalar"),
        pytest.param(Color.RED, {"": "Color.RED"}, id="enum"),
        pytest.param(b"abc", {"": "3 bytes"}, id="bytes"),
        pytest.param(slice(1, 2), {"": "slice(1, 2, None)"}, id="slice"),
        pytest.param((ONE, None, (ONE,)), {"0": "T", "1": None, "2.0": "T"}, id="tuple"),
        pytest.param(OrderedDict(b=ONE, a=1), {"b": "T", "a": 1}, id="dict-in-its-order"),
        pytest.param({3: ONE, None: ONE}, {"3": "T", "None": "T"}, id="dict-keys-that-are-no-text"),
        pytest.param(Pair(ONE, 2), {"first": "T", "second": 2}, id="namedtuple"),
        pytest.param(Output(ONE), {"logits": "T", "loss": None}, id="dataclass"),
        pytest.param(Slotted(ONE), {"x": "T"}, id="slots"),
        pytest.param(object(), {"": "object"}, id="object-without-tensor"),
        pytest.param(len, {"": "len"}, id="function"),
        pytest.param(Layer, {"": f"{__name__}.Layer"}, id="class"),
        pytest.param((), {}, id="empty"),
        pytest.param([0] * 2000, {"": "list of 2000 plain values"}, id="long-list"),
        pytest.param("x" * 5000, {"": "x" * 4096 + "… (5000 characters)"}, id="long-text"),
        pytest.param({"a.b": ONE, "a": {"b": 1}}, {"a.b": "T", "a.b:2": 1}, id="equal-names"),
    ],
)
def test_each_leaf_has_its_field_name(value: object, expected: dict[str, Any]) -> None:
    assert leaves(value) == expected


def test_a_cache_is_followed_by_its_attributes_and_no_property_is_run() -> None:
    assert leaves({"cache": Cache(Layer(ONE), Layer(None))}) == {
        "cache.layers.0.keys": "T",
        "cache.layers.0.length": 3,
        "cache.layers.1": f"{__name__}.Layer",
        "cache.kind": f"{__name__}.Layer",
    }


def test_an_iterator_is_not_consumed() -> None:
    numbers = (n for n in range(3))
    walk(numbers, KINDS)
    assert list(numbers) == [0, 1, 2]


@pytest.mark.parametrize(
    ("value", "name"),
    [
        pytest.param(iter([ONE]), "list_iterator", id="iter"),
        pytest.param(zip([ONE], [ONE], strict=True), "zip", id="zip"),
        pytest.param(map(str, [ONE]), "map", id="map"),
        pytest.param((n for n in [ONE]), "generator", id="generator"),
    ],
)
def test_what_would_be_used_up_is_reported_as_a_loss(value: object, name: str) -> None:
    (leaf,) = walk({"x": value}, KINDS)
    assert leaf == Leaf("x", None, reason=f"{name} is not followed: that would use it up")


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        pytest.param({1.5}, {"0": 1.5}, id="set"),
        pytest.param(frozenset({Held(ONE)}), {"0.x": "T"}, id="frozenset"),
        pytest.param({"a": ONE}.values(), {"0": "T"}, id="values"),
        pytest.param({"a": ONE}.items(), {"0.0": "a", "0.1": "T"}, id="items"),
        pytest.param({"a": ONE}.keys(), {"0": "a"}, id="keys"),
        pytest.param(OrderedDict(a=ONE).values(), {"0": "T"}, id="values-of-a-subclass"),
        pytest.param(
            partial(max, ONE, key=ONE), {"func": "max", "args.0": "T", "keywords.key": "T"}, id="partial"
        ),
    ],
)
def test_further_containers_are_entered(value: object, expected: dict[str, Any]) -> None:
    assert leaves(value) == expected


class ListWith(list[Any]):
    more: Any


class DictWith(dict[str, Any]):
    more: Any


class TupleWith(Pair):
    more: Any


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        pytest.param(ListWith([1]), {"0": 1, "more.x": "T"}, id="list"),
        pytest.param(DictWith(a=1), {"a": 1, "more.x": "T"}, id="dict"),
        pytest.param(TupleWith(1, 2), {"first": 1, "second": 2, "more.x": "T"}, id="namedtuple"),
        pytest.param(Output(1), {"logits": 1, "loss": None, "more.x": "T"}, id="dataclass"),
    ],
)
def test_tensors_that_a_container_has_as_attributes_are_leaves(value: Any, expected: dict[str, Any]) -> None:
    value.more = Held(ONE)
    value.plain = 3
    assert leaves(value) == expected


def test_an_attribute_that_is_an_item_too_is_one_leaf() -> None:
    value: Any = DictWith(logits=ONE, loss=None)
    value.logits, value.loss, value.renamed = value["logits"], None, value["logits"]
    assert leaves(value) == {"logits": "T", "loss": None}


def test_a_value_that_contains_itself_ends() -> None:
    loop: list[Any] = [ONE]
    loop.append(loop)
    assert leaves(loop) == {"0": "T", "1": "list that contains itself"}


@pytest.mark.spec("NAM-2")
def test_an_object_that_a_value_holds_twice_has_its_leaves_under_both_names() -> None:
    layer = Layer(ONE)
    assert leaves({"present": Cache(layer), "past": [layer, layer]}) == {
        "present.layers.0.keys": "T",
        "present.layers.0.length": 3,
        "present.kind": f"{__name__}.Layer",
        "past.0.keys": "T",
        "past.0.length": 3,
        "past.1.keys": "T",
        "past.1.length": 3,
    }


def test_an_object_without_tensors_that_a_value_holds_twice_is_named() -> None:
    layer = Layer(None)
    assert leaves([layer, layer]) == {
        "0": f"{__name__}.Layer",
        "1": f"{__name__}.Layer, the same as 0",
    }


def test_objects_that_hold_each_other_often_end() -> None:
    held: Any = ONE
    for _ in range(20):
        held = Held([held, held])
    assert len(walk(held, KINDS)) < 20_000


def test_what_is_too_deep_is_reported_as_a_loss() -> None:
    deep: Any = ONE
    for _ in range(40):
        deep = [deep]
    (leaf,) = walk(deep, KINDS)
    assert leaf.reason == "list is not followed: deeper than 24"


def test_what_is_too_large_is_reported_as_a_loss() -> None:
    reasons = [leaf.reason for leaf in walk([[] for _ in range(30_000)], KINDS)]
    assert reasons[-1] == "list is not followed: more than 20000 objects"


def test_an_opaque_class_is_named_and_not_entered() -> None:
    kinds = Kinds(tensors=(np.ndarray,), opaque=(Layer,), texts=(Color,))
    assert walk(Layer(ONE), kinds) == [Leaf("", f"{__name__}.Layer")]


def test_class_names_are_qualified() -> None:
    assert class_name(OrderedDict()) == "collections.OrderedDict"
    assert class_name(ValueError("x")) == "ValueError"
