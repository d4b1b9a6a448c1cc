"""List the leaves of a structured value, an argument or a result, each by its path of field names.

Frameworks are known here only by the classes that an adapter names in `Kinds`. Mappings and their views,
sequences, sets (in the order of their iteration), named tuples, dataclasses, `functools.partial` and plain
objects (by attribute) are entered; nothing is consumed or changed, and what is not followed has a reason.
"""

from __future__ import annotations

import enum
import math
from collections import deque
from collections.abc import (
    AsyncIterator,
    Callable,
    Coroutine,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
    Set,
    ValuesView,
)
from copy import copy
from dataclasses import fields, is_dataclass
from functools import partial
from types import (
    CodeType,
    FrameType,
    MemberDescriptorType,
    ModuleType,
    TracebackType,
)
from typing import Any, Final, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np

from tensorcap.workload import NAMED, class_name
from tensorcap_formats.keys import escape

MAX_DEPTH: Final = 24
MAX_NODES: Final = 20_000  # of one argument: a larger graph of objects is hardly meant as an argument
MAX_PLAIN_ITEMS: Final = 1024  # of a longer list of numbers only the length is recorded
MAX_TEXT: Final = 4096

_PLAIN: Final = (bool, int, float, str, type(None))
_PLAIN_TYPES: Final = frozenset(_PLAIN)
_SCALARS: Final = (*_PLAIN, np.generic, enum.Enum, complex, bytes, bytearray, range, slice)
_BARE: Final = frozenset({dict, list, tuple, set, frozenset})  # have no attributes of their own
_USED_UP: Final = (Iterator, AsyncIterator, Coroutine)
_NEVER_ENTERED: Final = (
    *NAMED,
    ModuleType,
    CodeType,
    FrameType,
    TracebackType,
)


class Kinds(NamedTuple):
    """How the walk treats the classes of a framework.

    Attributes:
        tensors: Leaves that are tensors.
        opaque: Leaves that are recorded by class name, never entered (modules).
        texts: Leaves that are recorded as their text (dtypes, devices).
    """

    tensors: tuple[type, ...]
    opaque: tuple[type, ...] = ()
    texts: tuple[type, ...] = ()


class Leaf(NamedTuple):
    """One leaf.

    Attributes:
        name: Path to it, `rope.0`; empty for the value itself.
        value: A tensor, or a JSON value.
        is_tensor: Whether it is a tensor.
        reason: Why the object at `name` is not followed; empty if it is.
    """

    name: str
    value: Any
    is_tensor: bool = False
    reason: str = ""


def leaf_slot(slot: str, name: str) -> str:
    """The slot of a leaf: that of the whole value, and the leaf's path in it, escaped.

    Example:
        >>> leaf_slot("input.cache", "0.k"), leaf_slot("output", "")
        ('input.cache.0.k', 'output')
    """
    return f"{slot}.{escape(name)}" if name else slot


def argument_slots(names: Sequence[str], count: int, keywords: Iterable[str]) -> Iterator[str]:
    """The slot of each argument of a call.

    Args:
        names: The names of its positional parameters.
        count: The number of its positional arguments.
        keywords: The names of its other arguments.

    Example:
        >>> list(argument_slots(["x"], 2, ["mask"]))
        ['input.x', 'input.args.0', 'input.mask']
    """
    for i in range(count):
        yield f"input.{escape(names[i])}" if i < len(names) else f"input.args.{i - len(names)}"
    for name in keywords:
        yield f"input.{escape(name)}"


def walk(value: object, kinds: Kinds) -> list[Leaf]:
    """List the leaves of `value` in the order of its fields, with unique names.

    Example:
        >>> import numpy as np
        >>> ones = np.ones(2)
        >>> [leaf.name for leaf in walk({"rope": (ones, ones), "cache": None}, Kinds((np.ndarray,)))]
        ['rope.0', 'rope.1', 'cache']
    """
    walker = _Walker(kinds)
    walker.visit("", value, 0)
    return _with_unique_names(walker.leaves)


def rebuild(value: Any, kinds: Kinds, change: Callable[[str, Any], Any]) -> Any:
    """Return the value with other tensors in it; containers of changed tensors are copied, not written to.

    Mappings, lists, tuples, named tuples, deques and dataclasses are entered, with the names of `walk`. What
    other objects hold (caches, to which the caller goes on writing) stays as it is.

    Args:
        value: Anything.
        kinds: As for `walk`.
        change: Returns what takes the place of a tensor, for its name and the tensor.

    Returns:
        The value itself if no tensor changes.

    Example:
        >>> import numpy as np
        >>> old = {"rope": (np.ones(2), None)}
        >>> new = rebuild(old, Kinds((np.ndarray,)), lambda name, tensor: np.zeros(2))
        >>> new["rope"], old["rope"][0]
        ((array([0., 0.]), None), array([1., 1.]))
    """
    return _Rebuilder(kinds, change).rebuild("", value, 0)


class _Rebuilder:
    def __init__(self, kinds: Kinds, change: Callable[[str, Any], Any]) -> None:
        self._kinds = kinds
        self._change = change
        self._taken: set[str] = set()

    def rebuild(self, name: str, value: Any, depth: int) -> Any:
        if isinstance(value, self._kinds.tensors):
            return self._change(_unique(name, self._taken), value)
        is_entered = isinstance(value, (Mapping, list, tuple, deque)) or is_dataclass(value)
        if not is_entered or isinstance(value, (type, self._kinds.opaque)) or depth > MAX_DEPTH:
            return value
        prefix = f"{name}." if name else ""
        items = _items(value) or []
        rebuilt_items = [self.rebuild(prefix + field, item, depth + 1) for field, item in items]
        if all(new is old for new, (_, old) in zip(rebuilt_items, items, strict=True)):
            return value
        return _copy_with_items(value, [field for field, _ in items], rebuilt_items)


def _copy_with_items(value: Any, names: list[str], items: list[Any]) -> Any:
    """Copy a container, with other items in it."""
    if isinstance(value, tuple):
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    new = copy(value)
    if isinstance(value, Mapping):
        for key, item in zip(value, items, strict=True):
            new[key] = item
    elif isinstance(value, (list, deque)):
        for i, item in enumerate(items):
            new[i] = item
    else:
        for field, item in zip(names, items, strict=True):
            object.__setattr__(new, field, item)
    return new


class _Walker:
    def __init__(self, kinds: Kinds) -> None:
        self.kinds = kinds
        self.leaves: list[Leaf] = []
        self._nodes = 0
        self._above: set[int] = set()  # ids of the containers that we are in
        self._objects: dict[int, tuple[str, list[Leaf]]] = {}  # ids of plain objects: first name, leaves

    def visit(self, name: str, value: Any, depth: int) -> bool:
        """Add the leaves below `value`; return whether there is a tensor among them."""
        kinds = self.kinds
        if isinstance(value, kinds.tensors):
            self.leaves.append(Leaf(name, value, is_tensor=True))
            return True
        if type(value) in _PLAIN_TYPES or isinstance(value, _SCALARS):
            self.leaves.append(Leaf(name, _plain(value)))
            return False
        if isinstance(value, kinds.texts):
            self.leaves.append(Leaf(name, str(value)))
            return False
        if isinstance(value, (kinds.opaque, _NEVER_ENTERED)):
            self.leaves.append(Leaf(name, class_name(value)))
            return False
        self._nodes += 1
        if self._nodes > MAX_NODES or depth > MAX_DEPTH:
            what = f"more than {MAX_NODES} objects" if self._nodes > MAX_NODES else f"deeper than {MAX_DEPTH}"
            self.leaves.append(Leaf(name, None, reason=f"{class_name(value)} is not followed: {what}"))
            return True  # there may be tensors, so the loss has to be noted
        if id(value) in self._above:
            self.leaves.append(Leaf(name, f"{class_name(value)} that contains itself"))
            return False
        self._above.add(id(value))
        try:
            return self._enter(name, value, depth)
        finally:
            self._above.discard(id(value))

    def _enter(self, name: str, value: Any, depth: int) -> bool:
        is_long = isinstance(value, (list, tuple, deque, Set)) and len(value) > MAX_PLAIN_ITEMS
        if is_long and all(isinstance(item, _PLAIN) for item in value):
            self.leaves.append(Leaf(name, f"{type(value).__name__} of {len(value)} plain values"))
            return False
        items = _items(value)
        if items is None:
            if isinstance(value, _USED_UP):
                reason = f"{class_name(value)} is not followed: that would use it up"
                self.leaves.append(Leaf(name, None, reason=reason))
                return True
            return self._enter_object(name, value, depth)
        start = len(self.leaves)
        has_tensor = self._visit_all(name, items, depth)
        if type(value) not in _BARE:
            has_tensor |= self._visit_further(name, value, items, start, depth)
        return has_tensor

    def _visit_further(
        self, name: str, value: object, items: list[tuple[str, Any]], start: int, depth: int
    ) -> bool:
        """Add the tensors that a container has as attributes, but not among its items."""
        further = [item for item in _attributes(value) if not _is_among(item, items)]
        if not further:
            return False
        end = len(self.leaves)
        known = {id(leaf.value) for leaf in self.leaves[start:] if leaf.is_tensor}
        self._visit_all(name, further, depth)
        added = self.leaves[end:]
        self.leaves[end:] = [
            leaf for leaf in added if leaf.reason or (leaf.is_tensor and id(leaf.value) not in known)
        ]
        return len(self.leaves) > end

    def _visit_all(self, name: str, items: list[tuple[str, Any]], depth: int) -> bool:
        has_tensor = False
        prefix = f"{name}." if name else ""
        for field, item in items:
            has_tensor |= self.visit(prefix + field, item, depth + 1)
        return has_tensor

    def _enter_object(self, name: str, value: object, depth: int) -> bool:
        """Follow the attributes of an object of any other class; without a tensor it is only named."""
        if id(value) in self._objects:
            return self._repeat(name, value)
        start = len(self.leaves)
        has_tensor = self._visit_all(name, _attributes(value), depth)
        if not has_tensor:
            self.leaves[start:] = [Leaf(name, class_name(value))]
        self._objects[id(value)] = (name, self.leaves[start:] if has_tensor else [])
        return has_tensor

    def _repeat(self, name: str, value: object) -> bool:
        """List what is below an object that was met before again, under its other name."""
        first, leaves = self._objects[id(value)]
        self._nodes += len(leaves)
        if not leaves or self._nodes > MAX_NODES:
            self.leaves.append(Leaf(name, f"{class_name(value)}, the same as {first}"))
            return False
        self.leaves += [leaf._replace(name=name + leaf.name[len(first) :]) for leaf in leaves]
        return True


def _items(value: Any) -> list[tuple[str, Any]] | None:
    """The items of a container, by name; None if the value is no container."""
    if isinstance(value, Mapping):
        return [(str(_plain_key(k)), v) for k, v in value.items()]
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return list(zip(value._fields, value, strict=True))
    if isinstance(value, (list, tuple, deque, Set, ValuesView)):
        return [(str(i), item) for i, item in enumerate(value)]
    if is_dataclass(value):
        return [(f.name, getattr(value, f.name)) for f in fields(value) if hasattr(value, f.name)]
    if isinstance(value, partial):
        return [("func", value.func), ("args", value.args), ("keywords", value.keywords)]
    return None


def _is_among(item: tuple[str, Any], items: list[tuple[str, Any]]) -> bool:
    return any(name == item[0] and value is item[1] for name, value in items)


def _attributes(value: object) -> list[tuple[str, Any]]:
    """Attributes that the object itself holds: no property, no method is run."""
    attributes = dict(getattr(value, "__dict__", {}))
    for name, member in _slots(type(value)):
        try:
            attributes.setdefault(name, member.__get__(value))
        except AttributeError:  # never set
            continue
    return list(attributes.items())


def _slots(cls: type) -> list[tuple[str, MemberDescriptorType]]:
    known = _SLOTS.get(cls)
    if known is None:
        known = [
            (name, member)
            for base in cls.__mro__
            if base.__module__ != "builtins" and "__slots__" in base.__dict__
            for name, member in base.__dict__.items()
            if isinstance(member, MemberDescriptorType)
        ]
        _SLOTS[cls] = known
    return known


_SLOTS: Final[WeakKeyDictionary[type, list[tuple[str, MemberDescriptorType]]]] = WeakKeyDictionary()


def _plain(value: Any) -> bool | int | float | str | None:
    """Convert a leaf that is no tensor into a JSON value."""
    if isinstance(value, enum.Enum):
        return f"{type(value).__name__}.{value.name}"
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, bool) or value is None:
        return value
    if isinstance(value, int):
        return int(value) if value.bit_length() <= 64 else hex(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else str(float(value))
    if isinstance(value, (bytes, bytearray)):
        return f"{len(value)} bytes"
    text = str(value)
    return text if len(text) <= MAX_TEXT else f"{text[:MAX_TEXT]}… ({len(text)} characters)"


def _plain_key(key: object) -> object:
    return _plain(key) if isinstance(key, (*_PLAIN, np.generic, enum.Enum)) else class_name(key)


def _with_unique_names(leaves: list[Leaf]) -> list[Leaf]:
    """Give the second leaf of one name another: `{"a.b": x, "a": {"b": y}}` holds two named `a.b`."""
    taken: set[str] = set()
    for i, leaf in enumerate(leaves):
        name = _unique(leaf.name, taken)
        if name != leaf.name:
            leaves[i] = leaf._replace(name=name)
    return leaves


def _unique(name: str, taken: set[str]) -> str:
    """Make a name unique: the second leaf of a name gets `NAME:2`; add it to those that are taken."""
    unique, n = name, 1
    while unique in taken:
        n += 1
        unique = f"{name}:{n}"
    taken.add(unique)
    return unique
