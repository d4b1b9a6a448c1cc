"""Which code made a tensor that the target has, if what lies before it has no tensors there.

A recurrent layer that a port writes out, or a head whose result its model returns, has no counterpart: what
it made shows only where it is used, and the code that hands it on is not what is wrong. The other way round,
a leaf that the reference gives something that the target has no tensor for shows errors of all that lies
between.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from tensorcap.comparison import called_sites, caller_of
from tensorcap.runs import Calls, Contents, calls_of, contents_of, enclosing_sites, is_inner, is_telling
from tensorcap_formats.archive import Archive
from tensorcap_formats.keys import ROOT_SITE, Key
from tensorcap_formats.records import Record


@dataclass(frozen=True, slots=True)
class Producers:
    """Who made tensors of the target that their own module, or the code around it, did not make alone.

    Attributes:
        results: The result that a tensor is which is only handed on, by the tensor's key text.
        spans: The module in which all lies that made the result of a leaf, by the result's key text.
    """

    results: Mapping[str, Record] = field(default_factory=dict)
    spans: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, reference: Archive, target: Archive) -> Producers:
        """Find them.

        1. A call is given what is known if the target has each tensor of floats of it: the argument, that of
           a module around, or an earlier result of these contents.
        2. A tensor that the target has is the result of a call, and not of the code that hands it on, if that
           result is the first appearance of its contents in the reference, aside from calls within it that it
           gave them to, the call was not given the same, and what it was given is known. So is the first
           result of a module around, with arguments before.
        3. The result of a leaf that was given what is not known is made by all that lies between: by the
           nearest module around these calls.

        Args:
            reference: The trusted archive.
            target: The archive under test, under the reference's keys.
        """
        flow = _Flow.of(reference, target)
        return cls(dict(_find_results(flow)), dict(_find_spans(flow)))

    def site(self, key: Key, maker: str) -> str:
        """The module that made a tensor.

        Args:
            key: Of the tensor.
            maker: The one whose code has it.
        """
        result = self.results.get(key.text)
        return self.spans.get(key.text, maker) if result is None else result.key.site


@dataclass(frozen=True, slots=True)
class _Flow:
    """Calls of the reference, and what of their tensors the target has.

    Attributes:
        calls: The calls.
        called: Sites that were called.
        target: The target.
        alike: Records of the same contents, in order of execution.
        inputs: Tensors of floats that each call was given.
        results: When the first result of some contents came that the target has.
    """

    calls: Calls
    called: set[str]
    target: Archive
    alike: Mapping[Contents, Sequence[Record]]
    inputs: Mapping[tuple[int, int, str, int], Sequence[Record]]
    results: Mapping[Contents, int]

    @classmethod
    def of(cls, reference: Archive, target: Archive) -> _Flow:
        calls = calls_of(reference)
        alike: dict[Contents, list[Record]] = defaultdict(list)
        for record in sorted(reference.records, key=lambda record: record.order):
            if _is_float(record) and is_telling(record):
                alike[contents_of(record)].append(record)
        results: dict[Contents, int] = {}
        for contents, records in alike.items():
            for record in records:
                if record.key.slot.startswith("output") and record.key.text in target:
                    results.setdefault(contents, record.order)
        inputs = {call.place: [one for one in call.inputs if _is_float(one)] for call in calls.calls}
        return cls(calls, called_sites(reference), target, alike, inputs, results)

    def inputs_of(self, key: Key) -> Sequence[Record]:
        return self.inputs.get((key.rank, key.step, key.site, key.call), ())

    def unknown(self, key: Key) -> Iterator[Record]:
        """What a call was given that the target has no tensor for."""
        around = {contents for site in enclosing_sites(key.site) for contents in self._known_of(key, site)}
        for record in self.inputs_of(key):
            contents = contents_of(record)
            is_result = self.results.get(contents, record.order) < record.order  # and not what is made of it
            if record.key.text not in self.target and not is_result and contents not in around:
                yield record

    def _known_of(self, key: Key, site: str) -> Iterator[Contents]:
        for record in self.inputs.get((key.rank, key.step, site, key.call), ()):
            if record.key.text in self.target:
                yield contents_of(record)


def _find_results(flow: _Flow) -> Iterator[tuple[str, Record]]:
    for contents, records in flow.alike.items():
        at = _find_first_result(flow, records)
        if at is None:
            continue
        record, users = records[at], records[at + 1 :]
        key = record.key
        given = flow.inputs_of(key)
        if not given or contents in map(contents_of, given) or any(flow.unknown(key)):
            continue
        for user in users:
            if user.key.text in flow.target:
                yield user.key.text, record
                if user.key.slot.startswith("output"):  # what comes behind it is made of the target's
                    break


def _find_first_result(flow: _Flow, records: Sequence[Record]) -> int | None:
    """Which of records of the same contents is the result of the call that made them; None if none is.

    The target has none before it. It is the first one, or that of the module whose code gave them to others
    first, as to a dropout.
    """
    first = records[0].key
    maker = first.site if first.slot.startswith("output") else caller_of(first.site, flow.called)
    for at, record in enumerate(records):
        key = record.key
        if key.text in flow.target or maker == ROOT_SITE:
            return None
        if key.slot.startswith("output") and key.site == maker:
            return at
    return None


def _find_spans(flow: _Flow) -> Iterator[tuple[str, str]]:
    for call in flow.calls.calls:
        if not call.outputs or not flow.calls.is_leaf(call.site):
            continue
        key = call.outputs[0].key
        waiting = list(flow.unknown(key))
        if not waiting:
            continue
        modules, seen = {caller_of(key.site, flow.called)}, set[Contents]()
        while waiting:
            contents = contents_of(waiting.pop())
            if contents in seen or contents not in flow.alike:
                continue
            seen.add(contents)
            first = flow.alike[contents][0].key
            modules.add(caller_of(first.site, flow.called))
            if first.slot.startswith("output"):
                waiting += flow.unknown(first)
        span = _find_common(modules, flow.called)
        for record in call.outputs:
            if record.key.text in flow.target:
                yield record.key.text, span


def _find_common(modules: set[str], called: set[str]) -> str:
    """The nearest module that others are, or lie in."""
    first, *others = modules
    around = [first, *(site for site in enclosing_sites(first) if site in called)]
    for site in around:
        if all(other == site or other.startswith(f"{site}.") for other in others):
            return site
    return ROOT_SITE


def _is_float(record: Record) -> bool:
    key = record.key
    is_slot = key.slot.startswith(("input", "output")) and not is_inner(key) and not key.is_bare
    return is_slot and record.dtype.kind == "float"
