"""All that the sources of a port say of runs other than the one on a CPU, and of the reference's code."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from tensorcap.source_analysis.class_divergence import (
    Divergence,
    KernelFlag,
    KernelImport,
    divergence_entry,
    find_divergences,
    find_kernel_flags,
    find_kernel_imports,
)
from tensorcap.source_analysis.reference_differences import (
    ClassDifference,
    ReferenceDifferences,
    class_differences,
    reference_differences,
)
from tensorcap.source_analysis.source_file import read_sources
from tensorcap_formats.json_values import json_value


@dataclass(frozen=True, slots=True)
class SourceDivergence:
    """What a static look at the sources of a port shows.

    Attributes:
        files: The sources that were read.
        divergences: Where a CPU, or one rank, goes another way than the device, or several.
        kernel_flags: Settings that turn kernels on.
        kernel_imports: What is imported from packages of kernels.
        reference: Differences from the reference's code; None if its sources were not given.
        between: What the code of two classes differs in, of which a CPU runs one and the device the other; of
            pairs whose classes both are in the sources.
    """

    files: tuple[str, ...]
    divergences: tuple[Divergence, ...]
    kernel_flags: tuple[KernelFlag, ...]
    kernel_imports: tuple[KernelImport, ...]
    reference: ReferenceDifferences | None = None
    between: tuple[ClassDifference, ...] = ()

    @property
    def classes(self) -> list[Divergence]:
        """Those of two classes."""
        return [divergence for divergence in self.divergences if divergence.is_class]

    @property
    def paths(self) -> list[Divergence]:
        """Those of two ways of the code, without two classes."""
        return [divergence for divergence in self.divergences if not divergence.is_class]

    @property
    def exit_status(self) -> int:
        """1 if anything calls for a second test, or differs from the reference's code, else 0."""
        differs = self.reference is not None and (self.reference.unread or self.reference.classes)
        return int(bool(self.divergences or self.kernel_flags or self.kernel_imports or differs))

    def to_json(self) -> dict[str, Any]:
        """The result as JSON; of each file the entries of the Equivalence method."""
        return {
            "format": "tensorcap-divergence",
            "version": 1,
            "files": [self._file(file) for file in self.files],
            "reference": json_value(self.reference) if self.reference else None,
            "between": json_value(self.between),
        }

    def _file(self, file: str) -> dict[str, Any]:
        entries = [divergence_entry(each) for each in self.divergences if each.file == file]
        classes = [entry for entry in entries if entry.pop("is_class")]
        return {
            "file": file,
            "divergence_count": len(classes),
            "divergences": classes,
            "paths": [entry for entry in entries if entry not in classes],
            "kernel_flags": [
                {
                    "name": flag.name,
                    "lines": list(flag.lines),
                    "functions": list(flag.functions),
                    "recommendation": flag.dual_test,
                }
                for flag in self.kernel_flags
                if flag.file == file
            ],
            "kernel_imports": [
                {
                    "module": one.module,
                    "names": list(one.names),
                    "line": one.line,
                    "users": list(one.users),
                    "optional": one.is_optional,
                    "recommendation": one.dual_test,
                }
                for one in self.kernel_imports
                if one.file == file
            ],
        }


def divergence(
    sources: Iterable[str | os.PathLike[str]],
    *,
    reference_sources: Iterable[str | os.PathLike[str]] = (),
) -> SourceDivergence:
    """Look through the sources of a port for code that only the device, or only a CPU, runs.

    Nothing of the sources is imported or run.

    Args:
        sources: Files, or folders of .py files, of the port.
        reference_sources: Those of the reference; if there are any, its code is compared with the port's.

    Raises:
        UsageError: There are no sources, or a folder holds none.
        ReadError: One cannot be read, or is no Python.
    """
    files = read_sources(sources)
    trusted = read_sources(reference_sources)
    divergences = tuple(each for source in files for each in find_divergences(source))
    pairs = [(each.here, each.there) for each in divergences if each.is_class]
    return SourceDivergence(
        tuple(str(source.path) for source in files),
        divergences,
        tuple(each for source in files for each in find_kernel_flags(source)),
        tuple(each for source in files for each in find_kernel_imports(source)),
        reference_differences(trusted, files) if trusted else None,
        tuple(class_differences([*trusted, *files], pairs)) if pairs else (),
    )
