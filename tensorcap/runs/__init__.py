"""What an archive says of a run: its calls, ops, data-flow graph and module tree."""
