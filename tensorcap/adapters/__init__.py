"""Adapters: what tensorcap knows of each framework; the only rooms that import one."""
