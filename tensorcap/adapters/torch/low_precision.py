"""Run torch operations on wide tensors as a narrow dtype would: every step is rounded."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Final

import torch

from tensorcap.adapters.torch.tensors import dtype_named

_LOW_DTYPES: Final = ("bfloat16", "float16")
_SENSITIVE: Final = frozenset(  # operations that models keep in float32 beside low precision
    {"softmax", "log_softmax", "logsumexp", "cumsum", "exp", "rsqrt", "sigmoid", "softplus", "matmul", "bmm"}
)
_ATTENTION: Final = "scaled_dot_product_attention"
_WORDS: Final[Mapping[str, str]] = {  # of an operation in a dtype, by the dtype
    **{f"operands and result in {dtype}": dtype for dtype in _LOW_DTYPES},
    **{f"its softmax in {dtype}": dtype for dtype in _LOW_DTYPES},
}


def find_low_precisions(name: str, result: torch.Tensor) -> list[str]:
    """List in which low precisions an operation that was done in float32 can be done, in words.

    Args:
        name: Of the operation, as torch calls it.
        result: What it returned.
    """
    if result.dtype != torch.float32 or name not in (*_SENSITIVE, _ATTENTION):
        return []
    start = "its softmax" if name == _ATTENTION else "operands"
    return [words for words in _WORDS if words.startswith(start)]


def is_low_precision(words: str) -> bool:
    """Whether the words for an alternative are of an operation in low precision."""
    return words in _WORDS


def run_in_low_precision(name: str, words: str, func: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
    """Do an operation in low precision, and return its result in the dtype that it has otherwise.

    Args:
        name: Of the operation, as torch calls it.
        words: As `find_low_precisions` lists them.
        func: The operation.
        args: What it is given.
        kwargs: Likewise.
    """
    low = dtype_named(_WORDS[words])
    if name == _ATTENTION:
        return _AttentionSteps(low)(*args, **kwargs)
    is_wide = isinstance(args[0], torch.Tensor) and args[0].is_floating_point()
    dtype = kwargs.get("dtype") or (args[0].dtype if is_wide else torch.float32)
    narrow = [x.to(low) if isinstance(x, torch.Tensor) and x.is_floating_point() else x for x in args]
    return func(*narrow, **{**kwargs, **({"dtype": low} if "dtype" in kwargs else {})}).to(dtype)


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
            _ATTENTION: _AttentionSteps(None, rounded=self._round, softmax=self._softmax),
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


class _AttentionSteps:
    """Scaled dot-product attention step by step.

    Args:
        softmax_dtype: What the softmax alone is computed in; None for that of its scores.
        rounded: Rounds each step; None for none.
        softmax: The softmax; None for torch's.
    """

    def __init__(
        self,
        softmax_dtype: torch.dtype | None,
        *,
        rounded: Callable[[torch.Tensor], torch.Tensor] | None = None,
        softmax: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> None:
        self._softmax_dtype = softmax_dtype
        self._round = rounded or (lambda x: x)
        self._softmax = softmax or (lambda x: torch.softmax(x, -1))

    def __call__(
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
        """Attend as torch's function of these arguments does."""
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
        if self._softmax_dtype is not None:
            return self._softmax(scores.to(self._softmax_dtype)).to(value.dtype) @ value
        return self._round(self._softmax(scores)) @ value
