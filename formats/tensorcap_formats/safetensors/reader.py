"""Read safetensors files: archives of ours in that container, and checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack, closing
from pathlib import Path

from tensorcap_formats.archive import Archive
from tensorcap_formats.content import content_of, holders
from tensorcap_formats.errors import CorruptArchiveError
from tensorcap_formats.foreign_archive import ForeignArchive
from tensorcap_formats.index import check_version, decode_index
from tensorcap_formats.indexed_archive import FlatArchive
from tensorcap_formats.input_file import InputFile
from tensorcap_formats.safetensors.foreign import foreign_tensors
from tensorcap_formats.safetensors.header import OUR_PADDING, HeaderEntry, read_header, stored_form


def open_safetensors(path: Path) -> Archive:
    """Open a safetensors file: an archive of ours, or a checkpoint from elsewhere.

    Raises:
        CorruptArchiveError: The header, or the index in it, contradicts the file.
        NewerVersionError: A newer tensorcap wrote it.
    """
    with ExitStack() as resources:
        file = resources.enter_context(closing(InputFile(path)))
        entries, metadata = read_header(file)
        if "tensorcap" in metadata:
            return _open_indexed(file, entries, metadata, resources)
        return ForeignArchive(path, "safetensors", foreign_tensors(file, entries), resources=resources)


def _open_indexed(
    file: InputFile,
    entries: Mapping[str, HeaderEntry],
    metadata: Mapping[str, str],
    resources: ExitStack,
) -> Archive:
    """Open an archive of ours, whose index and run are in the header's metadata, and check it (ARC-62)."""
    source = str(file.path)
    check_version(metadata, source)
    data, run = (metadata.get(name, "").encode("utf-8", "surrogatepass") for name in ("index", "run"))
    index = decode_index(data, run, source)
    stored = holders(index.records)
    for record in stored.values():
        entry = entries.get(record.key.text)
        if entry is None or (entry.code, entry.shape) != stored_form(record):
            present = f"{entry.code} of shape {list(entry.shape)}" if entry else "missing"
            code, shape = stored_form(record)
            raise CorruptArchiveError(
                f"{source}: tensor {record.key.text!r} is {present}, "
                f"expected {code} of shape {list(shape)} (ARC-62)"
            )
    if len(stored) != len(entries):
        raise CorruptArchiveError(
            f"{source}: header names {len(entries)} tensors, expected {len(stored)} as the index (ARC-62)"
        )
    places = {content: entries[r.key.text].offset for content, r in stored.items()}
    offsets = [places.get(content_of(r), 0) for r in index.records]
    header_end = min((entry.offset for entry in entries.values()), default=file.size)
    padding = file.read(header_end - len(OUR_PADDING), len(OUR_PADDING))
    trusts_digests = padding == OUR_PADDING
    return FlatArchive(file, "safetensors", index, offsets, resources, trusts_digests=trusts_digests)
