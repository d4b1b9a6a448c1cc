"""What an archive says of its run, beyond single tensors: calls, ops, data flow, module tree.

An open archive goes in. Read `record_kinds` (results, gradients, parameters, inner points), `calls` (calls of
modules, attention cores, depth), `graph` and `ops` (ops within modules), `tree` (the module tree, also as
text), `window` (a part of a tensor: read, printed, written), `views` (archives made of another one), and
`archive_summary` (an archive in a line).
"""
