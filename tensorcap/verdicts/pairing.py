"""Which reference record belongs to which target record, and why some have no partner."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final

from tensorcap.verdicts.absences import Absences
from tensorcap.verdicts.op_pairing import partner_texts
from tensorcap.verdicts.ops import Ops, ops_of
from tensorcap.verdicts.pair import Pair, Status
from tensorcap_formats.archive import Archive
from tensorcap_formats.errors import no_such_tensor
from tensorcap_formats.keys import Key, matches
from tensorcap_formats.run_info import PointInfo

_NO_VALUE: Final = "memory that nothing was written to yet"
_CAST: Final = "a cast, which computes nothing; the target has none"
_HELD: Final = "the target's op was given what it holds in"


@dataclass(frozen=True, slots=True)
class Selection:
    """What a user narrowed a comparison to, as globs over key texts.

    Attributes:
        only: Compare what fits one of these; everything where it is empty.
        exclude: Leave out what fits one of these.
        require: What fits none of these may be missing; nothing may where it is empty.
    """

    only: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    require: tuple[str, ...] = ()

    def is_optional(self, text: str) -> bool:
        """Whether a key may be missing."""
        return bool(self.require) and not any(matches(text, pattern) for pattern in self.require)

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
    pairs = []
    for record in reference.records:
        text = record.key.text
        wanted = partner_text(record) or ""
        partner = targets.pop(wanted, None)
        reason = selection.why_not(text) or (_NO_VALUE if ops and ops.is_uninitialised(record.key) else "")
        is_optional = selection.is_optional(text)
        status: Status
        if reason:
            status = "excluded"
        elif partner is not None:
            status = "unjudged"
        else:
            status, reason = explain(record)
            if not reason and ops and ops.is_cast(record.key.where):
                is_optional, reason = True, _CAST
            elif not reason and (holder := _holder(others, wanted)):
                is_optional, reason = True, f"{_HELD} {holder}"
        pairs.append(Pair(text, status, record, partner, reason=reason, is_optional=is_optional))
    pairs += _losses(reference.info.points, selection)
    known = {pair.key for pair in pairs}
    pairs += [  # an op of the same key, which is paired with another one, may stand there already
        Pair(f"{text} (target)" if text in known else text, "missing-in-reference", None, record)
        for text, record in targets.items()
        if not selection.why_not(text)
    ]
    return pairs


def _holder(others: Ops, wanted: str) -> str:
    """What holds in the target what the reference has a record of as an op's input; "" if nothing does."""
    place, _, slot = wanted.rpartition("/")
    return others.given_from(place, slot) if place in others else ""


def _losses(points: Iterable[PointInfo], selection: Selection) -> Iterator[Pair]:
    """What a run was to capture and could not: no record stands for it, and it must not be forgotten."""
    for point in points:
        if point.status != "not-capturable":
            continue
        for slot in point.slots or ("return" if point.kind == "function" else "output",):
            text = Key(point.site, slot).text
            if not selection.why_not(text):
                reason = f"in the reference: {point.reason or 'no reason is known'}"
                yield Pair(
                    text, "not-capturable", None, None, reason=reason, is_optional=selection.is_optional(text)
                )
