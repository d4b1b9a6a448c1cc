"""Layouts: the steps that make one tensor of another, parsed, checked on shapes, applied, undone, and found.

Read `steps` and `multi_tensor_steps` (what there is), `layout` (a list of steps), `patterns` and `dims` (the
notations), then `candidates` and `fits` (which steps two shapes allow, and which the values confirm).
"""
