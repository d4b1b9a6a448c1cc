"""How far a target tensor lies from its reference: engines, metrics, where and of what kind the error is."""
