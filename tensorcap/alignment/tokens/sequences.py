"""Token sequences of a run: which tokens are padding, and which step and position each one is fed at."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from tensorcap_formats.archive import Archive
from tensorcap_formats.dtypes import Array
from tensorcap_formats.errors import UsageError
from tensorcap_formats.keys import ROOT_SITE
from tensorcap_formats.records import Record

ROLES: Final[Mapping[str, tuple[str, ...]]] = {  # names of the root module's inputs, the first there is
    "ids": ("input_ids", "token_ids", "tokens", "ids", "inputs_embeds", "0"),
    "mask": ("attention_mask", "padding_mask", "mask"),
    "positions": ("position_ids", "positions", "input_pos", "cache_position"),
    "starts": ("cu_seqlens", "cu_seq_lens_q", "cu_seqlens_q", "query_start_loc", "input_row_offsets"),
}
_SAY_WHICH: Final = ("mask", "starts")  # of the roles
_OF_MODEL: Final = f"{ROOT_SITE}/input."
_OF_SENTENCES: Final = ("type", "segment")  # in names of inputs that tell two sentences apart
_MOST: Final = 1 << 24  # elements of an input that is read to know what it is
_EMBEDDINGS: Final = ("embed_tokens", "wte", "tok_embeddings", "word_embeddings", "embed_in")
_KEPT: Final = ("logits_to_keep", "num_logits_to_keep")  # arguments: of how many last tokens logits are made


@dataclass(frozen=True, slots=True)
class TokenSequence:
    """The valid tokens of one sequence, in their order.

    Attributes:
        ids: Token ids (token,); None if they were not captured.
        steps: The step in which each token was fed (token,).
        cells: The index of each among all tokens of its step, row by row, padding included (token,).
    """

    ids: Array | None
    steps: Array
    cells: Array


@dataclass(frozen=True, slots=True)
class Tokens:
    """The tokens of a run.

    Attributes:
        grids: Shape of each step's tokens: (row, position), or (token,) if sequences are packed.
        sequences: In the order of first steps and rows.
        padding: Count of padding tokens.
        last_only: Steps in which the model was asked for logits of the last token of each row only.
        has_bounds: Whether the starts of sequences are known; if not, all tokens are taken as one sequence.
        where: Path of the archive, for messages.
    """

    grids: Mapping[int, tuple[int, ...]]
    sequences: tuple[TokenSequence, ...]
    padding: int
    last_only: frozenset[int]
    has_bounds: bool
    where: str

    @classmethod
    def of(cls, archive: Archive, places: Mapping[str, str] | None = None) -> Tokens:
        """Read the tokens from the inputs of the root module: ids, mask, positions, starts of sequences.

        Args:
            archive: The run.
            places: `SITE/SLOT` of inputs with unusual names, by role.

        Raises:
            UsageError: There are no tokens; or the shapes of ids and masks do not go together.
            ReadError: They cannot be read.
        """
        steps = _collect_inputs(archive, places or {})
        if not steps:
            raise UsageError(
                f"{archive.path}: has no tokens, expected @root/input.input_ids or the like",
                hint="Say in the map file's [tokens] which record holds the ids.",
            )
        run = _Run(archive)
        for step, records in steps.items():
            run.add(step, records)
        return run.tokens()

    @property
    def count(self) -> int:
        """The number of valid tokens."""
        return sum(len(sequence.cells) for sequence in self.sequences)

    def last_cells(self, step: int) -> Array:
        """The last valid token of each sequence in a step, in the order of the sequences."""
        cells_by_sequence = [sequence.cells[sequence.steps == step] for sequence in self.sequences]
        return np.array([cells[-1] for cells in cells_by_sequence if len(cells)], np.int64)


@dataclass(slots=True)
class _SequenceSteps:
    """A sequence, step by step."""

    ids: list[Array] = field(default_factory=list)
    steps: list[Array] = field(default_factory=list)
    cells: list[Array] = field(default_factory=list)


class _Run:
    """Steps of a run, read one after the other."""

    def __init__(self, archive: Archive) -> None:
        self._archive = archive
        self._grids: dict[int, tuple[int, ...]] = {}
        self._all: list[_SequenceSteps] = []
        self._last: list[_SequenceSteps] = []  # of the prompt that the last step belongs to
        self._width = 0  # positions fed to them so far, padding counted
        self._padding = 0
        self._has_bounds = True

    def add(self, step: int, records: Mapping[str, Record]) -> None:
        """Read one step."""
        grid, ids = self._ids(records["ids"])
        mask, positions = (self._load(records, role) for role in ("mask", "positions"))
        continues = self._continues(records, grid, mask, positions)
        valid = np.ones(grid, np.bool_) if mask is None else mask[..., mask.shape[-1] - grid[-1] :] != 0
        rows = self._rows(records, grid, None if mask is not None else positions, continues=continues)
        if not continues:
            self._last, self._width = [_SequenceSteps() for _ in rows], 0
            self._all += self._last
        self._width += grid[-1]
        self._grids[step] = grid
        self._padding += int(valid.size - valid.sum())
        for sequence, cells in zip(self._last, rows, strict=True):
            kept = cells[valid.reshape(-1)[cells]]
            sequence.cells.append(kept)
            sequence.steps.append(np.full(len(kept), step))
            if ids is not None:
                sequence.ids.append(ids.reshape(-1)[kept])

    def tokens(self) -> Tokens:
        """The tokens of all steps that were added."""
        sequences = tuple(
            TokenSequence(
                np.concatenate(s.ids) if len(s.ids) == len(s.cells) else None,
                np.concatenate(s.steps),
                np.concatenate(s.cells),
            )
            for s in self._all
        )
        values = self._archive.values
        last = {
            step
            for step in self._grids
            if any(values.get(f"{step}/{ROOT_SITE}/input.{name}") == 1 for name in _KEPT)
        }
        where = str(self._archive.path)
        return Tokens(self._grids, sequences, self._padding, frozenset(last), self._has_bounds, where)

    def _ids(self, record: Record) -> tuple[tuple[int, ...], Array | None]:
        """The shape of a step's tokens, and the ids; None for embeddings."""
        if record.dtype.is_whole and len(record.shape) in (1, 2):
            return record.shape, self._archive.load(record)
        if record.dtype.kind == "float" and len(record.shape) in (2, 3):
            return record.shape[:-1], None
        raise self._refuse(record, "expected ids of (batch, token) or (token), or embeddings")

    def _load(self, records: Mapping[str, Record], role: str) -> Array | None:
        return self._archive.load(records[role]) if role in records else None

    def _continues(
        self,
        records: Mapping[str, Record],
        grid: tuple[int, ...],
        mask: Array | None,
        positions: Array | None,
    ) -> bool:
        """Whether a step continues the sequences of the step before."""
        if mask is not None:
            record, width = records["mask"], mask.shape[-1] if mask.ndim else 0
            if mask.shape[:-1] != grid[:-1] or width not in (grid[-1], self._width + grid[-1]):
                before = f" after {self._width}" if self._width else ""
                raise self._refuse(record, f"expected a mask of the tokens {list(grid)}{before}")
            if not np.isin(mask, (0, 1)).all():
                raise self._refuse(record, "expected ones and zeros")
            return width > grid[-1]
        if not self._last:
            return False
        if positions is None:
            return math.prod(grid) == len(self._last)
        first = positions.reshape(-1, positions.shape[-1])[:, 0] if positions.ndim else positions.reshape(1)
        if (first > 0).all() != (first > 0).any():
            raise self._refuse(records["positions"], "begins some sequences and goes on with others")
        return bool((first > 0).all())

    def _rows(
        self,
        records: Mapping[str, Record],
        grid: tuple[int, ...],
        positions: Array | None,
        *,
        continues: bool,
    ) -> list[Array]:
        """The indices of each sequence's tokens in the step."""
        count = math.prod(grid)
        cells = np.arange(count)
        if len(grid) == 2 and grid[0] != 1:
            rows = list(cells.reshape(grid))
        elif continues and count == len(self._last):
            rows = list(cells[:, None])
        else:
            starts = self._starts(records, count, positions)
            self._has_bounds &= starts is not None or len(grid) == 2
            rows = np.split(cells, starts or [])
        if continues and len(rows) != len(self._last):
            raise self._refuse(
                records["ids"], f"goes on with {len(rows)} sequences, expected the {len(self._last)} before"
            )
        return rows

    def _starts(self, records: Mapping[str, Record], count: int, positions: Array | None) -> list[int] | None:
        """The starts of packed sequences, without the first; None if they are not known."""
        if "starts" in records:
            bounds = self._archive.load(records["starts"]).reshape(-1)
            if bounds.size < 2 or bounds[0] != 0 or bounds[-1] != count or (np.diff(bounds) < 1).any():
                raise self._refuse(records["starts"], f"expected rising numbers from 0 to {count}")
            return [int(start) for start in bounds[1:-1]]
        if positions is None or positions.size != count or not count:
            return None
        flat = positions.reshape(-1)
        if flat[0] != 0:
            return None
        begins = np.flatnonzero(flat == 0)
        counted = np.arange(count) - np.repeat(begins, np.diff([*begins, count]))
        return [int(start) for start in begins[1:]] if np.array_equal(counted, flat) else None

    def _refuse(self, record: Record, reason: str) -> UsageError:
        shape, dtype = list(record.shape), record.dtype.name
        return UsageError(f"{self._archive.path}: {record.key.text}: {dtype} {shape}, {reason}")


def is_mask(archive: Archive, record: Record, inputs: Iterable[Record]) -> bool:
    """Whether an input (row, position) says which tokens are no padding, by its name or its values.

    These are zeros and ones, and zero where ids are one number, that of padding; zeros and ones of two kinds
    of sentences are none.

    Args:
        archive: The run.
        record: The input.
        inputs: All that the model was given, its ids by a usual name or by any.

    Returns:
        False also if values cannot be read.
    """
    name = record.key.slot.partition(".")[2]
    if name in ROLES["mask"]:
        return True
    if any(name in names for names in ROLES.values()) or any(word in name for word in _OF_SENTENCES):
        return False
    is_whole = record.dtype.is_whole or record.dtype.kind == "bool"
    if len(record.shape) != 2 or not is_whole or record.size > _MOST or not record.stored:
        return False
    try:
        return _leaves_out_padding(archive, record, inputs)
    except OSError:  # the comparison says so
        return False


def _leaves_out_padding(archive: Archive, record: Record, inputs: Iterable[Record]) -> bool:
    """Whether an input is of zeros and ones, and zero where ids are one number."""
    values = archive.load(record)
    is_left_out = values == 0
    if not np.isin(values, (0, 1)).all() or is_left_out.all():
        return False
    like = [
        other
        for other in inputs
        if other.key.step == record.key.step
        and other.key != record.key
        and other.shape == record.shape
        and other.dtype.is_whole
    ]
    ids = [other for other in like if other.key.slot.partition(".")[2] in ROLES["ids"]] or like
    numbers = [archive.load(other) for other in ids] if is_left_out.any() else []
    numbers = [each for each in numbers if not np.isin(each, (0, 1)).all()]  # others are masks, too
    return not numbers or any(len(np.unique(each[is_left_out])) == 1 for each in numbers)


def token_counters(archive: Archive) -> list[str]:
    """`SITE/SLOT` of the inputs that say which tokens there are, beside ids: a mask, starts of sequences."""
    steps = _collect_inputs(archive, {}).values()
    keys = [records[role].key for records in steps for role in _SAY_WHICH if role in records]
    return [*dict.fromkeys(f"{key.site}/{key.slot}" for key in keys)]


def ids_by_step(archive: Archive) -> dict[int, Record]:
    """The ids (row, token) that each step was fed, in order of steps; none if a step has none."""
    ids = {step: records["ids"] for step, records in _collect_inputs(archive, {}).items()}
    steps = {record.key.step for record in archive.records}
    is_known = steps == ids.keys() and all(record.dtype.is_whole for record in ids.values())
    return ids if is_known else {}


def _collect_inputs(archive: Archive, places: Mapping[str, str]) -> dict[int, dict[str, Record]]:
    """The records of each role, for each step that has ids."""
    by_step: dict[int, dict[str, Record]] = {}
    by_place: dict[str, list[Record]] = {}
    sites = {ROOT_SITE, *places.values(), *(place.rpartition("/")[0] for place in places.values())}
    for record in archive.records:
        key = record.key
        if key.site in sites and key.rank == key.call == 0 and record.stored:
            by_place.setdefault(key.site if key.is_bare else f"{key.site}/{key.slot}", []).append(record)
    for role, names in ROLES.items():
        usual = [f"{ROOT_SITE}/input.{name}" for name in names]
        for place in [places[role]] if role in places else usual:
            for record in by_place.get(place, ()):
                by_step.setdefault(record.key.step, {}).setdefault(role, record)
    for role, place in places.items():
        if not any(role in records for records in by_step.values()):
            raise UsageError(f"{archive.path}: has no {place!r}, which [tokens] names as the {role}")
    if "ids" not in places:  # what the whole model was given may not have been recorded
        for record in _find_embeddings(archive):
            by_step.setdefault(record.key.step, {}).setdefault("ids", record)
        steps = {record.key.step for records in by_place.values() for record in records}
        if any("ids" not in by_step.get(step, {}) for step in steps):
            for record in _find_lone_ids(archive, by_place):
                by_step.setdefault(record.key.step, {}).setdefault("ids", record)
    if "mask" not in places:
        _add_masks(archive, by_step, by_place)
    return {step: records for step, records in sorted(by_step.items()) if "ids" in records}


def _add_masks(
    archive: Archive, by_step: Mapping[int, dict[str, Record]], by_place: Mapping[str, Iterable[Record]]
) -> None:
    """Add the mask of each step that has ids and none by a usual name: the only input that can be one."""
    inputs = [r for place, records in by_place.items() for r in records if place.startswith(_OF_MODEL)]
    for step, roles in by_step.items():
        if "ids" in roles and "mask" not in roles:
            shape = roles["ids"].shape
            like = [r for r in inputs if r.key.step == step and r.shape == shape]
            masks = [r for r in like if is_mask(archive, r, like)]
            if len(masks) == 1:
                roles["mask"] = masks[0]


def _find_lone_ids(archive: Archive, by_place: Mapping[str, Sequence[Record]]) -> Sequence[Record]:
    """The ids of a model that has another name for them: its only input of whole numbers (row, position).

    Positions, which rise by one in each row, masks of zeros and ones, and kinds of sentences are none.
    """
    others = {name for role, names in ROLES.items() if role != "ids" for name in names}
    found = []
    for place, records in by_place.items():
        name = place.removeprefix(_OF_MODEL)
        is_other = name in others or any(word in name for word in _OF_SENTENCES)
        if place.startswith(_OF_MODEL) and not is_other and all(map(_may_be_ids, records)):
            try:
                values = [archive.load(record) for record in records]
            except OSError:  # the comparison says so
                continue
            are_flags = all(np.isin(each, (0, 1)).all() for each in values)
            if not are_flags and any((np.diff(each, axis=1) != 1).any() for each in values):
                found.append(records)
    return found[0] if len(found) == 1 else ()


def _may_be_ids(record: Record) -> bool:
    is_whole = record.dtype.is_whole and record.dtype.kind != "bool"
    return is_whole and len(record.shape) == 2 and record.size <= _MOST


def _find_embeddings(archive: Archive) -> list[Record]:
    """The ids that the token embedding took, and its outputs."""
    records = [
        record
        for record in archive.records
        if record.key.rank == record.key.call == 0
        and record.stored
        and record.key.site.rpartition(".")[2] in _EMBEDDINGS
    ]
    ids = [r for r in records if r.key.slot.startswith("input") and r.dtype.is_whole]
    return ids + [r for r in records if r.key.slot == "output" and r.dtype.kind == "float"]
