"""Patterns of axes in the notation of einops: `b s (h d) -> b h s d`, parsed, sized, turned round."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from tensorcap_formats.errors import UsageError, abbreviate

Shape = tuple[int, ...]
Group = tuple[str, ...]  # axes that one axis of a tensor is made of; `1` is none

_TOKEN: Final = re.compile(r"\s*(\(|\)|\.\.\.|[A-Za-z_]\w*|1)")


@dataclass(frozen=True, slots=True)
class Pattern:
    """A rearrangement of axes: nothing is repeated, reduced, or left out.

    Attributes:
        left: The groups before.
        right: The groups after; the same axes.
        sizes: Sizes of axes that do not follow from shapes.

    Example:
        >>> pattern = Pattern.parse("b s (h d) -> b h s d", {"h": 4})
        >>> pattern.shape((2, 5, 32))
        (2, 4, 5, 8)
        >>> pattern.reversed((2, 5, 32)).text
        'b h s d -> b s (h d)'
    """

    left: tuple[Group, ...]
    right: tuple[Group, ...]
    sizes: Mapping[str, int]

    @classmethod
    def parse(cls, text: str, sizes: Mapping[str, int]) -> Pattern:
        """Read `LEFT -> RIGHT`.

        Raises:
            UsageError: It is no such pattern; an axis is on one side only, twice on one, or has a size
                without being there.
        """
        sides = text.split("->")
        if len(sides) != 2:
            raise UsageError(f"pattern {abbreviate(text)!r}: expected axes, one '->', and axes")
        left, right = (parse_groups(side) for side in sides)
        names = [[name for group in side for name in group] for side in (left, right)]
        for names_of_side in names:
            twice = sorted({name for name in names_of_side if names_of_side.count(name) > 1})
            if twice:
                raise UsageError(f"pattern {abbreviate(text)!r}: axis {twice[0]!r} stands twice on one side")
        lone = sorted(set(names[0]) ^ set(names[1]))
        if lone:
            raise UsageError(f"pattern {abbreviate(text)!r}: axis {lone[0]!r} is on one side only")
        unknown = sorted(set(sizes) - set(names[0]))
        if unknown:
            raise UsageError(f"pattern {abbreviate(text)!r}: has no axis {unknown[0]!r}, whose size is given")
        for name, size in sizes.items():
            if size < 1:
                raise UsageError(f"pattern {abbreviate(text)!r}: {name} = {size}, expected 1 or more")
        return cls(left, right, dict(sizes))

    @property
    def text(self) -> str:
        """The pattern as `parse` reads it."""
        return f"{groups_text(self.left)} -> {groups_text(self.right)}"

    def axes(self, shape: Shape) -> dict[str, int]:
        """Sizes of all axes, for a tensor of this shape; `...` is the product of what it stands for.

        Raises:
            UsageError: The shape does not fit.
        """
        before, _ = self._expanded(shape)
        sizes = dict(self.sizes)
        for group, size in zip(before, shape, strict=True):
            known = math.prod(sizes[name] for name in group if name in sizes)
            missing = [name for name in group if name not in sizes]
            if len(missing) > 1:
                raise UsageError(
                    f"pattern {self.text!r}: the sizes of {' and '.join(missing)} are not known, "
                    f"expected all but one of ({' '.join(group)})"
                )
            if missing and known and size % known == 0:
                sizes[missing[0]] = size // known
            elif missing or known != size:
                raise UsageError(
                    f"pattern {self.text!r}: an axis of {size} does not fit ({' '.join(group)})"
                    + "".join(f" with {name} = {sizes[name]}" for name in group if name in sizes)
                )
        return sizes

    def shape(self, shape: Shape) -> Shape:
        """The shape after.

        Raises:
            UsageError: The shape before does not fit.
        """
        sizes = self.axes(shape)
        _, after = self._expanded(shape)
        return tuple(math.prod(sizes[name] for name in group) for group in after)

    def moves(self, shape: Shape) -> tuple[Shape, tuple[int, ...], Shape]:
        """What numpy has to do: the shape of single axes, their order, and the shape that comes out.

        Raises:
            UsageError: The shape before does not fit.
        """
        sizes = self.axes(shape)
        before, after = ([name for group in side for name in group] for side in self._expanded(shape))
        order = tuple(before.index(name) for name in after)
        return tuple(sizes[name] for name in before), order, self.shape(shape)

    def reversed(self, shape: Shape) -> Pattern:
        """The pattern that undoes this one for a tensor that had this shape before."""
        sizes = self.axes(shape)
        composed = {name for group in self.right if len(group) > 1 for name in group}
        return Pattern(self.right, self.left, {name: sizes[name] for name in composed})

    def _expanded(self, shape: Shape) -> tuple[tuple[Group, ...], tuple[Group, ...]]:
        """Both sides with `...` replaced by as many axes as the shape has there."""
        fixed = sum(group != ("...",) for group in self.left)
        has_dots = fixed < len(self.left)
        if len(shape) < fixed or (len(shape) > fixed and not has_dots):
            more = " or more" if has_dots else ""
            raise UsageError(
                f"pattern {self.text!r}: shape {list(shape)} has {len(shape)} axes, expected {fixed}{more}"
            )
        dots = tuple((f"...{i}",) for i in range(len(shape) - fixed))
        return _replaced(self.left, dots), _replaced(self.right, dots)


def parse_groups(text: str) -> tuple[Group, ...]:
    """Read one side of a pattern.

    Raises:
        UsageError: Parentheses do not match, or a name is none.

    Example:
        >>> parse_groups("b s (h d)")
        (('b',), ('s',), ('h', 'd'))
    """
    groups: list[Group] = []
    inner: list[str] | None = None
    at, text = 0, text.strip()
    while at < len(text):
        match = _TOKEN.match(text, at)
        token = match[1] if match else text[at:].split()[0]
        is_wrong = match is None or (token == "(" and inner is not None) or (token == ")" and inner is None)
        if is_wrong or (token == "..." and (inner is not None or ("...",) in groups)):
            raise UsageError(f"pattern {abbreviate(text)!r}: {token!r} is not understood there")
        assert match is not None
        at = match.end()
        if token == "(":
            inner = []
        elif token == ")":
            groups.append(tuple(inner or ()))
            inner = None
        elif inner is not None:
            inner += [] if token == "1" else [token]
        else:
            groups.append(() if token == "1" else (token,))
    if inner is not None:
        raise UsageError(f"pattern {abbreviate(text)!r}: a parenthesis is not closed")
    return tuple(groups)


def groups_text(groups: tuple[Group, ...]) -> str:
    """One side of a pattern as text."""
    return " ".join(
        group[0] if len(group) == 1 else f"({' '.join(group)})" if group else "1" for group in groups
    )


def _replaced(groups: tuple[Group, ...], dots: tuple[Group, ...]) -> tuple[Group, ...]:
    if ("...",) not in groups:
        return groups
    at = groups.index(("...",))
    return groups[:at] + dots + groups[at + 1 :]
