"""Between the adapters and the archive: what is recorded, where, and what became of it."""
