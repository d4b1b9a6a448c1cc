"""An archive described in a line: model, precision, count of records, whether its run ended as it should."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
        run = archive.run
        model = run.get("model")
        return cls(
            path=archive.path,
            container=archive.container,
            records=len(archive),
            model=str(model.get("class") or "") if isinstance(model, Mapping) else "",
            dtype=str(run.get("dtype") or ""),
            compute_dtype=str(run.get("compute_dtype") or ""),
            is_ordered=archive.is_ordered,
            is_complete=archive.is_complete,
            error=error_of(run),
        )


def error_of(run: Mapping[str, Any]) -> str:
    """What a run ended by, "" for nothing known."""
    error = run.get("error")
    if isinstance(error, Mapping):
        return ": ".join(str(error[part]) for part in ("type", "message") if error.get(part))
    return str(error or "")
