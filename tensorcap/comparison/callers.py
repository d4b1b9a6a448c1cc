"""Who called a module, and who gave it its arguments."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence

from tensorcap.comparison.pair import Pair
from tensorcap.runs import Contents, calls_of, contents_of, enclosing_sites, is_telling, lies_within
from tensorcap_formats.archive import Archive
from tensorcap_formats.keys import ROOT_SITE
from tensorcap_formats.records import Record


def caller_of(site: str, called: Collection[str]) -> str:
    """Return the nearest module around a site that was itself called; a list of layers is not."""
    return next((around for around in enclosing_sites(site) if around in called), ROOT_SITE)


def called_sites(reference: Archive) -> set[str]:
    """Return the sites of modules that were called, by a run's records and capture points."""
    called = {record.key.site for record in reference.records}
    called.update(point.site for point in reference.info.points if point.status != "never-called")
    return called


class Givers:
    """Who gave calls their arguments, where modules around them only hand these on (RPL-208).

    Args:
        reference: The trusted archive.
        targets: Records of the target, by the reference's key text.
    """

    def __init__(self, reference: Archive, targets: Mapping[str, Record]) -> None:
        self._targets = targets
        self._called = called_sites(reference)
        self._arguments: dict[tuple[int, int, str, int], Sequence[Record]] = {}
        self._alike: dict[Contents, list[Record]] = defaultdict(list)
        for call in calls_of(reference).calls:
            self._arguments[call.place] = call.inputs
            for record in filter(is_telling, call.inputs):
                self._alike[contents_of(record)].append(record)

    @classmethod
    def of_pairs(cls, reference: Archive, pairs: Iterable[Pair]) -> Givers:
        """Those of a comparison of a target with the reference."""
        return cls(reference, {pair.key: pair.target for pair in pairs if pair.target is not None})

    def of(self, record: Record) -> str:
        """The module whose code gave a call one of its arguments.

        Args:
            record: The argument, of the reference; the target has it.
        """
        giver = caller_of(record.key.site, self._called)
        while giver != ROOT_SITE and is_telling(record) and self._is_handed_on(record, giver):
            giver = caller_of(giver, self._called)
        return giver

    def _is_handed_on(self, record: Record, module: str) -> bool:
        """Whether a module was given a call's argument and only hands it on.

        The target has no tensor for what it was given. Where it gives unlike tensors to calls within the
        module that the reference gives the same, the module itself takes another one for some.
        """
        key, contents = record.key, contents_of(record)
        given = self._arguments.get((key.rank, key.step, module, key.call), ())
        alike = [one for one in given if contents_of(one) == contents]
        if not alike or any(one.key.text in self._targets for one in alike):
            return False
        within = (one.key for one in self._alike[contents] if lies_within(one.key.site, module))
        return len({self._targets[one.text].digest for one in within if one.text in self._targets}) == 1
