"""Preflight: what two runs differ in before any tensor does, and what of it explains a divergence.

Two open archives go in, a `Preflight` of `Item`s comes out. Read `item`, then what is looked at (`inputs`,
`configuration`, `parameters`, `runs`), and last `checklist`, which holds the order (specs/preflight.md).
"""
