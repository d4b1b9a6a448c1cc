"""Damaged folders of NxDI and vllm-neuron end in one clear error, or in an archive that lacks something."""

from __future__ import annotations

import itertools
import json
import random
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tensorcap_formats.errors import TensorcapError
from tensorcap_formats.open import open_archive
from tests.support.torch_bytes import bfloats, floats, integers, write_npy, write_torch

ODD: tuple[Any, ...] = (
    None,
    True,
    -1,
    10**30,
    1.5,
    "",
    "x",
    [],
    [[]],
    {},
    {"a": [1]},
    [None, "1"],
    [{"index": []}],
)


def captures(folder: Path) -> None:
    name = "captured_tensors_cte_step_1_module_norm_output.pt"
    write_torch(folder / name, bfloats(1, 2, shape=(1, 1, 2)))
    entry = {"step": 1, "module_name": "norm", "tensor_shape": [1, 1, 2], "tensor_dtype": "torch.bfloat16"}
    (folder / "capture_metadata.json").write_text(json.dumps({"tensors": {name: entry}}))


def inputs(folder: Path) -> None:
    write_torch(folder / "saved_inputs_cte_output_0.pt", (integers(1, 2), floats(1)))


def tree(folder: Path) -> None:
    write_torch(folder / "dp0/prefill_s2_0/norm/rank0.pt", floats(1, 2))
    metadata = {"req_ids": ["a"], "positions": [0, 1], "dp_rank": 0}
    (folder / "dp0/prefill_s2_0/prefill_s2_0_meta.json").write_text(json.dumps(metadata))


def snapshots(folder: Path) -> None:
    write_npy(folder / "a_model/_tp0_bk0/request0/rank0/input0.npy", "|V2", (2,), struct.pack("<2H", 1, 2))


def calls(folder: Path) -> None:
    write_npy(folder / "aa/rank0/call0/tensor0.npy", "|V1", (2,), b"12")
    entry = {"index": 0, "dtype": "torch.float8_e5m2", "shape": [2]}
    content = {"inputs": [entry], "global_step": 1, "is_prompt": True}
    (folder / "aa/rank0/call0/meta.json").write_text(json.dumps(content))


KINDS = (captures, inputs, tree, snapshots, calls)


def read_all(folder: Path) -> None:
    """Open a folder and read all of it, or fail with an error of ours in one line."""
    message = ""
    try:
        with open_archive(folder) as archive:
            for record in archive.records:
                archive.read(record)
    except TensorcapError as error:
        message = str(error)
    assert "\n" not in message


@pytest.mark.parametrize("make", KINDS, ids=lambda make: make.__name__)
def test_damaged_bytes_end_in_one_line(tmp_path: Path, make: Callable[[Path], None]) -> None:
    tmp_path.joinpath("seed").mkdir()
    make(tmp_path / "seed")
    chance = random.Random(17)
    for path in [path for path in (tmp_path / "seed").rglob("*") if path.is_file()]:
        whole = path.read_bytes()
        for _ in range(60):
            damaged = bytearray(whole)
            for _ in range(chance.randint(1, 4)):
                damaged[chance.randrange(len(damaged))] = chance.randrange(256)
            path.write_bytes(damaged[: chance.choice([len(damaged), chance.randrange(len(damaged))])])
            read_all(tmp_path / "seed")
        path.write_bytes(whole)


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Each object or list within JSON, with a key or an index of it."""
    pending = [value]
    while pending:
        inner = pending.pop()
        pairs = (
            inner.items() if isinstance(inner, dict) else enumerate(inner) if isinstance(inner, list) else ()
        )
        for key, below in list(pairs):
            yield inner, key
            pending.append(below)


@pytest.mark.parametrize("make", [captures, tree, calls], ids=lambda make: make.__name__)
def test_metadata_of_other_types_end_in_one_line(tmp_path: Path, make: Callable[[Path], None]) -> None:
    make(tmp_path)
    (path,) = tmp_path.rglob("*.json")
    text = path.read_text()
    for number, odd in itertools.product(range(len(list(places(json.loads(text))))), ODD):
        content = json.loads(text)
        owner, key = list(places(content))[number]
        owner[key] = odd
        path.write_text(json.dumps(content))
        read_all(tmp_path)
