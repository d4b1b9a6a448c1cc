"""Comparison: pairs of records, the policy that judges them, and what a report says beside them."""
