"""What an archive says of its run, beyond single tensors: calls, ops, data flow, module tree.

An open archive goes in. Read `record_kinds` (results, gradients, parameters, inner points, and kinds of
modules), `contents` (records of equal digests), `calls` (calls of modules, attention cores, depth),
`state_writers` (which of them wrote a cache), `graph` and `ops` (ops within modules), `tree` (the module
tree, also as text), `window` (a part of a tensor: read, printed, written), `value_histogram`, `views`
(archives made of another one), and `archive_summary` (an archive in a line).
"""

from tensorcap.runs.archive_summary import ArchiveSummary
from tensorcap.runs.calls import Call, Calls, Core, calls_of, enclosing_sites, is_state, lies_within
from tensorcap.runs.contents import Contents, contents_of, is_telling, rms_of
from tensorcap.runs.graph import Graph, GraphEnds, Node, Value, View
from tensorcap.runs.ops import FACTS, Ops, forget_ops, is_fact, ops_of, passed_in
from tensorcap.runs.record_kinds import (
    BESIDE_WEIGHT,
    component_of,
    is_gradient,
    is_inner,
    is_parameter,
    is_result,
)
from tensorcap.runs.state_writers import StateWriters, is_handed_on
from tensorcap.runs.tree import Shape, Tree, TreeNode, compressed, full, paths, ranges, shape_text, tree_lines
from tensorcap.runs.value_histogram import ValueHistogram
from tensorcap.runs.views import ArrayArchive, PartialArchive, TensorArchive, ViewRecords, find_tensor
from tensorcap.runs.window import (
    DIGITS,
    PRINTED_WHOLE,
    array_summary,
    parse_window,
    read_window,
    stored_summary,
    summary,
    write_npy,
)

__all__ = [
    "BESIDE_WEIGHT",
    "DIGITS",
    "FACTS",
    "PRINTED_WHOLE",
    "ArchiveSummary",
    "ArrayArchive",
    "Call",
    "Calls",
    "Contents",
    "Core",
    "Graph",
    "GraphEnds",
    "Node",
    "Ops",
    "PartialArchive",
    "Shape",
    "StateWriters",
    "TensorArchive",
    "Tree",
    "TreeNode",
    "Value",
    "ValueHistogram",
    "View",
    "ViewRecords",
    "array_summary",
    "calls_of",
    "component_of",
    "compressed",
    "contents_of",
    "enclosing_sites",
    "find_tensor",
    "forget_ops",
    "full",
    "is_fact",
    "is_gradient",
    "is_handed_on",
    "is_inner",
    "is_parameter",
    "is_result",
    "is_state",
    "is_telling",
    "lies_within",
    "ops_of",
    "parse_window",
    "passed_in",
    "paths",
    "ranges",
    "read_window",
    "rms_of",
    "shape_text",
    "stored_summary",
    "summary",
    "tree_lines",
    "write_npy",
]
