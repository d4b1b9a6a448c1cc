"""Hugging Face models: a folder or an id, and options, become a workload of the torch adapter.

Read `workload` (the entry: `build`), then `model` (configuration and weights), `inputs` (prompt, token ids,
archived inputs) and `generation` (greedy, free or with the tokens of another run).
"""
