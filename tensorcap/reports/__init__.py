"""A comparison for others: JSON, saved results, exports, rankings."""
