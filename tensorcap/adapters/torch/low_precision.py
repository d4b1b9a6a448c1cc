"""Run torch operations on wide tensors as a narrow dtype would: every step is rounded."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

from tensorcap.adapters.torch.tensors import dtype_named


class RoundedOperations:
    """Rounds the result of every operation, and the steps within softmax, attention, sums and means."""

    def __init__(self, dtype: str, *, is_in_turn: bool) -> None:
        """Choose the dtype and the order of sums.

        Args:
            dtype: Name of the dtype that everything is rounded to.
            is_in_turn: Whether sums are taken one after the other, rounded each time.
        """
        self._dtype = dtype_named(dtype)
        self._is_in_turn = is_in_turn
        self._stepwise: Mapping[str, Callable[..., torch.Tensor]] = {
            "softmax": self._softmax,
            "scaled_dot_product_attention": self._attention,
        }
        if is_in_turn:
            self._stepwise = {**self._stepwise, "sum": self._sum, "mean": self._mean}

    def __call__(self, name: str, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run an operation of a name, step by step if its steps are known."""
        operation: Callable[..., Any] = self._stepwise.get(name, func)
        result = operation(*args, **kwargs)
        return self._round(result) if isinstance(result, torch.Tensor) else result

    def _round(self, x: torch.Tensor) -> torch.Tensor:
        return x.to(self._dtype).to(x.dtype) if x.is_floating_point() else x

    def _sum(self, input: torch.Tensor, dim: Any = -1, keepdim: bool = False, **_: Any) -> torch.Tensor:
        (axis,) = dim if isinstance(dim, (tuple, list)) else (dim,)
        total = torch.zeros_like(input.select(axis, 0))
        for at in range(input.shape[axis]):
            total = self._round(total + input.select(axis, at))
        return total.unsqueeze(axis) if keepdim else total

    def _mean(self, input: torch.Tensor, dim: Any = -1, keepdim: bool = False, **_: Any) -> torch.Tensor:
        total = self._sum(input, dim, keepdim)
        return total * (total.numel() / input.numel())

    def _softmax(self, input: torch.Tensor, dim: int = -1, *_: Any, **__: Any) -> torch.Tensor:
        if not self._is_in_turn:
            return torch.softmax(input, dim)
        exponentials = self._round(self._round(input - input.amax(dim, keepdim=True)).exp())
        return exponentials / self._sum(exponentials, dim, keepdim=True)

    def _attention(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        groups = query.shape[-3] // key.shape[-3]
        key, value = (side.repeat_interleave(groups, -3) for side in (key, value))
        factor = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
        scores = self._round(self._round(query @ key.mT) * factor)
        if is_causal:
            visible = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
            scores = scores.masked_fill(~visible, -torch.inf)
        if attn_mask is not None:
            is_bool = attn_mask.dtype == torch.bool
            scores = (
                scores.masked_fill(~attn_mask, -torch.inf) if is_bool else self._round(scores + attn_mask)
            )
        return self._round(self._softmax(scores)) @ value
