"""Correct ports and rewrites of ten architectures, and mistakes planted beside them."""
