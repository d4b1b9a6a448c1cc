"""Write an archive: tensors as they come, each safe when `add` returns, one rename at the end."""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, NoReturn

import numpy as np

from tensorcap_formats.content import write_errors
from tensorcap_formats.digests import ALGORITHMS, DEFAULT_ALGORITHM, digest
from tensorcap_formats.dtypes import Array, DType
from tensorcap_formats.errors import CorruptArchiveError, UsageError, WriteError
from tensorcap_formats.hdf5 import HEAD_SIZE, align_offset, finish_flat_file, write_at
from tensorcap_formats.index import Index, encode_json, parse_shape
from tensorcap_formats.keys import Key
from tensorcap_formats.output_path import partial_path, recovery_command, resolved
from tensorcap_formats.records import Record
from tensorcap_formats.statistics import Statistics, StatisticsBuilder
from tensorcap_formats.writing.journal import Journal, Placed
from tensorcap_formats.writing.publishing import container_of, publish, refuse_to_replace_others

_NO_JSON: Final = (TypeError, ValueError, RecursionError)


class Writer:
    """Writes one archive; the caller ends it with `close`, or with `abandon` after a failure.

    Until `close` has returned, everything is in `PATH.partial` and `PATH.journal`, from which
    `recovery.recover` can save it, and what was at the path is untouched. May be used from several
    threads. Nothing here imports more than numpy and the standard library.

    Attributes:
        path: Where the archive will be.
        container: `hdf5`, `zarr` or `safetensors`.
        records_count: Count of records so far.
        tensor_bytes: Sum of the sizes of all records so far.
        stored_bytes: Bytes of the distinct tensors so far.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        container: str | None = None,
        run: Mapping[str, Any] | None = None,
        stats_only: bool = False,
        fsync: bool = False,
    ) -> None:
        """Reserve the path.

        Args:
            path: A file, or for zarr a folder; the folder it is in must exist.
            container: What to write; by the path's suffix if None.
            run: Run metadata as known now, a JSON object; kept for recovery.
            stats_only: Keep digests and statistics, no bytes.
            fsync: Make each tensor durable against a power cut; a killed process needs no such thing.

        Raises:
            UsageError: The suffix names no container, or the run has no JSON form.
            WriteError: Another process writes it, an unfinished capture is there, something that is no
                archive of ours does, or the folder cannot be written.
        """
        self.path = Path(path)
        self.container = container_of(self.path, container)
        self.records_count = self.tensor_bytes = self.stored_bytes = 0
        self._run: Mapping[str, Any] = run or {}
        _require_json(self._run, f"{self.path}: run")
        self._stats_only = stats_only
        self._fsync = fsync
        self._end = HEAD_SIZE
        self._placed: list[Placed] = []
        self._texts: set[str] = set()
        self._values: dict[str, Any] = {}
        self._known: dict[tuple[str, int], int] = {}  # digest and size: where the bytes lie
        self._statistics: dict[tuple[str, str], Statistics] = {}  # digest and dtype
        self._lock = threading.Lock()
        self._is_open = True
        folder = resolved(self.path).parent
        if not folder.is_dir():
            raise WriteError(f"{self.path}: there is no folder {str(folder)!r}", hint="Create it first.")
        self._partial = partial_path(self.path)
        self._journal = Journal(self.path)
        if not self._journal.is_empty and self._journal.confirms_nothing:
            with write_errors(self.path):
                self._journal.clear(self._partial)
        elif not self._journal.is_empty:
            self._journal.close(remove=False)
            raise WriteError(
                f"{self.path}: an unfinished capture lies there, in {self._journal.path.name}",
                hint=f"Save what it holds with {recovery_command(self.path)}, or delete "
                f"{self._journal.path.name} and {self._partial.name}.",
            )
        try:
            with write_errors(self.path):
                refuse_to_replace_others(self.path)
                self._journal.start(self.container, DEFAULT_ALGORITHM, self._run)
                self._fd = self._create_partial()
        except BaseException:
            self._journal.close(remove=True)
            raise

    def add(
        self,
        key: Key,
        bits: Array,
        dtype: DType,
        shape: tuple[int, ...],
        *,
        order: int | None = None,
    ) -> None:
        """Add one tensor; when this returns, a killed process no longer loses it.

        Args:
            key: Where it was seen; once an archive.
            bits: Its stored elements, C-contiguous, of the type `dtype.storage`; free again on return.
            dtype: Its logical dtype.
            shape: Its shape, whose product is the number of stored elements.
            order: Execution order number; the next one if None.

        Raises:
            UsageError: The key is there already, or bits, dtype and shape contradict each other.
            WriteError: The disk is full or fails; the writer has then ended.
        """
        flat = bits.reshape(-1)
        _require_storage(key, flat, dtype)
        with self._lock:
            self._check(key, dtype, shape, flat.size)
            hexdigest = digest(flat.view(np.uint8))
            statistics = self._statistics.get((hexdigest, dtype.name))
            if statistics is None:
                builder = StatisticsBuilder(dtype)
                builder.add(flat)
                statistics = builder.result()
            offset = self._offset_of(hexdigest, flat.nbytes)
            if offset == self._end:
                self._write(offset, flat.view(np.uint8))
            self._confirm(key, dtype, shape, order, hexdigest, statistics, offset)

    def add_blocks(
        self,
        key: Key,
        blocks: Iterable[Array],
        dtype: DType,
        shape: tuple[int, ...],
        *,
        order: int | None = None,
    ) -> None:
        """Add one tensor of any size in bounded memory; as `add`, with its elements in blocks.

        Args:
            key: As for `add`.
            blocks: One-dimensional pieces of the stored elements, in C order; each is used before the
                next is asked for.
            dtype: As for `add`.
            shape: As for `add`.
            order: As for `add`.

        Raises:
            UsageError: As `add`; or the blocks hold fewer or more elements than the shape, or of a type
                that is not the dtype's.
            WriteError: As `add`.
        """
        with self._lock:
            self._check(key, dtype, shape, None)
            hasher = ALGORITHMS[DEFAULT_ALGORITHM]()
            builder = StatisticsBuilder(dtype)
            expected, size = math.prod(shape) * dtype.itemsize, 0
            for block in blocks:
                flat = np.ascontiguousarray(block).reshape(-1)
                _require_storage(key, flat, dtype)
                raw = flat.view(np.uint8)
                if size + raw.nbytes > expected:
                    raise UsageError(
                        f"{key.text}: blocks hold more than {expected} bytes, those of shape {shape}"
                    )
                hasher.update(raw)
                builder.add(flat)
                if not self._stats_only:
                    self._write(self._end + size, raw)
                size += raw.nbytes
            if size != expected:
                raise UsageError(
                    f"{key.text}: blocks hold {size} bytes, expected {expected} for shape {shape}"
                )
            hexdigest = hasher.hexdigest()
            offset = self._offset_of(hexdigest, size)
            self._confirm(key, dtype, shape, order, hexdigest, builder.result(), offset)

    def add_value(self, key_text: str, value: object) -> None:
        """Add a value that is no tensor: None, a bool, a number or a text.

        Raises:
            UsageError: The value has no JSON form.
            WriteError: As `add`.
        """
        with self._lock:
            self._require_open()
            try:
                self._journal.confirm_value(key_text, value)
            except OSError as error:
                self._fail(error)
            except _NO_JSON as error:
                raise UsageError(f"{key_text}: value has no JSON form: {error}") from error
            self._values[key_text] = value

    def close(
        self,
        *,
        run: Mapping[str, Any] | None = None,
        complete: bool = True,
        ordered: bool = True,
        path: Path | None = None,
    ) -> Path:
        """Finish the archive and put it in its place.

        Args:
            run: Run metadata in place of that given at the start.
            complete: Whether the run ended as it should.
            ordered: Whether the order of the records is that of execution.
            path: Another place for it, in the same folder; for an incomplete archive that must not
                replace the one before.

        Returns:
            The path of the archive.

        Raises:
            UsageError: The run has no JSON form; the writer is still open.
            WriteError: The disk is full; the temporary and the journal stay for `recovery.recover`.
        """
        with self._lock:
            self._require_open()
            if run is not None:
                _require_json(run, f"{self.path}: run")
            target = path or self.path
            try:
                placed = sorted(self._placed, key=lambda p: p.record.order)
                index = Index(
                    [p.record for p in placed],
                    self._values,
                    self._run if run is None else run,
                    DEFAULT_ALGORITHM,
                    complete,
                    ordered,
                )
                offsets = [p.offset for p in placed]
                finish_flat_file(self._fd, index, offsets, self._end, fsync=self._fsync)
                os.close(self._fd)
                self._fd = -1
                publish(self._partial, target, self.container, fsync=self._fsync)
            except BaseException as error:
                self._end_unfinished()
                if isinstance(error, OSError):
                    self._fail(error)
                raise
            self._is_open = False
            self._journal.close(remove=True)
            return target

    def abandon(self, *, discard: bool = False) -> None:
        """End without an archive.

        Args:
            discard: Remove what was written; else it is left for `recovery.recover`.
        """
        with self._lock:
            self._end_unfinished(discard=discard)

    def _create_partial(self) -> int:
        """Create the temporary; a file of that name without a journal is not ours."""
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            return os.open(self._partial, flags, 0o666)
        except FileExistsError:
            raise WriteError(
                f"{self._partial}: is there without a journal, and is not overwritten",
                hint="Move it away or delete it.",
            ) from None

    def _require_open(self) -> None:
        if not self._is_open:
            raise UsageError(f"{self.path}: the writer has ended")
        if not self._journal.is_held:
            raise UsageError(
                f"{self.path}: is written by the process that this one was forked from",
                hint="Open another path in this process.",
            )

    def _check(self, key: Key, dtype: DType, shape: tuple[int, ...], size: int | None) -> None:
        self._require_open()
        text = key.text
        if Key.parse(text) != key:
            raise UsageError(f"key {text!r}: reads back as another key, expected escaped parts (NAM-3)")
        try:
            parse_shape(shape, dtype.itemsize, text)
        except CorruptArchiveError as error:
            raise UsageError(str(error)) from None
        if text in self._texts:
            raise UsageError(f"{self.path}: key {text!r} stands there already")
        if size is not None and size != math.prod(shape):
            raise UsageError(f"{text}: {size} elements, shape {shape} has another number")

    def _offset_of(self, hexdigest: str, nbytes: int) -> int | None:
        """Where bytes lie, or will lie if they are new; None if they are not stored."""
        if not nbytes or self._stats_only:
            return None
        return self._known.get((hexdigest, nbytes), self._end)

    def _write(self, offset: int, raw: Array) -> None:
        try:
            write_at(self._fd, offset, raw)
            if self._fsync:
                os.fdatasync(self._fd)
        except OSError as error:
            self._fail(error)

    def _confirm(
        self,
        key: Key,
        dtype: DType,
        shape: tuple[int, ...],
        order: int | None,
        hexdigest: str,
        statistics: Statistics,
        offset: int | None,
    ) -> None:
        row = len(self._placed)
        record = Record(
            key,
            dtype,
            tuple(shape),
            row if order is None else order,
            hexdigest,
            statistics,
            not self._stats_only,
            row,
        )
        placed = Placed(record, offset)
        try:
            self._journal.confirm(placed)
            if self._fsync:
                self._journal.sync()
        except OSError as error:
            self._fail(error)
        self._placed.append(placed)
        self._texts.add(key.text)
        self._statistics[hexdigest, dtype.name] = statistics
        self.records_count += 1
        self.tensor_bytes += record.nbytes
        if offset == self._end:
            self._known[hexdigest, record.nbytes] = offset
            self._end = align_offset(offset + record.nbytes)
            self.stored_bytes += record.nbytes

    def _end_unfinished(self, *, discard: bool = False) -> None:
        """Close the files; keep them for `recovery.recover`, or remove them."""
        if not self._is_open:
            return
        self._is_open = False
        if self._fd >= 0:
            os.close(self._fd)
        if discard and self._journal.is_held:
            self._partial.unlink(missing_ok=True)
        self._journal.close(remove=discard)

    def _fail(self, error: OSError) -> NoReturn:
        """End after an error of the disk; everything confirmed so far can be recovered."""
        with suppress(OSError):  # the first error is the one to report
            self._end_unfinished()
        raise WriteError(
            f"{self.path}: {error.strerror or error}; {self.records_count} tensors are safe in "
            f"{self._partial.name}",
            hint=f"Make room, then {recovery_command(self.path)} saves them.",
        ) from error


def _require_storage(key: Key, flat: Array, dtype: DType) -> None:
    if flat.dtype.str != dtype.storage:
        raise UsageError(f"{key.text}: bits are {flat.dtype}, expected {dtype.storage} for {dtype.name}")


def _require_json(value: object, what: str) -> None:
    try:
        encode_json(value)
    except _NO_JSON as error:
        raise UsageError(f"{what} has no JSON form: {error}") from error
