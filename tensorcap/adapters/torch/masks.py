"""Masks of attention in which each row sees other columns than it should."""

from __future__ import annotations

from typing import Any

import torch


def other_mask(mask: torch.Tensor, way: str) -> torch.Tensor:
    """A mask of another extent, of the same kind: bools that are true where it sees, or numbers to be added.

    Args:
        mask: Of any shape whose last two axes are rows and columns.
        way: `one further` and `one fewer` at the end of what a row sees, `longer window` and `shorter window`
            at its beginning.
    """
    if mask.dtype == torch.bool:
        return _seen(mask, way)
    least = mask.min()
    return torch.where(_seen(mask > least / 2, way), torch.zeros_like(mask), least)


def attention_with(way: str, func: Any, args: Any, kwargs: Any) -> torch.Tensor:
    """Attention as torch has it, with another mask than it is given."""
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    mask, query, key = given.get("attn_mask"), given["query"], given["key"]
    if mask is None:
        shape = (query.shape[-2], key.shape[-2])
        mask = torch.ones(shape, dtype=torch.bool, device=query.device)
        mask = mask.tril() if given.get("is_causal") else mask
    given |= {"attn_mask": other_mask(mask, way), "is_causal": False}
    return func(**given)  # type: ignore[no-any-return] # a tensor, as torch says


def _seen(seen: torch.Tensor, way: str) -> torch.Tensor:
    columns = torch.arange(seen.shape[-1], device=seen.device)
    first = torch.where(seen, columns, seen.shape[-1]).amin(-1, keepdim=True)
    last = torch.where(seen, columns, -1).amax(-1, keepdim=True)
    extent = last - first + 1
    if way == "one further":
        return seen | ((columns == last + 1) & (extent > 0))
    if way == "one fewer":
        return seen & ((columns != last) | (extent == 1))
    is_full = extent == extent.amax()  # rows whose beginning the window cuts off
    if way == "longer window":
        return seen | (is_full & (columns == first - 1))
    return seen & ~(is_full & (columns == first) & (extent > 1))
