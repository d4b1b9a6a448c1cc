"""Hugging Face models: from a folder or an id, and options, to a workload."""
