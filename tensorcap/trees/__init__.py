"""Module trees: of archives and live models, folded, and compared."""
