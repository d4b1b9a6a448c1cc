"""Dims: names of a tensor's axes and how a mesh of ranks holds it, and the layout steps that follow.

b s (h d)               axes in the notation of einops; names that two sides share are one axis
b s h[tp] d             each rank of `tp` holds a part of `h`, or several hold one part, as of KV heads
b s d [tp:partial]      each rank holds a summand
b s d [tp:replicated]   each rank holds the same
b s (h d) h=8           sizes that do not follow from shapes; of mesh axes too, the outermost first
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal, cast

from tensorcap.alignment.layout.axis_patterns import Group, Pattern, Shape, groups_text, parse_groups
from tensorcap.alignment.layout.layout import Layout
from tensorcap.alignment.layout.multi_tensor_steps import Concat, Dereplicate, Sum
from tensorcap.alignment.layout.steps import Rearrange, Step
from tensorcap_formats.errors import UsageError, abbreviate

Placement = Literal["partial", "replicated"]

_TOKENS: Final = ("b", "s", "t")  # rows, positions, and all tokens one after the other

_SHARDED: Final = re.compile(r"([A-Za-z]\w*)\[([A-Za-z]\w*)\]")
_WHOLE: Final = re.compile(r"(?:^|(?<=\s))\[([A-Za-z]\w*):(partial|replicated)\](?=\s|$)")
_SIZE: Final = re.compile(r"(?:^|(?<=\s))([A-Za-z]\w*)=([1-9]\d*)(?=\s|$)")


@dataclass(frozen=True, slots=True)
class Dims:
    """The axes of a tensor.

    Attributes:
        groups: Names of what each axis is made of.
        sharded: For each name that is sharded, the mesh axis it is sharded over.
        placements: For other mesh axes, what each rank holds: a summand, or the same as the others.
        sizes: Sizes of axes, in whole, and of mesh axes.

    Example:
        >>> Dims.parse("b s (h[tp] d) h=8").text
        'b s (h[tp] d) h=8'
    """

    groups: tuple[Group, ...]
    sharded: Mapping[str, str]
    placements: Mapping[str, Placement]
    sizes: Mapping[str, int]

    @classmethod
    def parse(cls, text: str) -> Dims:
        """Read the notation.

        Raises:
            UsageError: It is not understood; an axis stands twice; a mesh axis does two things; a size is of
                nothing that is there.
        """
        placements = _once(text, _WHOLE.findall(text))
        sizes = {name: int(size) for name, size in _once(text, _SIZE.findall(text)).items()}
        rest = _SIZE.sub("", _WHOLE.sub("", text))
        sharded = _once(text, _SHARDED.findall(rest))
        try:
            groups = parse_groups(_SHARDED.sub(r"\1", rest))
        except UsageError as error:
            raise UsageError(f"dims {abbreviate(text)!r}: {str(error).partition(': ')[2]}") from None
        names = [name for group in groups for name in group]
        meshes = [*sharded.values(), *placements]
        for kind, used in (("axis", names), ("mesh axis", meshes)):
            twice = sorted({name for name in used if used.count(name) > 1})
            if twice:
                raise UsageError(f"dims {abbreviate(text)!r}: {kind} {twice[0]!r} stands there twice")
        for name in sizes:
            if name not in names and name not in meshes:
                raise UsageError(f"dims {abbreviate(text)!r}: has no axis {name!r}, whose size is given")
        return cls(groups, sharded, cast("Mapping[str, Placement]", placements), sizes)

    @property
    def text(self) -> str:
        """The notation, as `parse` reads it."""
        shown = tuple(
            tuple(f"{name}[{self.sharded[name]}]" if name in self.sharded else name for name in group)
            for group in self.groups
        )
        parts = [groups_text(shown)] if shown else []
        parts += [f"[{mesh}:{what}]" for mesh, what in self.placements.items()]
        parts += [f"{name}={size}" for name, size in self.sizes.items()]
        return " ".join(parts)

    @property
    def names(self) -> tuple[str, ...]:
        """All names of axes, in order."""
        return tuple(name for group in self.groups for name in group)

    @property
    def meshes(self) -> tuple[str, ...]:
        """All mesh axes; several in the order in which their sizes are written."""
        meshes = (*self.sharded.values(), *self.placements)
        return tuple(sorted(meshes, key=lambda mesh: [*self.sizes, mesh].index(mesh)))

    def at(self, name: str, ndim: int) -> int | None:
        """Find the axis that a name stands for alone in a tensor of `ndim` axes; None if there is none."""
        has_dots, missing = ("...",) in self.groups, len(self.groups) - ndim
        if (name,) not in self.groups or (missing > 1 if has_dots else missing):
            return None
        at = self.groups.index((name,))
        return at - missing if has_dots and self.groups.index(("...",)) < at else at

    def refuse(self, reason: str, hint: str | None = None) -> UsageError:
        """The error that says what does not fit these dims."""
        return UsageError(f"dims {self.text!r}: {reason}", hint=hint)


def steps_between(
    target: Dims, reference: Dims, shapes: Sequence[Shape], shape: Shape, *, has_tokens: bool = False
) -> Layout:
    """Derive the steps from the target's tensors, one of each rank, to the reference's.

    Args:
        target: What each rank of the target holds.
        reference: What the reference holds, in whole.
        shapes: Shapes of the target's tensors, by rank; the last mesh axis varies fastest.
        shape: Shape of the reference's tensor.
        has_tokens: Whether tokens are matched, so that the sizes of `b`, `s` and `t` may differ.

    Raises:
        UsageError: An axis is on one side only; shapes contradict the dims; a needed size does not follow
            from them; or there are not as many tensors as the mesh has ranks.
    """
    if reference.meshes:
        raise reference.refuse("the reference is sharded, expected whole tensors")
    aim, loose = (token_dims(target, reference), _TOKENS) if has_tokens else (reference, ())
    for one, other, side in ((target, aim, "reference"), (aim, target, "target")):
        for name in one.names:
            if name not in other.names:
                raise one.refuse(f"axis {name!r} is missing from the {side}'s {other.text!r}")
    ranks = _ranks(target, len(shapes))
    whole = _sizes(reference, shape, {**reference.sizes, **_of_axes(target)})
    known = {name: size for name, size in whole.items() if name not in target.sharded and name not in loose}
    part = _sizes(target, shapes[0], known)
    groups, steps = target.groups, list[Step]()
    if any(group.index(name) for group in groups for name in group if name in target.sharded):
        inner = {name: _known(target, part, name) for group in groups if len(group) > 1 for name in group}
        apart = tuple((name,) for name in target.names)
        steps.append(Rearrange(Pattern(groups, apart, inner)))
        groups = apart
    left = len(shapes)
    for mesh, count in reversed(ranks.items()):
        step_run = None if count == left else count
        if target.placements.get(mesh) == "partial":
            steps.append(Sum(step_run))
        elif target.placements.get(mesh) == "replicated":
            steps.append(Dereplicate(count))
        else:
            name = next(name for name, over in target.sharded.items() if over == mesh)
            sizes = (part, shapes[0]), (whole, shape)
            copies = 1 if name in loose else _copies(target, reference, *sizes, name, count)
            steps += [Dereplicate(copies)] if copies > 1 else []
            at = next(i for i, group in enumerate(groups) if name in group)
            run = count // copies
            steps += [Concat(at, None if run == left // copies else run)] if run > 1 else []
        left //= count
    full = {**part, **{name: whole[name] for name in target.sharded if name in whole and name not in loose}}
    steps += _rearranged(target, groups, aim.groups, full)
    return Layout(tuple(steps))


def token_dims(target: Dims, reference: Dims) -> Dims:
    """The reference's dims with the target's token axes: `b s`, or `t` if packed."""
    groups = reference.groups
    if ("t",) in target.groups and ("b",) in groups and ("s",) in groups:
        groups = tuple(("t",) if group == ("b",) else group for group in groups if group != ("s",))
    elif ("t",) in groups and ("b",) in target.groups and ("s",) in target.groups:
        at = groups.index(("t",))
        groups = (*groups[:at], ("b",), ("s",), *groups[at + 1 :])
    return replace(reference, groups=groups)


def _once(text: str, pairs: Sequence[tuple[str, str]]) -> dict[str, str]:
    names = [name for name, _ in pairs]
    for name in names:
        if names.count(name) > 1:
            raise UsageError(f"dims {abbreviate(text)!r}: {name!r} stands there twice")
    return dict(pairs)


def _of_axes(dims: Dims) -> dict[str, int]:
    return {name: size for name, size in dims.sizes.items() if name in dims.names}


def _ranks(dims: Dims, count: int) -> dict[str, int]:
    """How many ranks each mesh axis has, the outermost first."""
    missing = [mesh for mesh in dims.meshes if mesh not in dims.sizes]
    known = math.prod(dims.sizes[mesh] for mesh in dims.meshes if mesh in dims.sizes)
    if len(missing) > 1:
        raise dims.refuse(
            f"the sizes of {' and '.join(missing)} are not known",
            f"Write them behind it, the outermost first: {' '.join(f'{mesh}=2' for mesh in dims.meshes)}",
        )
    if count % known or (not missing and count != known):
        raise dims.refuse(f"found {count} tensors, expected those of {known} ranks")
    return {mesh: dims.sizes.get(mesh, count // known) for mesh in dims.meshes}


def _sizes(dims: Dims, shape: Shape, known: Mapping[str, int]) -> dict[str, int]:
    """Sizes of the axes of a tensor, as far as they follow from its shape."""
    if len(shape) != len(dims.groups):
        raise dims.refuse(f"shape {list(shape)} has {len(shape)} axes, expected {len(dims.groups)}")
    sizes = dict(known)
    for group, size in zip(dims.groups, shape, strict=True):
        product = math.prod(sizes[name] for name in group if name in sizes)
        missing = [name for name in group if name not in sizes]
        if (missing and (not product or size % product)) or (not missing and size != product):
            with_sizes = "".join(f" with {name} = {sizes[name]}" for name in group if name in sizes)
            raise dims.refuse(f"an axis of {size} does not fit ({' '.join(group)}){with_sizes}")
        if len(missing) == 1:
            sizes[missing[0]] = size // product
    return sizes


def _known(dims: Dims, sizes: Mapping[str, int], name: str) -> int:
    if name not in sizes:
        raise dims.refuse(f"the size of {name!r} is not known", f"Write it behind it: {dims.text} {name}=…")
    return sizes[name]


def _copies(
    target: Dims,
    reference: Dims,
    part: tuple[Mapping[str, int], Shape],
    whole: tuple[Mapping[str, int], Shape],
    name: str,
    ranks: int,
) -> int:
    """How many ranks hold the same part of an axis."""
    sides = ((target, *part), (reference, *whole))
    groups = [next(group for group in dims.groups if name in group) for dims, _, _ in sides]
    if groups[0] == groups[1] and any(name not in known for _, known, _ in sides):
        # the other axes of the group are the same, so that its size will do
        local, full = (shape[dims.groups.index(groups[0])] for dims, _, shape in sides)
    else:
        local, full = (_known(dims, known, name) for dims, known, _ in sides)
    if not full or local * ranks % full or ranks % (local * ranks // full or ranks + 1):
        raise target.refuse(f"{ranks} ranks with {local} of {name!r} do not make {full}")
    return local * ranks // full


def _rearranged(
    dims: Dims, before: tuple[Group, ...], after: tuple[Group, ...], sizes: Mapping[str, int]
) -> Iterator[Step]:
    """The rearrangement, if one is needed; groups that stay together need no sizes."""
    together = {group: "_".join(group) for group in before if len(group) > 1 and group in after}
    left, right = (
        tuple((together[group],) if group in together else group for group in side)
        for side in (before, after)
    )
    if left != right:
        apart = [name for group in left if len(group) > 1 for name in group]
        yield Rearrange(Pattern(left, right, {name: _known(dims, sizes, name) for name in apart}))
