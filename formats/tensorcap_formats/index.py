"""The index: what an archive says of all its records, as columnar JSON (specs/archive.md, section 4).

Columns, not rows, since they parse four times as fast; no byte offsets, since other tools move datasets.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, repeat
from typing import Any, Final

from tensorcap_formats.digests import KNOWN_ALGORITHMS
from tensorcap_formats.dtypes import DTYPES, DType
from tensorcap_formats.errors import CorruptArchiveError, NewerVersionError, UsageError, abbreviate
from tensorcap_formats.garbage import paused_collection
from tensorcap_formats.keys import Key
from tensorcap_formats.records import Record
from tensorcap_formats.statistics import Statistics

FORMAT_VERSION: Final = "1.0"
MAX_RANK: Final = 32  # HDF5 has no more
MAX_TENSOR_BYTES: Final = 2**62
_ENCODER: Final = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False)
_VERSION: Final = re.compile(r"([0-9]{1,9})\.[0-9]{1,9}")
_STATISTICS: Final = tuple(Statistics.__dataclass_fields__)
_COUNTS: Final = ("nan", "posinf", "neginf", "zeros")
_INFINITIES: Final = (math.inf, -math.inf)
_BEYOND_FLOAT64: Final = re.compile(rb"[0-9]{309}")  # digits of any integer above 2**1024, and of some below
_SEAL: Final = re.compile(rb',"seal":"([0-9a-f]{32})"}')
_SEAL_BYTES: Final = len(',"seal":""}') + 32


@dataclass(frozen=True, slots=True)
class Index:
    """What an archive of ours says of itself; the fields are those of `Archive`.

    `root` is the hash that was read, which `encode_index` computes anew.
    """

    records: Sequence[Record]
    values: Mapping[str, Any]
    run: Mapping[str, Any]
    algorithm: str
    is_complete: bool = True
    is_ordered: bool = True
    root: str = ""


def encode_index(index: Index) -> tuple[bytes, bytes]:
    """Write the index, sealed together with the run metadata, and the run metadata, each as UTF-8 JSON."""
    records = index.records
    nothing = Statistics(None, None, None, None, 0, 0, 0, 0)
    statistics = [r.statistics or nothing for r in records]
    columns = {
        "tensorcap": FORMAT_VERSION,
        "complete": index.is_complete,
        "ordered": index.is_ordered,
        "algorithm": index.algorithm,
        "root": root_hash(records),
        "count": len(records),
        "key": [r.key.text for r in records],
        "dtype": [r.dtype.name for r in records],
        "shape": [r.shape for r in records],
        "order": [r.order for r in records],
        "stored": [int(r.stored) for r in records],
        "digest": "".join(r.digest for r in records),
        **{name: [getattr(s, name) for s in statistics] for name in _STATISTICS},
        "values": index.values,
    }
    run = encode_json(index.run)
    body = encode_json(columns)[:-1]
    return body + b',"seal":"%s"}' % _seal(body, run).encode(), run


@paused_collection()
def decode_index(data: bytes, run: bytes, source: str) -> Index:
    """Read an index and check everything in it that does not need the tensors' bytes.

    Args:
        data: The index, UTF-8 JSON.
        run: The run metadata, UTF-8 JSON.
        source: The archive's name, for messages.

    Raises:
        NewerVersionError: A newer major version, or an extension that must be understood.
        CorruptArchiveError: Anything else that is not as the specification says.
    """
    index = index_of(decode_json(data, f"{source}: index"), source, size=len(data))
    _check_seal(data, run, source)
    if root_hash(index.records) != index.root:
        raise CorruptArchiveError(
            f"{source}: index: root hash of its records is {root_hash(index.records)}, "
            f"expected {abbreviate(repr(index.root))} (ARC-36)"
        )
    return replace(index, run=decode_json(run, f"{source}: run"))


@paused_collection()
def index_of(index: dict[str, Any], source: str, *, size: int) -> Index:
    """Check an index that was parsed, as `decode_index` does, but for seal and root hash.

    This is for who knows that its bytes are as they were written, and may forget them by now.

    Args:
        index: The JSON object; columns are taken out of it, since those of 100,000 records take much memory.
        source: The archive's name, for messages.
        size: Bytes that it had, more than it can have records.

    Returns:
        The index, without the run's metadata.
    """
    check_version(index, source)
    count = index.get("count")
    if type(count) is not int or not 0 <= count <= size:
        raise CorruptArchiveError(
            f"{source}: index: count is {abbreviate(repr(count))}, expected the number of records (ARC-30)"
        )
    column = _columns(index, count, source)
    algorithm = index.get("algorithm")
    if algorithm not in KNOWN_ALGORITHMS:
        raise CorruptArchiveError(
            f"{source}: index: digest algorithm is {abbreviate(repr(algorithm))}, "
            f"known are {', '.join(KNOWN_ALGORITHMS)} (ARC-33)"
        )
    digests = index.get("digest")
    if not isinstance(digests, str) or len(digests) != 32 * count:
        raise CorruptArchiveError(
            f"{source}: index: digest has no 32 digits for each of {count} records (ARC-33)"
        )
    values = index.get("values")
    if not isinstance(values, dict):
        raise CorruptArchiveError(f"{source}: index: values is no object (ARC-35)")
    kinds = _kinds(column.pop("dtype"), column.pop("shape"), source)
    records = _records(column, kinds, digests, source)
    if len(set(column["key"])) != count:
        raise CorruptArchiveError(
            f"{source}: index: key {_first_duplicate(column['key'])!r} stands twice (ARC-32)"
        )
    return Index(
        records,
        values,
        {},
        algorithm,
        index.get("complete") is True,
        index.get("ordered") is True,
        str(index.get("root")),
    )


def _records(
    column: Mapping[str, Sequence[Any]],
    kinds: Sequence[tuple[DType, tuple[int, ...]]],
    digests: str,
    source: str,
) -> list[Record]:
    """The records; `kinds` are their dtypes and shapes."""
    columns = (column[name] for name in ("key", "order", "stored"))
    statistics = map(Statistics, *(column[name] for name in _STATISTICS))
    rows = zip(kinds, *columns, statistics, strict=True)
    records = []
    for row, ((dtype, shape), text, order, stored, numbers) in enumerate(rows):
        try:
            key = Key.parse(text)
        except UsageError as error:
            raise CorruptArchiveError(f"{source}: index: record {row}: {error}") from None
        digest = digests[32 * row : 32 * row + 32]
        records.append(Record(key, dtype, shape, order, digest, numbers, stored == 1, row))
    return records


def _kinds(
    dtypes: Sequence[str], shapes: Sequence[list[Any]], source: str
) -> list[tuple[DType, tuple[int, ...]]]:
    """Dtype and shape of each record, checked once for all that have the same, and one object for these."""
    are_plain = set(map(type, chain.from_iterable(shapes))) <= {int}  # True is no size, and equals 1
    known: dict[tuple[str, tuple[int, ...]], tuple[DType, tuple[int, ...]]] = {}
    kinds = []
    for row, (dtype, shape) in enumerate(zip(dtypes, shapes, strict=True)):
        kind = known.get((dtype, tuple(shape))) if are_plain else None
        if kind is None:
            logical = DTYPES.get(dtype)
            if logical is None:
                raise CorruptArchiveError(
                    f"{source}: index: record {row}: dtype {abbreviate(dtype)!r} is unknown (ARC-31)"
                )
            sizes = parse_shape(shape, logical.itemsize, f"{source}: index: record {row}")
            kind = known[dtype, sizes] = logical, sizes
        kinds.append(kind)
    return kinds


def check_version(index: Mapping[str, Any], source: str) -> None:
    """Refuse what a newer major version wrote, and extensions that must be understood (ARC-5, ARC-6)."""
    version = index.get("tensorcap")
    match = _VERSION.fullmatch(version) if isinstance(version, str) else None
    if match is None:
        raise CorruptArchiveError(
            f"{source}: index: version is {abbreviate(repr(version))}, expected MAJOR.MINOR (ARC-5)"
        )
    if int(match[1]) > int(FORMAT_VERSION.partition(".")[0]):
        raise NewerVersionError(
            f"{source}: archive format is {version}, expected {FORMAT_VERSION} or older (ARC-5)",
            hint="Upgrade tensorcap to read it.",
        )
    needed = index.get("must_understand", [])
    if needed:
        raise NewerVersionError(
            f"{source}: archive needs the extensions {abbreviate(repr(needed))}, unknown here (ARC-6)",
            hint="Upgrade tensorcap to read it.",
        )


def parse_shape(value: object, itemsize: int, source: str) -> tuple[int, ...]:
    """The sizes of a list or a tuple; refuses what is no shape, or what no machine could hold (ARC-34)."""
    if (
        isinstance(value, list | tuple)
        and len(value) <= MAX_RANK
        and set(map(type, value)) <= {int}
        and min(value, default=0) >= 0
        # numpy makes no empty array of absurd sizes either
        and math.prod(max(n, 1) for n in value) * itemsize <= MAX_TENSOR_BYTES
    ):
        return tuple(value)
    raise CorruptArchiveError(
        f"{source}: shape is {abbreviate(repr(value))}, expected up to {MAX_RANK} sizes "
        f"of at most {MAX_TENSOR_BYTES} bytes in all (ARC-34)"
    )


def root_hash(records: Iterable[Record]) -> str:
    """blake2b-128 over key, dtype, shape and digest of all records, in their order (ARC-36)."""
    hasher = hashlib.blake2b(digest_size=16)
    for r in records:
        shape = ",".join(map(str, r.shape))
        hasher.update(f"{r.key.text}\t{r.dtype.name}\t{shape}\t{r.digest}\n".encode())
    return hasher.hexdigest()


def _seal(body: bytes, run: bytes) -> str:
    """blake2b-128 over all of the index before the seal, and the run metadata (ARC-37)."""
    hasher = hashlib.blake2b(body, digest_size=16)
    hasher.update(run)
    return hasher.hexdigest()


def _check_seal(data: bytes, run: bytes, source: str) -> None:
    seal = _SEAL.fullmatch(data, max(0, len(data) - _SEAL_BYTES))
    if seal is None or seal[1].decode() != _seal(data[: seal.start()], run):
        raise CorruptArchiveError(
            f"{source}: index or run was altered: they do not have the hash that the index ends with (ARC-37)"
        )


def encode_json(value: object) -> bytes:
    """Compact UTF-8 JSON; refuses NaN and infinity, which JSON has not."""
    return _ENCODER.encode(value).encode("utf-8", "backslashreplace")


@paused_collection()
def decode_json(data: bytes, source: str) -> dict[str, Any]:
    """Read a JSON object; an integer that no float64 is near is a text.

    Raises:
        CorruptArchiveError: The bytes are not UTF-8, not JSON, not an object, or have another number that is
            beyond float64.
    """
    parse_int = _short_integer if _BEYOND_FLOAT64.search(data) else None
    try:
        value = json.loads(data, parse_constant=finite_number, parse_int=parse_int)
        if isinstance(value, list | dict) and _has_infinity(value):
            json.loads(data, parse_float=finite_number)  # names it; calls for all floats take too long
    except (ValueError, RecursionError) as error:
        raise CorruptArchiveError(f"{source}: is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise CorruptArchiveError(f"{source}: is a JSON {type(value).__name__}, expected an object")
    return value


def _has_infinity(value: dict[str, Any] | list[Any]) -> bool:
    """Whether any number in a JSON object or array is infinite."""
    members = value.values() if isinstance(value, dict) else value
    kinds = set(map(type, members))
    if kinds == {list}:  # shapes by the hundred thousand: as one list
        return _has_infinity([*chain.from_iterable(members)])
    if float in kinds and any(infinity in members for infinity in _INFINITIES):
        return True
    is_nested = not kinds.isdisjoint((list, dict))
    return is_nested and any(_has_infinity(member) for member in members if isinstance(member, list | dict))


def finite_number(text: str) -> float:
    """The float64 of a JSON number; ValueError for NaN, infinity, and what rounds to it."""
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{abbreviate(text)} is no number of float64")
    return value


def _short_integer(text: str) -> int | str:
    return int(text) if len(text.lstrip("-")) < 309 else text


def _columns(index: dict[str, Any], count: int, source: str) -> dict[str, list[Any]]:
    """Take the columns out of an index, each with `count` entries of its type."""
    number = (int, float, type(None))
    types: dict[str, tuple[type, ...]] = {
        "key": (str,),
        "dtype": (str,),
        "shape": (list,),
        "order": (int,),
        "stored": (int,),
        **dict.fromkeys(_STATISTICS, number),
        **dict.fromkeys(_COUNTS, (int,)),
    }
    for name, allowed in types.items():
        column = index.get(name)
        if not isinstance(column, list) or len(column) != count:
            raise CorruptArchiveError(
                f"{source}: index: column {name!r} has no entry for each of {count} records (ARC-30)"
            )
        if not all(map(isinstance, column, repeat(allowed))):
            raise CorruptArchiveError(
                f"{source}: index: column {name!r} holds a value of a wrong type (ARC-31)"
            )
    return {name: index.pop(name) for name in types}


def _first_duplicate(keys: Iterable[str]) -> str:
    earlier: set[str] = set()
    return next(k for k in keys if k in earlier or earlier.add(k))  # type: ignore[func-returns-value]  # add gives None
