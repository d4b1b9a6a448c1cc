"""Layout steps: how tensors of one side become those of the other, on shapes and on arrays."""
