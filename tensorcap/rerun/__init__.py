"""The model run again on archived values: injection, replay, and the own errors that they show."""
