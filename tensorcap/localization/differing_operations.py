"""Operations in which a suspect's code differs from the target's: where equal values become unequal ones.

Both models run once more, the target on the reference's arguments, and their operations are recorded in the
suspect and in what corresponds to it.
"""

from __future__ import annotations

import glob
import itertools
import math
import tempfile
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from difflib import SequenceMatcher
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

import numpy as np

from tensorcap.adapters import adapter_for
from tensorcap.alignment import MappingSource
from tensorcap.localization.evidence import is_within
from tensorcap.localization.suspect import DifferingOperations, Localization, Place, Suspect
from tensorcap.rerun import inject
from tensorcap.runs import Graph, Node, Value, ops_of
from tensorcap.session import capture_workload
from tensorcap_formats.archive import Archive
from tensorcap_formats.dtypes import Array
from tensorcap_formats.errors import ReadError, TensorNotFoundError
from tensorcap_formats.float_formats import UNIT_ROUNDOFFS
from tensorcap_formats.keys import ROOT_SITE, Key, module_of
from tensorcap_formats.open import open_archive
from tensorcap_formats.progress import Progress
from tensorcap_formats.view import recorded

if TYPE_CHECKING:
    from tensorcap.workload import Workload

_LOOKED_AT: Final = 3  # suspects
_MOST_BYTES: Final = 1 << 32  # that a trace holds; what does not fit is taken for equal
_MOST_ELEMENTS: Final = 1 << 24  # of a value that is read; a larger one is taken for equal
_LEAST: Final = 2.0**-17  # relative distance of values that are equal, in float32: sums in another order
_SAME: Final = 1e-9  # of numbers of the same elements in another order
_ROUNDINGS: Final = 4.0  # of the target's dtype that a value may be away from an equal one
_LONGEST: Final = 60  # characters of all arguments of an operation
_IMMATERIAL: Final = ("device", "generator", "half_to_float", "layout", "memory_format", "pin_memory")


def add_differing_operations(
    localization: Localization,
    reference: Archive,
    target: Archive,
    compared: Archive,
    *,
    reference_model: Workload | None,
    target_model: Workload | None,
    mapping: MappingSource | Literal["none"] | None,
    progress: Progress,
) -> Localization:
    """Say of the first suspects in which operations their code differs from the target's.

    1. The reference's model runs, and the target, of which what makes the same is given the reference's
       arguments, but not the modules within it; once for suspects none of which lies within another one. The
       operations in both are recorded.
    2. A value is *held* by the other side if a value there has its number of elements, mean, root mean
       square, minimum and maximum, but for rounding. These do not tell an order of elements.
    3. Operations differ whose results the other side does not hold, and of which something is made that it
       does not hold either. Of these, the two sides' first ones are those that take the same held value.

    Args:
        localization: The suspects.
        reference: The trusted archive.
        target: The archive under test, under its own keys.
        compared: That archive under the reference's keys.
        reference_model: The reference's model, inputs and seed; without it nothing is said.
        target_model: The target's model, inputs and seed; without it nothing is said.
        mapping: As for `compare`.
        progress: Shows what is being run.
    """
    if reference_model is None or target_model is None:
        return localization
    if not all(adapter_for(workload.model).has_operations for workload in (reference_model, target_model)):
        return localization
    suspects = list(localization.suspects)
    if not suspects:
        return localization
    progress.stage("tracing the operations of suspects")
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tensorcap-")))
        try:
            modules = [suspect.module for suspect in suspects[:_LOOKED_AT]]
            capture_workload(reference_model, folder / "reference.h5", **_traced(modules))
            ours = _Trace(stack.enter_context(open_archive(folder / "reference.h5")))
            counterparts = [_Counterpart.of(module, reference, target, compared) for module in modules]
            for number, group in enumerate(_apart(counterparts)):
                path = folder / f"target{number}.h5"
                within = [counterparts[at] for at in group]
                _trace_target(target_model, path, within, reference, target, mapping)
                theirs = _Trace(stack.enter_context(open_archive(path)))
                for at in group:
                    code = _differing(suspects[at], ours, theirs, counterparts[at])
                    suspects[at] = replace(suspects[at], code=code)
        except Exception as error:  # of a model that refuses to be traced, which no suspect may be lost by
            note = f"Operations of suspects were not traced: {type(error).__name__}: {error}."
            return replace(localization, notes=(*localization.notes, note))
    return replace(localization, suspects=tuple(suspects))


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
    mapping: MappingSource | Literal["none"] | None,
) -> None:
    """Run the target with the reference's arguments in what makes the same, which is not the model itself."""
    options = _traced([one.around for one in counterparts])
    if any(one.maker == ROOT_SITE for one in counterparts):
        capture_workload(workload, path, **options)
        return
    within = tuple(f"{one.maker}." for one in counterparts)
    left = [record.key.text for record in target.records if record.key.site.startswith(within)]
    inject(
        reference,
        workload,
        path,
        target=target,
        mapping=mapping,
        left=left,
        leaves_misfits=True,
        **options,
    )


def _traced(sites: Iterable[str]) -> dict[str, Any]:
    """Arguments of `capture` that record the operations of modules."""
    names = set(sites)
    globs = [] if ROOT_SITE in names else [glob.escape(name) for name in sorted(names)]
    return {"level": "op", "ops_in": globs, "max_bytes": _MOST_BYTES}


class _Counterpart(NamedTuple):
    """What makes in the target what a module of the reference makes.

    Attributes:
        maker: Site of the module.
        around: Site of the module around it that calls it; its own where none does but the model.
        results: Key texts, in the target, of what belongs to the reference's results.
    """

    maker: str
    around: str
    results: tuple[str, ...]

    @classmethod
    def of(cls, module: str, reference: Archive, target: Archive, compared: Archive) -> _Counterpart:
        """Find it.

        Args:
            module: Site of the reference's module.
            reference: The trusted archive.
            target: The target under its own keys.
            compared: The target under the reference's keys.
        """
        own, alike = _counterparts(module, reference, compared)
        texts = tuple(key.text for key in (*own, *alike))
        maker = ROOT_SITE
        while module != ROOT_SITE:
            if makers := [_maker(key).split(".") for key in own or alike]:
                shared = itertools.takewhile(lambda names: len(set(names)) == 1, zip(*makers, strict=False))
                maker = ".".join(names[0] for names in shared) or ROOT_SITE
                break
            module = _around(module)
            own, alike = _counterparts(module, reference, compared)
        around = _around(maker)
        is_called = any(module_of(record.key.site) == around for record in target.records)
        return cls(maker, around if is_called and around != ROOT_SITE else maker, texts)


def _counterparts(module: str, reference: Archive, compared: Archive) -> tuple[list[Key], list[Key]]:
    """Keys of the target's tensors that belong to a module's results, and to what else has their values."""
    results = [
        record
        for record in reference.records
        if module_of(record.key.site) == module and record.key.slot.startswith("output")
    ]
    texts = {record.key.text for record in results}
    digests = {record.digest for record in results if record.digest}
    alike = {record.key.text for record in reference.records if record.digest in digests} - texts
    found: tuple[list[Key], list[Key]] = [], []
    for record in compared.records:
        if record.key.text in texts | alike and (own := recorded(compared, record)[1]) is not None:
            found[record.key.text in alike].append(own.key)
    return found


def _around(site: str) -> str:
    return site.rpartition(".")[0] or ROOT_SITE


def _maker(key: Key) -> str:
    """Site of the module whose code makes a tensor: an argument is made around the module that takes it."""
    site = module_of(key.site)
    if key.slot.startswith("output") or site == ROOT_SITE:
        return site
    return _around(site)


class _Values(NamedTuple):
    """What is held against what, of a tensor: numbers that no layout changes."""

    size: int
    nonfinite: int
    rms: float
    mean: float
    minimum: float
    maximum: float

    @classmethod
    def of(cls, values: Array) -> _Values:
        """Measure an array; complex numbers count as two each."""
        parts = np.stack([values.real, values.imag]) if np.iscomplexobj(values) else values
        flat = parts.astype(np.float64).ravel()
        finite = flat[np.isfinite(flat)]
        if not finite.size:
            return cls(flat.size, flat.size, 0.0, 0.0, 0.0, 0.0)
        rms = float(np.sqrt(np.mean(finite * finite)))
        ends = float(finite.min()), float(finite.max())
        return cls(flat.size, flat.size - finite.size, rms, float(finite.mean()), *ends)

    def is_near(self, other: _Values, tolerance: float) -> bool:
        """Whether another tensor has these numbers, but for a part of its root mean square or its peak."""
        if self[:2] != other[:2]:
            return False
        rms = tolerance * max(self.rms, other.rms)
        peak = tolerance * max(map(abs, (*self[4:], *other[4:])))
        near = [abs(a - b) <= rms for a, b in zip(self[2:4], other[2:4], strict=True)]
        return all(near) and all(abs(a - b) <= peak for a, b in zip(self[4:], other[4:], strict=True))

    def has_elements_of(self, other: _Values) -> bool:
        """Whether it has the elements of another tensor, each as often; a sum may be in another order."""
        return self._replace(size=0).is_near(other._replace(size=0), _SAME)


class _Held:
    """Values that a side has.

    Args:
        values: All of them.
        tolerance: Relative distance of values that are equal.
    """

    def __init__(self, values: Iterable[_Values | None], tolerance: float) -> None:
        self._sorted = sorted({value for value in values if value is not None})
        self._tolerance = tolerance

    def __contains__(self, value: object) -> bool:
        if not isinstance(value, _Values):  # of what is not known nothing is said
            return True
        lowest = value.rms * (1 - 2 * self._tolerance)
        at = bisect_left(self._sorted, (value.size, value.nonfinite, lowest))
        for other in self._sorted[at:]:
            if other[:2] != value[:2] or other.rms > value.rms * (1 + 2 * self._tolerance):
                return False
            if value.is_near(other, self._tolerance):
                return True
        return False


class _Trace:
    """The operations of a run, and what is known of their values; each is measured once."""

    def __init__(self, archive: Archive) -> None:
        self.graph = Graph.of(archive) if ops_of(archive) else Graph(archive, (), {}, {}, {})
        self._archive = archive
        self._known: dict[object, _Values | None] = {}
        dtypes = {record.dtype for record in archive.records if record.dtype.is_inexact}
        self.unit = max((UNIT_ROUNDOFFS.get(dtype.name, 0.0) for dtype in dtypes), default=0.0)

    def calls(self, step: int, site: str) -> _Calls:
        """The operations of a step that a module ran, or one within it."""
        nodes = [
            node
            for node in self.graph.nodes
            if Key.parse(f"{node.where}/op").step == step
            and (site == ROOT_SITE or f"{node.module}.".startswith(f"{site}."))
        ]
        results = [
            self.measure(record.key.text)
            for record in self._archive.records
            if record.key.step == step and record.key.site == site and record.key.slot.startswith("output")
        ]
        return _Calls(self, nodes, results)

    def outputs(self, node: Node) -> list[_Values | None]:
        """What an operation returned."""
        return [self.measure(f"{node.where}/{value.name}") for value in node.outputs]

    def input(self, value: Value) -> _Values | None:
        """What it was given; None for a number, and for a parameter that is not recorded."""
        return None if value.number is not None else self.measure(value)

    def measure(self, value: Value | str) -> _Values | None:
        """Measure a value, or a record by its key text; None if it is not known, or too large."""
        known = value if isinstance(value, str) else (value.key, value.parameter, value.writes, value.view)
        if known not in self._known:
            values = self._read(value)
            self._known[known] = None if values is None or not values.size else _Values.of(values)
        return self._known[known]

    def _read(self, value: Value | str) -> Array | None:
        try:
            if isinstance(value, str) and value in self._archive:
                record, view = self._archive.get(value), None
            else:
                output = self.graph.output(value) if isinstance(value, str) else value
                record, view = self.graph.source(output)
            shape = record.shape if view is None else view.shape
            return self.graph.read(value) if math.prod(shape) <= _MOST_ELEMENTS else None
        except (ReadError, TensorNotFoundError):
            return None


class _Calls:
    """The operations of calls of one module, and of modules within it, in execution order.

    Args:
        trace: The run.
        nodes: The operations.
        results: What the module returned.
    """

    def __init__(self, trace: _Trace, nodes: Sequence[Node], results: Sequence[_Values | None]) -> None:
        self.nodes = nodes
        self.results = results
        self._trace = trace

    def made(self) -> Iterator[_Values | None]:
        """What they returned."""
        for node in self.nodes:
            yield from self._trace.outputs(node)

    def given(self, nodes: Sequence[Node]) -> Iterator[_Values | None]:
        """What some of them were given that none of these made."""
        places = {node.where for node in nodes}
        for node in nodes:
            for value in node.inputs:
                producer = self._trace.graph.producer(value)
                if producer is None or producer.where not in places:
                    yield self._trace.input(value)

    def alone(self, held: _Held) -> list[Node]:
        """Those whose results the other side does not hold, nor what is made of them in the end."""
        alone: dict[str, Node] = {}
        known = {node.where for node in self.nodes}
        for node in reversed(self.nodes):
            if not any(value.number is None for value in node.inputs):
                continue  # a constant
            if all(value in held for value in self._trace.outputs(node)):
                continue
            texts = [f"{node.where}/{value.name}" for value in node.outputs]
            users = {user.where for text in texts for user in self._trace.graph.consumers(text)} & known
            is_end = not users and (not self._only_moves(node) or self._makes(node, self.results))
            if is_end or users & alone.keys():
                alone[node.where] = node
        return list(reversed(alone.values()))

    def from_values(
        self, nodes: Sequence[Node], values: _Held, ends: Sequence[_Values | None] = ()
    ) -> list[Node]:
        """Those of some that take one of these values, and what is made of them, up to some values.

        What only moves elements, or repeats them, is left out.
        """
        reached: dict[str, Node] = {}
        passed: set[str] = set()
        for node in nodes:
            inputs = [value for value in node.inputs if value.number is None]
            producers = {maker.where for value in inputs if (maker := self._trace.graph.producer(value))}
            known = [self._trace.input(value) for value in inputs]
            if producers & passed or any(one is not None and one in values for one in known):
                reached[node.where] = node
                if not self._makes(node, ends):
                    passed.add(node.where)
        return self.without_moves(reached.values())

    def without_moves(self, nodes: Iterable[Node]) -> list[Node]:
        """Those of some that do more than to move elements, or to repeat them."""
        return [node for node in nodes if not self._only_moves(node)]

    def _makes(self, node: Node, values: Sequence[_Values | None]) -> bool:
        """Whether an operation makes one of some values."""
        known = [value for value in values if value is not None]
        made = [value for value in self._trace.outputs(node) if value is not None]
        return any(one.size == other.size and one.has_elements_of(other) for one in made for other in known)

    def _only_moves(self, node: Node) -> bool:
        """Whether an operation returns the elements that it was given, in another order or repeated."""
        given = [known for value in node.inputs if (known := self._trace.input(value)) is not None]
        made = [known for known in self._trace.outputs(node) if known is not None]
        return bool(made) and all(any(one.has_elements_of(other) for other in given) for one in made)


def _differing(
    suspect: Suspect, ours: _Trace, theirs: _Trace, counterpart: _Counterpart
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
    names = [[_described(node, parameters=False) for node in nodes] for nodes in left]
    first, second = (tuple(map(_place, nodes)) for nodes in left)
    return DifferingOperations(first, second, is_alike=names[0] == names[1])


def _first_alone(
    reference: _Calls, target: _Calls, ends: Sequence[_Values | None], tolerance: float
) -> tuple[Sequence[Node], Sequence[Node]]:
    """Both sides' operations that the other one lacks, from values that both hold on.

    Args:
        reference: What the reference's module ran.
        target: What the target runs, in and around what makes the same.
        ends: The target's own results; what it makes of these is of no interest.
        tolerance: Relative distance of values that are equal.
    """
    made = [*reference.made(), *reference.results]
    theirs = target.alone(_Held((*made, *reference.given(reference.nodes)), tolerance))
    ours = reference.alone(_Held((*target.made(), *target.results), tolerance))
    taken_by_target = _Held(target.given(theirs), tolerance)
    # Where the reference does nothing alone, the target does more with what the reference makes
    taken_by_reference = _Held(reference.given(ours) if ours else made, tolerance)
    first = reference.from_values(ours, taken_by_target) or reference.without_moves(ours)
    return first, target.from_values(theirs, taken_by_reference, ends)


def _without_common(ours: Sequence[Node], theirs: Sequence[Node]) -> tuple[Sequence[Node], Sequence[Node]]:
    """Leave out what both sides run in the same order, but for the first operation of each."""
    names = [[_described(node, parameters=False) for node in nodes] for nodes in (ours, theirs)]
    blocks = SequenceMatcher(None, names[0], names[1], autojunk=False).get_matching_blocks()
    common = [{block[side] + at for block in blocks for at in range(block.size)} for side in (0, 1)]
    left = [
        [node for at, node in enumerate(nodes) if at == 0 or at not in shared]
        for nodes, shared in zip((ours, theirs), common, strict=True)
    ]
    return left[0], left[1]


def _described(node: Node, *, parameters: bool = True) -> str:
    """An operation with its arguments, as `aten.gelu(approximate='tanh')`, and names of parameters."""
    numbers = {value.name: value.number for value in node.inputs if value.number is not None}
    named = {name: value for name, value in {**numbers, **node.arguments}.items() if name not in _IMMATERIAL}
    arguments = [value.parameter for value in node.inputs if value.parameter] if parameters else []
    text = ", ".join([*arguments, *(f"{name}={value!r}" for name, value in named.items())])
    name = node.op.removesuffix(".default")
    return f"{name}({text})" if text and len(text) <= _LONGEST else name


def _place(node: Node) -> Place:
    return Place(node.where, _described(node), node.module, node.file or "", node.line)
