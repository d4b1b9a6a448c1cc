"""What the name of a projection says: the query, key or value of attention, a gate or what it gates."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

_ROLES: Final = {
    **{"q": "query", "query": "query", "k": "key", "key": "key", "v": "value", "value": "value"},
    **{"gate": "gate", "up": "up"},
}
_LAYERS: Final = (("query", "key", "value"), ("gate", "up"))  # as they mostly stand in a fused one
USUAL_ORDER: Final[Mapping[str, int]] = {
    word: layer.index(role) for word, role in _ROLES.items() for layer in _LAYERS if role in layer
}


def name_words(name: str) -> list[str]:
    """The words of the last part of a site's name, and of a slot; `wq` is `q`."""
    site, _, slot = name.partition("/")
    last = f"{site.rpartition('.')[2]}_{slot}"
    words = [word.lower() for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+|\d+", last)]
    return [word[1] if len(word) == 2 and word[0] == "w" else word for word in words]


def projection_role(name: str) -> str:
    """What the name of a site says that it is; "" if nothing, or more than one thing.

    Example:
        >>> projection_role("layers.0.attn.wq"), projection_role("mlp.gate_up_proj")
        ('query', '')
    """
    roles = {_ROLES[word] for word in name_words(name) if word in _ROLES}
    return roles.pop() if len(roles) == 1 else ""


def are_exchanged(one: str, other: str) -> bool:
    """Whether names say of two sites that they are two projections of one layer.

    Example:
        >>> are_exchanged("self.query", "mixer.to_k"), are_exchanged("self.query", "mixer.to_q")
        (True, False)
    """
    roles = {projection_role(one), projection_role(other)}
    return len(roles) > 1 and any(roles <= set(layer) for layer in _LAYERS)
