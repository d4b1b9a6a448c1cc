"""`tcap view` at the command line: what it prints, and how it ends."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tensorcap
from tests.cli.conftest import Tcap

X = np.linspace(-1, 1, 64, dtype=np.float32).reshape(4, 16)


@pytest.fixture
def both(write: Callable[..., Path]) -> None:
    write("ref.h5", {"0/a/output": X})
    write("tgt.h5", {"0/a/output": 2 * X})


@pytest.mark.spec("VIEW-5")
@pytest.mark.usefixtures("both")
def test_what_cannot_be_served_is_refused_in_one_line(tcap: Tcap) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        refused = tcap("view", "ref.h5", "tgt.h5", "--port", str(port), "--no-browser", status=2)
    assert f"port {port}: cannot be listened on: Address already in use" in refused.stderr
    assert "--port 0" in refused.stderr
    assert refused.stdout == ""
    tcap("view", "none.h5", "--no-browser", status=3)
    tcap("view", "ref.h5", "none.h5", "--no-browser", status=3)
    tcap("view", "ref.h5", "--port", "70000", status=2)


@pytest.mark.usefixtures("both")
@pytest.mark.parametrize("package", ["starlette", "uvicorn", "jinja2"])
def test_an_absent_package_is_named_with_the_extra(
    tcap: Tcap, monkeypatch: pytest.MonkeyPatch, package: str
) -> None:
    for module in ("pages", "queries", "server"):
        monkeypatch.delitem(sys.modules, f"tensorcap.viewer.{module}", raising=False)
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.setitem(sys.modules, f"{package}.applications", None)
    refused = tcap("view", "ref.h5", "--no-browser", status=2)
    assert f"needs the package '{package}'" in refused.stderr
    assert "pip install 'tensorcap[view]'" in refused.stderr


@pytest.mark.spec("VIEW-11")
@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere there is always a screen")
@pytest.mark.parametrize(
    ("screen", "options", "is_opened"),
    [
        ("DISPLAY", [], True),
        ("WAYLAND_DISPLAY", [], True),
        ("DISPLAY", ["--no-browser"], False),
        ("", [], False),
    ],
)
def test_a_browser_is_opened_where_there_is_a_screen(
    tcap: Tcap, monkeypatch: pytest.MonkeyPatch, screen: str, options: list[str], is_opened: bool
) -> None:
    addresses: list[str] = []
    monkeypatch.delenv("DISPLAY", raising=False)
    monkeypatch.delenv("WAYLAND_DISPLAY", raising=False)
    if screen:
        monkeypatch.setenv(screen, ":0")
    monkeypatch.setattr("webbrowser.open", addresses.append)
    monkeypatch.setattr(tensorcap, "view", lambda *_, opened, **__: opened("http://127.0.0.1:81/token/"))
    done = tcap("view", "ref.h5", *options)
    assert done.stdout == "http://127.0.0.1:81/token/\n"
    assert "ssh -L 81:127.0.0.1:81 " in done.stderr
    assert addresses == ["http://127.0.0.1:81/token/"] * is_opened


@pytest.mark.slow
@pytest.mark.spec("VIEW-5", "VIEW-10", "VIEW-11")
@pytest.mark.usefixtures("both")
def test_the_address_and_how_to_forward_it_are_printed_and_an_interrupt_ends_it_well(folder: Path) -> None:
    command = [sys.executable, "-m", "tensorcap_cli", "view", "ref.h5", "tgt.h5", "--no-browser"]
    environment: dict[str, Any] = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    with subprocess.Popen(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        address = process.stdout.readline().strip()
        match = re.fullmatch(r"http://127\.0\.0\.1:(\d+)/([\w-]{32})/", address)
        assert match is not None, process.stderr.read()
        port = int(match[1])
        assert f"ssh -L {port}:127.0.0.1:{port} " in process.stderr.readline()
        deadline = time.monotonic() + 60
        while True:
            try:
                with urllib.request.urlopen(address, timeout=30) as answer:
                    assert b"1 not green" in answer.read()
                break
            except ConnectionError:
                assert time.monotonic() < deadline
        # On all interfaces there would be no address left for another server of this port.
        with socket.create_server(("127.0.0.2", port)):
            pass
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
        assert "Traceback" not in process.stderr.read()
