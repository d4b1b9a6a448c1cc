"""Write an archive as a safetensors file."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tensorcap_formats.archive import Archive
from tensorcap_formats.content import build_index, holders, write_errors
from tensorcap_formats.errors import WriteError
from tensorcap_formats.index import FORMAT_VERSION, encode_index, encode_json
from tensorcap_formats.records import Record
from tensorcap_formats.safetensors.header import MAX_HEADER_BYTES, METADATA, OUR_PADDING, stored_form


def write_safetensors(source: Archive, path: Path, records: Sequence[Record]) -> None:
    """Write an archive as a safetensors file at a path where nothing is yet.

    Args:
        source: Where the records and their bytes come from.
        path: Of the new file.
        records: Which, in the order of the new archive.

    Raises:
        ReadError: The source cannot be read, or fails a checksum.
        WriteError: The header would be above the limit of the format, or the disk is full.
    """
    index = build_index(source, records)
    # Large elements first: each tensor then begins at a multiple of its element size, as torch demands.
    stored = sorted(holders(index.records).values(), key=lambda r: -r.dtype.itemsize)
    index_json, run_json = encode_index(index)
    texts = {"tensorcap": FORMAT_VERSION, "index": index_json.decode(), "run": run_json.decode()}
    header: dict[str, Any] = {METADATA: texts}
    end = 0
    for record in stored:
        name = record.key.text
        if name == METADATA:
            raise WriteError(f"{path}: a tensor is named {name!r}, a name that the format needs for itself")
        code, shape = stored_form(record)
        header[name] = {"dtype": code, "shape": shape, "data_offsets": [end, end + record.nbytes]}
        end += record.nbytes
    text = encode_json(header)
    text += OUR_PADDING + b" " * (-len(text) % 8)
    if len(text) > MAX_HEADER_BYTES:
        raise WriteError(
            f"{path}: {len(records)} records need a header of {len(text)} bytes, "
            f"expected at most {MAX_HEADER_BYTES} (ARC-80)",
            hint="Write an .h5 or .zarr archive: they have no such limit.",
        )
    with write_errors(path), path.open("xb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for record in stored:
            for block in source.blocks(records[record.row]):
                file.write(block.view("u1").data)
