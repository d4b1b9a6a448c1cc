"""Evidence against operations: of a compiled target, whose operations hold the values of a graph's nodes."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

from tensorcap.adapters import adapter_for
from tensorcap.comparison import POLICY, SEVERITY, compare
from tensorcap.diagnosis import Family
from tensorcap.localization.evidence import (
    ComparedRuns,
    Evidence,
    EvidenceSource,
    GatheredEvidence,
    evidence_of_archives,
)
from tensorcap.localization.suspect import Operation, Place
from tensorcap.rerun import (
    OperationReplay,
    OperationReplays,
    OperationValues,
    OwnError,
    propose_operation_mistakes,
)
from tensorcap.runs import PartialArchive
from tensorcap.wording import counted, some
from tensorcap_formats.archive import Archive
from tensorcap_formats.errors import UsageError
from tensorcap_formats.keys import Key
from tensorcap_formats.progress import Progress, Silent
from tensorcap_formats.run_info import ExportedNode

if TYPE_CHECKING:
    from tensorcap.workload import Workload


def why_not_injectable(target: Archive) -> str:
    """Why nothing can be injected into a compiled target."""
    framework = target.info.framework or "the target"
    return f"the operations of {framework} are compiled, and nothing can be put in the place of their values"


def gather_operation_evidence(
    reference: Archive,
    target: Archive,
    reference_model: Workload | None,
    *,
    compute_dtype: str | None = None,
    progress: Progress | None = None,
) -> ComparedRuns:
    """Compare a compiled target with the run of the graph, and gather what speaks against operations.

    1. If the reference's model is known, its operations are computed on the target's values; values that the
       target did not compute with are known then, and not compared.
    2. The free runs are compared.
    3. Without the model the comparison of the free runs gives the evidence.

    Args:
        reference: The trusted archive, of a run of its graph.
        target: The archive under test, under its own keys.
        reference_model: The reference's model and inputs.
        compute_dtype: What the target computed in, if its run does not say so.
        progress: Shows what is being run.
    """
    progress = progress or Silent()
    values = OperationValues(reference, target)
    replays, result, error = None, None, None
    if reference_model is not None:
        progress.stage("computing the reference's operations on the target's values")
        scope = reference.info.scope
        try:
            graph = adapter_for(reference_model.model).operation_graph(
                reference_model, "" if scope is None else scope.decompositions
            )
            precision = POLICY.precision_of_runs(reference.info, target.info, compute_dtype)
            replays = OperationReplays(graph, values, precision)
            result = replays.replay()
        except UsageError as raised:
            error = raised
    sides = _without(values, () if result is None else result.elsewhere.keys())
    free = compare(*sides, mapping="none", compute_dtype=compute_dtype)
    if replays is None or result is None:
        source = evidence_of_archives(*sides, free)
    else:
        source = evidence_of_operations(replays, result, values)
    return ComparedRuns(sides, free, GatheredEvidence((source,), None, error, None))


def _without(values: OperationValues, elsewhere: Collection[str]) -> tuple[Archive, Archive]:
    """Both runs as they are compared, without values that the target did not compute with."""
    if not elsewhere:
        return values.reference, values.target
    ours, theirs = (
        PartialArchive(run, [record for record in run.records if record.key.text not in elsewhere])
        for run in (values.reference, values.target)
    )
    return ours, theirs


def evidence_of_operations(
    replays: OperationReplays, result: OperationReplay, values: OperationValues
) -> EvidenceSource:
    """What the reference's operations show that were computed on the target's values.

    Args:
        replays: The replays.
        result: What came of them.
        values: The target's values.
    """
    bad = sorted(result.bad, key=lambda own: -SEVERITY.index(own.status))
    evidence: list[Evidence] = []
    operations = {}
    for own in bad:
        site = Key.parse(own.key).site
        if any(one.module == site for one in evidence):
            continue
        name = result.nodes[own.key]
        before = result.between[own.key]
        operations[site] = _operation(values, name, before)
        for one in (*before, *replays.nearest(name)):  # one of these may be what explains it
            operations.setdefault(Key.parse(values.key(one, 0)).site, _operation(values, one, ()))
        reason = _reason(own)
        evidence.append(Evidence(site, (own.key,), own.status, own.findings, own.error, None, reason))
    return EvidenceSource(
        "replay",
        result.natural,
        result.values,
        None,
        tuple(evidence),
        result.own_errors,
        unjudged=tuple(own.key for own in result.unjudged),
        notes=tuple(_notes(result)),
        operations=operations,
        mistakes=partial(_mistakes, replays, result, values),
    )


def _mistakes(
    replays: OperationReplays, result: OperationReplay, values: OperationValues, key: str
) -> Family:
    """Hypotheses about the operation that made a tensor."""
    _, _, number = Key.parse(key).slot.partition(".")
    propose = partial(
        propose_operation_mistakes,
        replays=replays,
        values=values,
        name=result.nodes[key],
        at=int(number or 0),
    )
    return Family("operations of the graph", propose, makes_nonfinite=True)


def _operation(values: OperationValues, name: str, before: Sequence[str]) -> Operation:
    row = values.operation(name)
    converted = values.converted(name)
    source = converted or row
    return Operation(
        _place(values.nodes[name]),
        tuple(_place(values.nodes[one]) for one in reversed(before)),
        "" if row is None else row.op,
        None if row is None else row.op_id,
        values.names.get(name, ""),
        "" if source is None else source.file,
        None if source is None else source.line,
    )


def _place(node: ExportedNode) -> Place:
    return Place(node.node, node.op, node.module or "@root", node.file, node.line)


def _reason(own: OwnError) -> str:
    reason = "its result is not what the reference's operation makes of the values that the target gave it"
    if own.findings:
        worst = max(own.findings, key=lambda finding: SEVERITY.index(finding.status))
        reason += f": {worst.text}"
    return reason


def _notes(result: OperationReplay) -> list[str]:
    """How many operations were judged, and which values are others than the map of operations says."""
    of, count = result.counts
    notes = [
        f"Of {counted(of, 'operation')} of the reference's graph that compute something, the target has the "
        f"values of {count}; the others, as far as they were fused or never mapped, are judged by what is "
        "computed of them."
    ]
    rounded = [(own, one) for own in result.own_errors for one in own.findings if one.test == "weights"]
    if rounded:
        modules = list(dict.fromkeys(own.module for own, _ in rounded))
        texts = list(dict.fromkeys(one.text for _, one in rounded))
        notes.append(
            f"Weights are {some(texts)}, of {counted(len(modules), 'module')} ({some(modules)}): by such "
            "weights the free runs differ, and operations are judged with them."
        )
    if result.elsewhere:
        texts = [f"{Key.parse(key).site} ({text})" for key, text in result.elsewhere.items()]
        notes.append(f"No mistake: what is computed of them is right. {some(texts)}.")
    if result.unjudged:
        keys: Mapping[str, None] = dict.fromkeys(own.key for own in result.unjudged)
        notes.append(f"Could not be computed again: {some(list(keys))}.")
    return notes
