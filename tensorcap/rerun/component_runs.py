"""The reference's model run on the arguments that the target's modules were given: each module whole.

A replay (`reverse_replay`) replaces the results within a module too, so that each module shows what its own
code makes. Here only its arguments are the target's, and what is within it runs naturally: the result is that
of the module with all that is in it. Modules within each other need a run for each depth.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

import numpy as np

from tensorcap.alignment import as_seen, fed_in_common
from tensorcap.recording import Substitution
from tensorcap.rerun.finite_padding import with_finite_padding
from tensorcap.rerun.injection import open_run
from tensorcap.rerun.substitutes import exchangeable, is_slot, natural_arguments
from tensorcap.runs import lies_within
from tensorcap_formats.archive import Archive
from tensorcap_formats.dtypes import Array, decode, encode
from tensorcap_formats.keys import ROOT_SITE, Key
from tensorcap_formats.progress import Progress, Silent
from tensorcap_formats.records import Record
from tensorcap_formats.view import ArchiveView

if TYPE_CHECKING:
    from tensorcap.workload import Workload

_MIX: Final = np.uint64(0x9E3779B97F4A7C15)  # 2**64 by the golden ratio: bits of neighbours are unlike
_SENTINEL: Final = 1e30  # from which a value stands for minus infinity


@dataclass(frozen=True, slots=True)
class ComponentRun:
    """What a model made of the target's arguments, while its runs are open.

    Attributes:
        results: The archive that has a module's results, by site, under the reference's keys; of modules of
            which the target has an argument.
        natural: Key texts of arguments of these modules that the target has no tensor for.
    """

    results: Mapping[str, Archive]
    natural: tuple[str, ...]


def run_components(
    stack: ExitStack,
    workload: Workload,
    original: Archive,
    sides: tuple[Archive, Archive],
    sites: Collection[str],
    *,
    perturbation: float = 0.0,
    progress: Progress | None = None,
) -> ComponentRun:
    """Run the reference's model on the target's arguments, once for each depth of modules.

    Args:
        stack: Closes the runs.
        workload: The reference's model, in any precision, with its inputs and seed.
        original: The reference as it was captured.
        sides: The reference and the target under its keys, as `tensorcap.alignment.sides` gives them, the
            latter `with_equal_values`.
        sites: The modules.
        perturbation: How far each argument is put off, relative to each of its elements, no unit; whole
            numbers are put off as what a module without floats, an embedding, makes of them.
        progress: Shows what is being run.

    Raises:
        UsageError: The target has no argument of a module that the reference has.
        CaptureError: Nothing was captured.
    """
    progress = progress or Silent()
    seen, tested = sides
    fed, _ = fed_in_common(original, tested)
    keys = {key for key in exchangeable(tested, fed) if tested.get(key).key.slot.startswith("input")}
    source: Archive = with_finite_padding(tested, fed)
    if perturbation:
        source = _Perturbed(source, perturbation)
    results: dict[str, Archive] = {}
    depths = depths_of(sites)
    for depth, chosen in enumerate(depths):
        wanted = {site for site in chosen if any(tested.get(key).key.site == site for key in keys)}
        if not wanted:
            continue
        chosen_keys = {key for key in keys if tested.get(key).key.site in {*wanted, ROOT_SITE}}
        if perturbation:
            chosen_keys |= _looked_up(tested, fed, keys)
        substitution = Substitution(
            source,
            keys=chosen_keys,
            leaves_misfits=True,
            fed=None if fed is original else fed,
        )
        stage = f"running the source on the target's arguments, depth {depth + 1} of {len(depths)}"
        run = open_run(
            stack,
            workload,
            stage,
            progress=progress,
            substitution=substitution,
            only=sorted(wanted),
            inputs=False,
        )
        results.update(dict.fromkeys(wanted, as_seen(seen, run)))
    natural = (key for key in natural_arguments(original, keys) if original.get(key).key.site in results)
    return ComponentRun(results, tuple(natural))


def _looked_up(tested: Archive, fed: Archive, keys: Collection[str]) -> set[str]:
    """Key texts of what modules make of whole numbers alone, and have no module in them that does."""
    kinds: dict[str, set[str]] = defaultdict(set)
    for key in keys:
        record = tested.get(key)
        kinds[record.key.site].add(record.dtype.kind)
    sites = {site for site, of_site in kinds.items() if "float" not in of_site}
    leaves = {site for site in sites if not any(lies_within(other, site) for other in kinds)}
    exchanged = exchangeable(tested, fed)
    return {r.key.text for site in leaves for r in module_results(tested, site) if r.key.text in exchanged}


def depths_of(sites: Collection[str]) -> Sequence[Sequence[str]]:
    """Sort modules into groups of which none has two within each other, the outermost first.

    Example:
        >>> depths_of(["norm", "layers.0", "layers.0.mlp", "@root", "layers.1.mlp"])
        [['@root'], ['norm', 'layers.0', 'layers.1.mlp'], ['layers.0.mlp']]
    """
    groups: dict[int, list[str]] = defaultdict(list)
    for site in sites:
        above = sum(lies_within(site, other) for other in sites)
        groups[above].append(site)
    return [groups[depth] for depth in sorted(groups)]


def with_equal_values(original: Archive, sides: tuple[Archive, Archive]) -> Archive:
    """The target, with tensors of modules that it has no counterpart of and another of the reference equals.

    A mapping has one counterpart for what modules hand on as it is, though several return it, or are given
    it. So an argument or a result that is bit for bit another tensor in the reference's run is taken of that
    one's counterpart.

    Args:
        original: The reference as it was captured.
        sides: The reference and the target under its keys, as `tensorcap.alignment.sides` gives them.
    """
    seen, tested = sides
    fed, _ = fed_in_common(original, tested)
    known: dict[object, Record] = {}
    missing: list[tuple[object, Record]] = []
    for record in original.records:
        text = record.key.text
        if not (is_slot(record.key) and record.digest and _varies(record) and text in seen):
            continue
        # an argument has to fit into the model as it runs, a result what is compared
        place = fed if record.key.slot.startswith("input") and text in fed else seen
        identity = (record.digest, record.dtype.name, record.shape)
        if text in tested and tested.get(text).shape == place.get(text).shape:
            known.setdefault(identity, tested.get(text))
        else:
            missing.append((identity, place.get(text)))
    equal = {
        record.key: known[identity]
        for identity, record in missing
        if identity in known and known[identity].shape == record.shape
    }
    return _WithEqualValues(tested, equal) if equal else tested


def _varies(record: Record) -> bool:
    """Whether a tensor has two values that differ: constants are equal by chance."""
    statistics = record.statistics
    return statistics is not None and statistics.minimum != statistics.maximum


class _WithEqualValues(ArchiveView):
    """An archive with further records that have the values of others."""

    def __init__(self, archive: Archive, equal: Mapping[Key, Record]) -> None:
        further = [replace(record, key=key) for key, record in equal.items()]
        texts = {key.text for key in equal}
        kept = [record for record in archive.records if record.key.text not in texts]
        sources = {record.key.text: (record,) for record in kept}
        sources |= {key.text: (record,) for key, record in equal.items()}
        super().__init__(archive, [*kept, *further], sources, is_direct=archive.is_direct)


class _Perturbed(ArchiveView):
    """An archive whose arguments are put off, each element by a share of itself."""

    def __init__(self, archive: Archive, share: float) -> None:
        super().__init__(
            archive, archive.records, {r.key.text: (r,) for r in archive.records}, is_direct=False
        )
        self._share = share

    def _read_flat(self, record: Record, start: int, out: Array) -> None:
        super()._read_flat(record, start, out)
        if record.dtype.kind == "float" and "mask" not in record.key.slot:
            out[:] = encode(perturbed(decode(out, record.dtype), self._share, start), record.dtype)


def perturbed(values: Array, share: float, start: int = 0) -> Array:
    """Put values off by a share of each, with signs that depend on the place alone, as if by chance.

    Args:
        values: Floats, any shape.
        share: How far, relative to each element.
        start: The place of the first element in its tensor.

    Returns:
        float64; sentinels, whose product overflows, stay.
    """
    flat = values.astype(np.float64).reshape(-1)
    places = np.arange(start, start + flat.size, dtype=np.uint64) + np.uint64(1)
    mixed = places * _MIX
    mixed = (mixed ^ (mixed >> np.uint64(29))) * _MIX
    signs = (mixed >> np.uint64(63)).astype(np.float64) * 2.0 - 1.0
    moved = np.where(np.abs(flat) < _SENTINEL, flat * (1.0 + share * signs), flat)
    return moved.reshape(values.shape)


def module_results(archive: Archive, site: str) -> Iterator[Record]:
    """The results of a module in an archive, in execution order."""
    for record in archive.records:
        if record.key.site == site and record.key.slot.partition(".")[0] == "output" and record.stored:
            yield record
