"""The adapter of Apple's Core AI: assets, and torch models that it converts to them.

Read `adapter` (the protocol's methods), `model`, `engine` (names that differ between releases) and
`conversion`; then the capture: `operation_map` (which operation holds which torch node), `description` and
`tap` (one run recorded), which has `op_recorder` for operations, `output_order` for those of several outputs,
and `runtime_log` to keep what the runtime prints off the terminal.
"""
