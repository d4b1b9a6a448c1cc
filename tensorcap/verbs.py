"""Verbs that look for a mapping before they do what a function of another room does with it."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Literal

from tensorcap_formats.open import Source, opened, opened_both

if TYPE_CHECKING:
    from tensorcap.alignment import MappingSource
    from tensorcap.comparison.preflight import Preflight
    from tensorcap.diagnosis import Diagnosis


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
    from tensorcap.alignment import sides
    from tensorcap.diagnosis import diagnose as diagnose_pair

    with opened_both(reference, target) as (trusted, tested):
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
    from tensorcap.alignment import sides
    from tensorcap.comparison.preflight import preflight as preflight_archives

    again = nullcontext() if reference_repeat is None else opened(reference_repeat)
    with opened_both(reference, target) as (trusted, tested), again as repeat:
        return preflight_archives(*sides(trusted, tested, mapping), repeat=repeat)
