"""Alignment: which tensors of two runs belong together, and by which layout steps.

In come two archives and, if there is one, a map file; out come two views with equal keys and layouts.
Read `mapping` (entries), `links` and `resolution` (their records), then `layout` and `tokens` (what makes
tensors comparable), `names` and `match` (how a mapping is computed), `views`, and last `aligned`, the face.
"""
