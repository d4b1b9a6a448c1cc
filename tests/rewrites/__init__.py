"""Correct ports and rewrites of ten architectures, and mistakes planted beside them.

They judge `tcap compare`. Read `catalogue.py` first (what an entry is, and how plain torch proves that it is
right or wrong), then any architecture; `layers.py` has what their ports share. `python -m tests.rewrites.run`
captures and compares all. They were written by somebody who had not read the code that judges them: add what
a porter does, not what that code can do.
"""
