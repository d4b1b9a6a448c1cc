"""The three tensors of each result of a component: the source twice, and the port, on the port's arguments.

They lie in three archives of equal keys, so that a test needs no model: `reference.h5`, the source in the
wide precision; `baseline.h5`, in the precision under test; `port.h5`, what the port made. If the source
cannot run in a wide precision (the two-tensor way), the reference is the source in that under test, and the
baseline the same with its arguments put off by the precision's machine epsilon. What is of padding is NaN in
all three.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np

from tensorcap.alignment import sides
from tensorcap.comparison import Padding
from tensorcap.equivalence import captures, mapping
from tensorcap.equivalence.component_kinds import Component, find_components, untested
from tensorcap.equivalence.experiment import Experiment
from tensorcap.equivalence.parallel_modules import extra_roundings, given_unlike, target_modules
from tensorcap.rerun import ComponentRun, perturbed, run_components, with_equal_values
from tensorcap_formats.archive import Archive
from tensorcap_formats.dtypes import Array, dtype
from tensorcap_formats.keys import Key
from tensorcap_formats.open import open_archive
from tensorcap_formats.progress import Progress
from tensorcap_formats.writing import Writer

FILES: Final = ("reference.h5", "baseline.h5", "port.h5")
EPSILONS: Final = {  # the method's machine epsilons, and the like of others
    "bfloat16": 2.0**-7,
    "float16": 2.0**-10,
    "float32": 2.0**-23,
    "float64": 2.0**-52,
}


class Tensors(NamedTuple):
    """The three tensors of a result, float64 of one shape.

    Attributes:
        reference: What the port is held against.
        baseline: What the precision alone makes of it.
        port: What the port made.
    """

    reference: Array
    baseline: Array
    port: Array


@dataclass(frozen=True, slots=True)
class Components:
    """The components of an experiment.

    Attributes:
        tested: The components, the simplest first.
        left_out: Modules of the source that are none, each with the reason.
        natural: Key texts of arguments that the port has no tensor for, so that the source's own stayed.
        roundings: How many roundings more than the source each component makes, by its site.
    """

    tested: tuple[Component, ...]
    left_out: tuple[tuple[str, str], ...]
    natural: tuple[str, ...]
    roundings: Mapping[str, float]


def write_tensors(experiment: Experiment, target: str, folder: str, progress: Progress) -> Components:
    """Run the source on the arguments that the port's modules were given, and write the three archives.

    Args:
        experiment: The experiment.
        target: The name of the port's archive.
        folder: The name of the folder of the three archives.
        progress: Shows what is being run.

    Raises:
        UsageError: Both sides have no component in common, or a model cannot be built.
        CaptureError: A run gave nothing.
    """
    with ExitStack() as stack:
        original = stack.enter_context(open_archive(experiment.folder / captures.SOURCE))
        tested = stack.enter_context(open_archive(experiment.folder / target))
        trusted, mapped = sides(original, tested, experiment.folder / mapping.FILE)
        seen = with_equal_values(original, (trusted, mapped))
        unlike = given_unlike(seen, tested)
        components = tuple(one for one in find_components(trusted, seen) if one.site not in unlike)
        sites = [component.site for component in components]
        runs: list[ComponentRun] = []
        for precision, share in _ways(experiment):
            workload = captures.source_workload(experiment, precision)
            runs.append(
                run_components(
                    stack,
                    workload,
                    original,
                    (trusted, seen),
                    sites,
                    perturbation=share,
                    progress=progress,
                )
            )
        components = tuple(one for one in components if all(one.site in run.results for run in runs))
        archives = [
            (runs[0].results[component.site], runs[1].results[component.site], seen, key)
            for component in components
            for key in component.keys
        ]
        padding = Padding(trusted, mapped)
        left_out = {key: padding.left_out(trusted.get(key)) for *_, key in archives}
        for at, name in enumerate(FILES):
            path = experiment.path(f"{folder}/{name}")
            _write(path, [(one[at], one[3], left_out[one[3]]) for one in archives])
        others = [
            (site, "ranks were given unlike arguments" if site in unlike else reason)
            for site, reason in untested(trusted, components, seen)
        ]
        modules = target_modules(mapped, tested)
        roundings = extra_roundings([one.site for one in components], modules, experiment.settings.run.tp)
        return Components(components, tuple(others), runs[0].natural, roundings)


@contextmanager
def open_tensors(folder: Path, *, share: float = 0.0) -> Iterator[ComponentTensors]:
    """Open the three archives of a folder until the block ends.

    Args:
        folder: The folder.
        share: As `ComponentTensors` has it.

    Raises:
        ReadError: One is not there, or cannot be read.
    """
    with ExitStack() as stack:
        archives = [stack.enter_context(open_archive(folder / name)) for name in FILES]
        yield ComponentTensors(archives, share)


@dataclass(frozen=True, slots=True)
class ComponentTensors:
    """Reads the three tensors of results from open archives.

    Attributes:
        archives: Reference, baseline and port.
        share: How far arguments of the baseline were put off; 0 in the three-tensor way.
    """

    archives: Sequence[Archive]
    share: float = 0.0

    def read(self, key: str) -> Tensors:
        """Read the three tensors of a result.

        Args:
            key: Key text, in the source's names.

        Raises:
            TensorNotFoundError: A side has none.
        """
        arrays = [archive.load(archive.get(key)).astype(np.float64) for archive in self.archives]
        three = Tensors(*arrays)
        if self.share and np.array_equal(three.reference, three.baseline):  # as of whole numbers alone
            return three._replace(baseline=perturbed(three.reference, self.share))
        return three


def _ways(experiment: Experiment) -> Sequence[tuple[str, float]]:
    """In which precision the source runs, for the reference and the baseline, and how far it is put off."""
    run = experiment.settings.run
    if run.reference_dtype:
        return (run.reference_dtype, 0.0), (run.dtype, 0.0)
    return (run.dtype, 0.0), (run.dtype, EPSILONS[run.dtype])


def _write(path: Path, results: Sequence[tuple[Archive, str, Array | None]]) -> None:
    """Write results into an archive, in their order; what is of padding as NaN."""
    writer = Writer(path, run={"notes": ["results of components, for their tests"]})
    try:
        for archive, text, left_out in results:
            if text not in archive:
                continue
            record = archive.get(text)
            bits, logical = np.ascontiguousarray(archive.read(record)), record.dtype
            if left_out is not None and left_out.shape == record.shape:
                wide = np.float64 if logical.name == "float64" else np.float32
                bits = np.where(left_out, np.nan, archive.load(record)).astype(wide)
                logical = dtype(bits.dtype.name)
            writer.add(Key.parse(text), bits, logical, record.shape)
    except BaseException:
        writer.abandon(discard=True)
        raise
    writer.close(ordered=False)
