"""Attention over nothing, which a mutated module may come to: refused, since a kernel ends the process."""

from __future__ import annotations

from typing import Any, Final

import torch
from torch.overrides import TorchFunctionMode

_ATTENTION: Final = "scaled_dot_product_attention"


class EmptyAttentionRefused(TorchFunctionMode):
    """Raises for attention an operand of which has no elements.

    With `enable_gqa` torch divides by the number of heads of the keys; a division of whole numbers by zero
    in its code is a signal, which nothing can catch.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Do one operation, unless it is attention over nothing.

        Raises:
            ValueError: It is.
        """
        kwargs = kwargs or {}
        if getattr(func, "__name__", "") == _ATTENTION:
            operands = (*args[:3], *(kwargs.get(name) for name in ("query", "key", "value")))
            if any(isinstance(tensor, torch.Tensor) and not tensor.numel() for tensor in operands):
                raise ValueError("attention over a tensor without elements")
        return func(*args, **kwargs)
