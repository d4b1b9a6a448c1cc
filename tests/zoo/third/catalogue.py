"""The third zoo: mistakes in ports that were written anew, and correct ports.

Whoever writes what judges reads neither the entries nor what is reported of them one by one.

A mistake names, next to a kind of the other zoos, what a user would call it and the words that name it; these
lists were written before any report on an entry was read, and are not changed afterwards.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from tests.zoo.entry import Correct, Entry, PortedMistake
from tests.zoo.third import (
    decoder_mistakes,
    decoders,
    encoder_mistakes,
    encoders,
    sequence_mistakes,
    sequences,
    vision,
    vision_mistakes,
)

THIRD_MISTAKES: Final[tuple[PortedMistake, ...]] = (
    *decoder_mistakes.MISTAKES,
    *sequence_mistakes.MISTAKES,
    *vision_mistakes.MISTAKES,
    *encoder_mistakes.MISTAKES,
)

THIRD_CORRECT: Final = (
    Correct("phi_rewritten", "phi", decoders.PhiPort),
    Correct("phi_with_scaled_queries", "phi", decoders.phi_with_scaled_queries),
    Correct("stablelm_rewritten", "stablelm", decoders.StablePort),
    Correct("stablelm_stream_with_static_caches", "stablelm_stream", decoders.StablePort),
    Correct("falcon_divided_projection", "falcon", decoders.FalconPort),
    Correct("opt_with_padded_vocabulary", "opt", decoders.OptPort),
    Correct("cohere_rewritten", "cohere", decoders.CoherePort),
    Correct("cohere_with_norms_folded", "cohere", decoders.cohere_with_norms_folded),
    Correct("mamba2_token_by_token", "mamba2_two_groups", sequences.Mamba2Port),
    Correct("rwkv_rewritten", "rwkv", sequences.RwkvPort),
    Correct("dbrx_dense_experts", "dbrx", sequences.DbrxPort),
    Correct("tagger_written_out", "tagger", sequences.TaggerPort),
    Correct("tagger_in_the_order_of_onnx", "tagger", sequences.tagger_in_the_order_of_onnx),
    Correct("tagger_with_time_first", "tagger", sequences.batched_lstm),
    Correct("convnext_channels_last", "convnext", vision.NextPort),
    Correct("convnext_scales_folded", "convnext", vision.convnext_scales_folded),
    Correct("segformer_norm_folded", "segformer", vision.SegPort),
    Correct("segformer_memory_format", "segformer", vision.segformer_channels_last),
    Correct("siglip_rewritten", "siglip", vision.SiglipPort),
    Correct("albert_rewritten", "albert", encoders.AlbertPort),
    Correct("albert_eager", "albert", encoders.albert_eager),
    Correct("albert_row_by_row", "albert", encoders.Wrapped),
    Correct("marian_rewritten", "marian", encoders.MarianPort),
    Correct("marian_summed_in_parts", "marian", encoders.marian_summed_in_parts),
)

_ALL: Final[tuple[Entry, ...]] = (*THIRD_MISTAKES, *THIRD_CORRECT)
THIRD_ENTRIES: Final[Mapping[str, Entry]] = {entry.name: entry for entry in _ALL}
