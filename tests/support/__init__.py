"""What tests of several folders share.

`archives` writes numpy arrays, `floats` rounds them to bfloat16. `models` and `transformers_models` make models;
they need torch and transformers.
"""
