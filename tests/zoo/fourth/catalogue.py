"""The fourth zoo: mistakes in ports that were written anew, and correct ports, of twelve further models.

Whoever writes what judges reads neither the entries nor what is reported of them one by one. The lists of
words were written before any report on an entry was read, and are not changed afterwards.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from tests.zoo.entry import Correct, Entry, PortedMistake
from tests.zoo.fourth import (
    decoder_mistakes,
    decoders,
    hybrid_mistakes,
    hybrids,
    image_mistakes,
    images,
    signal_mistakes,
    signals,
    text_mistakes,
    texts,
)

FOURTH_MISTAKES: Final[tuple[PortedMistake, ...]] = (
    *decoder_mistakes.MISTAKES,
    *hybrid_mistakes.MISTAKES,
    *text_mistakes.MISTAKES,
    *image_mistakes.MISTAKES,
    *signal_mistakes.MISTAKES,
)

FOURTH_CORRECT: Final = (
    Correct("neo_rewritten", "gpt_neo", decoders.NeoPort),
    Correct("neo_stream_with_scaled_queries", "gpt_neo_stream", decoders.neo_with_scaled_queries),
    Correct("glm4_rewritten", "glm4", decoders.GlmPort),
    Correct("glm4_with_rows_reordered", "glm4", decoders.glm_with_rows_reordered),
    Correct("glm4_with_gains_folded", "glm4", decoders.glm_with_gains_folded),
    Correct("olmoe_dense_experts", "olmoe", decoders.OlmoPort),
    Correct("olmoe_with_gathered_experts", "olmoe", decoders.olmoe_with_gathered_experts),
    Correct("lfm2_stream_rewritten", "lfm2_stream", hybrids.LfmPort),
    Correct("lfm2_with_shifted_products", "lfm2", hybrids.lfm2_with_shifted_products),
    Correct("next_token_by_token", "qwen3_next", hybrids.NextPort),
    Correct("next_scores_of_the_last_token", "qwen3_next", hybrids.LastPort),
    Correct("deberta_rewritten", "deberta_v2", texts.DebertaPort),
    Correct("deberta_with_tables_of_pairs", "deberta_v2", texts.deberta_with_tables_of_pairs),
    Correct("m2m_rewritten", "m2m_100", texts.M2MPort),
    Correct("m2m_with_factor_in_tables", "m2m_100", texts.m2m_with_factor_in_tables),
    Correct(
        "efficientnet_with_statistics_folded", "efficientnet", images.efficientnet_with_statistics_folded
    ),
    Correct("efficientnet_channels_last", "efficientnet", images.efficientnet_channels_last),
    Correct("beit_rewritten", "beit", images.BeitPort),
    Correct("beit_with_gains_folded", "beit", images.beit_with_gains_folded),
    Correct("dpt_rewritten", "dpt", images.DptPort),
    Correct("dpt_with_readout_in_parts", "dpt", images.dpt_with_readout_in_parts),
    Correct("hifigan_with_statistics_folded", "hifigan", signals.hifigan_with_statistics_folded),
    Correct("hifigan_with_weight_norm", "hifigan", signals.hifigan_with_weight_norm),
    Correct("qwen2_vl_rewritten", "qwen2_vl", signals.MixedPort),
    Correct("qwen2_vl_image_by_image", "qwen2_vl", signals.qwen2_vl_image_by_image),
)

_ALL: Final[tuple[Entry, ...]] = (*FOURTH_MISTAKES, *FOURTH_CORRECT)
FOURTH_ENTRIES: Final[Mapping[str, Entry]] = {entry.name: entry for entry in _ALL}
