"""Diagnose a pair that differs: which mistake would make these values of those.

A pair of records comes in, a `Diagnosis` goes out. `diagnosis` reads the pair (`context`), lets each family
of hypotheses propose mistakes (`simple` to `error_location`; `mutation_trials` call the reference's module
again), scores them (`hypothesis`) and ranks those that hold.
"""

from tensorcap.diagnosis.context import PairContext
from tensorcap.diagnosis.diagnosis import FAMILIES, NOT_OF_MAKERS, Diagnosis, Family, diagnose
from tensorcap.diagnosis.hypothesis import Explanation, Hypothesis, Scorer, rank_explanations
from tensorcap.diagnosis.search import MOST_WORK, Search

__all__ = [
    "FAMILIES",
    "MOST_WORK",
    "NOT_OF_MAKERS",
    "Diagnosis",
    "Explanation",
    "Family",
    "Hypothesis",
    "PairContext",
    "Scorer",
    "Search",
    "diagnose",
    "rank_explanations",
]
