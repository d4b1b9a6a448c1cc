"""Replay: run a model on what another run was given, module by module, and compare what each makes of it.

Every module's arguments and results are replaced by archived ones, after the natural ones were recorded. So a
recorded result is what the model's own module makes of the archived arguments and of the archived results of
the modules within it, and a recorded argument is what the code of the caller makes of archived values: each
difference is of one module's own making (`specs/replay.md`).
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Literal

from tensorcap.adapters import adapter_for
from tensorcap.alignment import NO_MAPPING, MappingSource, aligned_if_needed, fed_in_common, sides
from tensorcap.comparison import POLICY
from tensorcap.recording import Substitution
from tensorcap.rerun.finite_padding import with_finite_padding
from tensorcap.rerun.injection import open_run, reverse
from tensorcap.rerun.operation_replay import OperationReplays
from tensorcap.rerun.operation_values import OperationValues, is_compiled
from tensorcap.rerun.replay_judge import ReplayRuns, judge_replay
from tensorcap.rerun.replay_result import Replay
from tensorcap.rerun.reverse_replay import cast_workload, replay_within
from tensorcap.rerun.substitutes import exchangeable, natural_arguments
from tensorcap_formats.archive import Archive
from tensorcap_formats.errors import UsageError
from tensorcap_formats.open import Source, opened
from tensorcap_formats.progress import Progress, Silent

if TYPE_CHECKING:
    from tensorcap.workload import Workload


def replay(
    reference: Source,
    target: Source | None = None,
    *,
    reference_model: Workload | None = None,
    target_model: Workload | None = None,
    mapping: MappingSource | Literal["none"] | None = None,
    compute_dtype: str | None = None,
    twin: bool = True,
    progress: Progress | None = None,
) -> Replay:
    """Run one side's model on the other side's values, and compare what each module makes of them.

    With `reference_model` alone the trusted model is run on the target's values (reverse), or on its own if
    there is no target, which it has to repeat bit for bit. With `target_model` the target is run on the
    reference's values (forward), and `reference_model` says how much the computation rounds by itself.

    Args:
        reference: The trusted archive, open or a path.
        target: The archive under test, open or a path. With `target_model` it is a capture of that workload
            without injection, which a mapping is resolved against, and is made if it is None.
        reference_model: The reference's model, inputs and seed.
        target_model: The target's model, inputs and seed.
        mapping: As for `compare`.
        compute_dtype: What the target computed in, if its run does not say so.
        twin: Whether to run a copy of the reference's model in the target's precision too, which says how
            much the model itself rounds.
        progress: Shows what is being run.

    Raises:
        UsageError: There is no model, the archives have nothing in common, or the mapping does not fit.
        CaptureError: Nothing was captured.
        ReadError: Bytes of a tensor that is judged are damaged: that accuses nobody.
    """
    progress = progress or Silent()
    with ExitStack() as stack:
        if target_model is not None:
            return _replay_forward(
                stack,
                reference,
                target,
                target_model,
                reference_model if twin else None,
                mapping=mapping,
                compute_dtype=compute_dtype,
                progress=progress,
            )
        if reference_model is None:
            raise UsageError("no model, expected reference_model or target_model")
        if target is not None:
            original, tested = (stack.enter_context(opened(source)) for source in (reference, target))
            if is_compiled(original, tested):
                return _replay_operations(original, tested, reference_model, compute_dtype, progress)
            reference, target = original, tested
        return replay_within(
            stack,
            reference,
            reference_model,
            target,
            mapping=mapping,
            compute_dtype=compute_dtype,
            twin=twin,
            progress=progress,
        ).replay


def _replay_operations(
    reference: Archive,
    target: Archive,
    reference_model: Workload,
    compute_dtype: str | None,
    progress: Progress,
) -> Replay:
    """Compute the operations of the reference's graph on the values of a compiled target."""
    progress.stage("computing the reference's operations on the target's values")
    scope = reference.info.scope
    adapter = adapter_for(reference_model.model)
    graph = adapter.operation_graph(reference_model, "" if scope is None else scope.decompositions)
    precision = POLICY.precision_of_runs(reference.info, target.info, compute_dtype)
    result = OperationReplays(graph, OperationValues(reference, target), precision).replay()
    name = precision.name if precision else ""
    return Replay(result.own_errors, name, len(result.own_errors), (), (), "reverse")


def _replay_forward(
    stack: ExitStack,
    reference: Source,
    target: Source | None,
    target_model: Workload,
    reference_model: Workload | None,
    *,
    mapping: MappingSource | Literal["none"] | None,
    compute_dtype: str | None,
    progress: Progress,
) -> Replay:
    """Run the target on the reference's values.

    1. The target is captured as it is, unless such a capture was given, and aligned with the reference.
    2. It is run with the reference's tensors, under its own keys, in the place of its own.
    3. If the reference's model is known, a copy in the target's precision (the twin) is run on its own
       values.
    4. Each tensor of the run is compared with the reference's, and judged by its own error.
    """
    original = stack.enter_context(opened(reference))
    run_open = partial(open_run, stack, progress=progress)
    if target is None:
        free = run_open(target_model, "running the target as it is")
    else:
        free = stack.enter_context(opened(target, reference=original))
    aligned = aligned_if_needed(original, free, mapping)
    source = original if aligned is None else reverse(aligned)
    _, fed = fed_in_common(original, free)
    keys = exchangeable(source, fed)
    source = with_finite_padding(source, fed)
    stage = "replaying the target on the reference's values"
    substitution = Substitution(source, keys=keys, fed=None if fed is free else fed)
    run = run_open(target_model, stage, substitution=substitution)
    precision = POLICY.precision_of_runs(original.info, run.info, compute_dtype)
    trusted, tested = sides(original, run, NO_MAPPING if aligned is None else aligned.alignment)
    has_twin = precision is not None and not precision.is_wide
    twin_run = None
    if reference_model is not None and precision is not None and has_twin:
        twin_model = cast_workload(reference_model, precision)
        own_keys = exchangeable(original, original)
        stage = f"replaying the reference's model in {precision.name}"
        twin_run = run_open(twin_model, stage, substitution=Substitution(original, keys=own_keys))
    runs = ReplayRuns(trusted, tested, twin_run, precision, compute_dtype)
    result = judge_replay(trusted, runs, "forward", keys, natural_arguments(free, keys))
    return replace(result, lacks_twin=has_twin and reference_model is None)
