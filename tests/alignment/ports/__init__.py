"""Ports of eight transformers models in own code, each with the true mapping written by hand."""
