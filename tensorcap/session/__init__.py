"""A capture under way: of a model, of a workload, or of somebody's program."""
