"""Matching: which sites of two runs belong together, by names, structure, shapes and values."""
