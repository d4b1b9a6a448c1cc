"""Sources of NxD Inference in folders that a user names: they are not ours to ship (NRN-170)."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import Final

from tensorcap.adapters.neuron.stand_ins import SOURCES, install_stand_ins, place_of
from tensorcap_formats.errors import UsageError

_TRIED: Final = {  # releases that all tests ran with
    "neuronx_distributed_inference": "0.9",
    "neuronx_distributed": "0.18",
    "transformers": "4.57",
}
_REPOSITORIES: Final = "aws-neuron/neuronx-distributed-inference and aws-neuron/neuronx-distributed"
_FOLDERS: Final = ("src", "*", "*/src")  # in which a package may lie: of a checkout, of several


def use_neuron_sources(paths: Sequence[str]) -> str:
    """Have sources in these folders imported, and stand-ins answer for a runtime that is not installed.

    Args:
        paths: Folders that hold the packages, checkouts of them, or folders of checkouts.

    Returns:
        A sentence if their releases, and that of transformers, are others than were tried; else "".

    Raises:
        UsageError: A package is in none of them and not installed, or it is in several.
    """
    for package in SOURCES:
        folder = _folder_of(package, paths)
        if folder is not None and str(folder) not in sys.path:
            sys.path.insert(0, str(folder))
    install_stand_ins()
    here = {package: _release(package) for package in _TRIED}
    is_tried = all(f"{here[package]}.".startswith(f"{release}.") for package, release in _TRIED.items())
    return "" if is_tried else f"other releases than were tried: {_releases()}"


def _folder_of(package: str, paths: Sequence[str]) -> Path | None:
    """The folder that holds a package; None if that is installed."""
    folders = list(dict.fromkeys(folder for path in paths for folder in _holding(package, Path(path))))
    option = f"--neuron-src {' and '.join(paths)}"
    if len(folders) > 1:
        raise UsageError(f"{option}: {package} is in {' and '.join(map(str, folders))}, expected one of them")
    if not folders and find_spec(package) is None:
        raise UsageError(
            f"{option}: there is no package {package}, expected it there or in {', '.join(_FOLDERS)}",
            hint=f"The option can be given twice. The sources are in {_REPOSITORIES}.",
        )
    return folders[0] if folders else None


def _holding(package: str, path: Path) -> Iterator[Path]:
    path = path.expanduser()
    for folder in (path, *(folder for pattern in _FOLDERS for folder in sorted(path.glob(pattern)))):
        if (folder / package / "__init__.py").is_file():
            yield folder.resolve()


def explain_import_error(error: ImportError) -> UsageError | None:
    """What an import that failed says of the sources; None if these have no part in it.

    Args:
        error: What the import raised, with its traceback.
    """
    package, place = _importer(error.__traceback__)
    root = (error.name or "").partition(".")[0]
    if package not in SOURCES and root not in SOURCES:
        return None
    if isinstance(error, ModuleNotFoundError) and root and find_spec(root) is None:
        if root in SOURCES:
            return UsageError(
                f"{place}: imports {error.name}, which is not installed, expected --neuron-src DIR",
                hint=f"The sources of NxD Inference are in {_REPOSITORIES}.",
            )
        return UsageError(
            f"{place}: imports {error.name}, which is not installed",
            hint=f"Sources of NxD need it: pip install {root}",
        )
    reason = str(error).partition(" (")[0]
    return UsageError(f"{place}: {reason}: releases that do not fit each other: {_releases()}")


def _importer(traceback: TracebackType | None) -> tuple[str, str]:
    """The package that made the last import, and its file and line."""
    package, place = "", ""
    while traceback is not None:
        name = str(traceback.tb_frame.f_globals.get("__name__", ""))
        if name.partition(".")[0] != "importlib":
            package, place = name.partition(".")[0], place_of(traceback.tb_frame, traceback.tb_lineno)
        traceback = traceback.tb_next
    return package, place


def _releases() -> str:
    """The releases that are here, and those that were tried."""
    listed = (f"{name} {_release(name)} (tried: {release})" for name, release in _TRIED.items())
    return ", ".join(listed)


def _release(package: str) -> str:
    """The release of a package: of sources what their own file says."""
    try:
        return version(package)
    except PackageNotFoundError:
        spec = find_spec(package)
    file = Path(spec.origin).parent / "_version.py" if spec is not None and spec.origin else None
    text = file.read_text(encoding="utf-8", errors="replace") if file is not None and file.is_file() else ""
    release = re.search(r"__version__ *= *[\"']([^\"']+)", text)
    return release[1] if release else "of no known release"
