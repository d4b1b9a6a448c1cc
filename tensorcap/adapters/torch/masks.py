"""Change the extent of an attention mask: each row sees other columns than it should."""

from __future__ import annotations

from typing import Any

import torch


def change_extent(mask: torch.Tensor, extent: str) -> torch.Tensor:
    """Make a mask of another extent, of the same kind: bools that are true if seen, or numbers to be added.

    Args:
        mask: Of any shape whose last two axes are rows and columns.
        extent: `one further` and `one fewer` at the end of what a row sees, `longer window` and
            `shorter window` at its beginning.
    """
    if mask.dtype == torch.bool:
        return _change_seen(mask, extent)
    least = mask.min()
    return torch.where(_change_seen(mask > least / 2, extent), torch.zeros_like(mask), least)


def attend_with_extent(extent: str, func: Any, args: Any, kwargs: Any) -> torch.Tensor:
    """Call torch's attention with a mask of another extent than its own."""
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
    arguments = {**dict(zip(names, args, strict=False)), **kwargs}
    mask, query, key = arguments.get("attn_mask"), arguments["query"], arguments["key"]
    if mask is None:
        shape = (query.shape[-2], key.shape[-2])
        mask = torch.ones(shape, dtype=torch.bool, device=query.device)
        mask = mask.tril() if arguments.get("is_causal") else mask
    arguments |= {"attn_mask": change_extent(mask, extent), "is_causal": False}
    return func(**arguments)  # type: ignore[no-any-return] # a tensor, as torch says


def _change_seen(visible: torch.Tensor, extent: str) -> torch.Tensor:
    columns = torch.arange(visible.shape[-1], device=visible.device)
    first = torch.where(visible, columns, visible.shape[-1]).amin(-1, keepdim=True)
    last = torch.where(visible, columns, -1).amax(-1, keepdim=True)
    length = last - first + 1
    if extent == "one further":
        return visible | ((columns == last + 1) & (length > 0))
    if extent == "one fewer":
        return visible & ((columns != last) | (length == 1))
    is_full = length == length.amax()  # rows whose beginning the window cuts off
    if extent == "longer window":
        return visible | (is_full & (columns == first - 1))
    return visible & ~(is_full & (columns == first) & (length > 1))
