"""The fifth zoo: mistakes in twelve further models and in ports of them, and correct ports.

Whoever writes what judges reads neither the entries nor what is reported of them one by one. All entries and
their lists of words were written before any report on one was read, and are not changed afterwards.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from tests.zoo.entry import Correct, Entry, PortedMistake
from tests.zoo.fifth import (
    decoder_mistakes,
    decoders,
    picture_mistakes,
    pictures,
    routed,
    routed_mistakes,
    signal_mistakes,
    signals,
    text_mistakes,
    texts,
)

FIFTH_MISTAKES: Final[tuple[PortedMistake, ...]] = (
    *decoder_mistakes.MISTAKES,
    *routed_mistakes.MISTAKES,
    *text_mistakes.MISTAKES,
    *picture_mistakes.MISTAKES,
    *signal_mistakes.MISTAKES,
)

FIFTH_CORRECT: Final = (
    Correct("nemotron_rewritten", "nemotron", decoders.NemotronPort),
    Correct("nemotron_by_blocks_of_keys", "nemotron", decoders.NemotronByBlocks),
    Correct("nemotron_with_norms_folded", "nemotron", decoders.nemotron_with_norms_folded),
    Correct("exaone4_rewritten", "exaone4", decoders.ExaonePort),
    Correct("exaone4_with_norms_in_queries", "exaone4", decoders.exaone_with_norms_in_queries),
    Correct("exaone4_stream_rewritten", "exaone4_stream", decoders.ExaonePort),
    Correct("exaone4_stream_with_rings", "exaone4_stream", decoders.ExaoneWithRings),
    Correct("minimax_rewritten", "minimax", routed.MaxPort),
    Correct("minimax_with_gathered_experts", "minimax", routed.MaxWithGatheredExperts),
    Correct("minimax_stream_states_transposed", "minimax_stream", routed.minimax_with_states_transposed),
    Correct("llama4_rewritten", "llama4", routed.ScoutPort),
    Correct("llama4_normed_before_rotation", "llama4", routed.ScoutNormedFirst),
    Correct("llama4_expert_by_expert", "llama4", routed.ScoutByExpert),
    Correct("modernbert_rewritten", "modernbert", texts.ModernPort),
    Correct("modernbert_neighbours_gathered", "modernbert", texts.ModernNearBy),
    Correct("modernbert_row_by_row", "modernbert", texts.ModernRowByRow),
    Correct("xlnet_rewritten", "xlnet", texts.XLPort),
    Correct("xlnet_terms_of_keys_apart", "xlnet", texts.XLByKeys),
    Correct("pegasus_x_blocks_as_a_mask", "pegasus_x", texts.pegasus_with_blocks_as_a_mask),
    Correct("pegasus_x_factor_in_tables", "pegasus_x", texts.pegasus_with_factor_in_tables),
    Correct("pegasus_x_globals_last", "pegasus_x", texts.pegasus_with_globals_last),
    Correct("mobilevit_rewritten", "mobilevit", pictures.MobilePort),
    Correct("mobilevit_columns_first", "mobilevit", pictures.mobilevit_columns_first),
    Correct("mobilevit_pointwise_as_linear", "mobilevit", pictures.mobilevit_pointwise_as_linear),
    Correct("detr_samples_by_index", "deformable_detr", pictures.detr_samples_by_index),
    Correct("detr_with_statistics_folded", "deformable_detr", pictures.detr_with_statistics_folded),
    Correct(
        "detr_offsets_and_weights_fused", "deformable_detr", pictures.detr_with_offsets_and_weights_fused
    ),
    Correct("clipseg_spread_by_linears", "clipseg", pictures.clipseg_spread_by_linears),
    Correct("clipseg_patches_by_a_linear", "clipseg", pictures.clipseg_patches_by_a_linear),
    Correct("clipseg_fused_without_mask", "clipseg", pictures.clipseg_fused_without_mask),
    Correct("parakeet_rewritten", "parakeet", signals.BirdPort),
    Correct("parakeet_distances_gathered", "parakeet", signals.BirdGathered),
    Correct("parakeet_with_statistics_folded", "parakeet", signals.parakeet_with_statistics_folded),
    Correct("mmdit_rewritten", "mmdit", signals.DiffusionPort),
    Correct("mmdit_rows_for_shuffle", "mmdit", signals.mmdit_with_rows_for_shuffle),
)

_ALL: Final[tuple[Entry, ...]] = (*FIFTH_MISTAKES, *FIFTH_CORRECT)
FIFTH_ENTRIES: Final[Mapping[str, Entry]] = {entry.name: entry for entry in _ALL}
