"""Two runs that were fed the same tokens in other steps: a prompt in chunks is compared with the whole."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tensorcap import compare
from tensorcap.alignment import in_own_steps, sides
from tensorcap.comparison import Comparison
from tensorcap_formats.open import open_archive
from tests.support.archives import write_archive

RANDOM = np.random.default_rng(3)
ROWS, LENGTH, HEADS, SIZE = 2, 12, 4, 6
IDS = RANDOM.integers(3, 60, (ROWS, LENGTH))
TABLE = RANDOM.standard_normal((60, SIZE)).astype(np.float32)
WEIGHT = RANDOM.standard_normal((SIZE, SIZE)).astype(np.float32)

Tensors = dict[str, Any]


def run_of(lengths: Sequence[int], ids: np.ndarray[Any, Any] = IDS) -> Tensors:
    """What a causal model with a cache makes, fed so many tokens in each step."""
    x = TABLE[ids] @ WEIGHT
    seen = np.cumsum(x, axis=1)  # what each token makes of itself and of those before
    heads = np.stack([x[..., :3] * (head + 1) for head in range(HEADS)], axis=1).astype(np.float32)
    allowed = np.tril(np.ones((LENGTH, LENGTH), np.float32))
    mask = np.where(allowed == 1, 0, np.finfo(np.float32).min).astype(np.float32)[None, None]
    run: Tensors = {"0/embed/param.weight": TABLE}
    for step, (start, end) in enumerate(zip(np.cumsum([0, *lengths]), np.cumsum(lengths), strict=False)):
        here = slice(start, end)
        run |= {
            f"{step}/@root/input.input_ids": ids[:, here],
            f"{step}/embed/output": x[:, here],
            f"{step}/mixer/input.mask": mask[:, :, here, :end],
            f"{step}/mixer/input.state": seen[:, start - 1] if start else np.zeros_like(seen[:, 0]),
            f"{step}/mixer/output.0": seen[:, here],
            f"{step}/mixer/output.heads": heads[:, :, here],
            f"{step}/mixer/output.keys": heads[:, :, :end],
            f"{step}/mixer/output.state": seen[:, end - 1],
            f"{step}/router/output": x[:, here].reshape(-1, SIZE)[:, :2].copy(),
            f"{step}/@root/output.logits": seen[:, here] @ TABLE.T,
        }
    return run


def compared(tmp_path: Path, one: Tensors, other: Tensors) -> Comparison:
    paths = (write_archive(tmp_path / f"{i}.h5", run) for i, run in enumerate((one, other)))
    return compare(*paths, rtol=1e-6, atol=1e-6)


def sentences(comparison: Comparison) -> list[str]:
    return [] if comparison.mapping is None else list(comparison.mapping.tokens)


@pytest.mark.spec("ALN-307")
@pytest.mark.parametrize(
    ("reference", "target", "text"),
    [
        pytest.param(
            [8, 1, 1, 1, 1],
            [4, 4, 1, 1, 1, 1],
            "steps 0 to 1 of the target, of 4 and 4 tokens, were compared as one: the reference was fed the "
            "same tokens in step 0",
            id="target",
        ),
        pytest.param(
            [5, 3, 1, 3],
            [8, 4],
            "steps 0 to 1 of the reference, of 5 and 3 tokens, were compared as one: the target was fed the "
            "same tokens in step 0; steps 2 to 3 of the reference, of 1 and 3 tokens, were compared as one: "
            "the target was fed the same tokens in step 1",
            id="reference",
        ),
        pytest.param(
            [5, 7],
            [6, 6],
            "steps 0 to 1 of the reference, of 5 and 7 tokens, were compared as one: the target was fed the "
            "same tokens in 2 others",
            id="both",
        ),
        pytest.param(
            [12],
            [1] * 12,
            "steps 0 to 11 of the target, of 1, 1, 1, 1, and 8 more tokens, were compared as one: the "
            "reference was fed the same tokens in step 0",
            id="one by one",
        ),
    ],
)
def test_the_same_tokens_in_other_steps_are_the_same(
    tmp_path: Path, reference: list[int], target: list[int], text: str
) -> None:
    comparison = compared(tmp_path, run_of(reference), run_of(target))
    assert {pair.status for pair in comparison.pairs} <= {"identical", "match"}
    assert comparison.exit_status == 0
    assert len(comparison.pairs) == 1 + 10 * len({*np.cumsum(reference)} & {*np.cumsum(target)})
    assert sentences(comparison)[0] == text


def test_a_mistake_in_a_later_chunk_is_found(tmp_path: Path) -> None:
    target = run_of([4, 4, 1, 1, 1, 1])
    target["1/mixer/output.0"] = target["1/mixer/output.0"].copy()
    target["1/mixer/output.0"][1, 2] *= 2
    comparison = compared(tmp_path, run_of([8, 1, 1, 1, 1]), target)
    wrong = [pair for pair in comparison.pairs if pair.status != "identical"]
    assert [pair.key for pair in wrong] == ["0/mixer/output.0"]
    index = wrong[0].difference.max_abs_index if wrong[0].difference else None
    assert index is not None
    assert index[:2] == (1, 6)


def test_steps_behind_other_tokens_stay_as_they_are(tmp_path: Path) -> None:
    """A free run that goes on with another token: its chunks before that are joined, and no more."""
    ids = IDS.copy()
    ids[0, 9] += 1
    comparison = compared(tmp_path, run_of([8, 1, 1, 1, 1]), run_of([4, 4, 1, 1, 1, 1], ids))
    by_key = {pair.key: pair.status for pair in comparison.pairs}
    assert by_key["0/mixer/output.0"] == by_key["1/mixer/output.0"] == "identical"
    assert by_key["2/embed/output"] == "diverged"
    assert not {"missing-in-reference", "missing-in-target"} & {*by_key.values()}


@pytest.mark.parametrize("target", [[4, 8], [8, 4]])
def test_other_tokens_are_not_joined(tmp_path: Path, target: list[int]) -> None:
    other = run_of(target, IDS[:, ::-1].copy())
    comparison = compared(tmp_path, run_of([12]), other)
    assert comparison.exit_status == 1
    assert not any("compared as one" in text for text in sentences(comparison))


@pytest.mark.spec("ALN-307")
def test_what_is_joined_comes_apart_again(tmp_path: Path) -> None:
    """Tensors of a run of whole prompts, in the steps of a run of chunks."""
    whole = open_archive(write_archive(tmp_path / "whole.h5", run_of([8, 4])))
    chunks = open_archive(write_archive(tmp_path / "chunks.h5", run_of([3, 5, 4])))
    _, view = sides(whole, chunks)
    split, keys = in_own_steps(whole, view, ["0/mixer/output.0", "1/embed/output"])
    assert keys == {"0/mixer/output.0", "1/mixer/output.0", "2/embed/output"}
    for name in ("mixer/output.0", "mixer/output.heads", "mixer/input.mask", "router/output", "embed/output"):
        for step in range(3):
            key = f"{step}/{name}"
            np.testing.assert_array_equal(split.load(split.get(key)), chunks.load(chunks.get(key)))
