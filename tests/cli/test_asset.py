"""Core AI assets in the place of archives, without the packages that read their programs."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tensorcap.adapters import protocol

Tcap = Callable[..., Any]
Write = Callable[..., Path]


@pytest.fixture
def asset(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The files of an asset, whose program is no real one, where the packages are absent."""
    path = folder / "net.aimodel"
    path.mkdir()
    (path / "main.mlirb").write_bytes(b"ML\xefRprogram")
    (path / "main.hash").write_bytes(hashlib.sha256(b"ML\xefRprogram").digest())
    (path / "metadata.json").write_text(
        '{"producer" : "coreai-core 1.0.0b3", "assetVersion" : "2.0", "creationDate" : "20261129T091023Z"}'
    )

    def absent(name: str) -> Any:
        raise ModuleNotFoundError(f"No module named {name!r}", name="coreai")

    monkeypatch.setattr(protocol, "import_module", absent)
    return path


@pytest.mark.spec("CAI-90")
def test_what_an_asset_says_of_itself_needs_no_packages(tcap: Tcap, asset: Path) -> None:
    digest = hashlib.sha256(b"ML\xefRprogram").hexdigest()
    assert tcap("show", "net.aimodel").output.splitlines() == [
        "net.aimodel: Core AI asset, 11 B",
        "  producer      coreai-core 1.0.0b3",
        "  version       2.0",
        "  created       2026-11-29T09:10:23Z",
        f"  hash          sha256 {digest}, that of its program",
        "  operations    not readable without Core AI's packages. "
        "Install it with: pip install 'tensorcap[coreai]'",
    ]
    members = json.loads(tcap("show", "net.aimodel", "--json").output)
    assert (members["digest"], members["is_intact"], members["operations"]) == (digest, True, None)


@pytest.mark.spec("CAI-90")
def test_a_program_that_was_changed_is_told(tcap: Tcap, asset: Path) -> None:
    (asset / "main.mlirb").write_bytes(b"ML\xefRanother")
    assert "NOT that of its program, which was changed since" in tcap("show", "net.aimodel").output
    (asset / "main.hash").unlink()
    assert "  hash          none\n" in tcap("show", "net.aimodel").output


@pytest.mark.spec("CAI-91")
def test_operations_are_not_listed_without_the_packages(tcap: Tcap, asset: Path) -> None:
    error = tcap("ls", "net.aimodel", status=2).stderr
    assert error.startswith("Error: net.aimodel: operations not readable without Core AI's packages")
    assert "A Core AI asset has operations and no tensors" in tcap("ls", "net.aimodel", "x", status=2).stderr


@pytest.mark.spec("CAI-92")
def test_an_asset_is_no_archive(tcap: Tcap, asset: Path, write: Write) -> None:
    write("ref.h5", {"0/a/output": np.ones(2, np.float32)})
    error = tcap("compare", "ref.h5", "net.aimodel", status=3).stderr
    assert error.startswith(
        "Error: net.aimodel: is a Core AI asset, which is not read\nHint: Capture a run of it"
    )
    assert "tcap capture coreai FILE" in error
    (asset / "main.mlirb").rename(asset / "main-universal.odix")
    error = tcap("compare", "ref.h5", "net.aimodel", status=3).stderr
    assert error.startswith("Error: net.aimodel: is a compiled Core AI model, which is not read\n")


@pytest.mark.spec("CAI-90")
@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        pytest.param("metadata.json", b"[", "metadata.json: is", id="no JSON"),
        pytest.param("metadata.json", b'{"producer": 3}', "producer is 3, expected a text", id="number"),
        pytest.param("main.mlirb", None, "holds no main.mlirb, expected a Core AI asset", id="no program"),
    ],
)
def test_a_damaged_asset_is_refused_in_one_line(
    tcap: Tcap, asset: Path, file: str, content: bytes | None, message: str
) -> None:
    (asset / file).unlink()
    if content is not None:
        (asset / file).write_bytes(content)
    error = tcap("show", "net.aimodel", status=3).stderr
    assert message in error
    assert error.count("\n") <= 2
