"""Recompute attention: `parts` collects tensors, `core` computes with them, `hypotheses` proposes mistakes."""
