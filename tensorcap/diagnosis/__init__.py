"""Diagnose a pair that differs: which mistake would make these values of those.

A pair of records comes in, a `Diagnosis` goes out. `diagnosis` reads the pair (`context`), lets each family
of hypotheses propose mistakes (`simple` to `error_location`; `mutation_trials` call the reference's module
again), scores them (`scoring`) and ranks those that hold.
"""
