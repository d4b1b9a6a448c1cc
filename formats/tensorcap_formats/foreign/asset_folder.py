"""Assets of Core AI, folders `NAME.aimodel`: what they say of themselves, without Apple's packages.

The program in `main.mlirb` is MLIR bytecode, which only those packages read; here its hash is checked.
"""

from __future__ import annotations

import hashlib
import os
import re
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tensorcap_formats.errors import CorruptArchiveError, NotAnArchiveError
from tensorcap_formats.folder import read_side_file, refuse_link_out
from tensorcap_formats.index import decode_json
from tensorcap_formats.input_file import InputFile

ASSET_SUFFIX: Final = ".aimodel"
PROGRAM_FILE: Final = "main.mlirb"
_METADATA_FILE: Final = "metadata.json"
_HASH_FILE: Final = "main.hash"
_MAX_METADATA_BYTES: Final = 1024 * 1024
_BLOCK_BYTES: Final = 16 * 1024 * 1024
_DATE: Final = re.compile(r"(\d{4})(\d\d)(\d\d)T(\d\d)(\d\d)(\d\d)Z")


@dataclass(frozen=True, slots=True)
class AssetInfo:
    """What an asset says of itself.

    Attributes:
        path: The folder.
        producer: The package that wrote it, "" if it does not say.
        version: Of its format, "" likewise.
        created: When it was written, ISO 8601, or as it says; "" likewise.
        digest: SHA-256 of its program as the asset says, in hexadecimal digits; "" likewise.
        is_intact: Whether the program has that digest; None if the asset says none.
        nbytes: Bytes of its program.
    """

    path: Path
    producer: str
    version: str
    created: str
    digest: str
    is_intact: bool | None
    nbytes: int

    def to_json(self) -> dict[str, Any]:
        """Convert to the object that `tcap show --json` prints."""
        return {
            "path": str(self.path),
            "producer": self.producer,
            "version": self.version,
            "created": self.created,
            "digest": self.digest,
            "is_intact": self.is_intact,
            "bytes": self.nbytes,
        }


def is_asset(path: str | os.PathLike[str]) -> bool:
    """Whether a path is that of an asset: a folder of its suffix, or with its program."""
    folder = Path(path)
    return os.path.isdir(folder) and (
        os.path.abspath(folder).endswith(ASSET_SUFFIX) or os.path.isfile(folder / PROGRAM_FILE)
    )


def read_asset(path: str | os.PathLike[str]) -> AssetInfo:
    """Read what an asset says of itself, and check its program against its hash.

    Raises:
        NotAnArchiveError: It has no program.
        CorruptArchiveError: Its metadata are no JSON object.
        ReadError: A file cannot be read.
    """
    folder = Path(path)
    if not (folder / PROGRAM_FILE).is_file():
        raise NotAnArchiveError(
            f"{folder}: holds no {PROGRAM_FILE}, expected a Core AI asset",
            hint="Convert the model anew, and save it with save_asset.",
        )
    metadata = _metadata(folder / _METADATA_FILE)
    created = str(metadata.get("creationDate", ""))
    if match := _DATE.fullmatch(created):
        created = "{}-{}-{}T{}:{}:{}Z".format(*match.groups())
    digest = ""
    if (folder / _HASH_FILE).is_file():
        digest = read_side_file(folder / _HASH_FILE, folder, _MAX_METADATA_BYTES)[:64].hex()
    refuse_link_out(folder / PROGRAM_FILE, folder)
    with closing(InputFile(folder / PROGRAM_FILE)) as file:
        hasher = hashlib.sha256()
        for start in range(0, file.size, _BLOCK_BYTES):
            hasher.update(file.read(start, min(_BLOCK_BYTES, file.size - start)))
        nbytes = file.size
    return AssetInfo(
        folder,
        str(metadata.get("producer", "")),
        str(metadata.get("assetVersion", "")),
        created,
        digest,
        hasher.hexdigest() == digest if digest else None,
        nbytes,
    )


def _metadata(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    metadata = decode_json(read_side_file(path, path.parent, _MAX_METADATA_BYTES), str(path))
    for name in ("producer", "assetVersion", "creationDate"):
        if not isinstance(metadata.get(name, ""), str):
            raise CorruptArchiveError(f"{path}: {name} is {metadata[name]!r}, expected a text")
    return metadata
