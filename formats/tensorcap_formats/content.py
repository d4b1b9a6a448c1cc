"""What a copy of an archive needs of it: an index, and which records share their bytes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from tensorcap_formats.archive import Archive
from tensorcap_formats.digests import ALGORITHMS, DEFAULT_ALGORITHM
from tensorcap_formats.errors import TensorcapError, WriteError
from tensorcap_formats.index import Index
from tensorcap_formats.records import Record
from tensorcap_formats.statistics import StatisticsBuilder

Content = tuple[str, str, tuple[int, ...]]


def content_of(record: Record) -> Content:
    """Digest, dtype and shape: records that are equal in these are stored once (ARC-60)."""
    return record.digest, record.dtype.name, record.shape


def holders(records: Iterable[Record]) -> dict[Content, Record]:
    """The first stored record of each content: the one whose key names the bytes (ARC-60)."""
    first: dict[Content, Record] = {}
    for record in records:
        if record.stored:
            first.setdefault(content_of(record), record)
    return first


def build_index(source: Archive, records: Sequence[Record]) -> Index:
    """Build the index of a new archive of some of a source's records, in the order that they have here.

    They are numbered anew; digests and statistics that the source lacks are computed.

    Raises:
        ReadError: A tensor cannot be read.
    """
    algorithm = source.algorithm or DEFAULT_ALGORITHM
    numbered = []
    for row, record in enumerate(records):
        if not record.digest:
            hasher = ALGORITHMS[algorithm]()
            builder = StatisticsBuilder(record.dtype)
            for block in source.blocks(record):
                hasher.update(block.view("u1").data)
                builder.add(block)
            record = replace(record, digest=hasher.hexdigest(), statistics=builder.result())
        numbered.append(replace(record, row=row))
    return Index(numbered, source.values, source.run, algorithm, source.is_complete, source.is_ordered)


@contextmanager
def write_errors(path: Path) -> Iterator[None]:
    """Turn errors of the system, which come from the output, into `WriteError`; ours pass."""
    try:
        yield
    except TensorcapError:
        raise
    except OSError as error:
        raise WriteError(f"{path}: cannot be written: {error.strerror or error}") from error
