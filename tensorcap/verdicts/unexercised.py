"""Features of a model that the inputs of a run never reached, as far as its configuration tells (POL-43)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

import numpy as np

from tensorcap.metrics.routing import is_routing
from tensorcap_formats.archive import Archive
from tensorcap_formats.errors import ReadError
from tensorcap_formats.keys import ROOT_SITE
from tensorcap_formats.records import Record

_TOKENS: Final = ("input_ids", "decoder_input_ids", "inputs_embeds")
_EXPERTS: Final = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


def unexercised(reference: Archive) -> list[str]:
    """List what a reference's inputs did not exercise, a sentence each."""
    config = reference.info.config
    inner = config.get("text_config")
    config = {**config, **inner} if isinstance(inner, Mapping) else config
    inputs = {
        record.key.slot.partition(".")[2]: record
        for record in reference.records
        if record.key.site == ROOT_SITE and record.key.step == 0 and record.key.slot.startswith("input.")
    }
    tokens = next((inputs[name] for name in _TOKENS if name in inputs), None)
    if tokens is None or len(tokens.shape) < 2:
        return []
    length = _length(reference, tokens)
    return [
        *_by_length(config, length),
        *_softcaps(reference, config),
        *_padding(reference, inputs.get("attention_mask"), tokens),
        *_experts(reference, config),
    ]


def _length(reference: Archive, tokens: Record) -> int:
    """The longest sequence that the run saw: prompt and generated tokens."""
    steps = 1 + max(record.key.step for record in reference.records)
    return tokens.shape[1] + steps - 1


def _by_length(config: Mapping[str, Any], length: int) -> Iterator[str]:
    window = config.get("sliding_window")
    is_used = config.get("use_sliding_window", True) is not False
    if isinstance(window, int) and is_used and length <= window:
        yield f"The sliding window of {window} tokens was not reached by {length}."
    scaling = config.get("rope_scaling") or config.get("rope_parameters")
    if isinstance(scaling, Mapping):
        kind = scaling.get("rope_type") or scaling.get("type") or "default"
        start = scaling.get("original_max_position_embeddings") or config.get(
            "original_max_position_embeddings"
        )
        if kind in ("dynamic", "longrope") and isinstance(start, int) and length <= start:
            yield f"Rotary scaling ({kind}) acts beyond {start} tokens; there were {length}."


def _softcaps(reference: Archive, config: Mapping[str, Any]) -> Iterator[str]:
    cap = config.get("final_logit_softcapping")
    logits = next((r for r in reference.records if r.key.slot == "output.logits"), None)
    if isinstance(cap, (int, float)) and cap and logits is not None and logits.statistics is not None:
        low, high = logits.statistics.minimum, logits.statistics.maximum
        if low is not None and high is not None and max(abs(low), abs(high)) < cap / 10:
            yield f"The cap of {cap:g} on logits was idle: the largest is {max(abs(low), abs(high)):.2g}."
    if config.get("attn_logit_softcapping"):
        yield "Whether the cap on attention scores acted is not known: the scores were not captured."


def _padding(reference: Archive, mask: Record | None, tokens: Record) -> Iterator[str]:
    padded = mask is not None and mask.statistics is not None and mask.statistics.zeros > 0
    if not padded:
        batch = f" in {tokens.shape[0]} sequences" if tokens.shape[0] > 1 else ""
        yield f"There was no padding{batch}."


def _experts(reference: Archive, config: Mapping[str, Any]) -> Iterator[str]:
    count = next((config[name] for name in _EXPERTS if isinstance(config.get(name), int)), None)
    chosen: dict[str, set[int]] = {}
    for record in reference.records:
        if record.key.slot.startswith("output") and is_routing(record) and record.stored:
            try:
                found = np.unique(reference.read(record))
            except ReadError:  # the pair says so
                continue
            chosen.setdefault(record.key.site, set()).update(map(int, found))
    if count and chosen:
        idle = sum(count - len(experts) for experts in chosen.values())
        if idle > 0:
            yield f"{idle} of {count * len(chosen)} experts were never chosen."
