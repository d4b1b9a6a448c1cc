"""The phase of a language model's call: prefill, decode or forward, by its tokens and its caches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch

from tensorcap.recording import Phase

_CACHES: Final = ("past_key_values", "past_key_value", "cache_params", "layer_past", "cache", "past")
_TOKENS: Final = ("decoder_input_ids", "decoder_inputs_embeds", "input_ids", "inputs_embeds")
_NO_CACHES: Final = (type(None), torch.Tensor)  # how much of a tensor is in use is unknown
_MAX_DEPTH: Final = 4  # of the tuples that a cache without a class is made of


def phase_of(names: Sequence[str], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Phase:
    """The phase of a call of the whole model.

    Args:
        names: The names of the positional arguments.
        args: Positional arguments.
        kwargs: Arguments by name.

    Returns:
        `decode` for a filled cache with at most one token; `prefill` for a cache that is empty or is to be
        made (`use_cache`), and for a filled one with several tokens; `forward` without a cache.
    """
    arguments = {**dict(zip(names, args, strict=False)), **kwargs}
    caches = [
        value
        for name, value in arguments.items()
        if (name in _CACHES and not isinstance(value, _NO_CACHES)) or hasattr(type(value), "get_seq_length")
    ]
    if any(map(_is_filled, caches)):
        return "prefill" if _count_tokens(arguments) > 1 else "decode"
    return "prefill" if caches or arguments.get("use_cache") is True else "forward"


def _count_tokens(arguments: Mapping[str, Any]) -> int:
    for name in _TOKENS:
        tokens = arguments.get(name)
        if isinstance(tokens, torch.Tensor):
            return tokens.shape[1] if tokens.ndim > 1 else tokens.numel()
    return 1


def _is_filled(cache: Any) -> bool:
    for name in ("get_seq_length", "has_previous_state"):
        try:
            state = getattr(cache, name, None)
            if state() if callable(state) else state:
                return True
        except Exception:  # a cache of another kind, which knows no such thing
            continue
    return _holds_elements(cache, 0)


def _holds_elements(value: Any, depth: int) -> bool:
    if isinstance(value, torch.Tensor):
        return value.numel() > 0
    if isinstance(value, Mapping):
        value = tuple(value.values())
    if isinstance(value, (tuple, list)) and depth < _MAX_DEPTH:
        return any(_holds_elements(item, depth + 1) for item in value)
    return False
