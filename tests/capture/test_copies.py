"""Copies of a model under capture, and copies of the process."""

from __future__ import annotations

import copy
import io
import os
import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tensorcap

X = torch.ones(1, 4)


def saved(model: Any) -> Any:
    file = io.BytesIO()
    torch.save(model, file)
    assert b"tensorcap" not in file.getvalue()
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize(
    "copied",
    [
        pytest.param(copy.deepcopy, id="deepcopy"),
        pytest.param(lambda m: pickle.loads(pickle.dumps(m)), id="pickle"),
        pytest.param(saved, id="torch.save"),
    ],
)
def test_a_copy_of_the_model_is_not_under_capture(
    path: Path, small: Any, copied: Callable[[Any], Any]
) -> None:
    with torch.no_grad(), tensorcap.capture(small, path):
        other = copied(small)
        small(X)
        assert torch.equal(other(X), small(X))
    with tensorcap.open_archive(path) as archive:
        assert [r.key.text for r in archive.records if r.key.site == "2"] == [
            "0/2/input.input",
            "0/2/output",
            "1/2/input.input",
            "1/2/output",
        ]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")
def test_a_forked_process_records_nothing_and_leaves_the_archive_alone(tmp_path: Path) -> None:
    class Forking(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.child = nn.Identity()
            self.forks = False

        def forward(self, x: torch.Tensor) -> Any:
            if not self.forks:
                return self.child(x)
            self.forks = False
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # that there are threads
                self.pid = os.fork()
            return self.child(x + 100 * (self.pid == 0))

    model: Any = Forking()
    model.pid = -1
    try:
        with torch.no_grad(), tensorcap.capture(model, tmp_path / "a.h5"):
            model(X)
            model.forks = True
            model(X)
            if model.pid == 0:
                model(X * 50)
            else:
                assert os.waitpid(model.pid, 0)[1] == 0
                model(X * 3)
        if model.pid == 0:
            with torch.no_grad(), tensorcap.capture(model, tmp_path / "child.h5"):
                model(X * 50)
    except BaseException:
        if model.pid == 0:
            os._exit(1)
        raise
    if model.pid == 0:
        os._exit(0)
    with tensorcap.open_archive(tmp_path / "a.h5") as archive:
        assert [(r.key.text, archive.load(r)[0, 0]) for r in archive.records if "/child/" in r.key.text] == [
            (f"{step}/child/{slot}", value)
            for step, value in ((0, 1), (1, 1), (2, 3))
            for slot in ("input.input", "output")
        ]
    with tensorcap.open_archive(tmp_path / "child.h5") as archive:
        assert archive.load(archive.get("0/child/output"))[0, 0] == 50
