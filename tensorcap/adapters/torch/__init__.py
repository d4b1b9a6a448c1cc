"""PyTorch: hooks, ops, functions, gradients, exported graphs, and all else that a capture needs of it."""
