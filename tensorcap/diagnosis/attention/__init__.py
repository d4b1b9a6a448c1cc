"""Attention: its core worked out from queries, keys and values, and what the target does otherwise."""
