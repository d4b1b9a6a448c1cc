"""What a call of a language model is of: told by its arguments, known by name or by how a cache behaves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch

from tensorcap.recording.point import Phase

_CACHES: Final = ("past_key_values", "past_key_value", "cache_params", "layer_past", "cache", "past")
_TOKENS: Final = ("decoder_input_ids", "decoder_inputs_embeds", "input_ids", "inputs_embeds")
_NO_CACHES: Final = (type(None), torch.Tensor)  # of a tensor nobody knows how much is in use
_MAX_DEPTH: Final = 4  # of the tuples that a cache without a class is made of


def phase_of(names: Sequence[str], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Phase:
    """What a call of the whole model is of.

    Args:
        names: Of the positional arguments.
        args: Positional arguments.
        kwargs: Arguments by name.

    Returns:
        `decode` where a cache is handed in that is filled, and at most one token with it; `prefill` for a
        cache that is empty, or is to be made (`use_cache`), or that is filled and handed in with several
        tokens; `forward` without a cache.
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
            found = getattr(cache, name, None)
            if found() if callable(found) else found:
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
