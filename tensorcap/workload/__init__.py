"""A model and its inputs, and what the metadata of its run say of code and machine.

Read `workload` (the pair itself, and archived inputs), `port` (both sides of a port in a file), `script` (a
program that runs a model), `metadata` and `sources` (what an archive keeps of them, without secrets), and
`patch` (an attribute replaced until a block ends).
"""
