"""A capture under way: a model or a workload goes in, an archive and a summary come out.

Read `capture_session` (`capture`, `capture_workload`), `program` (the first model that a block or a script
calls), `recipe` (how a workload is built from a path and options, or again from an archive),
`rank_processes` (a command on several ranks), and `intermediates` (an exported program, run and saved for
another debugger).
"""

from tensorcap.session.capture_session import Capture, capture, capture_workload
from tensorcap.session.intermediates import save_intermediates
from tensorcap.session.program import Called, ScriptRun, calls_text, capture_called
from tensorcap.session.rank_processes import run_on_ranks
from tensorcap.session.recipe import BY_NAME, INPUT_OPTIONS, Recipe, make_side, parse_setting

__all__ = [
    "BY_NAME",
    "INPUT_OPTIONS",
    "Called",
    "Capture",
    "Recipe",
    "ScriptRun",
    "calls_text",
    "capture",
    "capture_called",
    "capture_workload",
    "make_side",
    "parse_setting",
    "run_on_ranks",
    "save_intermediates",
]
