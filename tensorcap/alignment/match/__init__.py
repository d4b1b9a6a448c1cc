"""Matching: which sites of two runs belong together, by names, structure, shapes and values.

In come two archives, out comes a resolved mapping. Read `proposal` (the list of passes), `weights`, `sides`
and `fingerprints` (what is known of a run), `matching` and `passes` (how pairs are accepted), the passes
`fusion_rules`, `placement`, `derived_outputs`, then `entries`, `evidence` and `unmatched` (what is reported).
"""
