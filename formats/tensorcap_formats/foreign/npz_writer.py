"""Write the tensors of an archive as an .npz file, for programs that know nothing else."""

from __future__ import annotations

import zipfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from tensorcap_formats.archive import Archive
from tensorcap_formats.content import checked_blocks, write_errors
from tensorcap_formats.errors import UsageError
from tensorcap_formats.foreign.numpy_files import DTYPES_MEMBER
from tensorcap_formats.index import encode_json
from tensorcap_formats.records import Record


def write_npz(
    source: Archive, path: Path, *, records: Sequence[Record] | None = None, compress: bool = False
) -> None:
    """Write an .npz file at a path where nothing is yet.

    It has no run, no order and no links: equal tensors are written as often as they have names. Of dtypes
    that numpy has not, such as bfloat16, the bits are written as unsigned integers, exactly, and the member
    `__dtypes__.json` names the dtypes.

    Args:
        source: Where the records and their bytes come from.
        path: Of the new file.
        records: Which; all of the source by default.
        compress: Deflate the members.

    Raises:
        UsageError: Only statistics were kept of a record.
        ReadError: The source cannot be read, or fails a checksum.
        WriteError: The disk is full.
    """
    chosen = source.records if records is None else records
    for record in chosen:
        if not record.stored:
            raise UsageError(f"{record.key.text}: only its statistics were kept, which .npz has no place for")
    method = zipfile.ZIP_DEFLATED if compress else zipfile.ZIP_STORED
    with write_errors(path), zipfile.ZipFile(path, "x", method) as file:
        for record in chosen:
            member = zipfile.ZipInfo(f"{member_name(record)}.npy")
            member.compress_type = method
            with file.open(member, "w", force_zip64=True) as out:
                header = {
                    "descr": np.dtype(record.dtype.storage).str,
                    "fortran_order": False,
                    "shape": record.shape,
                }
                np.lib.format.write_array_header_1_0(out, header)
                for block in checked_blocks(source, record):
                    out.write(block.view("u1").data)
        dtypes = {member_name(r): r.dtype.name for r in chosen if not r.dtype.is_native}
        file.writestr(zipfile.ZipInfo(DTYPES_MEMBER), encode_json(dtypes))


def member_name(record: Record) -> str:
    """The key's text; a leading `/`, which would unpack to the root of the file system, is escaped."""
    text = record.key.text
    return f"%2F{text[1:]}" if text.startswith("/") else text
