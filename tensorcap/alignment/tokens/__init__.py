"""Tokens: which token of the target is which of the reference."""
