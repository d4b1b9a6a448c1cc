"""A model run again on archived values, which shows the error that each module makes itself.

An archive and the workload of the other side go in; an injected archive or a `Replay` comes out. Read
`injection` (a target with the reference's tensors in the place of its own) with `finite_padding`,
`own_errors` (which module made an error), `injection_judge` and `replay_judge` (what such runs show of each
module, judged) with `replay_tests` and `quantised_modules`, `compensation` (what is undone by what comes of
it), `injected_run` (the runs of an injection), `substitutes` (which tensors a replay replaces),
`replay_result` (a replay and its notes), `reverse_replay` (the reference's model on the target's values), and
`module_replay` (a replay in either direction). Of a compiled target: `operation_values` (which value is which
node's), `operation_replay` (what each operation of the graph makes of them) and `operation_mistakes`.
`component_runs` runs modules whole on the target's arguments; `call_through` is a call whose result the
target does not have; `run_log` keeps what the runs of a search came to.
"""

from tensorcap.rerun.call_through import CallThrough
from tensorcap.rerun.compensation import LEFT_OUT
from tensorcap.rerun.component_runs import (
    ComponentRun,
    module_results,
    perturbed,
    run_components,
    with_equal_values,
)
from tensorcap.rerun.injected_run import InjectedRun, run_injected
from tensorcap.rerun.injection import fitted_to, inject, open_run, reverse
from tensorcap.rerun.module_replay import replay
from tensorcap.rerun.operation_mistakes import propose_operation_mistakes
from tensorcap.rerun.operation_replay import OperationReplay, OperationReplays
from tensorcap.rerun.operation_values import OperationValues, is_compiled
from tensorcap.rerun.own_errors import BAD, TOO_LARGE, OwnError
from tensorcap.rerun.replay_result import Replay
from tensorcap.rerun.replay_tests import shares_off
from tensorcap.rerun.reverse_replay import OpenReplay, replay_within
from tensorcap.rerun.run_log import RunLog

__all__ = [
    "BAD",
    "LEFT_OUT",
    "TOO_LARGE",
    "CallThrough",
    "ComponentRun",
    "InjectedRun",
    "OpenReplay",
    "OperationReplay",
    "OperationReplays",
    "OperationValues",
    "OwnError",
    "Replay",
    "RunLog",
    "fitted_to",
    "inject",
    "is_compiled",
    "module_results",
    "open_run",
    "perturbed",
    "propose_operation_mistakes",
    "replay",
    "replay_within",
    "reverse",
    "run_components",
    "run_injected",
    "shares_off",
    "with_equal_values",
]
