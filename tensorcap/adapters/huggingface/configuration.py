"""The configuration of a Hugging Face model, changed by options; without torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from tensorcap_formats.errors import UsageError, abbreviate, did_you_mean

_LAYER_COUNTS: Final = ("num_hidden_layers", "num_decoder_layers", "decoder_layers")


def load_config(path: str, options: Mapping[str, Any]) -> Any:
    """Read a configuration, and change it by the options.

    Raises:
        UsageError: There is no such model, or no such member of its configuration.
    """
    from transformers import AutoConfig

    trust = bool(options.get("trust_remote_code"))
    if Path(path).is_dir() and not (Path(path) / "config.json").is_file():
        raise UsageError(f"{path}: a folder without config.json, expected that of a Hugging Face model")
    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=trust)
    except Exception as error:  # of files with members that its class refuses, of any type
        reason = _reason(error)
        hint = "If you trust its code: --trust-remote-code." if "trust_remote_code" in str(error) else None
        raise UsageError(f"{path}: no Hugging Face model can be read there: {reason}", hint=hint) from error
    change_config(path, config, options)
    return config


def _reason(error: Exception) -> str:
    """What transformers says of a configuration, in a line: the first, and what it announces."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    return " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]


def change_config(path: str, config: Any, options: Mapping[str, Any]) -> None:
    """Change a configuration by options: `num_hidden_layers` and `config`, members by name.

    Raises:
        UsageError: It has no such member; there are fewer layers.
    """
    may_grow = options.get("random_weights") is not None
    if options.get("num_hidden_layers") is not None:
        _set_layers(path, config, options["num_hidden_layers"], may_grow=may_grow)
    for key, value in dict(options.get("config") or {}).items():
        _set_option(path, config, key, value, may_grow=may_grow)


def _set_layers(path: str, config: Any, count: int, *, may_grow: bool) -> None:
    """Cut the model to its first layers, and with it every list that has an entry a layer."""
    parts = {id(c): c for c in (config, config.get_text_config())}.values()
    names = [(part, name) for part in parts for name in _LAYER_COUNTS if hasattr(part, name)]
    if not names:
        raise UsageError(f"{path}: its configuration has no num_hidden_layers")
    for part, name in names:
        _cut_layers(f"{path}: --num-hidden-layers", part, name, count, may_grow=may_grow)


def _cut_layers(where: str, part: Any, name: str, count: Any, *, may_grow: bool) -> None:
    before = getattr(part, name)
    if type(count) is not int or count < 1 or (count > before and not may_grow):
        raise UsageError(f"{where} is {count!r}, expected 1 to {before}")
    for key, value in list(vars(part).items()):
        if isinstance(value, list) and len(value) == before and key.lstrip("_").endswith(("types", "layers")):
            setattr(part, key, value[:count])
    setattr(part, name, count)


def _counts_layers(part: Any, name: str) -> bool:
    """Whether the option is a count of layers, under its common name or the model's own."""
    own = getattr(part, "attribute_map", None) or {}
    return name in _LAYER_COUNTS or name in [own.get(common) for common in _LAYER_COUNTS]


def _set_option(path: str, config: Any, key: str, value: Any, *, may_grow: bool) -> None:
    if key == "attn_implementation":  # a property with another name
        config._attn_implementation = value
        return
    *parents, last = key.split(".")
    place = config
    for name in (*parents, last):
        known = list(place) if isinstance(place, Mapping) else list(place.to_dict())
        if name not in known and not (not isinstance(place, Mapping) and hasattr(place, name)):
            raise UsageError(
                f"{path}: its configuration has no {abbreviate(key)!r}", hint=did_you_mean(name, known)
            )
        if name is not last:
            place = place[name] if isinstance(place, Mapping) else getattr(place, name)
            if not isinstance(place, Mapping) and not hasattr(place, "to_dict"):
                raise UsageError(f"{path}: {name!r} of its configuration holds no further options")
    if isinstance(place, Mapping):
        place[last] = value  # type: ignore[index]  # a dict; Mapping is what isinstance narrows to
    elif _counts_layers(place, last):
        _cut_layers(f"{path}: --config {key}", place, last, value, may_grow=may_grow)
    else:
        try:
            setattr(place, last, value)
        except Exception as error:  # huggingface_hub checks types by errors of its own
            reason = " ".join(str(error).split())
            raise UsageError(f"{path}: --config {key}={value}: {abbreviate(reason, 200)}") from error
