"""Operators of torch: the arguments that they read and write, and arguments that are no tensors as JSON."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

import torch

_MAX_ITEMS: Final = 64  # a longer list is recorded by its length
_MAX_TEXT: Final = 256
_PLAIN: Final = (bool, int, str, type(None))

# These return memory without values: what is in it is chance, and another run would not have it.
_MAKE_UNFILLED: Final = (
    "empty",
    "empty_like",
    "empty_permuted",
    "empty_quantized",
    "empty_strided",
    "new_empty",
    "new_empty_strided",
)
# These do not read what `self` held before.
_OVERWRITE: Final = (
    "bernoulli_",
    "cauchy_",
    "copy_",
    "exponential_",
    "fill_",
    "geometric_",
    "log_normal_",
    "normal_",
    "random_",
    "uniform_",
    "zero_",
)
# Written in training, which the schemas of most ops do not show.
_STATISTICS: Final = frozenset(("running_mean", "running_var"))
_IN_TRAINING: Final = ("training", "train", "use_input_stats")


class Operator(NamedTuple):
    """The properties of an op.

    Attributes:
        name: The name in records: `aten.mm.default`.
        arguments: The names of its arguments, in the order of the schema.
        written: The arguments that it writes to.
        overwritten: The arguments that it writes to and does not read.
        switch: The argument that decides whether it writes to running statistics too; None if it never does.
        makes_views: Whether the schema says that it returns views.
        makes_unfilled: Whether it returns memory without values.
    """

    name: str
    arguments: tuple[str, ...]
    written: frozenset[str]
    overwritten: frozenset[str]
    switch: str | None
    makes_views: bool
    makes_unfilled: bool

    @classmethod
    def of(cls, func: torch._ops.OpOverload[..., Any]) -> Operator:
        """Read the properties of an op off its schema, and off the tables above."""
        schema = func._schema
        name = str(func)
        namespace, _, rest = name.partition(".")
        base = rest.rpartition(".")[0] if namespace == "aten" else ""
        names = tuple(argument.name for argument in schema.arguments)
        is_view = torch.Tag.inplace_view in func.tags  # changes the view that a tensor is, and no memory
        written = frozenset(
            a.name
            for a in schema.arguments
            if a.alias_info is not None and a.alias_info.is_write and not is_view
        )
        out = frozenset(a.name for a in schema.arguments if getattr(a, "is_out", False))
        return cls(
            name,
            names,
            written,
            (written & {"self"} if base in _OVERWRITE else frozenset()) | (written & out),
            next((n for n in _IN_TRAINING if n in names), None) if _STATISTICS & {*names} else None,
            any(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns),
            base in _MAKE_UNFILLED and not written,
        )

    def items(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
        """The arguments of one run by name."""
        yield from zip(self.arguments, args, strict=False)
        yield from kwargs.items()

    def writes(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[tuple[str, torch.Tensor]]:
        """The tensors that one run writes to, by name."""
        names = self.written
        if self.switch is not None and dict(self.items(args, kwargs)).get(self.switch):
            names |= _STATISTICS
        if not names:
            return []
        values = ((name, value) for name, value in self.items(args, kwargs) if name in names)
        return [tensor for name, value in values for tensor in tensors_of(name, value)]


def leaves_of(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """An argument or a result and its name; of a list, its items by name and position."""
    if isinstance(value, (list, tuple)):
        for i, item in enumerate(value):
            yield from leaves_of(f"{name}.{i}", item)
    else:
        yield name, value


def tensors_of(name: str, value: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors among its leaves."""
    return (leaf for leaf in leaves_of(name, value) if isinstance(leaf[1], torch.Tensor))


def plain(value: Any) -> Any:
    """The JSON value of an argument that holds no tensor."""
    if isinstance(value, _PLAIN):
        return value if not isinstance(value, str) or len(value) <= _MAX_TEXT else value[:_MAX_TEXT] + "…"
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, (list, tuple)):
        if len(value) > _MAX_ITEMS:
            return f"{type(value).__name__} of {len(value)}"
        return [plain(item) for item in value]
    if isinstance(value, (torch.dtype, torch.layout, torch.memory_format)):
        return str(value).removeprefix("torch.")
    if isinstance(value, (torch.device, complex)):
        return str(value)
    return type(value).__name__
