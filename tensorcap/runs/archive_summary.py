"""An archive in a line: model, precision, count of records, whether its run ended as it should."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tensorcap_formats.archive import Archive


@dataclass(frozen=True, slots=True)
class ArchiveSummary:
    """What a comparison, or a mapping, says of an archive that is one of its sides.

    Attributes:
        path: The file or folder.
        container: As `Archive.container`.
        records: Count of its records.
        model: Class of the model, "" if unknown.
        dtype: Precision of its weights, "" if unknown.
        compute_dtype: Precision in which it computed, "" if unknown.
        is_ordered: Whether its execution order is known.
        is_complete: Whether the run ended as it should.
        error: The error that ended the run, "" if none is known.
    """

    path: Path
    container: str
    records: int
    model: str
    dtype: str
    compute_dtype: str
    is_ordered: bool
    is_complete: bool
    error: str

    @classmethod
    def of(cls, archive: Archive) -> ArchiveSummary:
        """Summarise an archive."""
        info = archive.info
        return cls(
            path=archive.path,
            container=archive.container,
            records=len(archive),
            model=info.model_class,
            dtype=info.dtype,
            compute_dtype=info.compute_dtype,
            is_ordered=archive.is_ordered,
            is_complete=archive.is_complete,
            error=info.error.text if info.error else "",
        )
