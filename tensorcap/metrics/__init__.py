"""How far one tensor lies from another: numbers without a verdict, as in `specs/metrics.md`.

Pairs of archived records go in, a `Difference` comes out. Read `difference` (the metrics, the tolerance),
`operands` (rows and blocks) and `measurement` (the loop over pairs, which chooses an engine); then the
engines: `numpy_engine`, and `compiled_engine` with `kernels`, `kernel_loops`, `kernel_state` and
`machine_code`. Both add up `totals` with `error_bins` and `scaled_sums`. `location`, `logits` and `routing`
are further passes, over `value_blocks`.
"""
