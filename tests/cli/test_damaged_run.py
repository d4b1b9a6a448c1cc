"""Commands on archives whose run metadata are damaged: what is damaged counts as absent."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from tensorcap_cli.main import main

TENSORS = {
    "0/@root/input.input_ids": np.array([[1, 2]]),
    "0/a/input.x": np.ones((1, 2, 4), np.float32),
    "0/a/output": np.ones((1, 2, 4), np.float32),
}
NAMES = (
    "framework",
    "model",
    "modules",
    "aliases",
    "dtype",
    "compute_dtype",
    "device",
    "packages",
    "workload",
    "inputs",
    "scope",
    "points",
    "steps",
    "phases",
    "ranks",
    "stopped",
    "injected",
    "error",
    "notes",
    "control",
    "duration_seconds",
)
DAMAGE: dict[str, Any] = {
    "null": None,
    "list": [1, None, "text", [2], {"site": "a", "path": "a", "slots": 3}],
    "object": {
        "a": 1,
        "config": [1],
        "slots": [{"site": "a", "slot": "output", "calls": {"x": "?"}}],
        "at": 3,
        "archives": ["a"],
        "tensors": [
            {"rule": "no rule", "keys": ["*"], "sizes": {"2": 3}},
            {"rule": "concat 9", "keys": ["a"]},
        ],
        "problems": [{"key": "0/a/output", "kind": "unequal", "ranks": "x"}, {"key": 3}],
    },
    "number": -7.5,
    "text": "a text",
}
COMMANDS = (
    ("compare", "ref.h5", "tgt.h5"),
    ("preflight", "ref.h5", "tgt.h5"),
    ("align", "ref.h5", "tgt.h5", "-o", "map.toml"),
    ("diagnose", "ref.h5", "tgt.h5", "0/a/output"),
    ("ls", "tgt.h5"),
    ("show", "tgt.h5"),
    ("show", "tgt.h5", "0/a/output"),
    ("tree", "tgt.h5"),
)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("damage", DAMAGE)
def test_no_command_breaks_on_damaged_metadata(write: Callable[..., Path], name: str, damage: str) -> None:
    whole = {
        "modules": [{"path": "a", "class": "A"}],
        "dtype": "float32",
        "model": {"config": {"hidden_size": 4}},
    }
    run = {**whole, name: DAMAGE[damage]}
    write("ref.h5", TENSORS, run=run)
    write("tgt.h5", {**TENSORS, "0/a/output": np.full((1, 2, 4), 1.5, np.float32)}, run=run, complete=False)
    for command in COMMANDS:
        result = CliRunner().invoke(main, list(command), prog_name="tcap", catch_exceptions=False)
        assert result.exit_code in (0, 1), (command, result.output)
