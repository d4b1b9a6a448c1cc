"""Compare parameters and buffers of two runs by their values, or by digests and statistics; else by shape.

Read `_compare_weights` first: it pairs them by name, then by equal bits, and judges each pair.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, NamedTuple

import numpy as np

from tensorcap.comparison.exact import parameter_rounding
from tensorcap.comparison.other_weights import OtherWeights
from tensorcap.comparison.policy import POLICY
from tensorcap.comparison.preflight.item import Item, UnknownError, common_modules, make_item
from tensorcap.comparison.preflight.weights import (
    Weight,
    WeightId,
    WeightKind,
    compare_contents,
    is_quantised,
    values_text,
    weights_of,
)
from tensorcap.comparison.quantised_layers import QuantisedLayers
from tensorcap.comparison.record_index import RecordIndex
from tensorcap.comparison.weight_grids import find_weight_grid
from tensorcap.comparison.weight_judge import PackedWeights, judge_by_values
from tensorcap.metrics import measure
from tensorcap.wording import FEW, conjugated, counted, some
from tensorcap_formats.archive import Archive
from tensorcap_formats.errors import ReadError
from tensorcap_formats.float_formats import UNIT_ROUNDOFFS
from tensorcap_formats.keys import ROOT_SITE
from tensorcap_formats.records import Record
from tensorcap_formats.view import ArchiveView

_COUNTERS: Final = ("num_batches_tracked",)  # buffers that a forward pass in evaluation mode does not read
_OF_CHECKPOINTS: Final = ("running_mean", "running_var")  # buffers that loading in another dtype rounds too
_LAYOUT: Final = "{} the same in another layout, as far as statistics show"
_HELD: Final = "holds what {} holds in the reference"
_LOOKED_UP: Final = (
    256  # weights that are held against all others: in another checkpoint none is one of these
)
_SUBTREE: Final = 3  # parameters: fewer are no part of a model that was never loaded


class _WeightPair(NamedTuple):
    reference: Weight
    target: Weight


class _Values:
    """The values of weights of both runs, as far as the archives hold them.

    Attributes:
        reference: The trusted archive.
        target: The archive under test.
        layers: Its quantised layers, as far as they were measured.
    """

    def __init__(self, reference: Archive, target: Archive, layers: QuantisedLayers) -> None:
        self.reference, self.target, self.layers = reference, target, layers
        self._packed = PackedWeights(RecordIndex(target))
        self._precision = POLICY.precision_of_runs(reference.info, target.info)

    def error(self, pair: _WeightPair) -> float | None:
        """The error relative to the norm of the values, 0 within rounding; None if not both hold them."""
        ours, theirs = pair.reference.record, pair.target.record
        if not (ours and theirs and ours.stored and theirs.stored):
            return None
        tolerance = parameter_rounding(ours, theirs)
        try:
            difference = measure(self.reference, ours, self.target, theirs, tolerance=tolerance)
        except OSError:  # the comparison says so
            return None
        if not (difference.mismatches or difference.mask_mismatches):
            return 0.0
        return difference.relative_frobenius or math.inf

    def grid(self, pair: _WeightPair) -> str:
        """The numbers that the target's values are the reference's rounded to; "" if there are none.

        Raises:
            OSError, ReadError: One of the two cannot be read.
        """
        ours, theirs = pair.reference.record, pair.target.record
        if ours is not None and theirs is not None and ours.key == theirs.key:
            measured = self.layers.rounded_to.get(ours.key.text)
            if measured is not None:
                return measured
        return self.grid_of(ours, theirs)

    def grid_of(self, ours: Record | None, theirs: Record | None) -> str:
        """As `grid`, of any weight of the reference, by values alone."""
        if ours is None or theirs is None or {ours.dtype.kind, theirs.dtype.kind} != {"float"}:
            return ""
        quantised = judge_by_values(self._packed, self.reference, ours, theirs, self._precision)
        if quantised is not None:
            return quantised.rounded_to
        sides = self.reference.load(ours), self.target.load(theirs)
        ours_values, theirs_values = (side.astype(np.float64) for side in sides)
        grid = find_weight_grid(ours_values, theirs_values, UNIT_ROUNDOFFS[theirs.dtype.name])
        return "" if grid is None else grid.text


@dataclass(slots=True)
class _Outcome:
    """What became of the pairs of one kind.

    Attributes:
        other: Pairs that are not the same numbers, with the error relative to the norm if it is known.
        moved: Pairs that hold the same numbers in another order, as far as statistics show.
        quantised: Pairs of which one side holds integers for floats.
        on_grid: Pairs of which the target holds the reference's values rounded to whole steps, by the grid.
        reshaped: Pairs of unlike shapes and unlike values.
        open: Why pairs were not compared by value, and how many.
    """

    other: list[tuple[float | None, _WeightPair]] = field(default_factory=list)
    moved: list[_WeightPair] = field(default_factory=list)
    quantised: list[_WeightPair] = field(default_factory=list)
    on_grid: dict[str, list[_WeightPair]] = field(default_factory=dict)
    reshaped: list[_WeightPair] = field(default_factory=list)
    open: Counter[str] = field(default_factory=Counter)


def compare_parameters(reference: Archive, target: Archive, layers: QuantisedLayers) -> Iterator[Item]:
    """Compare names of tensors in files without sites, then parameters, of one name or of equal bits.

    Args:
        reference: The trusted archive.
        target: The archive under test.
        layers: Its quantised layers, as far as they were measured.
    """
    yield from _renamed_items(target)
    yield from _compare_weights(_Values(reference, target, layers), "parameters")


def _renamed_items(target: Archive) -> Iterator[Item]:
    """Report tensors of files without sites that a mapping had to rename: a loader would not find them."""
    sources = target.sources.items() if isinstance(target, ArchiveView) else ()
    renamed = [
        (text, records[0].key.text)
        for text, records in sources
        if len(records) == 1 and records[0].key.is_bare and records[0].key.text != text
    ]
    if renamed:
        name, other = renamed[0]
        text = (
            f"{counted(len(renamed), 'tensor', 'have')} another name in the target: {name} is {other} there."
        )
        yield make_item("parameters", name, name, other, text, explains=False, rank=3)


def compare_buffers(reference: Archive, target: Archive) -> Iterator[Item]:
    """Compare dtypes of buffers, then their values."""
    ours, theirs = (weights_of(archive, "buffers") for archive in (reference, target))
    if not (ours or theirs):
        common_modules(reference, target)  # so that both are known to have none
        return
    dtypes = [
        (weight.text, weight.info.dtype, theirs[name].info.dtype)
        for name, weight in ours.items()
        if name in theirs
    ]
    unlike = [
        entry
        for entry in dtypes
        if all(entry) and entry[1] != entry[2] and not entry[0].endswith(_OF_CHECKPOINTS)
    ]
    if unlike:
        name, ours_dtype, theirs_dtype = unlike[0]
        text = (
            f"{counted(len(unlike), 'buffer', 'have')} another dtype, {ours_dtype} and {theirs_dtype}, as "
            "after model.to(…), which rounds tables such as rotary frequencies; "
            "from_pretrained(dtype=…) does not."
        )
        yield make_item("buffers", name, ours_dtype, theirs_dtype, text, explains=True)
    yield from _compare_weights(_Values(reference, target, QuantisedLayers()), "buffers")


def _compare_weights(values: _Values, kind: WeightKind) -> Iterator[Item]:
    """Compare the weights of one kind.

    1. Weights of one module and name are a pair; of the others those of equal bits. If a mapping gave the
       target's modules their names, equal bits go before names.
    2. A pair whose values both archives hold is measured, any other is judged by digests and statistics.
    3. What differs is one item for all; its text names weights that hold another one's values, ties that the
       target does not have, and the part of the model in which nothing is the same.

    Raises:
        UnknownError: Not all were compared by value; all items were yielded before.
    """
    ours, theirs = weights_of(values.reference, kind), weights_of(values.target, kind)
    is_mapped = _has_renamed_modules(values.target)
    pairs, renamed = _pair_weights(ours, theirs, bits_first=is_mapped)
    taken = {id(weight) for pair in (*pairs, *renamed) for weight in pair}
    only_ours, only_theirs = (
        [weight for weight in side.values() if id(weight) not in taken] for side in (ours, theirs)
    )
    if not (pairs or renamed):
        raise UnknownError(f"the {kind} of the two have no name in common")
    outcome = _Outcome()
    unlike_sites = _unlike_sites(ours.values(), theirs.values()) if is_mapped else set()
    for pair in pairs:
        if pair.reference.site in unlike_sites:
            outcome.open["{} of modules that the mapping pairs, with weights of other names or shapes"] += 1
        else:
            _judge(values, pair, outcome)
    for pair in outcome.reshaped:
        one, other = (None if weight.info.shape is None else list(weight.info.shape) for weight in pair)
        yield make_item(kind, pair.reference.text, one, other, "Its shapes differ.", explains=True)
    if outcome.other:
        yield _other_item(kind, outcome.other, pairs, ours.values(), theirs.values(), _Held(values))
    for grid, on_grid in outcome.on_grid.items():
        yield _grid_item(kind, grid, on_grid)
    if outcome.quantised:
        yield _quantised_item(kind, outcome.quantised)
    if outcome.moved:
        yield _moved_item(kind, outcome.moved)
    for side, weights in (("reference", only_theirs), ("target", only_ours)):
        lost = [weight.text for weight in weights]
        if not lost:
            continue
        outcome.open[f"{len(lost)} without a counterpart in the {side}"] += 0
        if kind == "parameters":
            text = f"The {side} lacks {counted(len(lost), 'parameter')} of the other: {some(lost)}."
            has_it = ("absent", "there") if side == "reference" else ("there", "absent")
            yield make_item(kind, lost[0], *has_it, text, explains=False, rank=2)
    if outcome.open:
        raise UnknownError(_open_text(outcome.open))


def _has_renamed_modules(target: Archive) -> bool:
    """Whether a mapping gave modules of the target other names than they have."""
    return isinstance(target, ArchiveView) and target.info.modules.keys() != target.source.info.modules.keys()


def _pair_weights(
    ours: Mapping[WeightId, Weight], theirs: Mapping[WeightId, Weight], *, bits_first: bool
) -> tuple[list[_WeightPair], list[_WeightPair]]:
    """Pair the weights of two runs.

    Returns:
        Pairs of one name, and pairs of two names that hold the same bits.
    """
    common = [name for name in ours if name in theirs]
    if bits_first:
        common = [name for name in common if ours[name].contents == theirs[name].contents]
    named = set(common)
    rest = [{n: w for n, w in side.items() if n not in named} for side in (ours, theirs)]
    renamed = _pair_by_bits(rest[0].values(), rest[1].values())
    taken = {id(weight) for pair in renamed for weight in pair}
    left = [n for n, w in rest[0].items() if n in rest[1] and not {id(w), id(rest[1][n])} & taken]
    return [_WeightPair(ours[name], theirs[name]) for name in (*common, *left)], renamed


def _pair_by_bits(ours: Iterable[Weight], theirs: Iterable[Weight]) -> list[_WeightPair]:
    """Pair weights that hold the same bits, in order."""
    by_contents: dict[tuple[str, str], list[Weight]] = defaultdict(list)
    for weight in theirs:
        by_contents[weight.contents].append(weight)
    pairs = []
    for weight in ours:
        equals = by_contents.get(weight.contents) if weight.is_telling else None
        if equals:
            pairs.append(_WeightPair(weight, equals.pop(0)))
    return pairs


def _unlike_sites(ours: Iterable[Weight], theirs: Iterable[Weight]) -> set[str]:
    """Sites at which the two have weights of unlike names or shapes."""
    shapes: list[dict[str, dict[str, object]]] = [defaultdict(dict), defaultdict(dict)]
    for side, weights in zip(shapes, (ours, theirs), strict=True):
        for weight in weights:
            side[weight.site][weight.name] = weight.info.shape
    return {site for site, named in shapes[0].items() if named != shapes[1].get(site)}


def _judge(values: _Values, pair: _WeightPair, outcome: _Outcome) -> None:
    """Add a pair to what became of all pairs."""
    ours, theirs = (weight.info for weight in pair)
    likeness = compare_contents(ours, theirs)
    if likeness == "equal":
        return  # of another shape too: a dimension of size 1 more or less
    if is_quantised(ours, theirs):
        outcome.quantised.append(pair)
    elif ours.shape != theirs.shape:
        if likeness in ("moved", "rounded"):
            outcome.open[_LAYOUT] += 1
        else:
            outcome.reshaped.append(pair)
    elif (error := values.error(pair)) is not None:
        grid = values.grid(pair) if error > 0 else ""
        if grid:
            outcome.on_grid.setdefault(grid, []).append(pair)
        elif error > 0:
            outcome.other.append((error, pair))
    elif likeness == "other":
        outcome.other.append((None, pair))
    elif likeness == "moved" and _is_one_class(values.reference, values.target, pair):
        outcome.moved.append(pair)
    elif likeness == "moved":
        outcome.open[_LAYOUT] += 1
    elif likeness == "rounded":
        outcome.open["{} the same but for rounding, as far as statistics show"] += 1
    else:
        outcome.open["{} by shape alone, since no digests or statistics of both are known"] += 1


def _is_one_class(reference: Archive, target: Archive, pair: _WeightPair) -> bool:
    """Whether the modules of two weights are of one class, or of unknown ones, and so have one layout."""
    modules = reference.info.modules.get(pair.reference.site), target.info.modules.get(pair.target.site)
    names = [module.class_name if module else "" for module in modules]
    return names[0] == names[1]


def _grid_item(kind: WeightKind, grid: str, pairs: Sequence[_WeightPair]) -> Item:
    names = some([pair.reference.text for pair in pairs])
    count = counted(len(pairs), kind[:-1])
    text = f"{count} rounded to {grid} in the target, and made floats again: {names}."
    first = pairs[0].reference
    return make_item(kind, first.text, first.info.dtype, grid, text, explains=True)


def _other_item(
    kind: WeightKind,
    other: Sequence[tuple[float | None, _WeightPair]],
    pairs: Sequence[_WeightPair],
    ours: Iterable[Weight],
    theirs: Iterable[Weight],
    held: _Held,
) -> Item:
    """One item for all pairs that are not the same numbers; the one with the largest error gives the name."""
    error, worst = max(other, key=lambda entry: -1.0 if entry[0] is None else entry[0])
    unlike = [pair for _, pair in other]
    names = some([pair.reference.text for pair in unlike])
    verb = conjugated(len(unlike), "are")
    text = (
        f"{len(unlike)} of {len(pairs)} {kind} {verb} not the same numbers, beyond rounding of the dtypes: "
    )
    text += names
    sides: tuple[object, object] = (0.0, error)
    if error is not None:
        text += f"; the worst is off by {error:.3g} of its norm."
    else:
        sides = values_text(worst.reference.info), values_text(worst.target.info)
        text += f"; the first holds {sides[0]} in the reference, {sides[1]} in the target."
    for hint in (
        _place_text(unlike, pairs),
        _exchanged_text(unlike, ours, held),
        _tied_text(unlike, ours, theirs),
    ):
        text += f" {hint}" if hint else ""
    explains = any(pair.reference.name not in _COUNTERS for pair in unlike)
    return make_item(kind, worst.reference.text, *sides, text, explains=explains)


def _place_text(unlike: Sequence[_WeightPair], pairs: Sequence[_WeightPair]) -> str:
    """Name the innermost module that holds all that differs, if nothing in it is the same."""
    sites = [pair.reference.site for pair in unlike]
    parts = [[] if site == ROOT_SITE else site.split(".") for site in sites]
    common = parts[0]
    for path in parts[1:]:
        size = next((i for i, (a, b) in enumerate(zip(common, path, strict=False)) if a != b), None)
        common = common[: min(len(common), len(path)) if size is None else size]
    within = [
        pair for pair in pairs if not common or f"{pair.reference.site}.".startswith(".".join(common) + ".")
    ]
    varied = [pair for pair in within if pair.reference.is_telling]
    if len(varied) < _SUBTREE or not {id(p.reference) for p in varied} <= {id(p.reference) for p in unlike}:
        return ""
    return f"Nothing in {'.'.join(common) or 'the model'} is the same: was it loaded?"


class _Held:
    """Which weights of the reference a target holds in the place of others, with rounding."""

    def __init__(self, values: _Values) -> None:
        self._values = values
        self._others = OtherWeights(values.reference)

    def text(self, pair: _WeightPair) -> str:
        """What the target holds in the place of a weight, as the end of a sentence; "" if nothing."""
        ours, theirs = pair.reference.record, pair.target.record
        judged = self._values.layers.weights.get(ours.key.text) if ours is not None else None
        if judged is not None:
            return _HELD.format(judged.mistake.held) + ", rounded" if judged.mistake.held else ""
        if ours is None or theirs is None or not theirs.stored or ours.shape != theirs.shape:
            return ""
        if theirs.dtype.kind != "float":
            return ""

        def error(record: Record) -> float | None:
            return self._values.error(_WeightPair(replace(pair.reference, record=record), pair.target))

        def is_held(record: Record) -> bool:
            return error(record) == 0 or self._values.grid_of(record, theirs) != ""

        try:
            record = self._others.find(ours, self._values.target, theirs, is_held)
        except (OSError, ReadError):  # the comparison says so
            record = None
        if record is None:
            return ""
        is_equal = record.dtype == theirs.dtype and error(record) == 0
        return _HELD.format(record.key.text) + ("" if is_equal else ", rounded")


def _exchanged_text(unlike: Sequence[_WeightPair], ours: Iterable[Weight], held: _Held) -> str:
    """Say which weights hold what another one holds in the reference."""
    holders: dict[tuple[str, str], Weight] = {}
    for weight in ours:
        holders.setdefault(weight.contents, weight)
    texts = []
    for at, pair in enumerate(unlike):
        other = ""
        if pair.target.is_telling and pair.target.contents in holders:
            other = _HELD.format(holders[pair.target.contents].text)
        elif at < _LOOKED_UP:
            other = held.text(pair)
        if other:
            texts.append(f"{pair.target.text} {other}")
    return (
        f"{'; '.join(texts[:FEW])}{f', and {len(texts) - FEW} more' if len(texts) > FEW else ''}."
        if texts
        else ""
    )


def _tied_text(unlike: Sequence[_WeightPair], ours: Iterable[Weight], theirs: Iterable[Weight]) -> str:
    """Say which weights are tied to another one in the reference, and not in the target."""
    tied: dict[tuple[str, str], list[Weight]] = defaultdict(list)
    for weight in ours:
        tied[weight.contents].append(weight)
    targets = {(weight.site, weight.name): weight for weight in theirs}
    for pair in unlike:
        if not pair.reference.is_telling:
            continue
        for partner in tied[pair.reference.contents]:
            counterpart = targets.get((partner.site, partner.name))
            if partner is pair.reference or counterpart is None:
                continue
            if counterpart.contents != pair.target.contents:
                tie = f"{pair.reference.text} is the same as {partner.text}"
                return f"{tie} in the reference, not in the target."
    return ""


def _quantised_item(kind: WeightKind, pairs: Sequence[_WeightPair]) -> Item:
    first = pairs[0]
    one, other = (weight.info.class_name or weight.info.dtype for weight in first)
    names = some([pair.reference.text for pair in pairs])
    text = (
        f"{counted(len(pairs), kind[:-1])} of quantised type on one side, so not the same numbers: {names}; "
        f"{one} in the reference, {other} in the target."
    )
    return make_item(kind, first.reference.text, one, other, text, explains=False, rank=1)


def _moved_item(kind: WeightKind, pairs: Sequence[_WeightPair]) -> Item:
    names = some([pair.reference.text for pair in pairs])
    text = (
        f"{counted(len(pairs), kind[:-1])} with the same numbers in another order, as far as statistics show "
        f"(transposed, or rows moved): {names}."
    )
    return make_item(
        kind, pairs[0].reference.text, "in order", "in another order", text, explains=False, rank=1
    )


def _open_text(reasons: Counter[str]) -> str:
    texts = [reason.format(count) for reason, count in reasons.items()]
    return f"not all were compared by value: {'; '.join(texts)}"
