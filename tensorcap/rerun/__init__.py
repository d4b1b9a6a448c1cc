"""A model run again on archived values, which shows the error that each module makes itself.

An archive and the workload of the other side go in; an injected archive or a `Replay` comes out. Read
`injection` (a target with the reference's tensors in the place of its own) with `finite_padding`,
`own_errors` (what such runs show of each module, judged) with `replay_tests` and `quantised_modules`,
`compensation` (what is undone by what comes of it), `injected_run` (the runs of an injection),
`replay_result` (a replay and its notes), and `module_replay` (the runs of a replay).
"""

from tensorcap.rerun.injected_run import InjectedRun, run_injected
from tensorcap.rerun.injection import inject, open_run, reverse
from tensorcap.rerun.module_replay import OpenReplay, replay, replay_within
from tensorcap.rerun.own_errors import BAD, OwnError, shares_off
from tensorcap.rerun.replay_result import Replay

__all__ = [
    "BAD",
    "InjectedRun",
    "OpenReplay",
    "OwnError",
    "Replay",
    "inject",
    "open_run",
    "replay",
    "replay_within",
    "reverse",
    "run_injected",
    "shares_off",
]
