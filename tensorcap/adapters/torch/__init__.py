"""The adapter of torch: models of `torch.nn`, run as Python code.

Read `adapter` (the protocol's methods), `modules`, `inputs`, `description` and `tensors`; then the capture:
`tap` (hooks), `module_tap` (one module's calls), `direct_calls` and `capture_gaps` (calls without a hook),
`tensor_leaves`, `staging` and `host_copy` (values on their way to the recorder), `points`, `parameters`,
`gradients`, `phase`, `scripted`. `substitution` replaces values; `roots` finds the model of a program.
Ops: `op_mode`, `ops`, `operators`, `storage`, `frames`, and `export` for exported graphs. Calls made again:
`rerun`, `mutations`, `masks`, `low_precision`.
"""
