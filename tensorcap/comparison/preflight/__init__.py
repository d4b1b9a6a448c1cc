"""Preflight: what two runs differ in before any tensor does, and what of it explains a divergence.

Two open archives go in, a `Preflight` of `Item`s comes out. Read `item`, then what is looked at (`inputs`,
`configuration`, `parameters`, `runs`), and last `checklist`, which holds the order (specs/preflight.md).
"""

from tensorcap.comparison.preflight.checklist import Preflight, preflight
from tensorcap.comparison.preflight.configuration import config_differences
from tensorcap.comparison.preflight.item import Item, item_text, side_texts

__all__ = ["Item", "Preflight", "config_differences", "item_text", "preflight", "side_texts"]
