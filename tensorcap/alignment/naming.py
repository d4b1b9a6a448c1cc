"""Names that mean the same: without what wrappers add, or by rules; of roles, apart from their numbers."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Final

from tensorcap.alignment.roles import Index, Role
from tensorcap.alignment.rules import wrapper_rules

Canonical = Callable[[str], str]

_MARK: Final = 1_000_000  # stands for a number of a role; rules may add to it


def plain_name(site: str) -> str:
    """A site's name without what wrappers put before it, and without doubled components.

    Example:
        >>> plain_name("module._orig_mod.layers.2.o_proj.o_proj")
        'layers.2.o_proj'
    """
    return wrapper_rules().canonical(site)


def name_of(role: Role, canonical: Canonical) -> tuple[str, Index]:
    """A role's name, with `{0}` … for its numbers, and what is added to each of them.

    Example:
        >>> name_of(Role("blocks.{0}.mlp"), lambda site: site.replace("blocks", "layers"))
        ('layers.{0}.mlp', (0,))
    """
    added: dict[int, int] = {}

    def unmark(found: re.Match[str]) -> str:
        number = round(int(found[0]) / _MARK) - 1
        added[number] = int(found[0]) - (number + 1) * _MARK
        return f"{{{number}}}"

    marked = re.sub(r"\{(\d+)\}", lambda found: str((int(found[1]) + 1) * _MARK), role.site)
    name = re.sub(r"\d{6,}", unmark, canonical(marked))
    in_slot = (0,) * role.slot.count("{")
    slot = f"/{role.slot}" if role.slot else ""
    return name + slot, tuple(added[number] for number in sorted(added)) + in_slot
