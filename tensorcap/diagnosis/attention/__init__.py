"""Recompute attention: `parts` collects tensors, `core` computes with them, `hypotheses` propose mistakes."""
