"""Recompute attention: `parts` collects tensors, `core` computes with them, `hypotheses` propose mistakes."""

from tensorcap.diagnosis.attention.hypotheses import propose_attention_cores

__all__ = ["propose_attention_cores"]
