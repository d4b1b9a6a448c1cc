"""How alike two roles are by their shapes, classes and nesting, apart from names and values."""

from __future__ import annotations

import math

from tensorcap.alignment.roles import Role

Shape = tuple[int, ...]


def shape_of(role: Role) -> Shape:
    """The sizes of a role's results, sorted, without those of one element."""
    return tuple(sorted(size for size in role.record.shape if size != 1))


def roles_alike(one: Role, other: Role) -> float:
    """What shapes of parameters, classes, nesting and being the main result say, in nats."""
    found = -2.0 if bool(one.slot) != bool(other.slot) else 0.0
    if bool(one.inside) != bool(other.inside):
        found -= 1.0
    if one.family and other.family:
        found += 2.0 if one.family == other.family else -2.0
    if one.first.shards or other.first.shards:
        return found
    if math.prod(shape_of(one)) != math.prod(shape_of(other)):
        found -= 6.0
    mine, theirs = one.parameters, other.parameters
    if mine and theirs:
        found += 3.0 if mine == theirs else 2.0 if mine[0] == theirs[0] else -4.0
    elif (mine or theirs) and one.first.module and other.first.module:
        found -= 3.0
    return found
