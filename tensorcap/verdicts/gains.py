"""What leaves and attention cores add to the error that they were given: tests D and D'."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from tensorcap.metrics.routing import is_routing
from tensorcap.verdicts.calls import Call, Calls
from tensorcap.verdicts.pairing import Finding, Pair
from tensorcap.verdicts.policy import Policy, Precision
from tensorcap_formats.archive import Archive
from tensorcap_formats.dtypes import Array, decode
from tensorcap_formats.records import Record

_SAMPLE: Final = 1 << 20  # elements of a tensor that a second look reads
Confirm = Callable[[Sequence[Pair], Pair, bool], "Sequence[Look]"]


@dataclass(frozen=True, slots=True)
class Look:
    """Errors of the inputs of a module and of its output, by one measure."""

    inputs: tuple[float, ...]
    output: float


@dataclass(frozen=True, slots=True)
class Gain:
    """What one module adds to an error.

    Attributes:
        site: The leaf, or the attention.
        pair: The pair of its result.
        inputs: Row error of what went in, together.
        output: Row error of what came out.
        finding: The verdict.
    """

    site: str
    pair: Pair
    inputs: float
    output: float
    finding: Finding


class Gains:
    """Finds the gain of every leaf and attention core whose inputs and outputs were compared.

    Args:
        calls: The reference's calls.
        pairs: Pairs by key text.
        errors: Row errors by key text.
        aligned: Keys whose error is that of rows that were brought together, so that no second look helps.
        policy: The limits.
        precision: The precision of a pair.
        confirm: A second look at a gain that is not green.

    Attributes:
        untested: Sites of leaves whose inputs were not captured, or not compared.
        has_inputs: Whether the inputs of any leaf were compared.
    """

    def __init__(
        self,
        calls: Calls,
        pairs: Mapping[str, Pair],
        *,
        errors: Mapping[str, float | None],
        aligned: Collection[str],
        policy: Policy,
        precision: Callable[[Pair], Precision],
        confirm: Confirm,
    ) -> None:
        self._calls = calls
        self._pairs = pairs
        self._errors = errors
        self._aligned = aligned
        self._policy = policy
        self._precision = precision
        self._confirm = confirm
        self.untested: dict[str, None] = {}
        self.has_inputs = False

    def all(self) -> Iterator[Gain]:
        """Every gain, leaves first."""
        for leaf in self._calls.leaves:
            yield from self._of_leaf(leaf)
        for core in self._calls.cores():
            sources = self._known(core.sources)
            if sources is not None:
                for result in core.results:
                    yield from self._of(core.attention, sources, result, is_core=True, is_centred=False)

    def _of_leaf(self, leaf: Call) -> Iterator[Gain]:
        inputs = self._known(leaf.inputs)
        self.has_inputs |= bool(inputs)
        if inputs is None or not inputs:
            if any(_is_float(record) for record in leaf.outputs):
                self.untested[leaf.site] = None
            return
        if any(not _is_float(pair) and pair.status != "identical" for pair in inputs):
            return  # other tokens, other experts: the outputs have nothing to do with each other
        is_core = not self._calls.is_simple(leaf.site)
        for output in made_directly(leaf):
            yield from self._of(
                leaf.site,
                [pair for pair in inputs if _is_float(pair)],
                output,
                is_core=is_core,
                is_centred=self._calls.is_centred(leaf.site),
            )

    def _known(self, records: Sequence[Record]) -> list[Pair] | None:
        """The pairs of records, or None if one of them was not compared."""
        pairs = [self._pairs.get(record.key.text) for record in records]
        known = [pair for pair in pairs if pair is not None and pair.is_compared]
        return known if len(known) == len(records) else None

    def _of(
        self, site: str, sources: Sequence[Pair], record: Record, *, is_core: bool, is_centred: bool
    ) -> Iterator[Gain]:
        result = self._pairs.get(record.key.text)
        if result is None or result.difference is None or not _is_float(record):
            return
        output = self._errors.get(result.key)
        errors = [self._errors.get(pair.key) for pair in sources]
        known = [error for error in errors if error is not None]
        if output is None or len(known) < len(errors):
            return
        inputs = self._together(known, is_core=is_core)
        precision = self._precision(result)
        finding = self._policy.judge_gain(output, inputs, precision, is_core=is_core)
        if finding.status != "within-rounding" and result.key not in self._aligned:
            looks = self._confirm(sources, result, is_centred)
            inputs, output = min(
                ((self._together(look.inputs, is_core=is_core), look.output) for look in looks),
                key=lambda errors: errors[1] / errors[0] if errors[0] else math.inf,
            )
            second = self._policy.judge_gain(output, inputs, precision, is_core=is_core)
            finding = min(finding, second, key=lambda found: found.value)
        yield Gain(site, result, inputs, output, finding)

    @staticmethod
    def _together(errors: Sequence[float], *, is_core: bool) -> float:
        """Errors of inputs as one: of queries, keys and values the largest, of others the root of squares."""
        return max(errors, default=0.0) if is_core else math.hypot(*errors)


def made_directly(leaf: Call) -> list[Record]:
    """Outputs of a leaf; of a router its scores alone, since what it does to those it chose is a softmax."""
    chosen = [record.shape[-1] for record in leaf.outputs if is_routing(record)]
    if not chosen:
        return leaf.outputs
    return [record for record in leaf.outputs if record.shape and record.shape[-1] > max(chosen)]


def row_error(pair: Pair) -> float | None:
    """`epsilon`, the median over rows of the relative error; 0 for identical pairs."""
    return 0.0 if pair.difference is None else pair.difference.row_error_median


class SecondLook:
    """Measures errors again in ways that one huge element, or a large mean, does not hide.

    A massive activation makes the relative error of a tensor small in the norm, so that the module after
    it, which may well ignore that element, seems to make a large error: the largest elements of a row are
    left out of the input. A norm that takes the mean away takes away what made the input large.
    """

    def __init__(self, reference: Archive, target: Archive) -> None:
        self._archives = reference, target

    def __call__(self, sources: Sequence[Pair], result: Pair, is_centred: bool) -> list[Look]:
        """Errors of the inputs and of the output, by each measure."""
        output, _, _ = self._errors(result, is_centred=False)
        inputs = [self._errors(pair, is_centred=is_centred) for pair in sources]
        return [Look(tuple(errors[i] for errors in inputs), output) for i in range(3)]

    def _errors(self, pair: Pair, *, is_centred: bool) -> tuple[float, float, float]:
        """Relative error of a pair: in the norm, without the largest of each row, and around its mean."""
        if pair.difference is None or pair.reference is None or pair.target is None:
            return 0.0, 0.0, 0.0
        records = pair.reference, pair.target
        x, y = (sample(a, r) for a, r in zip(self._archives, records, strict=True))
        columns = min(pair.reference.shape[-1] if pair.reference.shape else 1, x.size)
        rows = x[: x.size - x.size % columns].reshape(-1, columns)
        d = y[: rows.size].reshape(rows.shape) - rows
        ok = np.isfinite(d)
        d, rows = np.where(ok, d, 0), np.where(ok, rows, 0)
        smaller = np.argpartition(np.abs(rows), columns - _largest(columns) - 1, axis=1)
        smaller = smaller[:, : columns - _largest(columns)]
        errors, squares = (np.take_along_axis(side, smaller, axis=1) ** 2 for side in (d, rows))
        found = [
            np.sqrt(_ratio((d**2).sum(axis=1), (rows**2).sum(axis=1))),
            np.sqrt(_ratio(errors.sum(axis=1), squares.sum(axis=1))),
        ]
        if is_centred:
            spread = ((rows - rows.mean(axis=1, keepdims=True)) ** 2).sum(axis=1)
            found.append(np.sqrt(_ratio((d**2).sum(axis=1), spread)))
        else:
            found.append(found[0])
        norm, smaller_norm, centred = (float(np.median(errors)) for errors in found)
        return norm, smaller_norm, centred


def sample(archive: Archive, record: Record, limit: int = _SAMPLE) -> Array:
    """The first values of a tensor, at most `limit`, as float64 in one dimension."""
    bits = archive.read_range(record, 0, min(record.size, limit))
    values = decode(bits, record.dtype)
    return np.abs(values).astype(np.float64) if values.dtype.kind == "c" else values.astype(np.float64)


def _largest(columns: int) -> int:
    """How many elements of a row are left out: 1 %, at least one where there are several."""
    return max(1, columns // 100) if columns > 1 else 0


def _ratio(errors: Array, sizes: Array) -> Array:
    out: Array = np.zeros(errors.shape)
    np.divide(errors, sizes, out=out, where=sizes > 0)
    return out


def _is_float(thing: Record | Pair) -> bool:
    record = thing.reference if isinstance(thing, Pair) else thing
    return record is not None and record.dtype.kind in ("float", "complex")
