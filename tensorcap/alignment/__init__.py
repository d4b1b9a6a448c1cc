"""Alignment: which tensors of two runs belong together, and by which layout steps.

In come two archives and, if there is one, a map file; out come two views with equal keys and layouts.
Read `mapping` (entries), `links` and `resolution` (their records), then `layout` and `tokens` (what makes
tensors comparable), `names` and `match` (how a mapping is computed), `views`,
`node_sequences`, `operation_pairs` and `graph_nodes` (nodes of exported graphs), and last `aligned`, the
face.
"""

from tensorcap.alignment.aligned import (
    NO_MAPPING,
    Aligned,
    MappingSource,
    align,
    aligned_if_needed,
    aligned_sides,
    fitting,
    in_reference_layout,
    sides,
)
from tensorcap.alignment.common_part import CutArchive, fed_in_common
from tensorcap.alignment.coverage import Coverage, MappingSummary, Reasons
from tensorcap.alignment.equivalence_map import component_mapping, read_mapping, write_component_mapping
from tensorcap.alignment.graph_nodes import node_sites, paired_names, placement_of
from tensorcap.alignment.joined_steps import in_own_steps, joined_steps_of
from tensorcap.alignment.links import Link, place_of
from tensorcap.alignment.map_file import map_text, write_map
from tensorcap.alignment.mapping import (
    WITH_OTHER_VALUES,
    Alignment,
    Entry,
    LeftOver,
    paired_modules,
    parse_values,
    values_text,
)
from tensorcap.alignment.order import Order, order_between
from tensorcap.alignment.resolution import resolve
from tensorcap.alignment.tokens import Gather
from tensorcap.alignment.views import (
    GatheredArchive,
    MappedArchive,
    OrderedArchive,
    ReversedArchive,
    as_seen,
    in_whole_tensors,
    is_elsewhere,
)

__all__ = [
    "NO_MAPPING",
    "WITH_OTHER_VALUES",
    "Aligned",
    "Alignment",
    "Coverage",
    "CutArchive",
    "Entry",
    "Gather",
    "GatheredArchive",
    "LeftOver",
    "Link",
    "MappedArchive",
    "MappingSource",
    "MappingSummary",
    "Order",
    "OrderedArchive",
    "Reasons",
    "ReversedArchive",
    "align",
    "aligned_if_needed",
    "aligned_sides",
    "as_seen",
    "component_mapping",
    "fed_in_common",
    "fitting",
    "in_own_steps",
    "in_reference_layout",
    "in_whole_tensors",
    "is_elsewhere",
    "joined_steps_of",
    "map_text",
    "node_sites",
    "order_between",
    "paired_modules",
    "paired_names",
    "parse_values",
    "place_of",
    "placement_of",
    "read_mapping",
    "resolve",
    "sides",
    "values_text",
    "write_component_mapping",
    "write_map",
]
