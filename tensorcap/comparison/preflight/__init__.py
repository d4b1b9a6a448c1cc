"""Preflight: what two runs differ in apart from their tensors, and what of it explains a divergence.

Two open archives go in, a `Preflight` of `Item`s comes out. Read `item`, then the checks (`run_inputs`,
`configuration`, `parameters`, `runs`), and last `checklist`, which holds their order (specs/preflight.md).
"""

from tensorcap.comparison.preflight.checklist import Preflight, preflight
from tensorcap.comparison.preflight.configuration import config_differences
from tensorcap.comparison.preflight.item import Item, item_text, side_texts

__all__ = ["Item", "Preflight", "config_differences", "item_text", "preflight", "side_texts"]
