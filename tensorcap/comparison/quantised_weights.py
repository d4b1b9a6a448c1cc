"""The precision of a target whose weights are whole numbers: what their rounding does to results (POL-4).

A module may round its inputs to whole numbers too, at each call, as dynamic quantisation does (POL-180).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Final

from tensorcap.comparison.policy import POLICY, Precision
from tensorcap.runs import BESIDE_WEIGHT, enclosing_sites
from tensorcap_formats.archive import Archive
from tensorcap_formats.float_formats import UNIT_ROUNDOFFS
from tensorcap_formats.keys import ROOT_SITE, escape
from tensorcap_formats.records import Record
from tensorcap_formats.run_info import ModuleInfo, RunInfo, TensorInfo

_PACKED: Final = ("qint8", "quint8")  # of a weight that an engine keeps in an order of its own
_BYTES: Final = ("int8", "uint8", *_PACKED)
_BITS: Final[Mapping[str, int]] = {"int32": 32, **dict.fromkeys(_BYTES, 8)}  # dtypes that hold weights
_WHOLE: Final = ("int", "uint")  # beginnings of formats of whole numbers
_BITS_OF: Final[Mapping[str, int]] = {  # formats of numbers that have fewer than eight bits
    **{f"{kind}{bits}": bits for kind in _WHOLE for bits in range(2, 8)},
    **dict.fromkeys(("MXFP4", "nf4", "fp4"), 4),
}
_COMMON: Final = (8, 4, 3, 2)  # bits of a weight
_MATRIX: Final = 2  # axes
_PEAK: Final = 4.0  # largest weight of a group over their RMS: of 64 to 16,384 normal values 2.5 to 4.2


def quantised_precision(
    reference: RunInfo,
    target: RunInfo,
    precision: Precision,
    records: Collection[Record] = (),
    *,
    predicted: Mapping[str, float] | None = None,
    stepped: Collection[str] = (),
) -> Precision:
    """Return the precision that a target with quantised weights can agree in; the runs' own without any.

    A weight of b bits is rounded to `2^(b - 1) - 1` steps of its group's largest value, with an error that is
    spread evenly over a step: an RMS of `step / sqrt(12)`, which a matrix product hands on whole. It counts
    for what such a module makes, and for what comes after that in the same step. What a module adds itself is
    known of those that round, and of those that round nothing: these add what the runs' own precision makes.

    Args:
        reference: What the reference's metadata say.
        target: What the target's metadata say, with sites under the reference's names.
        precision: What both runs computed in.
        records: The reference's, if they have an order of execution; without them it counts everywhere.
        predicted: As for `quantised_modules`.
        stepped: Key texts of tensors that code between modules rounds: it counts from there on, too.
    """
    modules = quantised_modules(reference, target, records, predicted=predicted)
    if not modules:
        return precision
    rounded = max(modules.values(), key=lambda module: module.rounding).precision(precision)
    if not rounded.weights:
        return precision
    own_roundings = dict.fromkeys(_exact_sites(reference, target, modules), POLICY.noise(precision))
    own_roundings |= {site: module.rounding for site, module in modules.items()}
    first_results = _first_results(records, modules, stepped)
    return replace(rounded, weights_from=first_results, own_roundings=own_roundings)


def _exact_sites(reference: RunInfo, target: RunInfo, rounded: Collection[str]) -> Iterator[str]:
    """Yield the modules of the reference that the target computes in floats, without weights in few bits.

    Of a target that rounds results to whole steps, or somewhere outside the reference's modules, it is not
    known which modules round what they make: none is yielded.

    Args:
        reference: What the reference's metadata say.
        target: What the target's metadata say.
        rounded: Sites of the modules that round.
    """
    of_weights = {site for site, _ in quantised_bits(reference, target)}
    elsewhere = set(rounded) - of_weights - (reference.modules.keys() - {ROOT_SITE})
    if elsewhere or output_steps(target):
        return
    rounding = {*rounded, *_rounding_sites(target)}
    for site, module in reference.modules.items():
        theirs = target.modules.get(site)
        floats, held = (
            0 if side is None else max(map(_count, _matrices(side, UNIT_ROUNDOFFS)), default=0)
            for side in (module, theirs)
        )
        if site not in rounding and held >= floats:
            yield site


def _rounding_sites(target: RunInfo) -> Iterator[str]:
    """Yield the modules with whole numbers, and those that quantise values, with all modules around them."""
    for site, module in target.modules.items():
        has_numbers = bool(_numbers(module)) or any(_matrices(module, _BITS))
        if has_numbers:
            yield site
        elif "quant" in module.short_class.lower() and not any(_matrices(module, UNIT_ROUNDOFFS)):
            yield from (site, *enclosing_sites(site))


@dataclass(frozen=True, slots=True)
class QuantisedModule:
    """A module of the target that computes with whole numbers.

    Attributes:
        bits: Of a weight.
        rounding: What rounding its weights, and its inputs if it does that, does to its products: RMS of the
            error over that of the result, no unit.
        number: The format of one weight, if that is no whole number.
    """

    bits: int
    rounding: float
    number: str = ""

    def precision(self, runs: Precision) -> Precision:
        """Return the precision of its products; that of the runs if that is coarser."""
        if self.rounding <= runs.rounding:
            return runs
        unit = self.rounding / POLICY.rounding
        name = self.number or f"int{self.bits}"
        return replace(runs, unit=unit, rounding=self.rounding, weights=name, weights_from=())


def quantised_modules(
    reference: RunInfo,
    target: RunInfo,
    records: Collection[Record] = (),
    *,
    predicted: Mapping[str, float] | None = None,
) -> dict[str, QuantisedModule]:
    """Return the modules of the target that hold whole numbers in the place of floats, by site.

    Args:
        reference: What the reference's metadata say.
        target: What the target's metadata say, with sites under the reference's names.
        records: The reference's, whose statistics say how large inputs and results are.
        predicted: The errors of results that values of weights and inputs predict, by site, where both
            archives hold these (POL-280).
    """
    modules = {}
    calls: dict[str, list[Record]] = {}
    bits_by_site = dict(quantised_bits(reference, target))
    for record in records if bits_by_site else ():
        if record.key.site in bits_by_site:
            calls.setdefault(record.key.site, []).append(record)
    for site, error in (predicted or {}).items():
        if site not in bits_by_site and error:  # it rounds its result alone
            modules[site] = QuantisedModule(_COMMON[0], error)
    for site, bits in bits_by_site.items():
        weights = _PEAK / ((2 ** (bits - 1) - 1) * math.sqrt(12))
        settings = target.modules[site].settings
        number = next((name for name in _numbers(target.modules[site]) if not name.startswith(_WHOLE)), "")
        if number in UNIT_ROUNDOFFS:
            weights = POLICY.rounding * UNIT_ROUNDOFFS[number]
        if predicted is not None and predicted.get(site):
            modules[site] = QuantisedModule(bits, predicted[site], number)
            continue
        input_bits = settings.get("input_bits")
        if not isinstance(input_bits, int):
            modules[site] = QuantisedModule(bits, weights, number)
            continue
        errors = _product_errors(
            calls.get(site, ()),
            reference.modules.get(site),
            bits,
            input_bits,
            has_one_scale=settings.get("one_scale") is not False,
        )
        inputs = 2 * _PEAK / ((2**input_bits - 1) * math.sqrt(12))
        modules[site] = QuantisedModule(bits, max(errors, default=math.hypot(weights, inputs)))
    return modules


def output_steps(run: RunInfo) -> dict[str, float]:
    """Return the step of each module that rounds its results to whole steps, by site."""
    return {
        site: step
        for site, module in run.modules.items()
        if isinstance(step := module.settings.get("output_step"), float)
    }


def packed_weights(run: RunInfo) -> set[tuple[str, str]]:
    """Return site and name of each weight that is kept in few bits, and recorded in floats."""
    packed = {
        (site, name)
        for site, module in run.modules.items()
        for name, tensor in module.parameters.items()
        if tensor.dtype in _PACKED
    }
    for site, module in run.modules.items():
        names = module.settings.get("dequantised")
        packed |= (
            {(site, name) for name in names if isinstance(name, str)} if isinstance(names, list) else set()
        )
    return packed


def holds_packed_weights(archive: Archive) -> bool:
    """Whether an archive has values of weights that are kept in few bits, in floats."""
    slots = {(site, f"param.{escape(name)}") for site, name in packed_weights(archive.info)}
    return any(record.stored and (record.key.site, record.key.slot) in slots for record in archive.records)


def kept_beside(run: RunInfo) -> set[tuple[str, str]]:
    """Return site and slot of what is recorded of weights in few bits beside their floats (CAP-290)."""
    return {
        (site, f"param.{escape(name)}{end}") for site, name in packed_weights(run) for end in BESIDE_WEIGHT
    }


def _product_errors(
    records: Collection[Record], module: ModuleInfo | None, bits: int, input_bits: int, *, has_one_scale: bool
) -> Iterator[float]:
    """Yield the error of each call of a linear layer of one scale for its weight and one for its inputs.

    Rounding errors are spread evenly over a step, and independent. With `E` those of the inputs X
    and `D` those of the weight W of m outputs, the mean of `|EW + XD|^2` over them is
    `e^2 rows |W|^2 + d^2 m |X|^2`, for e and d the RMS of each, `step / sqrt(12)`.
    """
    weight = weight_errors(records, module, bits, has_one_scale=has_one_scale)
    if weight is None:
        return
    inputs = {_call(r): r for r in records if r.key.slot.startswith("input")}
    for record in records:
        fed = inputs.get(_call(record))
        if not record.key.slot.startswith("output") or fed is None:
            continue
        x, y = fed.statistics, record.statistics
        if x is None or y is None:
            continue
        numbers = (x.minimum, x.maximum, x.l2, y.l2)
        if None in numbers or not y.l2:
            continue
        low, high, x_norm, y_norm = (float(number or 0) for number in numbers)
        e = (max(high, 0.0) - min(low, 0.0)) / ((2**input_bits - 1) * math.sqrt(12))
        rows = math.prod(fed.shape) / weight.shape[1]
        squares = e**2 * rows * weight.norm**2 + weight.error**2 * weight.shape[0] * x_norm**2
        yield math.sqrt(squares) / y_norm


@dataclass(frozen=True, slots=True)
class WeightErrors:
    """What is known of a weight in few bits by statistics of the reference's.

    Attributes:
        shape: `[outputs, inputs]`.
        norm: Of all its elements.
        error: RMS of what rounding an element is off by.
    """

    shape: tuple[int, int]
    norm: float
    error: float


def weight_errors(
    records: Iterable[Record], module: ModuleInfo | None, bits: int, *, has_one_scale: bool
) -> WeightErrors | None:
    """What rounding the weight of a linear layer makes, by its statistics; None if they are not known.

    Args:
        records: The module's, its weight among them if that was recorded.
        module: What the reference's metadata say of it.
        bits: Of a weight.
        has_one_scale: Whether all rows share a scale; if not, 4 times the RMS stands for the largest value
            of each.
    """
    held = module.parameters.get("weight") if module is not None else None
    weight = held.statistics if held is not None else None
    for record in records:
        if record.key.slot == "param.weight" and record.statistics is not None:
            weight = record.statistics
    shape = held.shape if held is not None else None
    if weight is None or shape is None or len(shape) != _MATRIX:
        return None
    if weight.minimum is None or weight.maximum is None or weight.l2 is None:
        return None
    largest = max(float(weight.maximum), -float(weight.minimum))
    if not has_one_scale:
        largest = min(largest, _PEAK * weight.l2 / math.sqrt(math.prod(shape)))
    error = 2 * largest / ((2**bits - 1) * math.sqrt(12))
    return WeightErrors((shape[0], shape[1]), weight.l2, error)


def _call(record: Record) -> tuple[int, int, int]:
    return record.key.rank, record.key.step, record.key.call


def _first_results(
    records: Collection[Record], sites: Collection[str], stepped: Collection[str]
) -> tuple[tuple[int, int], ...]:
    """By step, when the first of some modules gave a result, or a tensor was rounded.

    Nothing if one of the modules never did.
    """
    first: dict[int, int] = {}
    called = set()
    for record in records:
        is_result = record.key.slot.startswith("output") and record.key.site in sites
        if is_result:
            called.add(record.key.site)
        if is_result or record.key.text in stepped:
            first[record.key.step] = min(record.order, first.get(record.key.step, record.order))
    return tuple(first.items()) if all(site in called for site in sites) else ()


def quantised_bits(reference: RunInfo, target: RunInfo) -> Iterator[tuple[str, int]]:
    """Yield site and bits of each module of the target that holds whole numbers in the place of floats.

    It is the fewest bits of its weights.

    A table of indices beside a weight is none, nor is one in a module that has no weight.
    """
    for site, module in target.modules.items():
        named = [_BITS_OF.get(name, 8) for name in _numbers(module)]
        trusted = reference.modules.get(site)
        if named and (trusted is None or any(_matrices(trusted, UNIT_ROUNDOFFS))):
            yield site, min(named)
            continue
        integers = max(map(_bits_held, _matrices(module, _BITS)), default=0)
        floats = max(map(_count, _matrices(module, UNIT_ROUNDOFFS)), default=0)
        if site in reference.modules:
            trusted = reference.modules[site]
            count = max(map(_count, _matrices(trusted, UNIT_ROUNDOFFS)), default=0)
            if integers and floats < count and not any(_matrices(trusted, _BITS)):
                yield site, min(_COMMON, key=lambda bits: abs(bits - integers / count))
        elif any(_matrices(module, _BYTES)) and floats < integers / _COMMON[0]:
            yield site, _COMMON[0]


def _numbers(module: ModuleInfo) -> list[str]:
    """The formats of numbers that a module says its weights have."""
    numbers = module.settings.get("numbers")
    named = numbers.values() if isinstance(numbers, Mapping) else ()
    return [name for name in named if isinstance(name, str) and name]


def _matrices(module: ModuleInfo, dtypes: Container[str]) -> Iterator[TensorInfo]:
    """Yield the tensors of a module of two axes or more in some dtypes."""
    for tensor in (*module.parameters.values(), *module.buffers.values()):
        if tensor.dtype in dtypes and len(tensor.shape or ()) >= _MATRIX:
            yield tensor


def _count(tensor: TensorInfo) -> int:
    return math.prod(tensor.shape or ())


def _bits_held(tensor: TensorInfo) -> int:
    return _count(tensor) * _BITS[tensor.dtype]
