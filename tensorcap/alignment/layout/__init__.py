"""Layouts: the steps that make one tensor of another, parsed, checked on shapes, applied, undone, and found.

Read `steps` and `multi_tensor_steps` (what there is), `layout` (a list of steps), `axis_patterns` and `dims`
(the notations), then `layout_candidates` and `fits` (the steps that two shapes allow, and those that the
values confirm).
"""

from tensorcap.alignment.layout.axis_patterns import Shape
from tensorcap.alignment.layout.dims import Dims, steps_between, token_dims
from tensorcap.alignment.layout.fits import CLOSE, Fit, find_layout, residual
from tensorcap.alignment.layout.layout import Layout, parse_step
from tensorcap.alignment.layout.layout_candidates import (
    LayoutChoice,
    candidates,
    fits_shapes,
    only_order,
    plain,
)
from tensorcap.alignment.layout.multi_tensor_steps import Sum

__all__ = [
    "CLOSE",
    "Dims",
    "Fit",
    "Layout",
    "LayoutChoice",
    "Shape",
    "Sum",
    "candidates",
    "find_layout",
    "fits_shapes",
    "only_order",
    "parse_step",
    "plain",
    "residual",
    "steps_between",
    "token_dims",
]
