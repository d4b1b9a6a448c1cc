"""zarr: archives of ours, and stores from elsewhere."""
