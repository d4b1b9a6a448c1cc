"""Which call made a tensor that code hands on as it is, if the target has no result of that call.

A recurrent layer that a port writes out, or a head whose result its model returns, has no counterpart: what
it made shows only where it is used. The code that hands it on is not what is wrong then.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Final

from tensorcap.runs import Calls, is_inner
from tensorcap_formats.archive import Archive
from tensorcap_formats.keys import ROOT_SITE
from tensorcap_formats.records import Record

_LEAST: Final = 16  # elements; fewer are equal by chance

_Contents = tuple[object, ...]


def find_producers(reference: Archive, target: Archive, calls: Calls) -> Mapping[str, Record]:
    """Find the results that tensors of the target are, of calls that have no result there.

    1. A tensor's first appearance in the reference, by its contents, is the result of a call: that made it.
       It was not given the same.
    2. Each tensor of floats that the call was given is known: the target has one of these contents, so that
       nobody else's work lies between.
    3. The target has the tensor as an argument, or as the result of a module around: the first one of these
       is the call's, and arguments before it.

    Args:
        reference: The trusted archive.
        target: The archive under test, under the reference's keys.
        calls: The reference's calls.

    Returns:
        The result, by key text of the tensor.
    """
    alike: dict[_Contents, list[Record]] = defaultdict(list)
    for record in sorted(reference.records, key=lambda record: record.order):
        if _is_telling(record):
            alike[_contents(record)].append(record)
    known = {contents for contents, records in alike.items() if any(r.key.text in target for r in records)}
    inputs = {call.place: [one for one in call.inputs if _is_float(one)] for call in calls.calls}
    producers: dict[str, Record] = {}
    for contents, (record, *users) in alike.items():
        key = record.key
        if not key.slot.startswith("output") or key.site == ROOT_SITE or key.text in target:
            continue
        given = {_contents(one) for one in inputs.get((key.rank, key.step, key.site, key.call), ())}
        if not given or contents in given or not given <= known:
            continue
        for user in users:
            if user.key.text in target:
                producers[user.key.text] = record
                if user.key.slot.startswith("output"):  # what comes behind it is made of the target's
                    break
    return producers


def _is_telling(record: Record) -> bool:
    """Whether another record holds the same by no chance."""
    statistics = record.statistics
    is_varied = statistics is not None and statistics.minimum != statistics.maximum
    return _is_float(record) and record.digest != "" and record.size >= _LEAST and is_varied


def _is_float(record: Record) -> bool:
    key = record.key
    is_slot = key.slot.startswith(("input", "output")) and not is_inner(key) and not key.is_bare
    return is_slot and record.dtype.kind == "float"


def _contents(record: Record) -> _Contents:
    return record.key.rank, record.key.step, record.digest, record.dtype.name, record.shape
