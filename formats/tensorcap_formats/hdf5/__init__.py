"""HDF5: archives of ours, and files from elsewhere."""
