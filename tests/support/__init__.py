"""What tests of several folders share.

`archives` writes numpy arrays, `floats` rounds them to bfloat16. `models` needs torch; `transformers_models`
needs transformers too.
"""
