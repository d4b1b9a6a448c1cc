"""A capture under way: a model or a workload goes in, an archive and a summary come out.

Read `capture_session` (`capture`, `capture_workload`), `program` (the first model that a block or a script
calls), and `recipe` (how a workload is built from a path and options, or again from an archive).
"""
