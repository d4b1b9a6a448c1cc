"""What a run's records say of its calls: leaves, attention cores, depth."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import tensorcap
from tensorcap.comparison import compare
from tensorcap.runs import Calls
from tensorcap_formats.dtypes import Array

MakeArchive = Callable[..., Any]
Step = tuple[str, str, str]  # site, what it is given, what it makes; one letter stands for one tensor


def tensor(letter: str, rows: int = 64) -> Array:
    found: Array = np.random.default_rng(ord(letter)).standard_normal((rows, 64)).astype(np.float32)
    return found


def calls_of(make_archive: MakeArchive, steps: Sequence[Step], classes: dict[str, str]) -> Calls:
    tensors: dict[str, Array] = {}
    for site, given, made in steps:
        if given:
            tensors[f"0/{site}/input.x"] = tensor(given)
        if made:
            tensors[f"0/{site}/output"] = tensor(made)
    modules = [{"path": site, "class": f"models.{name}", "parameters": {}} for site, name in classes.items()]
    return Calls(make_archive(tensors, run={"modules": modules}))


LINEAR = {f"a.{name}": "Linear" for name in ("q", "k", "v", "o", "fused", "query", "key", "value")}


@pytest.mark.spec("POL-11")
@pytest.mark.parametrize(
    ("steps", "sources", "result"),
    [
        pytest.param(
            [
                ("a", "h", ""),
                ("a.q", "h", "q"),
                ("a.k", "h", "k"),
                ("a.v", "h", "v"),
                ("a.o", "c", "d"),
                ("a", "", "d"),
            ],
            ["0/a.q/output", "0/a.k/output", "0/a.v/output"],
            "0/a.o/input.x",
            id="projections",
        ),
        pytest.param(
            [
                ("a", "h", ""),
                ("a.q", "h", "q"),
                ("a.q_norm", "q", "n"),
                ("a.k", "h", "k"),
                ("a.o", "c", "d"),
                ("a", "", "d"),
            ],
            ["0/a.q_norm/output", "0/a.k/output"],
            "0/a.o/input.x",
            id="a-norm-of-queries-takes-their-place",
        ),
        pytest.param(
            [("a", "h", ""), ("a.fused", "h", "f"), ("a.o", "c", "d"), ("a.drop", "d", "d"), ("a", "", "d")],
            ["0/a.fused/output"],
            "0/a.o/input.x",
            id="fused-projection-and-dropout",
        ),
        pytest.param(
            [
                ("a", "h", ""),
                ("a.query", "h", "q"),
                ("a.key", "h", "k"),
                ("a.value", "h", "v"),
                ("a", "", "c"),
            ],
            ["0/a.query/output", "0/a.key/output", "0/a.value/output"],
            "0/a/output",
            id="no-output-projection",
        ),
    ],
)
def test_an_attention_core_lies_between_the_projections(
    make_archive: MakeArchive, steps: list[Step], sources: list[str], result: str
) -> None:
    calls = calls_of(
        make_archive, steps, {"a": "SomeAttention", **LINEAR, "a.drop": "Dropout", "a.q_norm": "Norm"}
    )
    (core,) = calls.cores()
    assert core.attention == "a"
    assert [record.key.text for record in core.sources] == sources
    assert [record.key.text for record in core.results] == [result]


@pytest.mark.spec("POL-11")
def test_only_the_innermost_attention_has_a_core(make_archive: MakeArchive) -> None:
    steps = [
        ("att", "h", ""),
        ("att.self", "h", ""),
        ("att.self.query", "h", "q"),
        ("att.self.key", "h", "k"),
        ("att.self", "", "c"),
        ("att.out", "c", "o"),
        ("att", "", "o"),
        ("mlp", "o", ""),
        ("mlp.fc", "o", "f"),
        ("mlp.proj", "g", "p"),
        ("mlp", "", "p"),
    ]
    classes = {
        "att": "Attention",
        "att.self": "SelfAttention",
        "att.self.query": "Linear",
        "att.self.key": "Linear",
    }
    calls = calls_of(
        make_archive, steps, {**classes, "att.out": "Linear", "mlp.fc": "Linear", "mlp.proj": "Linear"}
    )
    assert [core.attention for core in calls.cores()] == ["att.self"]


@pytest.mark.spec("POL-11")
@pytest.mark.parametrize(
    ("error", "status"), [(0.076, "within-rounding"), (0.09, "suspect"), (0.11, "diverged")]
)
def test_a_core_is_held_against_the_worst_of_its_sources(
    make_archive: MakeArchive, error: float, status: str
) -> None:
    def archive(inputs: float, output: float, run: dict[str, Any]) -> Any:
        letters = {"h": 0.0, "q": inputs, "k": inputs, "v": inputs, "c": output, "d": output}

        def off(letter: str) -> Array:
            signs = np.where(tensor(letter.upper()) > 0, 1, -1)
            found: Array = (tensor(letter) * (1 + letters[letter] * signs)).astype(np.float32)
            return found

        tensors = {"0/a/input.x": off("h")}
        for name in "qkv":
            tensors |= {f"0/a.{name}/input.x": off("h"), f"0/a.{name}/output": off(name)}
        tensors |= {"0/a.o/input.x": off("c"), "0/a.o/output": off("d"), "0/a/output": off("d")}
        return make_archive(tensors, run={"modules": modules, **run})

    modules = [
        {"path": site, "class": name, "parameters": {}} for site, name in {"a": "Attention", **LINEAR}.items()
    ]
    # sqrt(0.02**2 + (2 * 0.425 * 2**-8)**2) is 0.02027; 4 times that 0.0811, 5 times 0.1014
    found = compare(archive(0, 0, {}), archive(0.02, error, {"compute_dtype": "bfloat16"}))
    (pair,) = [pair for pair in found.pairs if pair.key == "0/a.o/input.x"]
    (finding,) = [finding for finding in pair.findings if finding.test == "attention_gain"]
    assert finding.status == status


@pytest.mark.spec("POL-13")
def test_depth_counts_blocks_in_the_order_of_execution(make_archive: MakeArchive) -> None:
    steps = [
        ("wte", "a", "b"),
        ("h.1", "b", ""),
        ("h.1.fc", "b", "c"),
        ("h.1", "", "c"),
        ("h.0.fc", "c", "d"),
        ("h.0", "", "d"),
        ("out", "d", "e"),
    ]
    archive = make_archive({f"0/{site}/output": tensor(made) for site, _, made in steps if made})
    calls = Calls(archive)
    depths = {record.key.site: calls.depth(record) for record in archive.records}
    assert depths == {"wte": 0, "h.1.fc": 1, "h.1": 1, "h.0.fc": 2, "h.0": 2, "out": 2}


def test_a_module_without_called_children_is_a_leaf(make_archive: MakeArchive) -> None:
    calls = calls_of(make_archive, [("m", "a", ""), ("m.fc", "a", "b"), ("m", "", "b"), ("n", "b", "c")], {})
    assert [site for site in ("m", "m.fc", "n") if calls.is_leaf(site)] == ["m.fc", "n"]


class Doubling(nn.Module):
    def __init__(self, factor: float = 2.0) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.factor = factor

    def forward(self, x: torch.Tensor) -> Any:
        return self.inner(x) * self.factor


def run_by_threads(path: Path, order: list[int], *, wrong: int = -1, alone: bool = False) -> Path:
    """A model called once by each of three threads, which are alive together, one after another."""
    torch.manual_seed(0)
    model = Doubling().eval()
    turns = [threading.Event() for _ in range(4)]
    turns[0].set()

    def call(number: int, turn: int) -> None:
        turns[turn].wait(60)
        model.factor = 2.5 if number == wrong else 2.0
        with torch.no_grad():
            model(torch.full((2, 8), 1.0 + number))
        turns[turn + 1].set()
        turns[3].wait(60)  # until all have been called, so that no two of them have one identity

    with tensorcap.capture(model, path):
        if alone:
            turns[3].set()
            for turn, number in enumerate(order):
                call(number, turn)
        else:
            threads = [
                threading.Thread(target=call, args=(number, turn)) for turn, number in enumerate(order)
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
    return path


@pytest.mark.spec("CMP-34", "CAP-68")
def test_steps_of_threads_are_paired_by_what_they_were_given(tmp_path: Path) -> None:
    reference = run_by_threads(tmp_path / "r.h5", [0, 1, 2])
    with tensorcap.open_archive(reference) as archive:
        assert archive.run["threads"] == [0, 1, 2]
    comparison = compare(reference, run_by_threads(tmp_path / "t.h5", [2, 0, 1]))
    assert comparison.counts == {"identical": comparison.records}
    assert any("Several threads called the model" in warning for warning in comparison.warnings)


@pytest.mark.spec("CMP-34")
def test_a_mistake_in_a_step_of_threads_is_found_in_that_step(tmp_path: Path) -> None:
    reference = run_by_threads(tmp_path / "r.h5", [0, 1, 2])
    comparison = compare(reference, run_by_threads(tmp_path / "t.h5", [2, 0, 1], wrong=1))
    assert [pair.key for pair in comparison.pairs if not pair.is_green] == ["1/@root/output"]


@pytest.mark.spec("CMP-34")
def test_steps_of_one_thread_are_never_reordered(tmp_path: Path) -> None:
    reference = run_by_threads(tmp_path / "r.h5", [0, 1, 2], alone=True)
    comparison = compare(reference, run_by_threads(tmp_path / "t.h5", [2, 0, 1], alone=True))
    assert comparison.exit_status == 1
    assert any("in another order: step 0 of the reference is step 1" in w for w in comparison.warnings)


class Chunked(torch.nn.Module):
    """Rows go through one layer in threads of their own, in a given order; then through the head."""

    def __init__(self, order: list[int], wrong: int = -1) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU())
        self.head = torch.nn.Linear(8, 2)
        self.order, self.wrong = order, wrong

    def forward(self, x: torch.Tensor) -> Any:
        turns = [threading.Event() for _ in range(len(x) + 1)]
        turns[0].set()
        results: dict[int, torch.Tensor] = {}

        def call(row: int, turn: int) -> None:
            turns[turn].wait(60)
            with torch.no_grad():
                results[row] = self.layer(x[row : row + 1]) * (1.5 if row == self.wrong else 1.0)
            turns[turn + 1].set()
            turns[-1].wait(60)  # until all have been called, so that no two of them have one identity

        threads = [threading.Thread(target=call, args=(row, turn)) for turn, row in enumerate(self.order)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return self.head(torch.cat([results[row] for row in range(len(x))]))


def run_in_chunks(path: Path, order: list[int], wrong: int = -1) -> Path:
    model = Chunked(order, wrong).eval()
    if wrong >= 0:
        model.layer[0].register_forward_hook(lambda _, args, y: y + (args[0][0, 0] == wrong))
    with torch.no_grad(), tensorcap.capture(model, path):
        model(torch.arange(3.0)[:, None].expand(3, 8).contiguous())
    return path


@pytest.mark.spec("CMP-150", "CAP-171")
def test_calls_of_one_module_by_threads_are_paired_by_what_they_were_given(tmp_path: Path) -> None:
    reference = run_in_chunks(tmp_path / "r.h5", [0, 1, 2])
    with tensorcap.open_archive(reference) as archive:
        assert archive.run["threaded_sites"] == ["layer", "layer.0", "layer.1"]
    comparison = compare(reference, run_in_chunks(tmp_path / "t.h5", [2, 0, 1]))
    assert comparison.counts == {"identical": comparison.records}
    assert any("Several threads called layer, layer.0" in warning for warning in comparison.warnings)


@pytest.mark.spec("CMP-150")
def test_a_mistake_in_a_call_of_threads_is_found_in_that_call(tmp_path: Path) -> None:
    reference = run_in_chunks(tmp_path / "r.h5", [0, 1, 2])
    comparison = compare(reference, run_in_chunks(tmp_path / "t.h5", [2, 0, 1], wrong=1))
    wrong = [pair.key for pair in comparison.pairs if not pair.is_green]
    assert wrong[0] == "0/layer.0@1/output"
    assert not any("@2" in key or "layer.0/" in key for key in wrong)
