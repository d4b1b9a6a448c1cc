"""Measure pairs of records: read both block by block, in one thread or several, with the fastest engine."""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Final, TypeAlias

import numpy as np

from tensorcap.metrics.difference import Difference, Tolerance
from tensorcap.metrics.kernel_state import KERNELS, Kernel
from tensorcap.metrics.numpy_engine import NumpyEngine
from tensorcap.metrics.operands import Operands
from tensorcap.metrics.totals import Totals
from tensorcap_formats.archive import Archive, room_for
from tensorcap_formats.dtypes import Array
from tensorcap_formats.errors import UsageError
from tensorcap_formats.progress import Progress
from tensorcap_formats.records import Record

if TYPE_CHECKING:
    from tensorcap.metrics.compiled_engine import CompiledEngine, EngineMemory

Tolerances = Tolerance | None | Sequence[Tolerance | None]

_ENGINE_VARIABLE: Final = "TCAP_ENGINE"
_BUFFER_BYTES: Final = 512 * 1024  # of either side: both stay in a core's L2 cache
_PART_BYTES: Final = 64 * 1024 * 1024  # of the reference; larger tensors are measured in parts of about that
_WORTH_LOADING_BYTES: Final = 64 * 1024 * 1024  # of both sides: below, numpy is done before code is loaded
_WORTH_COMPILING_BYTES: Final = 512 * 1024 * 1024  # of both sides, if there is no code yet
_PAIR_BYTES: Final = 128 * 1024  # numpy takes as long to begin with a pair as for so many bytes
_SMALL_BYTES: Final = 64 * 1024  # tensors below it are read faster by one thread than by two
_TOGETHER_BYTES: Final = 1024 * 1024  # of either side: so many bytes of small tensors are measured together,
_TOGETHER_PAIRS: Final = 1024  # and so many pairs


EngineClass: TypeAlias = "type[NumpyEngine] | type[CompiledEngine]"


def measure(
    reference: Archive,
    reference_record: Record,
    target: Archive,
    target_record: Record,
    *,
    tolerance: Tolerance | None = None,
) -> Difference:
    """Measure how far one stored tensor lies from another of the same shape, in bounded memory.

    Args:
        reference: The trusted archive.
        reference_record: One of its records.
        target: The archive under test.
        target_record: A record of the same shape that packs as many values into an element.
        tolerance: The error that is allowed, or None.

    Raises:
        ReadError: One side cannot be read.
    """
    (result,) = measure_pairs(reference, target, [(reference_record, target_record)], tolerance=tolerance)
    if isinstance(result, OSError):
        raise result
    return result


def measure_pairs(
    reference: Archive,
    target: Archive,
    pairs: Sequence[tuple[Record, Record]],
    *,
    tolerance: Tolerances = None,
    threads: int = 2,
    progress: Progress | None = None,
) -> Iterator[Difference | OSError]:
    """Measure pairs of records, each as `measure` does.

    A tensor whose bytes have not the digest that its archive says cannot be read.

    Args:
        reference: The trusted archive.
        target: The archive under test.
        pairs: Records of both archives; the two of a pair have one shape.
        tolerance: The error that is allowed for all of them, or for each.
        threads: How many may read and measure at the same time; the numbers do not depend on it.
        progress: Receives the bytes of the reference that are measured, and those of all pairs.

    Yields:
        In the order of the pairs the difference, or the error why a side cannot be read.

    Raises:
        UsageError: The environment asks for an engine that does not exist, or is not installed.
    """
    tolerances = list(tolerance) if isinstance(tolerance, Sequence) else [tolerance] * len(pairs)
    operands = [
        Operands(trusted.dtype, tested.dtype, trusted.shape, allowed)
        for (trusted, tested), allowed in zip(pairs, tolerances, strict=True)
    ]
    reference_bytes = [trusted.nbytes for trusted, _ in pairs]
    total = sum(reference_bytes)
    pair_bytes = [nbytes + tested.nbytes for nbytes, (_, tested) in zip(reference_bytes, pairs, strict=True)]
    both = sum(pair_bytes)
    batch = _Batch(reference, target, pairs, operands, _choose_engines(operands, pair_bytes))
    if both < 2 * _SMALL_BYTES * len(pairs):
        threads = 1
    done = 0
    for nbytes, result in zip(reference_bytes, batch.results(threads), strict=True):
        yield result
        done += nbytes
        if progress is not None and nbytes:
            progress.advance(done, total)


def _choose_engines(operands: Sequence[Operands], pair_bytes: Sequence[int]) -> list[EngineClass]:
    """Choose the fastest engine for each pair, or the one that the environment asks for.

    1. numpy for little data and few pairs, for dtypes that no kernel takes, and if numba is not installed.
    2. Compiled kernels for more, if they are in the cache or there is so much that compiling them pays.
    3. numpy with a warning if the kernels cannot be compiled or loaded.
    """
    engines: list[EngineClass] = [NumpyEngine] * len(operands)
    asked = os.environ.get(_ENGINE_VARIABLE, "")
    if asked not in ("", "numba", "numpy"):
        raise UsageError(f"{_ENGINE_VARIABLE}: is {asked!r}, expected 'numba' or 'numpy'")
    work_bytes = sum(pair_bytes) + _PAIR_BYTES * len(operands)
    if asked == "numpy" or (not asked and work_bytes < _WORTH_LOADING_BYTES):
        return engines
    from tensorcap.metrics import machine_code

    if not machine_code.is_available():
        if asked:
            raise UsageError(f"{_ENGINE_VARIABLE}: is 'numba', which is not installed, expected 'numpy'")
        return engines
    from tensorcap.metrics.compiled_engine import CompiledEngine

    kernels = [CompiledEngine.kernel(pair) for pair in operands]
    for kernel in KERNELS:
        numbers = [number for number, one in enumerate(kernels) if one == kernel]
        work_bytes = sum(pair_bytes[number] for number in numbers) + _PAIR_BYTES * len(numbers)
        try:
            if not numbers or not (asked or _is_worth_loading(kernel, work_bytes)):
                continue
            machine_code.load(kernel)  # before there are threads
        except Exception as error:  # whatever a numba that does not fit may raise: numpy has the same results
            if asked:
                raise
            reason = str(error).partition("\n")[0]
            warnings.warn(f"compiled kernels cannot be had, numpy is slower: {reason}", stacklevel=3)
            return engines
        for number in numbers:
            engines[number] = CompiledEngine
    return engines


def _is_worth_loading(kernel: Kernel, work_bytes: int) -> bool:
    from tensorcap.metrics import machine_code

    if work_bytes < _WORTH_LOADING_BYTES:
        return False
    return work_bytes >= _WORTH_COMPILING_BYTES or machine_code.is_kept(kernel)


@dataclass(slots=True)
class _Work:
    """A pair that is being measured.

    Attributes:
        number: Number of the pair.
        cuts: Where its parts begin, and the last one ends.
        parts: Totals of its parts, None for those that are not measured yet.
        left: How many parts are not measured yet.
        error: Why a side cannot be read.
    """

    number: int
    cuts: Sequence[int]
    parts: list[Totals | None]
    left: int
    error: OSError | None = None


@dataclass(frozen=True, slots=True)
class _Together:
    """Small pairs that are measured together.

    Attributes:
        numbers: Numbers of the pairs.
    """

    numbers: Sequence[int]


_Task: TypeAlias = _Together | tuple[_Work, Sequence[int]]


class _NotTogetherError(Exception):
    """Pairs have to be measured one by one."""


class _Buffers:
    """Memory that one thread uses again and again: for a block of either side, and for a compiled engine."""

    def __init__(self) -> None:
        self.sides = np.empty((2, _BUFFER_BYTES), np.uint8)
        self._compiled: EngineMemory | None = None

    @cached_property
    def whole_sides(self) -> Array:
        """Room for many small tensors of either side."""
        return np.empty((2, _TOGETHER_BYTES), np.uint8)

    def compiled(self) -> EngineMemory:
        """Return the memory of compiled engines, which belongs to one at a time."""
        from tensorcap.metrics.compiled_engine import EngineMemory

        if self._compiled is None:
            self._compiled = EngineMemory()
        return self._compiled

    def engine(self, kind: EngineClass, operands: Operands, start: int) -> NumpyEngine | CompiledEngine:
        """Return an engine, to which the memory belongs until the next one is asked for."""
        if kind is NumpyEngine:
            return NumpyEngine(operands, start)
        from tensorcap.metrics.compiled_engine import CompiledEngine

        return CompiledEngine(operands, start, self.compiled())


class _Batch:
    """Pairs that are measured by one thread or several; results come in the order of the pairs."""

    def __init__(
        self,
        reference: Archive,
        target: Archive,
        pairs: Sequence[tuple[Record, Record]],
        operands: Sequence[Operands],
        engines: Sequence[EngineClass],
    ) -> None:
        self._archives = reference, target
        self._pairs = pairs
        self._operands = operands
        self._engines = engines
        self._changed = threading.Condition()
        self._tasks = self._list_tasks()
        self._finished: dict[int, Difference | OSError] = {}
        self._failure: BaseException | None = None

    def results(self, threads: int) -> Iterator[Difference | OSError]:
        """Measure all pairs."""
        if threads == 1:
            buffers, number = _Buffers(), 0
            for task in self._tasks:
                self._do(task, buffers)
                while number in self._finished:
                    yield self._finished.pop(number)
                    number += 1
            return
        workers = [threading.Thread(target=self._run, daemon=True) for _ in range(threads)]
        for worker in workers:
            worker.start()
        try:
            for number in range(len(self._pairs)):
                with self._changed:
                    self._changed.wait_for(lambda n=number: n in self._finished or self._failure)  # type: ignore[misc]  # mypy cannot infer it
                    if self._failure:
                        raise self._failure
                    result = self._finished.pop(number)
                yield result
        finally:  # also if the caller does not want the rest: the archives may be closed next
            with self._changed:
                self._tasks = iter(())
            for worker in workers:
                worker.join()

    def _list_tasks(self) -> Iterator[_Task]:
        """List the tasks of threads: pairs that are measured together, or what is done for one alone."""
        together: list[int] = []
        room = 0
        for number, (operands, records) in enumerate(zip(self._operands, self._pairs, strict=True)):
            nbytes = max(map(room_for, records))
            is_small = 0 < nbytes <= _SMALL_BYTES and self._engines[number] is not NumpyEngine
            if together and (
                not is_small or room + nbytes > _TOGETHER_BYTES or len(together) == _TOGETHER_PAIRS
            ):
                yield _Together(together)
                together, room = [], 0
            if is_small:
                together.append(number)
                room += nbytes
            else:
                yield from self._list_parts(number, operands)
        if together:
            yield _Together(together)

    def _list_parts(self, number: int, operands: Operands) -> Iterator[tuple[_Work, Sequence[int]]]:
        """List tasks of one pair: a part of it if parts can be read independently, else all of it."""
        are_direct = all(archive.is_direct for archive in self._archives)
        cuts = _find_cuts(operands, self._engines[number].unit)
        count = len(cuts) - 1
        if count > 1 and are_direct:  # what is read in parts is not checked: another task reads all of it
            count += len(self._archives)
        work = _Work(number, cuts, [None] * count, count)
        if are_direct:
            yield from ((work, [part]) for part in range(count))
        else:
            yield work, range(count)

    def _run(self) -> None:
        buffers = _Buffers()
        try:
            while True:
                with self._changed:
                    task = next(self._tasks, None)
                if task is None:
                    return
                self._do(task, buffers)
        except BaseException as failure:
            with self._changed:
                self._failure = failure
                self._changed.notify_all()

    def _do(self, task: _Task, buffers: _Buffers) -> None:
        if not isinstance(task, _Together):
            self._measure_parts(*task, buffers)
            return
        try:
            results = self._measure_together(task.numbers, buffers)
        except _NotTogetherError:
            for number in task.numbers:
                for work, parts in self._list_parts(number, self._operands[number]):
                    self._measure_parts(work, parts, buffers)
            return
        with self._changed:
            self._finished.update(results)
            self._changed.notify_all()

    def _measure_together(self, numbers: Sequence[int], buffers: _Buffers) -> dict[int, Difference]:
        """Read small tensors of both sides, and measure those of the same dtypes by one call.

        Raises:
            _NotTogetherError: One cannot be read, or compiled code does not measure it.
        """
        from tensorcap.metrics.compiled_engine import CompiledEngine, OutOfRangeError
        from tensorcap.metrics.pair_batch import measure_batch

        groups: dict[tuple[str, str], list[int]] = {}
        for place, number in enumerate(numbers):
            trusted, tested = self._pairs[number]
            groups.setdefault((trusted.dtype.name, tested.dtype.name), []).append(place)
        results: dict[int, Difference] = {}
        try:
            places = [
                archive.read_many([self._pairs[number][side] for number in numbers], buffer)
                for side, (archive, buffer) in enumerate(
                    zip(self._archives, buffers.whole_sides, strict=True)
                )
            ]
            for group in groups.values():
                members = [numbers[place] for place in group]
                operands = [self._operands[number] for number in members]
                reference, target = (
                    (buffer, [side[place] for place in group])
                    for buffer, side in zip(buffers.whole_sides, places, strict=True)
                )
                kernel = CompiledEngine.kernel(operands[0]) or "narrow"
                differences = measure_batch(kernel, operands, reference, target, buffers.compiled())
                results.update(zip(members, differences, strict=True))
        except (OSError, OutOfRangeError):
            raise _NotTogetherError from None
        return results

    def _measure_parts(self, work: _Work, numbers: Sequence[int], buffers: _Buffers) -> None:
        """Measure some parts of a pair; the thread that measures the last one adds them up."""
        for number in numbers:
            totals, error = None, work.error
            if error is None:
                try:
                    if number + 1 < len(work.cuts):
                        start, stop = work.cuts[number : number + 2]
                        totals = self._measure_part(work.number, start, stop, buffers)
                    else:
                        side = number + 1 - len(work.cuts)
                        self._archives[side].verify(self._pairs[work.number][side])
                except OSError as read_error:  # one of ours, or of the system
                    error = read_error
            with self._changed:
                work.parts[number], work.error = totals, work.error or error
                work.left -= 1
                is_last = not work.left
        if is_last:
            result = work.error or self._add_parts(work)
            with self._changed:
                self._finished[work.number] = result
                self._changed.notify_all()

    def _add_parts(self, work: _Work) -> Difference:
        first, *others = (totals for totals in work.parts if totals)
        for totals in others:
            first.add(totals)
        return first.difference(self._operands[work.number])

    def _measure_part(self, number: int, start: int, stop: int, buffers: _Buffers) -> Totals:
        kind = self._engines[number]
        if kind is NumpyEngine:
            return self._add_blocks(kind, number, start, stop, buffers)
        from tensorcap.metrics.compiled_engine import OutOfRangeError

        try:
            return self._add_blocks(kind, number, start, stop, buffers)
        except OutOfRangeError:
            return self._add_blocks(NumpyEngine, number, start, stop, buffers)

    def _add_blocks(self, kind: EngineClass, number: int, start: int, stop: int, buffers: _Buffers) -> Totals:
        operands, records = self._operands[number], self._pairs[number]
        packed = operands.reference.packed
        itemsizes = [record.dtype.itemsize for record in records]
        limit = _BUFFER_BYTES // max(itemsizes) * packed
        engine = buffers.engine(kind, operands, start)
        while start < stop:
            end = stop if stop - start <= limit else min(operands.cut(start, limit, kind.unit), stop)
            sides = []
            for archive, record, itemsize, buffer in zip(
                self._archives, records, itemsizes, buffers.sides, strict=True
            ):
                sides.append(buffer[: (end - start) // packed * itemsize].view(record.dtype.storage))
                archive.read_into(record, start // packed, sides[-1])
            engine.add(*sides)
            start = end
        return engine.totals()


def _find_cuts(operands: Operands, unit: int) -> list[int]:
    """Find where the parts of a tensor begin, and the last one ends: the same places for all threads."""
    size, dtype = operands.size, operands.reference
    cuts = [0]
    while cuts[-1] < size and size * dtype.itemsize > _PART_BYTES * dtype.packed:
        limit = _PART_BYTES // dtype.itemsize * dtype.packed
        cuts.append(operands.cut(cuts[-1], limit, unit))
    return cuts if len(cuts) > 1 else [0, size]
