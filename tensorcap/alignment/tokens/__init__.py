"""Tokens: which token of the target is which of the reference, if sides padded, packed or stepped
differently.

Read `sequences` (what a run was fed), `alignment` (pairs of tokens), `axes` (where a tensor has tokens), then
`gathering` (tensors reduced to the tokens that both sides have).
"""
