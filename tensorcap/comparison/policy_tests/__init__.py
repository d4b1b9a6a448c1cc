"""The tests of the policy: each asks one question of measured pairs and gives findings.

In: a `Context` (archives, calls, pairs by key, errors, routers). Out: pairs of key text and `Finding`.
Read `context`, then `tests` (the list, in the order of a pair's findings), then the subjects: `exact_values`,
`own_error`, `growth`, `outlier`, `gains`, `op_gains`, `input_dependence`. A test that is added is a class in
its module, a line in `tests.TESTS` and a limit in `Policy`.
"""
