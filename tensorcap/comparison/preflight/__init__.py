"""Preflight: what two runs differ in before any tensor does."""
