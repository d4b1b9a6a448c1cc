"""Rules: which names mean the same in two ecosystems, which modules are fused, and what is no bug."""

from tensorcap.alignment.rules.catalogue import builtin_rules, catalogue, wrapper_rules
from tensorcap.alignment.rules.reading import read_rules
from tensorcap.alignment.rules.ruleset import Expected, Fused, Rules

__all__ = ["Expected", "Fused", "Rules", "builtin_rules", "catalogue", "read_rules", "wrapper_rules"]
