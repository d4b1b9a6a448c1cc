"""Hugging Face models: a folder or an id, and options, become a workload of the torch adapter.

Read `workload_builder` (the entry: `build`), then `model` (configuration and weights), `model_inputs`
(prompt, token ids, archived inputs) and `generation` (greedy, free or with the tokens of another run).
"""
