"""Read safetensors files: archives of ours in that container, and checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack, closing
from pathlib import Path

from tensorcap_formats.archive import Archive
from tensorcap_formats.content import content_of, holders
from tensorcap_formats.dtypes import Array
from tensorcap_formats.errors import CorruptArchiveError
from tensorcap_formats.foreign_archive import ForeignArchive
from tensorcap_formats.index import check_version, decode_index
from tensorcap_formats.indexed_archive import IndexedArchive
from tensorcap_formats.input_file import InputFile
from tensorcap_formats.records import Record
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
            return SafetensorsArchive(file, entries, metadata, resources)
        return ForeignArchive(path, "safetensors", foreign_tensors(file, entries), resources=resources)


class SafetensorsArchive(IndexedArchive):
    """An archive of ours in a safetensors file: index and run are in the header's metadata (ARC-62)."""

    is_direct = True

    def __init__(
        self,
        file: InputFile,
        entries: Mapping[str, HeaderEntry],
        metadata: Mapping[str, str],
        resources: ExitStack,
    ) -> None:
        """Check the index against the header."""
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
        self._file = file
        self._offsets = {content: entries[r.key.text].offset for content, r in stored.items()}
        header_end = min((entry.offset for entry in entries.values()), default=file.size)
        padding = file.read(header_end - len(OUR_PADDING), len(OUR_PADDING))
        super().__init__(file.path, "safetensors", index, resources, trusts_digests=padding == OUR_PADDING)

    def _read_flat(self, record: Record, start: int, out: Array) -> None:
        self._file.read_into(self._offsets[content_of(record)] + start * record.dtype.itemsize, out)
