"""Between the hooks of an adapter and the archive: what is recorded of a run, and what was not and why.

Calls and tensors of a running model go in, records and run metadata come out. Read `options` (what the user
asks for) and `record_filter` (which records these keep), `point` (a site and its status), `recorder` (steps,
calls, records) and `summary` (the outcome). `structure` lists the tensors of an argument, `plain_log` prints
them; `probes`, `watch`, `source_rewrite` and `function_lookup` record values within code, and `substitution`
replaces them by archived ones.
"""
