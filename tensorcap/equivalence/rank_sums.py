"""How much more than its source a port of parallel layers rounds: sums over ranks, and the bias after them.

A `RowParallelLinear` rounds the partial sum of each rank, each addition of the reduction, and the sum with
the bias, where a plain linear layer rounds once. A right port in low precision has an R of 1.2 to 1.5 there.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Final

from tensorcap.rerun import is_within
from tensorcap_formats.archive import Archive
from tensorcap_formats.run_info import ModuleInfo

_SUMMING: Final = "RowParallel"  # in the names of classes that add up ranks


def target_modules(seen: Archive, target: Archive) -> Mapping[str, ModuleInfo]:
    """The target's module by the source's site, as far as a result of one is a result of the other.

    Args:
        seen: The target under the source's keys.
        target: The target as it was captured.
    """
    modules: dict[str, ModuleInfo] = {}
    sources = getattr(seen, "sources", {})
    for record in seen.records:
        if record.key.slot.partition(".")[0] != "output":
            continue
        for source in sources.get(record.key.text, (record,)):
            module = target.info.modules.get(source.key.site)
            if module is not None:
                modules.setdefault(record.key.site, module)
    return modules


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
        site: sum(extra for other, extra in own.items() if other == site or is_within(other, site))
        for site in sites
    }
