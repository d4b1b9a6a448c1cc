"""Verbs that take archives by their paths or open alike; a path is opened, and closed at the end."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from tensorcap_formats.archive import Archive
from tensorcap_formats.check import ArchiveCheck, check_archive
from tensorcap_formats.conversion import convert as convert_archive
from tensorcap_formats.open import open_archive

if TYPE_CHECKING:
    from tensorcap.alignment.aligned import Aligned, MappingSource
    from tensorcap.alignment.match.proposal import By
    from tensorcap.comparison.preflight.checklist import Preflight
    from tensorcap.diagnosis.diagnosis import Diagnosis
    from tensorcap_formats.progress import Progress

Source = Archive | str | os.PathLike[str]


def align(
    reference: Source,
    target: Source,
    *,
    mapping: MappingSource | None = None,
    rules: str | os.PathLike[str] | None = None,
    by: By | Literal["none"] | None = None,
) -> Aligned:
    """Find which tensor of one archive is which of another.

    Args:
        reference: The trusted archive.
        target: The archive under test.
        mapping: A mapping, or a map file, that goes before what is computed.
        rules: A file of rules for names, which go before those that come with tensorcap.
        by: `all`, `names` or `values`: the evidence; `none` computes nothing, and is the default if a mapping
            is given.

    Raises:
        UsageError: The mapping makes no sense, or does not fit the archives.
        ReadError: A file cannot be read.
    """
    from tensorcap.alignment.aligned import align as align_archives
    from tensorcap.alignment.names.rule_files import read_rules

    with ExitStack() as stack:
        return align_archives(
            _opened(reference, stack),
            _opened(target, stack),
            mapping=mapping,
            rules=None if rules is None else read_rules(rules),
            by=by,
        )


def diagnose(
    reference: Source,
    target: Source,
    key: str,
    *,
    target_key: str | None = None,
    mapping: MappingSource | Literal["none"] | None = None,
    compute_dtype: str | None = None,
) -> Diagnosis:
    """Test hypotheses about a mistake on the values of one pair.

    Args:
        reference: The trusted archive.
        target: The archive under test.
        key: The reference's tensor.
        target_key: The target's, if it has another key; then no mapping is looked for.
        mapping: What belongs together, as for `compare`.
        compute_dtype: Precision in which the target computed, if its archive does not say.

    Raises:
        TensorNotFoundError: One of the tensors does not exist.
        UsageError: The values are complex or were not kept, or the mapping does not fit.
        ReadError: An archive cannot be read.
    """
    from tensorcap.alignment.aligned import sides
    from tensorcap.diagnosis.diagnosis import diagnose as diagnose_pair

    with ExitStack() as stack:
        trusted, tested = _opened(reference, stack), _opened(target, stack)
        if target_key is None:
            trusted, tested = sides(trusted, tested, mapping)
        return diagnose_pair(trusted, tested, key, target_key=target_key, compute_dtype=compute_dtype)


def preflight(
    reference: Source,
    target: Source,
    *,
    mapping: MappingSource | Literal["none"] | None = None,
    reference_repeat: Source | None = None,
) -> Preflight:
    """Look at what can make two runs differ before any module is at fault.

    Args:
        reference: The trusted archive.
        target: The archive under test.
        mapping: What belongs together, as for `compare`.
        reference_repeat: A second run of the reference, which ought to be bit-equal to the first.

    Raises:
        UsageError: The mapping does not fit the archives.
        ReadError: Inputs or parameters cannot be read.
    """
    from tensorcap.alignment.aligned import sides
    from tensorcap.comparison.preflight.checklist import preflight as preflight_archives

    with ExitStack() as stack:
        trusted, tested = sides(_opened(reference, stack), _opened(target, stack), mapping)
        repeat = None if reference_repeat is None else _opened(reference_repeat, stack)
        return preflight_archives(trusted, tested, repeat=repeat)


def convert(
    source: Source,
    path: str | os.PathLike[str],
    *,
    container: str | None = None,
    compress: str | None = None,
    only: Iterable[str] = (),
    exclude: Iterable[str] = (),
    progress: Progress | None = None,
) -> Path:
    """Write an archive in another container; what is at the path stays until all is written.

    Args:
        source: The archive, or a file from elsewhere.
        path: Of the new archive.
        container: `hdf5`, `zarr`, `safetensors` or `npz`; by the path's suffix if None.
        compress: `zstd` or `blosc2` for hdf5, `zstd` for zarr, `deflate` for npz; None for plain bytes.
        only: Globs; take only keys that match one of them.
        exclude: Globs; leave out keys that match one of them.
        progress: Receives the bytes read so far, and all that will be.

    Returns:
        The path of the new archive.

    Raises:
        UsageError: Container or compression is unknown, nothing is selected, or the path is the source's.
        ReadError: The source cannot be read, or fails a checksum.
        WriteError: Something that is no archive of ours is at the path, or it cannot be written.
    """
    with ExitStack() as stack:
        return convert_archive(
            _opened(source, stack),
            path,
            container=container,
            compress=compress,
            only=only,
            exclude=exclude,
            progress=progress,
        )


def check(archive: Source, *, progress: Progress | None = None) -> ArchiveCheck:
    """Read all of an archive and check structure, sizes and checksums.

    Args:
        archive: The archive, or a file from elsewhere.
        progress: Receives the bytes read so far, and all that will be.

    Raises:
        ReadError: It cannot be opened.
    """
    with ExitStack() as stack:
        return check_archive(_opened(archive, stack), progress=progress)


def _opened(source: Source, stack: ExitStack) -> Archive:
    """Open a path until the stack is left; an archive that is open already stays so."""
    return source if isinstance(source, Archive) else stack.enter_context(open_archive(source))
