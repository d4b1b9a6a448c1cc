"""An archive described in a line: model, precision, count of records, whether its run ended as it should."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tensorcap_formats.archive import Archive


@dataclass(frozen=True, slots=True)
class Side:
    """What is said of an archive that is one side of a comparison, or of a mapping.

    Attributes:
        path: The file or folder.
        container: As `Archive.container`.
        records: Count of its records.
        model: Class of the model, "" where unknown.
        dtype: Precision of its weights, "" where unknown.
        compute_dtype: Precision in which it computed, "" where unknown.
        is_ordered: Whether its execution order is known.
        is_complete: Whether the run ended as it should.
        error: What the run ended by, "" for nothing known.
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
    def of(cls, archive: Archive) -> Side:
        """Describe an archive."""
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
