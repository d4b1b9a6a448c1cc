"""Files of torch.save."""

from __future__ import annotations

from pathlib import Path

import torch

from tensorcap.adapters.torch.tensors import from_stored
from tensorcap_formats.dtypes import Array, DType


def save_tensor(bits: Array, dtype: DType, path: Path) -> None:
    """Write one tensor of stored elements as a `.pt` file.

    Raises:
        UsageError: This release of torch has no such dtype.
    """
    torch.save(from_stored(bits, dtype), path)
