"""The adapter of torch: models of `torch.nn`, run as Python code.

Read `adapter` (the protocol's methods), `modules`, `model_inputs`, `token_model`, `description` and
`tensors`; then the capture: `tap` (hooks), `module_tap` (one module's calls), `direct_calls` and
`capture_gaps` (calls without a hook), `tensor_leaves`, `staging_buffer` and `host_copy` (values on their way
to the recorder), `points`, `parameters`, `gradients`, `phase`, `scripted`; `dtensors` and `parallel_layers`
say what a rank's tensors are parts of. `injector` replaces values; `roots` finds the model of a program.
Ops: `op_mode`, `op_recorder`, `operators`, `storage`, `frames`, and `export` for exported graphs. Calls made
again: `rerun`, `module_mutations`, `masks`, `low_precision`.
"""
