"""Hypotheses about one pair that differs: what mistake would make these values of those."""
