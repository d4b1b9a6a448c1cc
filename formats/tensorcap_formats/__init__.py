"""Archives of named tensors: writers and readers for HDF5, zarr and safetensors, readers of foreign dumps."""
