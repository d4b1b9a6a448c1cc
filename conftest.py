"""What is not collected where an optional framework is not installed."""

from __future__ import annotations

from importlib.util import find_spec

# Docstrings are tests, and to read them a module is imported.
collect_ignore_glob = [] if find_spec("max") else ["tensorcap/adapters/_max/*", "tests/max/nets.py"]
