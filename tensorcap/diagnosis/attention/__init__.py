"""Recompute attention: `parts` collects tensors, `core` computes with them, `hypotheses` propose mistakes."""

from tensorcap.diagnosis.attention.hypotheses import propose_attention_cores
from tensorcap.diagnosis.attention.rotary import list_tables, read_angles

__all__ = ["list_tables", "propose_attention_cores", "read_angles"]
