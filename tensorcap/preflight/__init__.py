"""What is worth knowing of two runs before their tensors are compared."""
