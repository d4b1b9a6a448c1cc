"""Modular MAX: models of max.nn, and programs that make graphs of them."""
