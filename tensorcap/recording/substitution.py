"""Choose the archived tensors that take the place of a running model's own, and keep account of each."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from tensorcap.recording.options import as_tuple, parse_steps, span_text
from tensorcap.recording.record_filter import fits_key
from tensorcap_formats.archive import Archive
from tensorcap_formats.dtypes import Array, DType, cast
from tensorcap_formats.errors import TensorcapError, UsageError, no_such_tensor
from tensorcap_formats.keys import ROOT_SITE, Key
from tensorcap_formats.records import Record

Kind = Literal["input", "output"]
SlotStatus = Literal["injected", "never-called", "not-in-archive", "explained", "left"]

_MOST_KEYS: Final = 8  # absent keys that the metadata name
HELD: Final = "an object holds it that the model goes on writing to, such as a cache"
_NO_MODULE: Final = "the model has no such module"


@dataclass(slots=True)
class Slot:
    """One slot of one site: how often it was replaced, or why not.

    Attributes:
        site: The site, as the model names it.
        slot: Which tensor there, `input.hidden_states`.
        archived: Count of the archive's tensors for it at the chosen steps and calls.
        injected: The steps in which it was replaced, by number of the call.
        casts: Counts of the casts that made values fit, by text.
        absent: Keys for which the archive has no tensor.
        explained: Further ones, of which it is known why.
        reason: Why it was not replaced although its call took place.
    """

    site: str
    slot: str
    archived: int = 0
    injected: dict[int, list[int]] = field(default_factory=dict)
    casts: dict[str, int] = field(default_factory=dict)
    absent: list[str] = field(default_factory=list)
    explained: list[str] = field(default_factory=list)
    reason: str = ""

    @property
    def count(self) -> int:
        """How often it was replaced."""
        return sum(map(len, self.injected.values()))

    @property
    def status(self) -> SlotStatus:
        """What became of it (INJ-21); a tensor that does not fit ends the run."""
        if self.injected:
            return "injected"
        if self.absent:
            return "not-in-archive"
        if self.explained:
            return "explained"
        return "left" if self.reason and self.reason != _NO_MODULE else "never-called"

    def describe(self) -> dict[str, Any]:
        """The entry of the run's metadata (INJ-21)."""
        entry: dict[str, Any] = {
            "site": self.site,
            "slot": self.slot,
            "status": self.status,
            "injected": self.count,
            "archived": self.archived,
        }
        if self.injected:
            entry["calls"] = {str(call): _spans(steps) for call, steps in sorted(self.injected.items())}
        if self.casts:
            entry["casts"] = dict(self.casts)
        for name, keys in (("absent", self.absent), ("explained", self.explained)):
            if keys:
                entry[name] = [*keys[:_MOST_KEYS], *(["…"] if len(keys) > _MOST_KEYS else [])]
        if self.reason:
            entry["reason"] = self.reason
        return entry


class Substitution:
    """The archived tensor for a site, a step, a call and a slot, if one is to be injected there.

    It keeps account of what was injected, so one is for one run.

    Attributes:
        archive: Where the tensors come from; its keys are those of the model that runs.
        failure: The error of a tensor that did not fit, by which the run has to end.
        map_path: The map file that gave the archive the model's keys, "computed" for a computed mapping; ""
            if keys are equal.
        map_text: The mapping as text of such a file, "" if keys are equal.
        source_path: Where the archive is, or is going to be, as the run's metadata name it.
    """

    def __init__(
        self,
        archive: Archive,
        *,
        inputs: str | Iterable[str] | None = None,
        outputs: str | Iterable[str] = (),
        steps: str | Iterable[range | int] = (),
        calls: str | Iterable[range | int] = (),
        keys: Collection[str] | None = None,
        left: Collection[str] = (),
        leaves_misfits: bool = False,
        fed: Archive | None = None,
        why_absent: Callable[[Key], str] = lambda _: "",
    ) -> None:
        """Choose tensors of an archive.

        Args:
            archive: Where the tensors come from.
            inputs: Globs (NAM-8) of arguments to replace. If None, those of all modules but the model
                itself, unless outputs are chosen.
            outputs: Globs of results to replace.
            steps: Only in these steps; in all if empty.
            calls: Only in these calls of a site within a step, counted from 0; in all if empty.
            keys: Key texts of what to replace, arguments and results, in the place of globs.
            left: Key texts of what is not replaced, whatever globs say.
            leaves_misfits: Whether a tensor of a torch model that the archived one does not fit stays, and
                does not end the run; inputs of the model itself aside.
            fed: An archive of which the inputs of the model take the place of its own in any shape: its run
                is then one of these rows and tokens alone.
            why_absent: Says why the archive has no tensor of a key that the model has; "" if that is not
                known.

        Raises:
            UsageError: A glob fits no tensor of the archive, or one of which no values were kept.
        """
        self.archive = archive
        self.failure: TensorcapError | None = None
        self.source_path = archive.path
        self.map_path = self.map_text = ""
        self._keys = None if keys is None else frozenset(keys)
        self._left = frozenset(left)
        self._leaves_misfits = leaves_misfits
        self._why_absent = why_absent
        output_globs = as_tuple(outputs)
        self._globs: dict[Kind, tuple[str, ...] | None] = {
            "input": None if inputs is None else as_tuple(inputs),
            "output": output_globs,
        }
        self._steps, self._calls = parse_steps(steps), parse_steps(calls)
        if inputs is None and output_globs:
            self._globs["input"] = ()
        self._slots: dict[tuple[str, str], Slot] = {}
        self._sites: dict[str, str] = {}  # names in the archive by names in the model
        self._asked: set[tuple[str, str]] = set()  # sites with arguments or results to replace
        self._lock = threading.Lock()
        self._planned: dict[tuple[str, int, int, str], dict[str, Record]] = {}
        for record in archive.records:
            if self._chooses(record.key):
                self._add(record)
        self._fed = fed
        self._fed_keys: set[str] = set()
        if fed is not None:
            self._feed(fed)
        for kind, globs in self._globs.items():
            for glob in globs or ():
                if not any(fits_key(glob, record.key) for record in self._records(kind)):
                    raise no_such_tensor(str(archive.path), glob, {r.key.site for r in archive.records})
        if not self._planned and not self._left:  # all of them may be left in place
            raise UsageError(
                f"{archive.path}: holds no {' or '.join(self._kinds)} of modules that were chosen",
                hint="Capture it with the inputs of modules, or choose other steps and calls.",
            )

    @property
    def slots(self) -> Sequence[Slot]:
        """Each slot that was asked for."""
        return tuple(self._slots.values())

    @property
    def sites(self) -> Collection[str]:
        """The archive's names of the sites at which something is to be replaced."""
        return dict.fromkeys(site for site, _, _, _ in self._planned)

    @property
    def kinds(self) -> frozenset[str]:
        """Whether arguments, results or both are replaced."""
        return frozenset(kind for _, _, _, kind in self._planned)

    def bind(self, sites: Mapping[str, Sequence[str]]) -> set[str]:
        """Find the chosen sites in a model.

        Args:
            sites: Further names of each of the model's sites, by its name.

        Returns:
            The model's sites at whose calls something may be injected.

        Raises:
            UsageError: None of the archive's sites is one of the model's.
        """
        wanted = self.sites
        for site, aliases in sites.items():
            archived = next((name for name in (site, *aliases) if name in wanted), None)
            if archived is not None:
                self._sites[site] = archived
        known = set(self._sites.values())
        if not known and wanted:
            some = ", ".join(list(wanted)[:3]) + (", …" if len(wanted) > 3 else "")
            raise UsageError(
                f"{self.archive.path}: none of its {len(wanted)} sites is a module of the model: {some}",
                hint="A mapping says which belong together: see tcap align, and --map.",
            )
        for slot in self._slots.values():
            if slot.site not in known:
                slot.reason = _NO_MODULE
        return set(self._sites)

    def binds(self, site: str) -> bool:
        """Whether something may be injected at calls of a site of the model."""
        return site in self._sites

    def planned(self, site: str, step: int, call: int, kind: Kind) -> Mapping[str, Record] | None:
        """The records to inject in one call of a site, by slot; None if none of its slots was asked for."""
        name = self._sites.get(site)
        if name is None or not self._is_within(step, call):
            return None
        records = self._planned.get((name, step, call, kind))
        if records is None and (name, kind) not in self._asked:
            return None
        return records or {}

    def read(self, record: Record) -> Array:
        """The values of a record that is to be injected, as they are stored."""
        is_fed = self._fed is not None and record.key.text in self._fed_keys
        return (self._fed if is_fed and self._fed is not None else self.archive).read(record)

    def read_as(
        self, key: Key, record: Record, dtype: DType, shape: tuple[int, ...] | None
    ) -> tuple[Array, str]:
        """The stored elements that are to be injected, in the dtype of the natural tensor.

        Args:
            key: The key of the natural tensor.
            record: What takes its place.
            dtype: Its dtype.
            shape: Its shape; None if any fits.

        Returns:
            The elements, and how they were cast, "" if they were not.

        Raises:
            UsageError: They do not fit.
        """
        bits = self.read(record)
        if shape is not None and bits.shape != shape:
            raise no_fit(self.archive, key, bits.shape, shape)
        try:
            return cast(bits, record.dtype, dtype)
        except UsageError as error:
            message = f"{self.archive.path}: {key.text}: does not fit: {error}"
            raise UsageError(message, hint=error.hint) from None

    def may_resize(self, key: Key) -> bool:
        """Whether an archived tensor may have another shape than that of a key: the model is fed it."""
        return key.text in self._fed_keys

    def leaves_misfit(self, key: Key) -> bool:
        """Whether the tensor of a key stays if the archived one does not fit; inputs of the model do not."""
        return self._leaves_misfits and not (key.site == ROOT_SITE and _kind(key) == "input")

    def note_injected(self, key: Key, cast: str) -> None:
        """Note that a tensor took the place of the one of this key."""
        with self._lock:
            slot = self._slot(key)
            slot.injected.setdefault(key.call, []).append(key.step)
            if cast:
                slot.casts[cast] = slot.casts.get(cast, 0) + 1

    def note_absent(self, key: Key, *, is_held: bool = False) -> None:
        """Note that the archive has nothing for a tensor that was asked for, or for what an object holds."""
        if self._chooses(key):
            why = self._why_absent(key)
            with self._lock:
                slot = self._slot(key)
                if not is_held:
                    (slot.explained if why else slot.absent).append(key.text)
                slot.reason = slot.reason or (HELD if is_held else why)

    def note_left(self, key: Key, reason: str = "", *, is_held: bool = False) -> None:
        """Note that a tensor of the archive was not injected, and why."""
        with self._lock:
            self._slot(key).reason = reason or (HELD if is_held else "its call has no such tensor")

    def describe(self) -> dict[str, Any]:
        """The entry `injected` of the run's metadata (INJ-20)."""
        entry: dict[str, Any] = {
            "source": str(self.source_path),
            "root": self.archive.root,
            "mapping": self.map_path,
            "inputs": None if self._globs["input"] is None else list(self._globs["input"]),
            "outputs": list(self._globs["output"] or ()),
        }
        for name, spans in (("steps", self._steps), ("calls", self._calls)):
            if spans:
                entry[name] = ",".join(map(span_text, spans))
        if self.map_text:
            entry["map"] = self.map_text
        return {**entry, "slots": [slot.describe() for slot in self._slots.values()]}

    @property
    def _kinds(self) -> list[str]:
        return [f"{kind}s" for kind, globs in self._globs.items() if globs != ()]

    def _records(self, kind: Kind) -> Iterator[Record]:
        return (r for r in self.archive.records if not r.key.is_bare and _kind(r.key) == kind)

    def _add(self, record: Record) -> None:
        """Plan to inject a record."""
        key = record.key
        if not record.stored:
            raise UsageError(
                f"{self.archive.path}: {key.text}: only its statistics were kept",
                hint="Capture again without --stats-only to have its values.",
            )
        if key.rank:
            raise UsageError(
                f"{self.archive.path}: {key.text}: is of another rank than 0",
                hint="A mapping joins what ranks hold: see tcap align.",
            )
        self._planned.setdefault((key.site, key.step, key.call, _kind(key)), {})[key.slot] = record
        self._asked.add((key.site, _kind(key)))
        slot = self._slots.setdefault((key.site, key.slot), Slot(key.site, key.slot))
        slot.archived += 1

    def _feed(self, fed: Archive) -> None:
        """Plan to give the model the inputs of an archive, in the place of its own."""
        for record in fed.records:
            key = record.key
            if key.site == ROOT_SITE and _kind(key) == "input" and not key.rank and record.stored:
                self._fed_keys.add(key.text)
                self._add(record)

    def _chooses(self, key: Key) -> bool:
        """Whether a tensor of the key is to be replaced, there or not."""
        if key.text in self._left:
            return False
        if self._keys is not None:
            return key.text in self._keys
        kind = _kind(key)
        if key.is_bare or kind not in self._globs or not self._is_within(key.step, key.call):
            return False
        globs = self._globs[kind]
        if globs is None:
            return key.site != ROOT_SITE and ":" not in key.site
        return any(fits_key(glob, key) for glob in globs)

    def _is_within(self, step: int, call: int) -> bool:
        spans = ((step, self._steps), (call, self._calls))
        return all(not allowed or any(at in span for span in allowed) for at, allowed in spans)

    def _slot(self, key: Key) -> Slot:
        name = self._sites.get(key.site, key.site)
        return self._slots.setdefault((name, key.slot), Slot(name, key.slot))


def no_fit(archive: Archive, key: Key, archived: tuple[int, ...], own: tuple[int, ...]) -> UsageError:
    """The error for a tensor of an archive whose shape is not that of the tensor that it is to replace."""
    return UsageError(
        f"{archive.path}: {key.text}: does not fit: {list(archived)} in the archive, "
        f"{list(own)} in the model",
        hint=_step_hint(archived, own),
    )


def _step_hint(archived: tuple[int, ...], own: tuple[int, ...]) -> str | None:
    """Name the layout step of a mapping that would make the shapes equal, if one is obvious."""
    if math.prod(archived) != math.prod(own):
        return None
    step = None
    if archived[:1] == (1,) and archived[1:] == own:
        step = "unsqueeze 0"
    elif own[:1] == (1,) and own[1:] == archived:
        step = "squeeze 0"
    elif len(own) == len(archived):
        unlike = [axis for axis, sizes in enumerate(zip(own, archived, strict=True)) if sizes[0] != sizes[1]]
        if len(unlike) == 2 and [own[axis] for axis in reversed(unlike)] == [
            archived[axis] for axis in unlike
        ]:
            step = f"transpose {unlike[0]} {unlike[1]}"
    return f"A mapping with the step {step!r} would make it fit." if step else None


def _kind(key: Key) -> str:
    return key.slot.partition(".")[0]


def _spans(steps: Iterable[int]) -> str:
    """Steps as text, runs of them as spans.

    Example:
        >>> _spans([0, 1, 2, 5])
        '0-2,5'
    """
    spans: list[range] = []
    for step in sorted(set(steps)):
        if spans and spans[-1].stop == step:
            spans[-1] = range(spans[-1].start, step + 1)
        else:
            spans.append(range(step, step + 1))
    return ",".join(map(span_text, spans))
