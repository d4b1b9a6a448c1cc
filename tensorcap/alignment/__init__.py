"""Which tensors of two runs belong together, and by which layout steps."""
