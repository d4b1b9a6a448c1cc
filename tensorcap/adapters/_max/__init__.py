"""Adapter for Modular MAX."""
