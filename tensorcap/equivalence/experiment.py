"""An experiment: a folder with `equivalence.toml` and the files of the stages, each whole or not there."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from tensorcap.equivalence.parameters import FILE, Settings, changed_settings, read_settings, write_settings
from tensorcap_formats.errors import ReadError, UsageError
from tensorcap_formats.output_path import publish_text

PATCHES: Final = "patches"
RECORDS: Final = ".stages"
_DIGEST_BYTES: Final = 16
_BLOCK_BYTES: Final = 1 << 20


@dataclass(frozen=True)
class Experiment:
    """The folder of an experiment.

    Attributes:
        folder: Where it is.
        settings: The content of its `equivalence.toml`.
    """

    folder: Path
    settings: Settings
    _digests: dict[Path, tuple[tuple[int, int], str]] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def open(cls, folder: str | Path) -> Experiment:
        """Open the experiment of a folder.

        Raises:
            ReadError: It has no `equivalence.toml`, or one that cannot be read.
            UsageError: That file makes no sense.
        """
        return cls(Path(folder), read_settings(Path(folder) / FILE))

    def changed(self, values: Mapping[str, Any]) -> Experiment:
        """The experiment with settings changed, also in its file; itself if there is none to change.

        Args:
            values: By table and name, as `run.dtype`.

        Raises:
            UsageError: There is no such setting, or a value is of another type.
            WriteError: The file cannot be written.
        """
        settings = changed_settings(self.settings, values)
        if settings == self.settings:
            return self
        write_settings(self.folder / FILE, settings)
        return Experiment(self.folder, settings)

    @property
    def patches(self) -> tuple[Path, ...]:
        """Files of patches of the target, in the order in which they are applied; no skeletons."""
        files = sorted((self.folder / PATCHES).glob("*.py"))
        return tuple(file for file in files if self.is_edited(str(file.relative_to(self.folder))))

    def path(self, name: str) -> Path:
        """The path of a file of the folder; folders above it are made."""
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    def resolve(self, text: str) -> str:
        """A path of the settings: relative to the folder, if it names something there."""
        path, colon, name = text.rpartition(":")
        if not (colon and path.endswith(".py")):
            path, colon, name = text, "", ""
        below = self.folder / Path(path).expanduser()
        return f"{below}{colon}{name}" if path and below.exists() else text

    def write_json(self, name: str, content: Mapping[str, Any]) -> str:
        """Write a JSON file of the folder, whole or not at all; infinite numbers as `Infinity`.

        Returns:
            The name.

        Raises:
            WriteError: Something else is there, or it cannot be written.
        """
        first = next(iter(content))
        text = json.dumps(content, indent=2, ensure_ascii=False)
        return self.write_text(name, f"{text}\n", beginning=f'{{"{first}":')

    def write_text(self, name: str, text: str, *, beginning: str = "") -> str:
        """Write a text of the folder, whole or not at all.

        Args:
            name: Of the file.
            text: Its content.
            beginning: How texts of its kind begin, without white space: nothing else is written over.

        Returns:
            The name.

        Raises:
            WriteError: Something else is there, or it cannot be written.
        """
        with publish_text(self.path(name), beginning=beginning) as file:
            file.write(text)
        return name

    def write_editable(self, name: str, text: str) -> str:
        """Write a file that people edit, unless somebody has, or has put one of his own there.

        What is about to be written is noted before, so that an interrupted run is not taken for a person.

        Returns:
            The name.

        Raises:
            WriteError: It cannot be written.
        """
        if not self.is_edited(name):
            self.write_text(self._note(name), f"{hashed(text.encode())}\n")
            self.write_text(name, text)
        return name

    def is_edited(self, name: str) -> bool:
        """Whether there is a file that is not as `write_editable` wrote it last."""
        digest = self.digest(self.folder / name)
        try:
            noted = (self.folder / self._note(name)).read_text(encoding="utf-8").strip()
        except OSError:
            noted = ""
        return digest not in ("", noted)

    def _note(self, name: str) -> str:
        return f"{RECORDS}/written/{name}.digest"

    def read_json(self, name: str, *, stage: str) -> Any:
        """Read a JSON file of the folder.

        Args:
            name: Of the file.
            stage: The command that writes it.

        Raises:
            UsageError: It is not there.
            ReadError: It cannot be read, or is no JSON.
        """
        path = self.folder / name
        try:
            return json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise UsageError(
                f"{path}: is not there", hint=f"`tcap equivalence {stage} {self.folder}` writes it."
            ) from None
        except OSError as error:
            raise ReadError(f"{path}: cannot be read: {error.strerror}") from error
        except (ValueError, RecursionError) as error:
            raise ReadError(f"{path}: is no JSON: {error}") from error

    def digest(self, path: Path) -> str:
        """The digest of a file, or of the names, sizes and times of a folder's files; "" if there is none."""
        if path.is_dir():
            return digest_of(
                [[str(p.relative_to(path)), p.stat().st_size, p.stat().st_mtime_ns] for p in _files(path)]
            )
        if not path.is_file():
            return ""
        status = path.stat()
        state = (status.st_size, status.st_mtime_ns)
        known = self._digests.get(path)
        if known is None or known[0] != state:
            content = hashlib.blake2b(digest_size=_DIGEST_BYTES)
            with path.open("rb") as file:
                while block := file.read(_BLOCK_BYTES):
                    content.update(block)
            known = self._digests[path] = (state, content.hexdigest())
        return known[1]

    def setting(self, name: str) -> Any:
        """A setting by its table and name, as `run.dtype`."""
        table, _, member = name.partition(".")
        return getattr(getattr(self.settings, table), member)


def digest_of(value: Any) -> str:
    """The digest of a value of JSON."""
    return hashed(json.dumps(value, sort_keys=True, default=str).encode())


def hashed(content: bytes) -> str:
    """The digest of some bytes."""
    return hashlib.blake2b(content, digest_size=_DIGEST_BYTES).hexdigest()


def _files(folder: Path) -> Iterable[Path]:
    return sorted(p for p in folder.rglob("*") if p.is_file() and "__pycache__" not in p.parts)
