"""An open archive: records in execution order, their bytes on demand, the same for every container."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from tensorcap_formats.dtypes import Array, decode
from tensorcap_formats.errors import ReadError, TensorNotFoundError, UsageError, no_such_tensor
from tensorcap_formats.keys import Key, escape_bare, matches
from tensorcap_formats.notebook import ROWS, card
from tensorcap_formats.records import Record
from tensorcap_formats.run_info import RunInfo
from tensorcap_formats.statistics import Statistics, StatisticsBuilder

if TYPE_CHECKING:
    from typing_extensions import Self

_ALIGNMENT: Final = 64  # of tensors in a buffer, as in our flat files
BLOCK_BYTES: Final = 512 * 1024  # two of them, reference and target, stay in a core's L2 cache


class Archive(ABC):
    """Base class of all readers; get one from `open_archive`, and close it or use `with`.

    Attributes:
        path: The file or folder.
        container: `hdf5`, `zarr`, `safetensors`, `npz`, `npy`, `npy-folder`, `pt`, `pt-folder`, `max`,
            `raw`, `dump-folder`, `intermediates-folder`, or `neuron-captures`, `neuron-inputs`,
            `neuron-snapshots` or `neuron-ranks`.
        is_foreign: Whether the file is not one of ours, so that it has names and tensors and no more.
        records: All records; in execution order if `is_ordered`, else in natural order of names.
        is_ordered: Whether the execution order is known.
        is_complete: Whether the run that wrote the archive ended as it should.
        run: The run's metadata as the file has them, `{}` for a file from elsewhere; `info` has them parsed.
            Specified in `specs/archive.md`.
        values: Arguments and results that are no tensors, by key text, as JSON values.
        algorithm: Digest algorithm of `Record.digest`, or None if there are no digests.
        root: Hash over all records as the index gives it, or None if there is no index.
        is_direct: Whether any part of a tensor costs no more to read than its bytes, and threads may read
            parts of one tensor; if not, tensors are best read from beginning to end.
        trusts_digests: Whether the digests are known to be those of the bytes, as far as that can be known
            without reading them: the archive is as we wrote it. False if another program may have altered
            tensors under an index that stayed as it was, or if there are no digests.
        checks_digests: Whether a tensor that is read from its beginning to its end is checked against its
            digest.
        skipped: Why other things in a file from elsewhere, such as arrays of text, were not read, by name.
        problems: Why some of these could not be read though they should be, so that tensors are lacking.
    """

    is_direct = False
    checks_digests = False

    def __init__(
        self,
        path: Path,
        container: str,
        records: Sequence[Record],
        *,
        is_foreign: bool = False,
        is_ordered: bool = True,
        is_complete: bool = True,
        run: Mapping[str, Any] | None = None,
        values: Mapping[str, Any] | None = None,
        algorithm: str | None = None,
        root: str | None = None,
        trusts_digests: bool = False,
        skipped: Mapping[str, str] | None = None,
        problems: Mapping[str, str] | None = None,
    ) -> None:
        self.path = path
        self.container = container
        self.records = records
        self.is_foreign = is_foreign
        self.is_ordered = is_ordered
        self.is_complete = is_complete
        self.run = dict(run or {})
        self.values = dict(values or {})
        self.algorithm = algorithm
        self.root = root
        self.trusts_digests = trusts_digests
        self.skipped: Mapping[str, str] = dict(skipped or {})
        self.problems: Mapping[str, str] = dict(problems or {})

    @abstractmethod
    def _read_flat(self, record: Record, start: int, out: Array) -> None:
        """Fill one-dimensional `out` with the stored elements from number `start` on, in C order.

        Raises:
            ReadError: The bytes cannot be read, or there are fewer of them than the record says.
        """

    @abstractmethod
    def close(self) -> None:
        """Close the file; a second call does nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        model = self.info.model_class.rpartition(".")[2]
        parts = [self.container, f"{len(self)} tensors", f"{model} {self.info.dtype}".strip()]
        parts += [] if self.is_complete else ["INCOMPLETE"]
        return f"<Archive {self.path}: {', '.join(filter(None, parts))}>"

    def _repr_html_(self) -> str:
        info = self.info
        facts = {
            "model": info.model_class.rpartition(".")[2],
            "weights in": info.dtype,
            "computed in": info.compute_dtype,
            "framework": info.framework,
            "run": "" if self.is_complete else "ended early",
        }
        rows = [(r.key.text, r.dtype.name, "x".join(map(str, r.shape))) for r in self.records[:ROWS]]
        return card(
            f"{self.path}: {self.container}, {len(self)} tensors",
            facts,
            head=("key", "dtype", "shape"),
            rows=rows,
            count=len(self),
            tone="plain" if self.is_complete else "red",
        )

    def __len__(self) -> int:
        return len(self.records)

    def __contains__(self, text: object) -> bool:
        return text in self._by_text

    @cached_property
    def _by_text(self) -> Mapping[str, Record]:
        return {record.key.text: record for record in self.records}

    @cached_property
    def info(self) -> RunInfo:
        """The run metadata, parsed; damaged entries count as absent."""
        return RunInfo.of(self.run)

    def get(self, name: str | Key) -> Record:
        """Find one record by its key, or by a shorter text that fits one record only.

        A name may leave out the step if there is one step that fits, and the slot likewise; aliases of
        shared modules resolve to the site that they share. A tensor of a file from elsewhere may be named
        as the file names it, unescaped.

        Raises:
            TensorNotFoundError: No record fits, or several do.
        """
        text = name.text if isinstance(name, Key) else name
        text = self.canonical(text)
        record = self._by_text.get(text) or self._by_text.get(escape_bare(text))
        if record is not None:
            return record
        fitting = [r for r in self.records if _fits(r.key, text)]
        if len(fitting) == 1:
            return fitting[0]
        if fitting:
            some = ", ".join(r.key.text for r in fitting[:4]) + (", …" if len(fitting) > 4 else "")
            raise TensorNotFoundError(
                f"{self.path}: {text!r} fits {len(fitting)} tensors, expected one",
                hint=f"Name one of: {some}",
            )
        raise no_such_tensor(str(self.path), text, self._by_text.keys())

    def select(self, only: Iterable[str] = (), *, exclude: Iterable[str] = ()) -> list[Record]:
        """The records whose keys match one of `only` (all if it is empty) and none of `exclude`.

        Raises:
            TensorNotFoundError: One of the patterns in `only` matches nothing.
        """
        only, exclude = list(only), list(exclude)
        for pattern in only:
            if not any(matches(record.key.text, pattern) for record in self.records):
                raise no_such_tensor(str(self.path), pattern, self._by_text.keys())
        return [
            record
            for record in self.records
            if (not only or any(matches(record.key.text, pattern) for pattern in only))
            and not any(matches(record.key.text, pattern) for pattern in exclude)
        ]

    def read(self, record: Record) -> Array:
        """The tensor's stored elements, in its shape; see `dtypes.decode` for values."""
        self._require_stored(record)
        try:
            out = np.empty(record.size, record.dtype.storage)
        except MemoryError:
            raise ReadError(
                f"{self.path}: {record.key.text}: its {record.nbytes} bytes do not fit into memory"
            ) from None
        if out.size:
            self._read_flat(record, 0, out)
        return out.reshape(record.shape)

    def of_rank(self, rank: int) -> Archive | None:
        """The same archive with what ranks hold copies of as one of them has it; None if it is not of ranks.

        Args:
            rank: The rank; of tensors that it has none of, those of the first rank stay.

        Returns:
            A view that is not to be closed.
        """
        return None

    def load(self, record: Record) -> Array:
        """The tensor's values, in its shape: float32 for bfloat16 and narrower floats."""
        return decode(self.read(record), record.dtype)

    def blocks(self, record: Record, block_bytes: int = BLOCK_BYTES) -> Iterator[Array]:
        """The stored elements in C order, one-dimensional, in blocks of one reused buffer."""
        self._require_stored(record)
        size = record.size
        buffer = np.empty(min(size, max(1, block_bytes // record.dtype.itemsize)), record.dtype.storage)
        for start in range(0, size, max(1, buffer.size)):
            out = buffer[: size - start]
            self._read_flat(record, start, out)
            yield out

    def read_range(self, record: Record, start: int, stop: int) -> Array:
        """The stored elements from number `start` up to `stop` in C order, one-dimensional.

        Raises:
            UsageError: They are not all within the tensor, or the archive has no bytes of it.
            ReadError: The bytes cannot be read.
        """
        self._require_range(record, start, stop)
        out = np.empty(stop - start, record.dtype.storage)
        self.read_into(record, start, out)
        return out

    def read_into(self, record: Record, start: int, out: Array) -> None:
        """Fill one-dimensional `out` with the stored elements from number `start` on, in C order.

        Raises:
            UsageError: They are not all within the tensor, or the archive has no bytes of it.
            ReadError: The bytes cannot be read.
        """
        self._require_range(record, start, start + out.size)
        if out.size:
            self._read_flat(record, start, out)

    def read_many(self, records: Sequence[Record], buffer: Array) -> list[int]:
        """Fill a buffer of bytes with whole tensors, each at a place that is a multiple of 64.

        Args:
            records: At least one.
            buffer: One-dimensional, of as many bytes as `room_for` says of each, or more.

        Returns:
            Where each of them begins in the buffer.

        Raises:
            UsageError: The archive has no bytes of one.
            CorruptArchiveError: One has another digest than the archive says.
            ReadError: The bytes of one cannot be read.
        """
        places, end = [], 0
        for record in records:
            self.read_into(record, 0, buffer[end : end + record.nbytes].view(record.dtype.storage))
            places.append(end)
            end += room_for(record)
        return places

    def verify(self, record: Record) -> None:
        """Read a tensor's bytes and, if `checks_digests`, compare them with its digest.

        Raises:
            UsageError: The archive has no bytes of it.
            CorruptArchiveError: They have another digest.
            ReadError: The bytes cannot be read.
        """
        for _ in self.blocks(record):
            pass

    def statistics(self, record: Record) -> Statistics:
        """The record's statistics; computed from its bytes if the archive has none."""
        if record.statistics is not None:
            return record.statistics
        builder = StatisticsBuilder(record.dtype)
        for block in self.blocks(record):
            builder.add(block)
        return builder.result()

    def remark(self, record: Record) -> str:
        """A warning about a tensor's bytes; "" if there is none.

        For zarr stores from elsewhere: that chunks are missing, or why the tensor cannot be read at all.
        """
        return ""

    def _require_stored(self, record: Record) -> None:
        if not record.stored:
            raise UsageError(
                f"{self.path}: {record.key.text}: only its statistics were kept",
                hint="Capture again without --stats-only to have its values.",
            )

    def _require_range(self, record: Record, start: int, stop: int) -> None:
        self._require_stored(record)
        if not 0 <= start <= stop <= record.size:
            raise UsageError(
                f"{self.path}: {record.key.text}: has no elements {start} to {stop} among {record.size}"
            )

    def canonical(self, text: str) -> str:
        """The key text with other names of shared modules replaced by the site that has the records."""
        aliases = self.info.aliases
        if not aliases:
            return text
        parts = text.split("/")
        for i, part in enumerate(parts):
            site, at, call = part.partition("@")
            module, colon, point = site.partition(":")
            if module in aliases:
                parts[i] = aliases[module] + colon + point + at + call
        return "/".join(parts)


def room_for(record: Record) -> int:
    """Return how many bytes `Archive.read_many` needs for a record, up to a multiple of 64."""
    return -(-record.nbytes // _ALIGNMENT) * _ALIGNMENT


def _fits(key: Key, text: str) -> bool:
    if key.is_bare:
        return False
    call = key.site_call
    return text in (call, f"{call}/{key.slot}", f"{key.step}/{call}")
