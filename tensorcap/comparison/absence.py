"""Absences that both runs explain: the target lacks a tensor, and all that was made of it agrees (CMP-54)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from tensorcap.comparison.pair import Decision, Pair, Status, decide
from tensorcap.comparison.pairing import Absences, Selection
from tensorcap.runs import is_gradient, is_inner, is_parameter, is_result, ops_of
from tensorcap_formats.archive import Archive
from tensorcap_formats.keys import ROOT_SITE, Key, module_of
from tensorcap_formats.records import Record

_OPEN: Final[tuple[Status, ...]] = ("missing-in-target", "never-called", "unmapped")
_LEAST: Final = 16  # elements; fewer are equal by chance
_FUSED_ATTENTION: Final = ("sdpa", "flash", "flex")  # implementations that keep no attention weights

_Place = tuple[int, int, str]  # rank, step, site


def explain_absences(
    reference: Archive, target: Archive, pairs: Sequence[Pair], selection: Selection
) -> list[Pair]:
    """Make `explained` what the target lacks and what both runs explain.

    Args:
        reference: The trusted archive.
        target: The archive under test.
        pairs: Their pairs, judged.
        selection: What a user asked for; nothing explains that a required record is missing.
    """
    if not any(pair.status in _OPEN for pair in pairs):
        return list(pairs)
    explanations = _Explanations(reference, target, pairs)
    return [
        _explained(pair, explanations)
        if pair.status in _OPEN and not selection.is_required(pair.key)
        else pair
        for pair in pairs
    ]


def _explained(pair: Pair, explanations: _Explanations) -> Pair:
    reason = "" if pair.reference is None or pair.reference.key.is_bare else explanations.of(pair.reference)
    return decide(pair, Decision("absence", "explained", reason)) if reason else pair


class _Explanations:
    """Why nothing is lost where the target lacks a record.

    Args:
        reference: The trusted archive.
        target: The archive under test.
        pairs: All pairs, judged.
    """

    def __init__(self, reference: Archive, target: Archive, pairs: Sequence[Pair]) -> None:
        self._target = target
        self._has_ops = bool(ops_of(target))
        self._has_digests = reference.trusts_digests
        self._absences = Absences(reference, ops_of(reference), target, ops_of(target))
        compared = [p for p in pairs if p.reference is not None and p.is_compared and p.status != "excluded"]
        self._agreeing = {
            _contents(p.reference): p.key
            for p in reversed(compared)
            if p.reference and p.is_green and _is_telling(p.reference)
        }
        self._results: dict[_Place, list[Pair]] = {}
        self._of_call: dict[str, list[Pair]] = {}
        for pair in compared:
            if pair.reference is None or not is_result(pair.reference.key):
                continue
            key = pair.reference.key
            self._results.setdefault((key.rank, key.step, key.site), []).append(pair)
            self._of_call.setdefault(key.where, []).append(pair)

    def of(self, record: Record) -> str:
        """Why the target may lack a record of the reference; "" if it may not."""
        key = record.key
        if self._absences.is_left_out(record) or not self._target.info.modules or is_gradient(key):
            return ""
        same = self._agreeing.get(_contents(record)) if self._has_digests and _is_telling(record) else None
        if same is not None:
            return f"it holds what {same} holds, which agrees"
        if is_inner(key):
            return self._of_enclosing(key, module_of(key.site)) if self._has_ops else ""
        if is_parameter(key):
            return self._of_parameter(key)
        results = self._of_call.get(key.where, ())
        if results:
            return self._of_known_call(key, results)
        if key.site != ROOT_SITE and self._is_without_call(key):
            return self._of_enclosing(key, _around(key.site))
        return ""

    def _of_known_call(self, key: Key, results: Sequence[Pair]) -> str:
        """Of a call that the target makes too, with fewer arguments or results."""
        if not _agree(results) or self._target.info.scope is None:
            return ""
        if key.slot.startswith("input"):
            return "the target's call is given no such argument, and its results agree"
        if key.site == ROOT_SITE:
            return ""
        implementation = self._target.info.attention_implementation
        if implementation.startswith(_FUSED_ATTENTION):
            return f"the target's call returns no such value ({implementation} keeps no attention weights)"
        return "the target's call returns no such value, and its other results agree"

    def _of_parameter(self, key: Key) -> str:
        module = self._target.info.modules.get(key.site)
        name = key.slot.partition(".")[2]
        if module is not None and name in {**module.parameters, **module.buffers}:
            return ""
        return self._of_enclosing(key, key.site)

    def _is_without_call(self, key: Key) -> bool:
        """Whether the target has no such module, or does not call it."""
        return self._absences.is_never_called(key) or key.site not in self._target.info.modules

    def _of_enclosing(self, key: Key, site: str) -> str:
        """By the results of the nearest module around it that both sides called."""
        while True:
            results = self._results.get((key.rank, key.step, site))
            if results:
                module = "the model" if site == ROOT_SITE else site
                return (
                    f"the target computes {module} without it, with results that agree"
                    if _agree(results)
                    else ""
                )
            if site == ROOT_SITE:
                return ""
            site = _around(site)


def _agree(results: Sequence[Pair]) -> bool:
    return all(pair.is_green for pair in results)


def _around(site: str) -> str:
    return site.rpartition(".")[0] or ROOT_SITE


def _contents(record: Record) -> tuple[object, ...]:
    return record.key.rank, record.key.step, record.digest, record.dtype.name, record.shape


def _is_telling(record: Record) -> bool:
    """Whether a record of equal contents holds the same by no chance."""
    statistics = record.statistics
    is_varied = statistics is not None and statistics.minimum != statistics.maximum
    return record.digest != "" and record.size >= _LEAST and is_varied
