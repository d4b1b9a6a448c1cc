"""Names: rules that make names of two ecosystems equal, site templates, and differences of module trees.

Read `name_patterns` and `rulesets` (what a rule says), `rule_files` (where rules come from), `site_templates`
(sites folded over layer numbers), `projection_roles` (q, k, v), `graph_names` (of other
runtimes), then `tree_difference`.
"""

from tensorcap.alignment.names.graph_names import exported_wrapper, graph_rules, names_results
from tensorcap.alignment.names.projection_roles import USUAL_ORDER, are_exchanged, name_words, projection_role
from tensorcap.alignment.names.rule_files import builtin_rules, catalogue, read_rules, wrapper_rules
from tensorcap.alignment.names.rulesets import Fused, Rules
from tensorcap.alignment.names.site_templates import (
    PARAMETER_SLOTS,
    Canonical,
    Index,
    Member,
    SiteTemplate,
    Survey,
    are_equal,
    collect_site_templates,
    fold,
    name_of,
    pattern,
    plain_name,
)
from tensorcap.alignment.names.tree_difference import TreeDifference, tree_differences

__all__ = [
    "PARAMETER_SLOTS",
    "USUAL_ORDER",
    "Canonical",
    "Fused",
    "Index",
    "Member",
    "Rules",
    "SiteTemplate",
    "Survey",
    "TreeDifference",
    "are_equal",
    "are_exchanged",
    "builtin_rules",
    "catalogue",
    "collect_site_templates",
    "exported_wrapper",
    "fold",
    "graph_rules",
    "name_of",
    "name_words",
    "names_results",
    "pattern",
    "plain_name",
    "projection_role",
    "read_rules",
    "tree_differences",
    "wrapper_rules",
]
