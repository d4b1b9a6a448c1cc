"""Archives of files from elsewhere: tensors with names, and nothing more."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tensorcap_formats.archive import Archive
from tensorcap_formats.dtypes import Array, DType
from tensorcap_formats.errors import CorruptArchiveError, UsageError, abbreviate
from tensorcap_formats.index import parse_shape
from tensorcap_formats.keys import Key, check_length, escape, escape_bare, natural
from tensorcap_formats.records import Record

_MAX_LEAVES: Final = 1_000_000
_MAX_DEPTH: Final = 100


@dataclass(frozen=True, slots=True)
class ForeignTensor:
    """One tensor of a file from elsewhere.

    Attributes:
        name: As the file has it, any characters.
        dtype: Logical dtype.
        shape: As the file has it.
        read: Fills a one-dimensional array with the stored elements from a number on, in C order; raises
            ReadError if they cannot be read.
        remark: Gives a warning about the tensor's bytes; "" if there is none.
    """

    name: str
    dtype: DType
    shape: tuple[int, ...]
    read: Callable[[int, Array], None]
    remark: Callable[[], str] = lambda: ""


class ForeignArchive(Archive):
    """Tensors by name; in natural order of the names unless the execution order is known."""

    def __init__(
        self,
        path: Path,
        container: str,
        tensors: Iterable[ForeignTensor],
        *,
        resources: ExitStack | None = None,
        values: Mapping[str, Any] | None = None,
        skipped: Mapping[str, str] | None = None,
        problems: Mapping[str, str] | None = None,
        run: Mapping[str, Any] | None = None,
        is_ordered: bool = False,
        is_direct: bool = False,
    ) -> None:
        """Make records of the tensors.

        Args:
            path: The file or folder.
            container: As in `Archive`.
            tensors: In the order of execution if `is_ordered`, else in any.
            resources: What `close` closes; the archive takes it over if nothing is raised.
            values: Values that are no tensors, by name.
            skipped: Why other things in the file are not read, by name.
            problems: Why tensors, or parts with tensors, could not be read, by name. One makes the archive
                incomplete, and is what the run's metadata give as its error.
            run: As in `Archive`.
            is_ordered: As in `Archive`.
            is_direct: As in `Archive`.

        Raises:
            CorruptArchiveError: Two tensors have one name, a name is too long, or a shape is absurd.
        """
        keyed: dict[str, tuple[Key, ForeignTensor]] = {}
        for tensor in tensors:
            key = key_of(tensor.name, str(path))
            if keyed.setdefault(key.text, (key, tensor))[1] is not tensor:
                raise CorruptArchiveError(
                    f"{path}: two tensors are named {abbreviate(tensor.name)!r}, expected each name once"
                )
            parse_shape(tensor.shape, tensor.dtype.itemsize, f"{path}: {abbreviate(tensor.name)!r}")
        ordered = [keyed[text] for text in (keyed if is_ordered else sorted(keyed, key=natural))]
        self.is_direct = is_direct
        self._tensors = [tensor for _, tensor in ordered]
        problems, run = problems or {}, dict(run or {})
        if problems:
            run["error"] = {"message": _problems_text(problems)}
        super().__init__(
            path,
            container,
            [
                Record(key, tensor.dtype, tensor.shape, row, "", None, stored=True, row=row)
                for row, (key, tensor) in enumerate(ordered)
            ],
            is_foreign=True,
            is_ordered=is_ordered,
            is_complete=not problems,
            run=run,
            values={key_of(name, str(path)).text: value for name, value in (values or {}).items()},
            skipped={**problems, **(skipped or {}), **problems},
            problems=problems,
        )
        self._resources = (resources or ExitStack()).pop_all()

    def _read_flat(self, record: Record, start: int, out: Array) -> None:
        self._tensors[record.row].read(start, out)

    def remark(self, record: Record) -> str:
        """As `Archive.remark`."""
        return self._tensors[record.row].remark()

    def close(self) -> None:
        """Close the files; a second call does nothing."""
        self._resources.close()


def _problems_text(problems: Mapping[str, str]) -> str:
    """The problems, in one line."""
    name, reason = next(iter(problems.items()))
    parts = "1 part of it" if len(problems) == 1 else f"{len(problems)} parts of it"
    more = f", and {len(problems) - 1} more" if len(problems) > 1 else ""
    return f"{parts} could not be read: {abbreviate(name)}: {reason}{more}"


def key_of(name: str, source: str) -> Key:
    """The key of a name from elsewhere: a full one if the name has that form, else a bare one.

    Raises:
        CorruptArchiveError: The name is empty, or too long for a key (NAM-6).
    """
    try:
        check_length(name)
        with suppress(UsageError):  # a bare name with characters that a key escapes
            key = Key.parse(name)
            if not key.is_bare:
                return key
        return Key.parse(escape_bare(name))
    except UsageError as error:
        raise CorruptArchiveError(f"{source}: {error}") from None


def nested_leaves(
    value: Any, slot: str, is_leaf: Callable[[dict[str, Any]], bool], where: str
) -> Iterator[tuple[str, Any]]:
    """The leaves of a JSON value by slot, in its order: `SLOT.NAME.0` for what lies in objects and lists.

    Args:
        value: The value.
        slot: Its own slot.
        is_leaf: Whether an object is one of them, and not entered.
        where: What the value is of, for messages.

    Raises:
        CorruptArchiveError: It is nested too deep, or too large.
    """
    pending: list[tuple[str, Any, int]] = [(slot, value, 0)]
    while pending:
        own, leaf, depth = pending.pop()
        if depth > _MAX_DEPTH or len(pending) > _MAX_LEAVES:
            raise CorruptArchiveError(f"{where}: a value is nested deeper than {_MAX_DEPTH}, or too large")
        if isinstance(leaf, dict) and not is_leaf(leaf):
            items = list(leaf.items())
        elif isinstance(leaf, list):
            items = [(str(i), one) for i, one in enumerate(leaf)]
        else:
            yield own, leaf
            continue
        pending += [(f"{own}.{escape(name)}", one, depth + 1) for name, one in reversed(items)]
