"""What tests of several folders share.

`archives` writes numpy arrays, `floats` rounds them to bfloat16. `models` needs torch, and `transformers_models`
transformers too.
"""
