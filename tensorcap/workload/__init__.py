"""A workload: a model and its inputs, how they were made, and where their source is."""
