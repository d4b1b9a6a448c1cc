"""Files of raw numbers, whose dtype and shape the user names."""

from __future__ import annotations

import fnmatch
import math
import re
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

from tensorcap_formats.archive import Archive
from tensorcap_formats.dtypes import DTYPES, DType
from tensorcap_formats.errors import CorruptArchiveError, UsageError
from tensorcap_formats.foreign_archive import ForeignArchive, ForeignTensor
from tensorcap_formats.index import parse_shape
from tensorcap_formats.input_file import InputFile, read_stored

_SPEC: Final = re.compile(r"(.+):(\w+):((?:\d{1,18}(?:,\d{1,18})*)?)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class RawSpec:
    """Dtype and shape of raw files.

    Attributes:
        name: Of the file, or a glob that names of files match.
        dtype: Logical dtype, little endian.
        shape: In C order.
    """

    name: str
    dtype: DType
    shape: tuple[int, ...]

    @classmethod
    def parse(cls, text: str) -> RawSpec | None:
        """Read `NAME:DTYPE:SIZES`; None if the text has not that form (MXF-40).

        Raises:
            UsageError: The sizes are absurd.

        Example:
            >>> RawSpec.parse("x.bin:float32:2,3").shape
            (2, 3)
            >>> RawSpec.parse("x.bin") is None
            True
        """
        match = _SPEC.fullmatch(text)
        if match is None or match[2] not in DTYPES:
            return None
        dtype, shape = DTYPES[match[2]], tuple(int(size) for size in match[3].split(",") if size)
        try:
            parse_shape(shape, dtype.itemsize, text)
        except CorruptArchiveError as error:
            raise UsageError(str(error)) from None
        return cls(match[1], dtype, shape)

    def fits(self, name: str) -> bool:
        """Whether the name of a file matches the glob."""
        return fnmatch.fnmatchcase(name, self.name)

    def tensor(self, path: Path, name: str) -> ForeignTensor:
        """The tensor of a file, under a name.

        Raises:
            CorruptArchiveError: The file has fewer or more bytes than such a tensor.
            ReadError: The system cannot read it.
        """
        with closing(InputFile(path)) as file:
            size = file.size
        expected = math.prod(self.shape) * self.dtype.itemsize
        if size != expected:
            raise CorruptArchiveError(
                f"{path}: has {size} bytes, expected {expected} for {self.dtype.name} of shape {self.shape} "
                "(MXF-40)"
            )
        read = partial(read_stored, path, size, self.dtype.itemsize, 0)
        return ForeignTensor(name, self.dtype, self.shape, read)


def raw_file_hint(path: Path) -> str:
    """The hint for a file of no known kind, which may hold raw numbers."""
    return f"If it holds raw numbers, say which: {path.name}:float32:2,3"


def open_raw(spec: RawSpec) -> Archive:
    """Open one file; its tensor is named as the file.

    Raises:
        ReadError: As `RawSpec.tensor`.
    """
    path = Path(spec.name)
    return ForeignArchive(path, "raw", [spec.tensor(path, path.stem)], is_direct=True)
