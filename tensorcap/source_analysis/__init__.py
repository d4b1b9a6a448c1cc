"""What the sources of a port say before it is run: read by their syntax, never imported.

Files go in, a `SourceDivergence` comes out. Read `source_file`, then `switches` (which conditions depend on
the device), `branches` (their two ways) and `class_divergence`; then `class_contents` and
`reference_differences`, which hold the port's code against the reference's, and `source_divergence`.
"""

from tensorcap.source_analysis.class_divergence import SIDES, Divergence, KernelFlag, KernelImport
from tensorcap.source_analysis.reference_differences import (
    ClassDifference,
    ReferenceDifferences,
    UnreadSetting,
)
from tensorcap.source_analysis.source_divergence import SourceDivergence, divergence

__all__ = [
    "SIDES",
    "ClassDifference",
    "Divergence",
    "KernelFlag",
    "KernelImport",
    "ReferenceDifferences",
    "SourceDivergence",
    "UnreadSetting",
    "divergence",
]
