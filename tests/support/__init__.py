"""What tests of several folders share.

`archives` writes numpy arrays, `floats` rounds them to bfloat16, `models` makes small models of torch and
transformers and is the only module here that needs these.
"""
