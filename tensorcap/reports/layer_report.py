"""The layer verification report: errors of a comparison by layer, by component, and with depth, as text."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from tensorcap.comparison import GREEN, Comparison, Pair, Status, error_of
from tensorcap.runs import component_of, is_inner
from tensorcap.wording import printable
from tensorcap_formats.archive import Archive
from tensorcap_formats.keys import Key

_STEADY: Final = 2.0  # an error that changes by less from the first layer to the last does neither
_ROUNDING: Final = 2.0**-24  # of float32: a relative error below it is no smaller one
_FEWEST: Final = 3  # layers, to say anything of depth


@dataclass(frozen=True, slots=True)
class TargetLayer:
    """What of the target a result of the reference was compared with, as the target has it.

    Attributes:
        keys: Key texts of its records; several if it has them apart.
        class_name: Class of the module of the first, "" if unknown.
        inputs: Shapes of the arguments of that module's call.
        output: Shape of the result, before steps of layout; None if it is several.
        place: File and first line of that class, `linear.py:24`; "" if unknown.
    """

    keys: tuple[str, ...]
    class_name: str
    inputs: tuple[tuple[int, ...], ...]
    output: tuple[int, ...] | None
    place: str = ""


@dataclass(frozen=True, slots=True)
class Layer:
    """A result of a module, on both sides.

    Attributes:
        key: Key text of the reference's record.
        class_name: Class of the module in the reference, "" if unknown.
        component: What kind of module it is: its path below the numbered block that it is in.
        status: Of the pair.
        mse: Mean squared error; None if nothing was measured.
        error: Relative Frobenius error, no unit; None if nothing was measured.
        inputs: Shapes of the arguments of the reference's call, in the order of the records.
        outputs: Shape of the result in the reference, and in the target, as it is compared; None if missing.
        target: The same result under the target's own names and in its layout; None if it has none.
        place: File and first line of the class in the reference, `modeling_bert.py:24`; "" if unknown.
        tail_error: Relative error that 95 % of its rows do not exceed, tokens of padding aside, no unit; None
            if nothing was measured.
    """

    key: str
    class_name: str
    component: str
    status: Status
    mse: float | None
    error: float | None
    inputs: tuple[tuple[int, ...], ...]
    outputs: tuple[tuple[int, ...], tuple[int, ...] | None]
    target: TargetLayer | None = None
    place: str = ""
    tail_error: float | None = None

    @property
    def error_of_tokens(self) -> float | None:
        """Its relative error, of a green one no larger than that of its rows: padding may be anything."""
        if self.status not in GREEN or self.tail_error is None or self.error is None:
            return self.error
        return min(self.error, self.tail_error)


@dataclass(frozen=True, slots=True)
class Spread:
    """Mean squared errors of some layers.

    Attributes:
        layers: Count of them.
        finite: Count of those with an error that is a finite number.
        minimum: The smallest of these, None without any; so are the others.
        maximum: The largest.
        mean: The mean.
        median: The median.
    """

    layers: int
    finite: int
    minimum: float | None
    maximum: float | None
    mean: float | None
    median: float | None

    @classmethod
    def of(cls, layers: Iterable[Layer]) -> Spread:
        """Sum up layers."""
        listed = list(layers)
        errors = [layer.mse for layer in listed if layer.mse is not None and math.isfinite(layer.mse)]
        if not errors:
            return cls(len(listed), 0, None, None, None, None)
        mean, median = math.fsum(errors) / len(errors), statistics.median(errors)
        return cls(len(listed), len(errors), min(errors), max(errors), mean, median)


@dataclass(frozen=True, slots=True)
class Depth:
    """How the error of numbered blocks changes with their number.

    Attributes:
        blocks: Count of blocks with an error that is not zero.
        factor: What the relative error is multiplied by from the first of them to the last, by a straight
            line through its logarithms; None for fewer than three.
    """

    blocks: int
    factor: float | None

    @property
    def text(self) -> str:
        """How the error changes with depth, as a sentence."""
        if self.factor is None:
            return "Too few numbered blocks have an error to say how it changes with depth."
        if self.factor > _STEADY:
            how = f"grows with depth, by a factor of {self.factor:.3g}"
        elif self.factor < 1 / _STEADY:
            how = f"falls with depth, by a factor of {1 / self.factor:.3g}"
        else:
            how = "neither grows nor falls with depth by a factor of 2 or more"
        return f"The error {how} over {self.blocks} blocks."


def layers_of(reference: Archive, target: Archive, comparison: Comparison) -> tuple[Layer, ...]:
    """Results of modules, in execution order of the reference; ops and values within modules are left out.

    Args:
        reference: The trusted archive.
        target: The archive under test, under its own names.
        comparison: The comparison of both.
    """
    ours, theirs = _Calls(reference), _Calls(target)
    pairs = sorted(filter(_is_layer, comparison.pairs), key=lambda p: p.reference.order if p.reference else 0)
    return tuple(_layer(pair, ours, theirs) for pair in pairs)


class _Calls:
    """What the calls of a run were given, and the classes of their modules."""

    def __init__(self, archive: Archive) -> None:
        self._modules = archive.info.modules
        self.classes = {site: module.short_class for site, module in archive.info.modules.items()}
        self._places = _class_places(archive.run)
        self.outputs: dict[str, tuple[int, ...]] = {}
        self._inputs: dict[str, list[tuple[int, ...]]] = {}
        for record in archive.records:
            if record.key.slot.startswith("input"):
                self._inputs.setdefault(record.key.where, []).append(record.shape)
            else:
                self.outputs[record.key.text] = record.shape

    def inputs(self, key: Key) -> tuple[tuple[int, ...], ...]:
        return tuple(self._inputs.get(key.where, ()))

    def place(self, site: str) -> str:
        module = self._modules.get(site)
        return "" if module is None else self._places.get(module.class_name, "")


def _class_places(run: Mapping[str, Any]) -> dict[str, str]:
    """File, without its folders, and first line of each class whose text a run's metadata hold."""
    sources = run.get("sources")
    places = {}
    for name, entry in sources.items() if isinstance(sources, Mapping) else ():
        file, line = (entry.get("file"), entry.get("line")) if isinstance(entry, Mapping) else (None, None)
        if isinstance(file, str) and type(line) is int:
            places[str(name)] = f"{file.replace(chr(92), '/').rpartition('/')[2]}:{line}"
    return places


def _layer(pair: Pair, ours: _Calls, theirs: _Calls) -> Layer:
    assert pair.reference is not None
    key, difference = pair.reference.key, pair.difference
    mse = difference.mse if difference else (0.0 if pair.status == "identical" else None)
    return Layer(
        pair.key,
        ours.classes.get(key.site, ""),
        component_of(key.site),
        pair.status,
        None if mse is None else float(mse),
        error_of(pair),
        ours.inputs(key),
        (pair.reference.shape, pair.target.shape if pair.target else None),
        _target_layer(pair, theirs),
        ours.place(key.site),
        pair.tail_error if difference else None,
    )


def _target_layer(pair: Pair, theirs: _Calls) -> TargetLayer | None:
    if pair.target is None:
        return None
    keys = pair.origin.target if pair.origin else (pair.target.key.text,)
    first = Key.parse(keys[0])
    output = theirs.outputs.get(keys[0]) if len(keys) == 1 else None
    class_name, place = theirs.classes.get(first.site, ""), theirs.place(first.site)
    return TargetLayer(keys, class_name, theirs.inputs(first), output, place)


def _is_layer(pair: Pair) -> bool:
    record = pair.reference
    if record is None or pair.status == "excluded" or record.key.is_bare or is_inner(record.key):
        return False
    return record.key.slot.partition(".")[0] == "output"


def by_component(layers: Iterable[Layer]) -> dict[str, Spread]:
    """The spread of each component, the largest mean first."""
    groups: dict[str, list[Layer]] = {}
    for layer in layers:
        groups.setdefault(layer.component, []).append(layer)
    spreads = {name: Spread.of(group) for name, group in groups.items()}
    return dict(
        sorted(spreads.items(), key=lambda item: -1.0 if item[1].mean is None else item[1].mean)[::-1]
    )


def depth_of(layers: Iterable[Layer]) -> Depth:
    """How the error of the results of numbered blocks changes: of those of the list with the most members."""
    lists: dict[str, list[tuple[int, float]]] = {}
    for layer in layers:
        key = Key.parse(layer.key)
        parent, _, number = key.site.rpartition(".")
        error = layer.error_of_tokens
        if number.isdigit() and error is not None and 0 < error < math.inf:
            lists.setdefault(parent, []).append((int(number), math.log(max(error, _ROUNDING))))
    points = max(lists.values(), key=lambda blocks: len({number for number, _ in blocks}), default=[])
    numbers = {number for number, _ in points}
    if len(numbers) < _FEWEST:
        return Depth(len(numbers), None)
    slope = statistics.linear_regression(*zip(*points, strict=True)).slope
    return Depth(len(numbers), math.exp(slope * (max(numbers) - min(numbers))))


def layer_report(title: str, layers: Sequence[Layer], order: str) -> str:
    """The report as text.

    Args:
        title: What was compared.
        layers: As `layers_of` gives them.
        order: Whether the execution order is the same, as a sentence.
    """
    return "\n".join(_lines(title, layers, order)) + "\n"


def _lines(title: str, layers: Sequence[Layer], order: str) -> Iterator[str]:
    yield title
    yield "=" * len(title)
    yield ""
    yield "EXECUTION ORDER"
    yield order
    yield ""
    yield "MEAN SQUARED ERROR"
    total = Spread.of(layers)
    yield f"layers  {total.layers}"
    yield f"finite  {total.finite}"
    for name in ("minimum", "maximum", "mean", "median"):
        yield f"{name:7} {_number(getattr(total, name))}"
    yield depth_of(layers).text
    yield ""
    yield "BY COMPONENT"
    rows: list[tuple[str, ...]] = [("component", "layers", "finite", "minimum", "maximum", "mean", "median")]
    for name, one in by_component(layers).items():
        numbers = map(_number, (one.minimum, one.maximum, one.mean, one.median))
        rows.append((name, str(one.layers), str(one.finite), *numbers))
    yield from _table(rows)
    yield ""
    yield "BY LAYER, in execution order"
    own = "layer", "class", "status", "MSE", "relative error", "inputs", "output", "compared with"
    heads = (*own, "layer of the target", "class", "inputs", "output")
    yield from _table([heads, *map(_row, layers)])


def _row(layer: Layer) -> tuple[str, ...]:
    ours, theirs = layer.outputs
    inputs = shape_texts(layer.inputs)
    other = "-" if theirs is None else "same" if theirs == ours else _shape(theirs)
    numbers = _number(layer.mse), _number(layer.error)
    own = layer.key, layer.class_name or "-", layer.status, *numbers, inputs, _shape(ours), other
    target = layer.target
    if target is None:
        return (*own, "-", "-", "-", "-")
    output = "several" if target.output is None else _shape(target.output)
    return (*own, " + ".join(target.keys), target.class_name or "-", shape_texts(target.inputs), output)


def _table(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = (printable(cell).ljust(width) for cell, width in zip(row, widths, strict=True))
        yield "  ".join(cells).rstrip()


def shape_texts(shapes: Iterable[Iterable[int]]) -> str:
    """Shapes in a line, `-` for none.

    Example:
        >>> shape_texts([(2, 3), ()])
        '2x3 scalar'
    """
    return " ".join(map(_shape, shapes)) or "-"


def _shape(shape: Iterable[int]) -> str:
    return "x".join(map(str, shape)) or "scalar"


def _number(value: Any) -> str:
    return "-" if value is None else f"{value:.3e}"
