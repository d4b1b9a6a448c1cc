"""Names: rules that make names of two ecosystems equal, site templates, and differences of module trees.

Read `patterns` and `rulesets` (what a rule says), `rule_files` (where rules come from), `site_templates`
(sites folded over layer numbers), then `tree_difference`.
"""
