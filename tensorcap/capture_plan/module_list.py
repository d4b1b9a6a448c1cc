"""The modules of a port by path: of an archive of its run, or of a list in a file."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from tensorcap_formats.archive import Archive
from tensorcap_formats.errors import NotAnArchiveError, ReadError, UsageError, abbreviate
from tensorcap_formats.keys import module_path
from tensorcap_formats.open import open_archive

_MAX_BYTES: Final = 64 * 1024 * 1024
_LINE: Final = re.compile(r"([^\s:]+)(?:\s*[:\s]\s*(?:<class\s+')?([\w.]+).*)?")


@dataclass(frozen=True, slots=True)
class ModuleList:
    """The modules of a port.

    Attributes:
        source: Where the list comes from.
        classes: The class of each module by path, without its package; "" if it is not known.
        never_called: Modules that the archived run did not call; empty if no run is known.
        results: Slots of results by path, in the order in which the run recorded them.
        arguments: Slots of arguments by path, likewise.
    """

    source: str
    classes: Mapping[str, str]
    never_called: frozenset[str] = frozenset()
    results: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    arguments: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def children(self, path: str) -> Iterator[str]:
        """Paths of the modules directly in one."""
        for other in self.classes:
            if other.startswith(f"{path}.") and "." not in other[len(path) + 1 :]:
                yield other


def read_modules(source: str | os.PathLike[str] | Archive) -> ModuleList:
    """Read the modules of an archive; or of a file with a path in each line, and JSON of paths or a tree.

    A line is `PATH` or `PATH: CLASS`. JSON is a list of paths, an object of classes by path, an object of one
    of these by the name of a submodel (as `list_capturable_modules_in_application` gives), or a tree of
    `name`, `type` and `children`.

    Raises:
        UsageError: There are no modules in it.
        ReadError: It cannot be read.
    """
    if isinstance(source, Archive):
        return _of_archive(source)
    path = Path(source)
    text = _text(path)
    if text is None:
        with open_archive(path) as archive:
            return _of_archive(archive)
    classes = dict(_of_json(path, text) if text.lstrip()[:1] in ("[", "{") else _of_lines(path, text))
    classes.pop("", None)
    if not classes:
        raise UsageError(f"{path}: lists no module, expected a path in each line")
    return ModuleList(str(path), classes)


def _text(path: Path) -> str | None:
    """The content of a file of text; None for what is to be opened as an archive."""
    try:
        if path.is_dir() or path.suffix in (".h5", ".hdf5", ".safetensors", ".npz", ".zarr"):
            return None
        if path.stat().st_size > _MAX_BYTES:
            return None
        return path.read_text("utf-8")
    except UnicodeDecodeError:
        return None
    except OSError as error:
        raise NotAnArchiveError(f"{path}: cannot be read: {error.strerror}") from error


def _of_archive(archive: Archive) -> ModuleList:
    info = archive.info
    classes = {module.path: module.short_class for module in info.modules.values() if module.path}
    sites = {point.site: point.status for point in info.points if point.kind == "module"}
    results: dict[str, list[str]] = {}
    arguments: dict[str, list[str]] = {}
    for record in archive.records:
        key = record.key
        if key.is_bare or key.site.startswith("@root") or ":" in key.site:
            continue
        path = module_path(key.site)
        kind = key.slot.partition(".")[0]
        slots = {"output": results, "input": arguments}.get(kind)
        if slots is not None and key.slot not in slots.setdefault(path, []):
            slots[path].append(key.slot)
        classes.setdefault(path, "")
    if not classes:
        raise UsageError(f"{archive.path}: names no module, expected an archive of a model's run")
    return ModuleList(
        str(archive.path),
        classes,
        frozenset(module_path(site) for site, status in sites.items() if status == "never-called"),
        {path: tuple(slots) for path, slots in results.items()},
        {path: tuple(slots) for path, slots in arguments.items()},
    )


def _of_lines(path: Path, text: str) -> Iterator[tuple[str, str]]:
    for number, line in enumerate(text.splitlines(), 1):
        line = line.partition("#")[0].strip()
        if not line:
            continue
        match = _LINE.fullmatch(line)
        if match is None:
            raise ReadError(f"{path}:{number}: found {abbreviate(line)!r}, expected PATH or PATH: CLASS")
        yield match[1], (match[2] or "").rpartition(".")[2]


def _of_json(path: Path, text: str) -> Iterable[tuple[str, str]]:
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ReadError(f"{path}: is no JSON: {error}") from None
    try:
        pairs = _pairs(content)
        if pairs is None and isinstance(content, dict):
            inner = [_pairs(each) for each in content.values()]
            pairs = None if None in inner else [pair for each in inner for pair in each or ()]
    except RecursionError:
        raise ReadError(f"{path}: its tree nests too deeply") from None
    if pairs is None:
        raise ReadError(f"{path}: is no list of modules, expected paths, classes by path, or a tree")
    return pairs


def _pairs(content: Any) -> list[tuple[str, str]] | None:
    if isinstance(content, list) and all(isinstance(each, str) for each in content):
        return [(each, "") for each in content]
    if isinstance(content, dict) and isinstance(content.get("children"), list):
        return list(_of_tree(content, ""))
    if isinstance(content, dict) and all(isinstance(each, str) for each in content.values()):
        return [(name, each.rpartition(".")[2].strip("'>")) for name, each in content.items()]
    return None


def _of_tree(node: Mapping[str, Any], path: str) -> Iterator[tuple[str, str]]:
    """Paths of a tree of the Equivalence method, in full or compressed, whose nodes have several names."""
    for child in node.get("children") or ():
        if not isinstance(child, dict):
            continue
        names = child.get("names") or [child.get("name", "")]
        for name in names:
            below = f"{path}.{name}" if path else str(name)
            yield below, str(child.get("type", ""))
            yield from _of_tree(child, below)
