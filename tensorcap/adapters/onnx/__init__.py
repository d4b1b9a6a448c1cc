"""The adapter of ONNX Runtime: models in `.onnx` files.

Read `adapter` (the protocol's methods), `model` and `engine` (sessions of the runtime); then the graph:
`graph` (nodes, weights), `scopes` (the modules that nodes lie in, by names that exporters give) and
`boundaries` (arguments and results of these); then the capture: `sections` (parts of the graph that are run
one after the other, within a bound of memory), `tap` (one run recorded), `op_facts`, `switches` (archived
values in the place of the graph's own), `parameters` and `description`.
"""
