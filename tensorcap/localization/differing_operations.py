"""Operations in which a suspect's code differs from the target's: where equal values become unequal ones.

Both models run once more, the target on the reference's arguments, and their operations are recorded in the
suspect and in what corresponds to it.
"""

from __future__ import annotations

import glob
import itertools
import tempfile
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from difflib import SequenceMatcher
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

from tensorcap.adapters import adapter_for
from tensorcap.alignment import Aligned, MappingSource
from tensorcap.comparison import called_sites, caller_of
from tensorcap.localization.evidence import is_within
from tensorcap.localization.operation_traces import HeldValues, OperationTrace, TracedCalls, TracedValue
from tensorcap.localization.suspect import DifferingOperations, Localization, Place, Suspect
from tensorcap.rerun import inject
from tensorcap.runs import Node, enclosing_sites, is_inner, is_parameter, is_telling, ops_of
from tensorcap.session import capture_workload
from tensorcap.wording import some
from tensorcap_formats.archive import Archive
from tensorcap_formats.keys import ROOT_SITE, Key, module_of, module_site
from tensorcap_formats.open import open_archive
from tensorcap_formats.progress import Progress
from tensorcap_formats.view import recorded

if TYPE_CHECKING:
    from tensorcap.workload import Workload

_LOOKED_AT: Final = 3  # suspects
_MOST_BYTES: Final = 1 << 32  # that a trace holds; what does not fit is taken for equal
_LEAST: Final = 2.0**-17  # relative distance of values that are equal, in float32: sums in another order
_ROUNDINGS: Final = 4.0  # of the target's dtype that a value may be away from an equal one
_LONGEST: Final = 60  # characters of an operation's arguments, beside which parameters are named too


def add_differing_operations(
    localization: Localization,
    reference: Archive,
    target: Archive,
    compared: Archive,
    *,
    reference_model: Workload | None,
    target_model: Workload | None,
    mapping: MappingSource | Aligned | Literal["none"] | None,
    progress: Progress,
) -> Localization:
    """Say of the first suspects in which operations their code differs from the target's.

    1. The reference's model runs, and the target, of which what makes the same is given the reference's
       arguments, but not the modules within it from the suspect on; once for suspects none of which lies
       within another one. The operations in both are recorded. Suspects by their weights alone are left out.
    2. A value is *held* by the other side if a value there has its number of elements and its statistics, but
       for rounding. These do not tell an order of elements.
    3. Operations differ whose results the other side does not hold, and of which something is made that it
       does not hold either. Of these, the two sides' first ones are those that take the same held value.

    Args:
        localization: The suspects.
        reference: The trusted archive.
        target: The archive under test, under its own keys.
        compared: That archive under the reference's keys.
        reference_model: The reference's model, inputs and seed; without it nothing is said.
        target_model: The target's model, inputs and seed; without it nothing is said.
        mapping: As for `inject`.
        progress: Shows what is being run.
    """
    if reference_model is None or target_model is None:
        return localization
    if not all(adapter_for(workload.model).has_operations for workload in (reference_model, target_model)):
        return localization
    suspects = list(localization.suspects)
    traced = [at for at, one in enumerate(suspects[:_LOOKED_AT]) if one.by != ("weights",)]
    if not traced:
        return localization
    progress.stage("tracing the operations of suspects")
    modules = [suspects[at].module for at in traced]
    counterparts = [_Counterpart.of(suspects[at], reference, target, compared) for at in traced]
    notes = list(localization.notes)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tensorcap-")))
        ours: OperationTrace | None = None
        for number, group in enumerate(_apart(counterparts)):
            try:
                if ours is None:
                    options = _traced(reference_model.model, modules)
                    capture_workload(reference_model, folder / "reference.h5", **options)
                    ours = OperationTrace(stack.enter_context(open_archive(folder / "reference.h5")))
                path = folder / f"target{number}.h5"
                _trace_target(
                    target_model, path, [counterparts[at] for at in group], reference, target, mapping
                )
                theirs = OperationTrace(stack.enter_context(open_archive(path)))
                for at in group:
                    suspect = suspects[traced[at]]
                    code = _differing(suspect, ours, theirs, counterparts[at])
                    suspects[traced[at]] = replace(suspect, code=code)
            except Exception as error:  # of a model that refuses it: no suspect may be lost by that
                names = some(modules if ours is None else [modules[at] for at in group])
                notes.append(f"Operations of {names} were not traced: {type(error).__name__}: {error}.")
                if ours is None:
                    break
    return replace(localization, suspects=tuple(suspects), notes=tuple(notes))


def _apart(counterparts: Sequence[_Counterpart]) -> list[list[int]]:
    """Group what one run can trace: numbers of counterparts none of which lies within another one."""
    groups: list[list[int]] = []
    for at, one in enumerate(counterparts):
        for group in groups:
            others = [counterparts[other].maker for other in group]
            if not any(is_within(one.maker, other) or is_within(other, one.maker) for other in others):
                group.append(at)
                break
        else:
            groups.append([at])
    return groups


def _trace_target(
    workload: Workload,
    path: Path,
    counterparts: Sequence[_Counterpart],
    reference: Archive,
    target: Archive,
    mapping: MappingSource | Aligned | Literal["none"] | None,
) -> None:
    """Run the target with the reference's arguments, but not from the suspects on in what makes the same."""
    results = [text for one in counterparts for text in one.results]
    # Of a graph every node counts: what one takes, others made
    around = [one.around for one in counterparts]
    options = _traced(workload.model, around, None if ops_of(target) else results)
    left = {text for one in counterparts for text in one.left}
    if not any(_is_injectable(record.key) and record.key.text not in left for record in target.records):
        capture_workload(workload, path, **options)
        return
    inject(
        reference,
        workload,
        path,
        target=target,
        mapping=mapping,
        left=sorted(left),
        leaves_misfits=True,
        **options,
    )


def _is_injectable(key: Key) -> bool:
    """Whether it is of an argument that a module within the model is given."""
    return key.slot.startswith("input") and key.site != ROOT_SITE and not is_inner(key)


def _traced(model: object, sites: Iterable[str], results: Iterable[str] | None = ()) -> dict[str, Any]:
    """Arguments of `capture` that record the operations of modules, what these pass on, and further results.

    Args:
        model: The model.
        sites: Of the modules; if the model is one, everything is recorded.
        results: Key texts; None for those of all modules.
    """
    names = set(sites)
    options: dict[str, Any] = {"level": "op", "max_bytes": _MOST_BYTES}
    if ROOT_SITE in names:
        return options
    modules = {name: glob.escape(name) for name in sorted(names)}
    if results is None:
        return {**options, "ops_in": list(modules.values())}
    listed = [name for site in adapter_for(model).list_sites(model) for name in (site.name, *site.aliases)]
    enclosing = {outer for name in listed for outer in enclosing_sites(module_site(name))}
    only = [pattern for name in modules.values() for pattern in (name, f"{name}:*")]  # and its operations
    only += [f"{pattern}.*" for name, pattern in modules.items() if name in enclosing]
    further = {glob.escape(Key.parse(text).site) for text in results}
    return {**options, "ops_in": list(modules.values()), "only": [*only, *sorted(further)]}


class _Counterpart(NamedTuple):
    """What makes in the target what a module of the reference makes.

    Attributes:
        maker: Site of the module.
        around: Site of the module around it that calls it; its own where none does but the model.
        results: Key texts, in the target, of what belongs to the reference's results.
        left: Key texts, in the target, of what is not the reference's in its run: all in the module, but for
            what the reference makes before the suspect, which another suspect may have made wrong.
    """

    maker: str
    around: str
    results: tuple[str, ...]
    left: tuple[str, ...]

    @classmethod
    def of(cls, suspect: Suspect, reference: Archive, target: Archive, compared: Archive) -> _Counterpart:
        """Find it.

        Args:
            suspect: The reference's module, and a step of it.
            reference: The trusted archive.
            target: The target under its own keys.
            compared: The target under the reference's keys.
        """
        module = suspect.module
        own, alike = _counterparts(module, reference, compared)
        texts = tuple(key.text for key in (*own, *alike))
        maker = ROOT_SITE
        while module != ROOT_SITE:
            if makers := [_maker(key).split(".") for key in own or alike]:
                shared = itertools.takewhile(lambda names: len(set(names)) == 1, zip(*makers, strict=False))
                maker = ".".join(names[0] for names in shared) or ROOT_SITE
                break
            module = next(enclosing_sites(module))
            own, alike = _counterparts(module, reference, compared)
        around = caller_of(maker, called_sites(target))
        before = _before(suspect, reference, compared)
        within = (r.key for r in target.records if maker == ROOT_SITE or r.key.site.startswith(f"{maker}."))
        left = tuple(key.text for key in within if key not in before)
        return cls(maker, maker if around == ROOT_SITE else around, texts, left)


def _before(suspect: Suspect, reference: Archive, compared: Archive) -> set[Key]:
    """Keys of the target's tensors that belong to what the reference makes before it calls a suspect."""
    step = Key.parse(suspect.key).step
    orders = [
        record.order
        for record in reference.records
        if record.key.step == step and is_within(module_of(record.key.site), suspect.module)
    ]
    first = min(orders, default=0)
    texts = {r.key.text for r in reference.records if r.order < first and not is_parameter(r.key)}
    own = (recorded(compared, record)[1] for record in compared.records if record.key.text in texts)
    return {record.key for record in own if record is not None}


def _counterparts(module: str, reference: Archive, compared: Archive) -> tuple[list[Key], list[Key]]:
    """Keys of the target's tensors that belong to a module's results, and to what else has their values."""
    results = [
        record
        for record in reference.records
        if module_of(record.key.site) == module and record.key.slot.startswith("output")
    ]
    texts = {record.key.text for record in results}
    digests = {record.digest for record in results if is_telling(record)}
    alike = {record.key.text for record in reference.records if record.digest in digests} - texts
    found: tuple[list[Key], list[Key]] = [], []
    for record in compared.records:
        if record.key.text in texts | alike and (own := recorded(compared, record)[1]) is not None:
            found[record.key.text in alike].append(own.key)
    return found


def _maker(key: Key) -> str:
    """Site of the module whose code makes a tensor: an argument is made around the module that takes it."""
    site = module_of(key.site)
    return site if key.slot.startswith("output") else next(enclosing_sites(site), site)


def _differing(
    suspect: Suspect, ours: OperationTrace, theirs: OperationTrace, counterpart: _Counterpart
) -> DifferingOperations | None:
    """Find the operations in which one suspect differs; None if none is known.

    If nothing in what makes the same in the target takes the place of what the reference runs, the module
    around that is looked at.
    """
    step = Key.parse(suspect.key).step
    tolerance = max(_LEAST, _ROUNDINGS * max(ours.unit, theirs.unit))
    reference = ours.calls(step, suspect.module)
    ends = [theirs.measure(text) for text in counterpart.results if Key.parse(text).step == step]
    sides: tuple[Sequence[Node], Sequence[Node]] = (), ()
    for site in dict.fromkeys((counterpart.maker, counterpart.around)):
        sides = _first_alone(reference, theirs.calls(step, site), ends, tolerance)
        if sides[1] or not sides[0]:
            break
    if not any(sides):
        return None
    left = _without_common(*sides)
    is_alike = [node.call_text for node in left[0]] == [node.call_text for node in left[1]]
    first, second = (tuple(map(_place, nodes)) for nodes in left)
    return DifferingOperations(first, second, is_alike)


def _first_alone(
    reference: TracedCalls, target: TracedCalls, ends: Sequence[TracedValue | None], tolerance: float
) -> tuple[Sequence[Node], Sequence[Node]]:
    """Both sides' operations that the other one lacks, from values that both hold on.

    Args:
        reference: What the reference's module ran.
        target: What the target runs, in and around what makes the same.
        ends: The target's own results; what it makes of these is of no interest.
        tolerance: Relative distance of values that are equal.
    """
    made = [*reference.made(), *reference.results]
    theirs = target.alone(HeldValues((*made, *reference.given(reference.nodes)), tolerance))
    ours = reference.alone(HeldValues((*target.made(), *target.results), tolerance))
    taken_by_target = HeldValues(target.given(theirs), tolerance)
    # Where the reference does nothing alone, the target does more with what the reference makes
    taken_by_reference = HeldValues(reference.given(ours) if ours else made, tolerance)
    first = reference.from_values(ours, taken_by_target) or reference.without_moves(ours)
    return first, target.from_values(theirs, taken_by_reference, ends)


def _without_common(ours: Sequence[Node], theirs: Sequence[Node]) -> tuple[Sequence[Node], Sequence[Node]]:
    """Leave out what both sides run in the same order, but for the first operation of each."""
    texts = [[node.call_text for node in nodes] for nodes in (ours, theirs)]
    blocks = SequenceMatcher(None, texts[0], texts[1], autojunk=False).get_matching_blocks()
    common = [{block[side] + at for block in blocks for at in range(block.size)} for side in (0, 1)]
    left = [
        [node for at, node in enumerate(nodes) if at == 0 or at not in shared]
        for nodes, shared in zip((ours, theirs), common, strict=True)
    ]
    return left[0], left[1]


def _place(node: Node) -> Place:
    """Where an operation ran, with its arguments and the names of parameters, as far as these are short."""
    text = node.call_text
    name, _, arguments = text.partition("(")
    parameters = ", ".join(value.parameter for value in node.inputs if value.parameter)
    if parameters and len(parameters) + len(arguments) <= _LONGEST:
        text = f"{name}({parameters}, {arguments}" if arguments else f"{name}({parameters})"
    return Place(node.where, text, node.module, node.file or "", node.line)
