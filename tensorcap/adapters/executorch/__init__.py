"""The adapter of ExecuTorch: programs in `.pte` files, and the graphs that their ETRecords have.

Read `adapter` (the protocol's methods), `model` and `engine` (the runtime and its Inspector); then `program`
(the graph, its modules, and which event of a run is which node) and `tap` (one run recorded).
"""
