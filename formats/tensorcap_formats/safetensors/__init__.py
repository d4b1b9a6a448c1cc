"""safetensors: archives of ours, and checkpoints from elsewhere."""
