"""Why a target lacks a record: what its run says of the site, and what its capture was told to leave out."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator, Mapping
from functools import cached_property

from tensorcap.comparison.pair import Status
from tensorcap.recording.options import CaptureOptions, parse_steps
from tensorcap.recording.record_filter import RecordFilter
from tensorcap.runs.ops import Ops
from tensorcap.runs.record_kinds import is_gradient, is_inner, is_parameter
from tensorcap_formats.archive import Archive
from tensorcap_formats.errors import UsageError
from tensorcap_formats.keys import PROBES, ROOT_SITE, Key, module_of
from tensorcap_formats.records import Record
from tensorcap_formats.run_info import PointInfo, ScopeInfo

_OF_POINTS = {  # what was never passed, by the kind of the point
    "function": "the target never called this function",
    "probe": "the target never passed this probe",
}


class Absences:
    """What the target says of a record that it does not have (CMP-6, CMP-73).

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
        """The status of a reference record without a partner, and the reason where one is known."""
        key = record.key
        point = self._slots.get((key.site, key.slot)) or self._points.get(key.site)
        if point is None and is_inner(key):  # the module around it may never have been called
            around = self._points.get(module_of(key.site))
            point = around if around and around.status in ("never-called", "excluded") else None
        said = point.reason if point else ""
        status = point.status if point else ""
        if status == "not-capturable":
            return "not-capturable", said
        why = self._left_out(record)
        if status == "never-called" and not why:
            kind = point.kind if point else ""
            return "never-called", said or _OF_POINTS.get(kind, "the target never called this module")
        if why:
            return "missing-in-target", f"the target's capture {why}"
        return "missing-in-target", said or (
            "the target's capture left it out" if status == "excluded" else ""
        )

    def _left_out(self, record: Record) -> str:
        """What the target's capture was told that rules the record out."""
        key, scope = record.key, self._target.info.scope
        if scope is None:
            return ""
        if self._steps and not any(key.step in span for span in self._steps):
            return f"took steps {scope.steps}"
        if is_gradient(key) and not scope.grads:
            return "took no gradients"
        if is_parameter(key) and not scope.params:
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
        """Why there are no ops, or no variables of functions, of a module."""
        if key.where not in self._ops:
            is_function = module_of(key.site) != PROBES
            return "watched no functions" if is_function and not scope.watch else ""
        if not self._others:
            return "took no ops"
        around = list(_around(module_of(key.site)))
        if scope.ops_in and not any(fnmatch.fnmatchcase(site, g) for g in scope.ops_in for site in around):
            return f"took only ops in {', '.join(scope.ops_in)}"
        return ""

    def _stopped(self, record: Record) -> str:
        """That the limit of bytes was reached before the record's turn."""
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
        """How many calls of each site the target has records of."""
        calls: dict[str, set[str]] = {}
        for record in self._target.records:
            if not record.key.is_bare:
                calls.setdefault(record.key.site, set()).add(record.key.where)
        return {site: len(found) for site, found in calls.items()}


def _is_ruled_out(key: Key, scope: ScopeInfo) -> bool:
    """Whether globs that include or exclude leave a key out."""
    if not (scope.include or scope.exclude):
        return False
    globs = RecordFilter(CaptureOptions(only=tuple(scope.include), exclude=tuple(scope.exclude)))
    aliases = (module_of(key.site),) if is_inner(key) else ()
    wanted = globs.keeps_site(key.site, aliases)
    return not globs.keeps(key, aliases) if wanted is None else not wanted


def _around(site: str) -> Iterator[str]:
    """A module's site, and those of the modules around it."""
    yield site
    while "." in site:
        site = site.rpartition(".")[0]
        yield site
    yield ROOT_SITE
