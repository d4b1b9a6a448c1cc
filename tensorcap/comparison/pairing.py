"""Pair the records of two archives by key, and say why some have no partner.

Ops are paired in order (CMP-30): ops of one name are numbered within a module's call, so that one more of
them, a cast say, would shift all that follow. The ops and the calls of modules in a call are two sequences;
what they have in common, in order, is paired. `Absences` says why a record has no partner (CMP-6, CMP-33).
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from functools import cached_property
from typing import Final, NamedTuple

from tensorcap.comparison.pair import Decision, Pair, Status, decide
from tensorcap.comparison.program_pair import ProgramPair
from tensorcap.comparison.quantised_weights import kept_beside
from tensorcap.recording import CaptureOptions, RecordFilter, parse_steps
from tensorcap.runs import Ops, enclosing_sites, is_gradient, is_inner, is_parameter, is_result, ops_of
from tensorcap_formats.archive import Archive
from tensorcap_formats.errors import UsageError, no_such_tensor
from tensorcap_formats.keys import PROBES, ROOT_SITE, Key, escape, matches, module_of
from tensorcap_formats.records import Record
from tensorcap_formats.run_info import PointInfo, ScopeInfo

_PAIRED: Final = Decision("pairing", "unjudged")  # one object for all pairs
_UNINITIALIZED: Final = "memory that nothing was written to yet"
UNNAMED: Final = "an operation of the reference's program that no node of its graph names"
NOT_MAPPED: Final = "no operation of the target's program is mapped to it"
_CONSTANT: Final = "the target's program has its weights as constants"
_CAST: Final = "a cast, which computes nothing; the target has none"
_INPUT_KEY: Final = "the target's op was given what it holds in"


@dataclass(frozen=True, slots=True)
class Selection:
    """What a user narrowed a comparison to, as globs over key texts.

    Attributes:
        only: Compare what fits one of these; everything if it is empty.
        exclude: Leave out what fits one of these.
        require: What fits none of these may be missing; nothing may if it is empty.
    """

    only: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    require: tuple[str, ...] = ()

    def is_optional(self, text: str) -> bool:
        """Whether a key may be missing."""
        return bool(self.require) and not any(matches(text, pattern) for pattern in self.require)

    def is_required(self, text: str) -> bool:
        """Whether `require` names a key, so that nothing explains its absence."""
        return bool(self.require) and not self.is_optional(text)

    def why_not(self, text: str) -> str:
        """Why a key is left out, or "" if it is not."""
        if self.only and not any(matches(text, pattern) for pattern in self.only):
            return "not among those asked for by --only"
        for pattern in self.exclude:
            if matches(text, pattern):
                return f"by --exclude {pattern}"
        return ""

    def require_hits(self, reference: Archive) -> None:
        """Refuse a pattern in `only` or `require` that fits no key of the reference.

        Raises:
            TensorNotFoundError: There is one: it is a slip, or the reference lacks what was asked for.
        """
        if not self.only and not self.require:
            return
        texts = {record.key.text for record in reference.records}
        for pattern in (*self.only, *self.require):
            if not any(matches(text, pattern) for text in texts):
                raise no_such_tensor(str(reference.path), pattern, texts)


def pair_records(reference: Archive, target: Archive, selection: Selection) -> list[Pair]:
    """Pair the records of two archives by equal key text (CMP-1).

    Returns:
        One pair for each reference record, in the reference's order; then what the reference was to hold
        and could not capture (CMP-16), without records; then those of the target that have no partner.
        Pairs with two sides are `unjudged` as yet.

    Raises:
        TensorNotFoundError: A pattern in `selection.only` or `selection.require` fits no key of the
            reference.
    """
    selection.require_hits(reference)
    targets = {record.key.text: record for record in target.records}
    ops = ops_of(reference)
    partner_text = partner_texts(reference, target)
    others = ops_of(target)
    explain = Absences(reference, ops, target, others)
    programs = ProgramPair.of(reference, target)
    unnamed = _Unnamed(reference)
    pairs = []
    for record in reference.records:
        text = record.key.text
        wanted = partner_text(record) or ""
        partner = targets.pop(wanted, None)
        reason = selection.why_not(text)
        if not reason and ops and ops.is_uninitialised(record.key):
            reason = _UNINITIALIZED
        elif not reason and (
            record.key.site in programs.numbered or (partner is None and record.key in unnamed)
        ):
            reason = UNNAMED
        is_optional = selection.is_optional(text)
        status: Status
        if reason:
            status = "excluded"
        elif partner is not None:
            status = "unjudged"
        else:
            status, reason = explain(record)
            if not reason and ops and ops.is_cast(record.key.where):
                status, reason = "explained", _CAST
            elif not reason and (key := others.input_key(*wanted.rpartition("/")[::2])):
                status, reason = "explained", f"{_INPUT_KEY} {key}"
        pair = Pair(text, "unjudged", record, partner, is_optional=is_optional)
        pairs.append(decide(pair, _PAIRED if status == "unjudged" else Decision("pairing", status, reason)))
    pairs += _losses(reference, selection, programs)
    known = {pair.key for pair in pairs}
    surplus = _Surplus(reference)
    beside = kept_beside(target.info)
    pairs += [  # an op of the same key, which is paired with another one, may stand there already
        decide(
            Pair(f"{text} (target)" if text in known else text, "unjudged", None, record),
            surplus.decision(record, is_optional=selection.is_optional(text)),
        )
        for text, record in targets.items()
        if not selection.why_not(text)
        and record.key.site not in programs.numbered
        and (record.key.site, record.key.slot) not in beside
    ]
    return pairs


class _Unnamed:
    """Records of operations of a compiled reference that no node names: their numbers are its own.

    Args:
        reference: The trusted archive.
    """

    def __init__(self, reference: Archive) -> None:
        self._nodes = {escape(row.node) for row in reference.info.operation_map}

    def __contains__(self, key: Key) -> bool:
        return bool(self._nodes) and is_inner(key) and key.site.partition(":")[2] not in self._nodes


class _Surplus:
    """What a record is that only the target has: one more tensor, or a step that the reference lacks (CMP-7).

    Args:
        reference: The trusted archive.
    """

    def __init__(self, reference: Archive) -> None:
        scope = reference.info.scope
        is_whole = not (reference.info.stopped or (scope and (scope.steps or scope.sample is not None)))
        keys = [record.key for record in reference.records if not record.key.is_bare] if is_whole else []
        self._ranks = {key.rank for key in keys if _is_result_of_model(key)}
        self._steps = {(key.rank, key.step) for key in keys}

    def decision(self, record: Record, *, is_optional: bool) -> Decision:
        """Return the status of a record of the target without a partner."""
        key = record.key
        is_further_step = key.rank in self._ranks and (key.rank, key.step) not in self._steps
        if is_optional or not (is_further_step and _is_result_of_model(key)):
            return Decision("pairing", "missing-in-reference")
        return Decision("pairing", "unexpected", f"the reference's run has no step {key.step}")


def _is_result_of_model(key: Key) -> bool:
    return not key.is_bare and key.site == ROOT_SITE and is_result(key)


def _losses(reference: Archive, selection: Selection, programs: ProgramPair) -> Iterator[Pair]:
    """Yield a pair for each point that a run was to capture and could not: it has no record.

    An operation that the reference's own program was compiled without has nothing to compare (SYN-14).
    """
    is_compiled = bool(reference.info.operation_map)
    for point in reference.info.points:
        if point.status != "not-capturable":
            continue
        for slot in point.slots or ("return" if point.kind == "function" else "output",):
            text = Key(point.site, slot).text
            if not selection.why_not(text):
                reason = point.reason or "no reason is known"
                decision = Decision("pairing", "not-capturable", f"in the reference: {reason}")
                if is_compiled and ":" in point.site:
                    decision = Decision("pairing", "excluded", reason)
                if (point.site, slot) in programs.lacking:
                    decision = Decision("pairing", "explained", f"in neither program: {reason}")
                pair = Pair(text, "unjudged", None, None, is_optional=selection.is_optional(text))
                yield decide(pair, decision)


_Call = tuple[int, int, str, int]  # rank, step, site of the module, number of the call


class _Step(NamedTuple):
    """A step of a module's call: an op, or the call of a module within it.

    Attributes:
        name: Name of the op, or the site of the module.
        shapes: Shapes of the op's records; of a module none.
        place: The op's place; "" for a module.
    """

    name: str
    shapes: tuple[tuple[int, ...], ...]
    place: str


def partner_texts(reference: Archive, target: Archive) -> Callable[[Record], str | None]:
    """Return a function from a reference's record to the key text of the target's; None if it has none.

    Ops pair in order (CMP-30), but for those of a compiled program, whose nodes have the reference's names.
    """
    is_compiled = bool(reference.info.operation_map or target.info.operation_map)
    ours, theirs = ops_of(reference), ops_of(target)
    partners = {} if is_compiled else pair_ops(reference, ours, target, theirs)

    def find(record: Record) -> str | None:
        if not is_compiled and ours and theirs and (place := record.key.where) in ours:
            return f"{partners[place]}/{record.key.slot}" if place in partners else None
        text = record.key.text
        return text if text in target else target.canonical(text)

    return find


def pair_ops(reference: Archive, ours: Ops, target: Archive, theirs: Ops) -> dict[str, str]:
    """Pair ops in order: the place of the target's op by that of the reference's, if it has a partner.

    Args:
        reference: The trusted archive.
        ours: Its ops.
        target: The archive under test.
        theirs: Its ops.
    """
    if not (ours and theirs):
        return {}
    trusted, tested = _sequences(reference, ours, target.info.aliases), _sequences(target, theirs, {})
    partners: dict[str, str] = {}
    for call, steps in trusted.items():
        others = tested.get(call, ())
        if len(steps) == len(others) and all(a[:2] == b[:2] for a, b in zip(steps, others, strict=True)):
            partners.update((a.place, b.place) for a, b in zip(steps, others, strict=True))
        else:
            partners.update(_common(steps, others))
    partners.pop("", None)
    return partners


def _common(steps: Sequence[_Step], others: Sequence[_Step]) -> Iterator[tuple[str, str]]:
    """Pair what two sequences have in common by name and shapes, and what is between by name alone."""
    matcher = SequenceMatcher(None, [s[:2] for s in steps], [s[:2] for s in others], autojunk=False)
    for tag, i, j, k, m in matcher.get_opcodes():
        if tag == "equal":
            yield from ((a.place, b.place) for a, b in zip(steps[i:j], others[k:m], strict=True))
        elif tag == "replace":
            rest, other = steps[i:j], others[k:m]
            by_name = SequenceMatcher(None, [s.name for s in rest], [s.name for s in other], autojunk=False)
            for block in by_name.get_matching_blocks():
                for n in range(block.size):
                    yield rest[block.a + n].place, other[block.b + n].place


def _sequences(archive: Archive, ops: Ops, aliases: Mapping[str, str]) -> dict[_Call, list[_Step]]:
    """List the steps of each call of a module that has ops, in execution order.

    Args:
        archive: The archive of the run.
        ops: Its ops.
        aliases: Names of modules in the other run, by those in this one.
    """
    shapes: dict[str, list[tuple[int, ...]]] = {}
    for record in archive.records:
        if is_inner(record.key):
            shapes.setdefault(record.key.where, []).append(record.shape)
    numbers: dict[tuple[int, int, str], int] = {}  # of the call that is under way, as far as records show
    sequences: dict[_Call, list[_Step]] = {}
    known_places: set[str] = set()
    for record in archive.records:
        key = record.key
        place = key.where
        if key.is_bare or place in known_places:
            continue
        known_places.add(place)
        if place in ops and is_inner(key):  # a mapping may have put an op in a module's place
            module = module_of(key.site)
            call = (key.rank, key.step, aliases.get(module, module), ops.module_call(place))
            sequences.setdefault(call, []).append(_Step(ops.op(place), tuple(shapes[place]), place))
        elif not is_inner(key):
            for module in enclosing_sites(key.site):  # the nearest that is under way
                number = numbers.get((key.rank, key.step, module))
                if number is not None:
                    call = (key.rank, key.step, aliases.get(module, module), number)
                    sequences.setdefault(call, []).append(_Step(aliases.get(key.site, key.site), (), ""))
                    break
            numbers[key.rank, key.step, key.site] = key.call
    return sequences


_NEVER_CALLED: Final[Mapping[str, str]] = {  # by the kind of the point
    "function": "the target never called this function",
    "probe": "the target never passed this probe",
}


class Absences:
    """Why the target has no record of a key, as far as its run says (CMP-6, CMP-33).

    Args:
        reference: The trusted archive.
        ops: Its ops.
        target: The archive under test.
        others: Its ops.
    """

    def __init__(self, reference: Archive, ops: Ops, target: Archive, others: Ops) -> None:
        self._reference = reference
        self._ops = ops
        self._target = target
        self._others = others
        self._points: dict[str, PointInfo] = {}
        self._slots: dict[tuple[str, str], PointInfo] = {}
        for point in target.info.points:
            if point.slots:
                self._slots.update(((point.site, slot), point) for slot in point.slots)
            else:
                self._points[point.site] = point

    def __call__(self, record: Record) -> tuple[Status, str]:
        """Return the status of a reference record without a partner, and the reason if one is known."""
        point = self._point(record.key)
        reason = point.reason if point else ""
        status = point.status if point else ""
        if status == "not-capturable":
            return "not-capturable", reason
        option = self._left_out(record)
        if option:
            return "missing-in-target", f"the target's capture {option}"
        if status == "never-called":
            kind = point.kind if point else ""
            return "never-called", reason or _NEVER_CALLED.get(kind, "the target never called this module")
        excluded = "the target's capture left it out" if status == "excluded" else ""
        if self._target.info.operation_map and not (reason or excluded):
            reason = NOT_MAPPED if is_inner(record.key) else _CONSTANT if is_parameter(record.key) else ""
        return "missing-in-target", reason or excluded

    def is_left_out(self, record: Record) -> bool:
        """Whether the target's capture was told to leave a record out, or reached its limit before."""
        point = self._point(record.key)
        return bool(self._left_out(record)) or (point is not None and point.status == "excluded")

    def is_never_called(self, key: Key) -> bool:
        """Whether the target has the module and did not call it."""
        point = self._point(key)
        return point is not None and point.status == "never-called"

    def _point(self, key: Key) -> PointInfo | None:
        point = self._slots.get((key.site, key.slot)) or self._points.get(key.site)
        if point is None and is_inner(key):  # the module around it may never have been called
            around = self._points.get(module_of(key.site))
            return around if around and around.status in ("never-called", "excluded") else None
        return point

    def _left_out(self, record: Record) -> str:
        """Return which option of the target's capture rules the record out, as a verb phrase; "" if none."""
        key, scope = record.key, self._target.info.scope
        if scope is None:
            return ""
        if self._steps and not any(key.step in span for span in self._steps):
            return f"took steps {scope.steps}"
        if is_gradient(key) and not scope.grads:
            return "took no gradients"
        if is_parameter(key) and not scope.params and not self._target.info.operation_map:
            return "took no parameters"
        if is_inner(key) and (why := self._without(key, scope)):
            return why
        if key.slot.partition(".")[0] == "input" and not is_inner(key) and not scope.inputs:
            return "took no inputs of modules"
        if _is_ruled_out(key, scope):
            return "left it out"
        if scope.sample is not None and self._calls.get(key.site, 0) >= scope.sample:
            return f"took the first {scope.sample} calls of each site"
        return self._stopped(record)

    def _without(self, key: Key, scope: ScopeInfo) -> str:
        """Return why there are no ops, or no variables of functions, of a module, unless it is compiled."""
        if self._target.info.operation_map:
            return ""
        if key.where not in self._ops:
            is_function = module_of(key.site) != PROBES
            return "watched no functions" if is_function and not scope.watch else ""
        if not self._others:
            return "took no ops"
        module = module_of(key.site)
        around = [module, *enclosing_sites(module)]
        if scope.ops_in and not any(fnmatch.fnmatchcase(site, g) for g in scope.ops_in for site in around):
            return f"took only ops in {', '.join(scope.ops_in)}"
        return ""

    def _stopped(self, record: Record) -> str:
        """Return that the limit of bytes was reached before the record's turn, or ""."""
        stopped = self._target.info.stopped
        if stopped is None or not stopped.at:
            return ""
        if stopped.at in self._reference and self._reference.get(stopped.at).order > record.order:
            return ""
        return f"stopped at {stopped.text}"

    @cached_property
    def _steps(self) -> tuple[range, ...]:
        scope = self._target.info.scope
        try:
            return parse_steps(scope.steps) if scope and scope.steps else ()
        except UsageError:  # of a damaged file
            return ()

    @cached_property
    def _calls(self) -> Mapping[str, int]:
        """Counts of calls that the target has records of, by site."""
        calls: dict[str, set[str]] = {}
        for record in self._target.records:
            if not record.key.is_bare:
                calls.setdefault(record.key.site, set()).add(record.key.where)
        return {site: len(places) for site, places in calls.items()}


def _is_ruled_out(key: Key, scope: ScopeInfo) -> bool:
    """Whether globs that include or exclude leave a key out."""
    if not (scope.include or scope.exclude):
        return False
    globs = RecordFilter(CaptureOptions(only=tuple(scope.include), exclude=tuple(scope.exclude)))
    aliases = (module_of(key.site),) if is_inner(key) else ()
    wanted = globs.keeps_site(key.site, aliases)
    return not globs.keeps(key, aliases) if wanted is None else not wanted
