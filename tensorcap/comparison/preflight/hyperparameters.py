"""Compare the settings of modules that both runs have: eps, padding, groups, the kind of GELU."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any, Final

from tensorcap.comparison.preflight.item import Item, UnknownError, common_modules, make_item
from tensorcap.wording import some
from tensorcap_formats.archive import Archive
from tensorcap_formats.keys import ROOT_SITE
from tensorcap_formats.run_info import ModuleInfo

# One name for what implementations spell in several ways
_SYNONYMS: Final = {
    "variance_epsilon": "eps",
    "epsilon": "eps",
    "layer_norm_eps": "eps",
    "layer_norm_epsilon": "eps",
    "norm_eps": "eps",
    "rms_norm_eps": "eps",
    "num_attention_heads": "num_heads",
    "n_heads": "num_heads",
    "n_head": "num_heads",
    "num_key_value_heads": "num_kv_heads",
    "softmax_scale": "scale",
    "scaling": "scale",
}
# fmt: off
# What a forward pass in evaluation mode computes with, and what every implementation means alike
_EXPLAINING: Final = frozenset((
    "approximate", "ceil_mode", "count_include_pad", "dilation", "eps", "groups", "head_dim", "is_causal",
    "kernel_size", "negative_slope", "norm_topk_prob", "num_groups", "num_heads", "num_kv_heads",
    "output_padding", "padding", "padding_mode", "sliding_window", "stride", "top_k",
))
# The same, but each class has its own meaning for it
_OF_ONE_CLASS: Final = frozenset((
    "add_zero_attn", "align_corners", "alpha", "beta", "bidirectional", "dim", "divisor_override", "lambd",
    "logit_scale", "lower", "max_val", "min_val", "mode", "norm_first", "num_layers", "scale", "scale_factor",
    "softcap", "threshold", "upper", "upscale_factor",
))
# What shapes and parameters say better, and numbers of places
_ELSEWHERE: Final = frozenset((
    "bias", "device", "dtype", "embedding_dim", "in_channels", "in_features", "layer_id", "layer_idx",
    "normalized_shape", "num_embeddings", "num_features", "out_channels", "out_features",
))
# fmt: on
_SAME: Final = 1e-6  # relative difference of numbers that were printed, or are float32


def compare_hyperparameters(reference: Archive, target: Archive) -> Iterator[Item]:
    """Compare the settings of modules of one site that both sides have, one item for each that differs.

    Modules that differ alike are one item. It explains a divergence if a forward pass computes with the
    setting; one that each class has its own meaning for, such as a scale, only in modules of one class. What
    is of another type on both sides (a text and a number) is another way to say it, and is not compared.
    """
    common = common_modules(reference, target)
    compared = 0
    unlike: dict[tuple[str, str, str, bool], list[tuple[str, Any, Any]]] = defaultdict(list)
    for site, sides in common.items():
        ours, theirs = map(_settings, sides)
        is_one_class = sides[0].class_name == sides[1].class_name
        names = [name for name in ours if name in theirs and name not in _ELSEWHERE]
        compared += len(names)
        for name in names:
            one, other = ours[name], theirs[name]
            if not _is_same(one, other):
                explains = name in _EXPLAINING or (is_one_class and name in _OF_ONE_CLASS)
                unlike[name, _value_text(one), _value_text(other), explains].append((site, one, other))
    if not compared:
        raise UnknownError("not both runs say how their modules are set")
    for (name, ours_text, theirs_text, explains), places in unlike.items():
        site, one, other = places[0]
        text = f"{name} is {ours_text} in the reference, {theirs_text} in the target"
        if len(places) > 1:
            text += f"; so it is in {len(places)} modules: {some([place[0] for place in places])}"
        where = "the model" if site == ROOT_SITE else site
        yield make_item(
            "hyperparameters", where, one, other, f"{text}.", explains=explains, rank=not explains
        )


def _settings(module: ModuleInfo) -> Mapping[str, Any]:
    settings: dict[str, Any] = {}
    for name, value in module.settings.items():
        settings.setdefault(_SYNONYMS.get(name, name), value)
    return settings


def _is_same(one: Any, other: Any) -> bool:
    """Whether two settings are the same, or cannot be compared."""
    one, other = _alone(one), _alone(other)
    if isinstance(one, int | float) and isinstance(other, int | float):
        if isinstance(one, bool) != isinstance(other, bool):
            return True
        return math.isclose(one, other, rel_tol=_SAME)
    return bool(one == other) or type(one) is not type(other)


def _alone(value: Any) -> Any:
    """One number for a list of the same ones: a kernel of 3 is one of 3 by 3."""
    is_repeated = isinstance(value, list) and value and all(item == value[0] for item in value)
    return value[0] if is_repeated else value


def _value_text(value: Any) -> str:
    """A setting as people write it.

    Example:
        >>> _value_text(1e-05), _value_text([1, 2])
        ('1e-5', '[1, 2]')
    """
    text = f"{value:.6g}" if isinstance(value, float) else str(value)
    return text.replace("e-0", "e-").replace("e+0", "e+") if isinstance(value, float) else text
