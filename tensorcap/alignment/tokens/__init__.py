"""Tokens: which token of the target is which of the reference, if sides padded, packed or stepped
differently.

Read `sequences` (what a run was fed), `token_pairs`, `axes` (where a tensor has tokens), then `gathering`
(tensors reduced to the tokens that both sides have).
"""

from tensorcap.alignment.tokens.axes import TokenAxes
from tensorcap.alignment.tokens.gathering import Gather, Gathering
from tensorcap.alignment.tokens.sequences import ROLES, Tokens, ids_by_step, is_mask, token_counters
from tensorcap.alignment.tokens.token_pairs import (
    LAST,
    TOKEN_STEPS,
    VALID,
    How,
    TokenAlignment,
    TokenRule,
    rule_of_other_padding,
)

__all__ = [
    "LAST",
    "ROLES",
    "TOKEN_STEPS",
    "VALID",
    "Gather",
    "Gathering",
    "How",
    "TokenAlignment",
    "TokenAxes",
    "TokenRule",
    "Tokens",
    "ids_by_step",
    "is_mask",
    "rule_of_other_padding",
    "token_counters",
]
