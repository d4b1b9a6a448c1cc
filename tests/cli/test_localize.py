"""`tcap localize` at the command line: what to type where nothing explains a suspect."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
from click.testing import CliRunner

from tensorcap_cli.main import main as tcap
from tensorcap_formats.archive import Archive
from tensorcap_formats.open import open_archive

SOURCE = """
import torch
from torch import nn

import tensorcap


class Feed(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 24), nn.Linear(24, 16)

    def forward(self, x):
        return self.down(torch.tanh(self.up(x)))


class Port(Feed):
    def forward(self, x):
        x = self.up(x)
        return self.down(torch.sinc(x.cumprod(-1)))


def workload(kind):
    torch.manual_seed(0)
    return tensorcap.Workload(kind().eval(), (torch.linspace(-1, 2, 80).reshape(5, 16),))


def reference():
    return workload(Feed)


def port():
    return workload(Port)
"""


@pytest.mark.spec("LCL-604")
def test_the_next_step_of_an_unexplained_suspect_traces_both_models(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models.py").write_text(SOURCE)
    run = CliRunner()
    for name in ("reference", "port"):
        assert run.invoke(tcap, ["capture", "torch", f"models.py:{name}", "-o", f"{name}.h5"]).exit_code == 0
    paths: list[str] = []  # that are opened: to merge ranks, or to parse a dump, takes long

    def counted(path: str) -> Archive:
        paths.append(str(path))
        return open_archive(path)

    monkeypatch.setattr("tensorcap_formats.open.open_archive", counted)
    found = run.invoke(tcap, ["localize", "reference.h5", "port.h5"])
    assert (paths.count("reference.h5"), paths.count("port.h5")) == (1, 1)
    *_, last = found.stdout.splitlines()
    what, _, command = last.partition(": ")
    assert what == "Next, which operations either side alone runs, with their lines"
    assert "operations:" not in found.stdout
    traced = run.invoke(tcap, shlex.split(command)[1:])
    assert (found.exit_code, traced.exit_code) == (1, 1)
    line = 1 + next(at for at, text in enumerate(SOURCE.splitlines()) if "cumprod" in text)
    text = " ".join(traced.stdout.split())
    assert (
        "operations: the reference runs aten.tanh at models.py:14; the target runs aten.cumprod(dim=-1)"
        in text
    )
    assert f"aten.sinc at models.py:{line}" in text
    assert "all that was tried on the values of" in traced.stdout.splitlines()[-1]
