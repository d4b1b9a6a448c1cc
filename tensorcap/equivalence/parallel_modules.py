"""What ranks add to a port: roundings of sums and of a bias after them, and arguments that should be alike.

A `RowParallelLinear` rounds the partial sum of each rank, each addition of the reduction, and the sum with
the bias, where a plain linear layer rounds once. A right port in low precision has an R of 1.2 to 1.5 there.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Final

from tensorcap.runs import lies_within
from tensorcap_formats.archive import Archive
from tensorcap_formats.records import Record
from tensorcap_formats.run_info import ModuleInfo
from tensorcap_formats.view import ArchiveView

_SUMMING: Final = "RowParallel"  # in the names of classes that add up ranks


def target_modules(seen: Archive, target: Archive) -> Mapping[str, ModuleInfo]:
    """The target's module by the source's site, as far as a result of one is a result of the other.

    Args:
        seen: The target under the source's keys.
        target: The target as it was captured.
    """
    modules: dict[str, ModuleInfo] = {}
    for record in seen.records:
        if record.key.slot.partition(".")[0] == "output":
            for source in _origins(seen, record):
                module = target.info.modules.get(source.key.site)
                if module is not None:
                    modules.setdefault(record.key.site, module)
    return modules


def given_unlike(seen: Archive, target: Archive) -> Collection[str]:
    """Sites of the source whose module in the target was given another tensor on each rank, as by a mistake.

    Args:
        seen: The target under the source's keys.
        target: The target as it was merged.
    """
    ranks = target.info.ranks
    problems = {problem.key for problem in ranks.problems} if ranks else set()
    return {
        record.key.site
        for record in seen.records
        if problems and record.key.slot.startswith("input")
        if any(source.key.text in problems for source in _origins(seen, record))
    }


def _origins(view: Archive, record: Record) -> Sequence[Record]:
    """The records of the archive that views were made of, which a record of the last view is made of."""
    if not isinstance(view, ArchiveView):
        return (record,)
    sources = view.sources.get(record.key.text, ())
    return [origin for source in sources for origin in _origins(view.source, source)]


def extra_roundings(
    sites: Collection[str], modules: Mapping[str, ModuleInfo], count: int
) -> Mapping[str, float]:
    """How many roundings more than the source's module each component makes.

    Args:
        sites: The components, by their sites in the source.
        modules: The target's modules, by the same.
        count: How many ranks there are.

    Returns:
        By site, as squares add up: of each layer within that adds up ranks, those of its partial sums and of
        its additions, and one of its bias. A sum of k of N parts is k/N of the whole.
    """
    own = {}
    for site, module in modules.items():
        if _SUMMING in module.short_class:
            of_sum = 1 + (count + 2) * (count - 1) / (2 * count) if count > 1 else 1.0
            own[site] = of_sum + ("bias" in module.parameters) - 1
    return {
        site: sum(extra for other, extra in own.items() if other == site or lies_within(other, site))
        for site in sites
    }
