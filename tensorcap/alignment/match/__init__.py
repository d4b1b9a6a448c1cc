"""Matching: which sites of two runs belong together, by names, structure, shapes and values.

In come two archives, out comes a resolved mapping. Read `proposal` (the list of passes), `match_weights`,
`sides`, `fingerprints` and `fingerprint_tree` (what is known of a run), `matching` and `passes` (how pairs
are accepted), the passes `fusion_rules`, `placement`, `derived_outputs`, then `member_layouts`, `entries`,
`pair_evidence` and `unmatched` (what is reported), last `token_layouts` and `moved_results` (what is seen of
records that are paired), and `numbered_children` (pairs that go before all passes).
"""

from tensorcap.alignment.match.fingerprints import (
    Fingerprint,
    NearestFingerprints,
    agreements,
    rounding_of,
    statistics_distance,
)
from tensorcap.alignment.match.match_weights import WEIGHTS
from tensorcap.alignment.match.moved_results import pair_moved_results
from tensorcap.alignment.match.numbered_children import pair_numbered_children
from tensorcap.alignment.match.pair_evidence import order_doubt
from tensorcap.alignment.match.pairs import Drift
from tensorcap.alignment.match.proposal import By, propose
from tensorcap.alignment.match.systematic_layouts import find_systematic_layouts, without_lone_moves
from tensorcap.alignment.match.token_layouts import match_tokens, pair_equal_keys

__all__ = [
    "WEIGHTS",
    "By",
    "Drift",
    "Fingerprint",
    "NearestFingerprints",
    "agreements",
    "find_systematic_layouts",
    "match_tokens",
    "order_doubt",
    "pair_equal_keys",
    "pair_moved_results",
    "pair_numbered_children",
    "propose",
    "rounding_of",
    "statistics_distance",
    "without_lone_moves",
]
