"""A run of some rows of a batch, or of a padded vocabulary: compared in the part that both runs have."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tensorcap import align, compare
from tensorcap.comparison import Comparison
from tests.support.archives import write_archive

RANDOM = np.random.default_rng(7)
SIZE, HEADS, EXPERTS, WORDS = 6, 2, 3, 31
TABLE = RANDOM.standard_normal((60, SIZE)).astype(np.float32)
PLACES = RANDOM.standard_normal((40, SIZE)).astype(np.float32)
HEAD = RANDOM.standard_normal((WORDS, SIZE)).astype(np.float32)
IDS = RANDOM.integers(3, 60, (3, 8))
MASK = np.ones((3, 8), np.int64)

Tensors = dict[str, Any]


def run_of(ids: np.ndarray[Any, Any], mask: np.ndarray[Any, Any] | None = None) -> Tensors:
    """What a small encoder makes: tokens, attention, tokens one after the other, and a pooled row each."""
    rows, length = ids.shape
    valid = np.ones(ids.shape, bool) if mask is None else mask.astype(bool)
    x = TABLE[ids] + PLACES[:length]
    scores = np.where(valid[:, None, None], np.einsum("bqd,bkd->bqk", x, x)[:, None] / [[[1]], [[2]]], -1e9)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights = (weights / weights.sum(-1, keepdims=True)).astype(np.float32)
    y = (x + np.einsum("bhqk,bkd->bqd", weights, x)).astype(np.float32)
    pooled = np.tanh(y[:, 0])
    given = {} if mask is None else {"0/@root/input.attention_mask": mask}
    return {
        "0/@root/input.input_ids": ids,
        **given,
        "0/places/output": PLACES[None, :length],
        "0/embed/output": x,
        "0/attention/output": weights,
        "0/mixer/output": y,
        "0/router/output": y.reshape(rows * length, SIZE)[:, :EXPERTS].copy(),
        "0/pooler/output": pooled,
        "0/@root/output": y @ HEAD.T,
    }


def compared(tmp_path: Path, one: Mapping[str, Any], other: Mapping[str, Any], **options: Any) -> Comparison:
    return compare(
        write_archive(tmp_path / "r.h5", one),
        write_archive(tmp_path / "t.h5", other),
        rtol=1e-4,
        atol=1e-5,
        **options,
    )


def statuses(comparison: Comparison) -> set[str]:
    return {pair.status for pair in comparison.pairs}


def sentences(comparison: Comparison) -> list[str]:
    return [] if comparison.mapping is None else list(comparison.mapping.tokens)


NO_MORE = "the target was fed no more, and no more was compared"


@pytest.mark.spec("ALN-41", "ALN-42")
@pytest.mark.parametrize(
    ("rows", "text"),
    [
        pytest.param([1], f"row 1 of the reference's batch of 3: {NO_MORE}", id="one"),
        pytest.param([2, 0], f"rows 2, 0 of the reference's batch of 3: {NO_MORE}", id="two"),
    ],
)
def test_rows_of_a_batch_are_compared_with_those_rows(tmp_path: Path, rows: list[int], text: str) -> None:
    comparison = compared(tmp_path, run_of(IDS), run_of(IDS[rows]))
    assert comparison.exit_status == 0
    assert statuses(comparison) <= {"identical", "match"}
    assert sentences(comparison) == [text]
    assert not comparison.warnings


@pytest.mark.spec("ALN-41")
def test_a_batch_is_compared_with_a_run_of_one_row(tmp_path: Path) -> None:
    comparison = compared(tmp_path, run_of(IDS[2:]), run_of(IDS))
    assert comparison.exit_status == 0
    text = "row 2 of the target's batch of 3: the reference was fed no more, and no more was compared"
    assert sentences(comparison) == [text]


@pytest.mark.spec("ALN-41")
@pytest.mark.parametrize("padding", ["right", "left"])
def test_padding_of_the_row_is_cut_off(tmp_path: Path, padding: str) -> None:
    mask, kept = MASK.copy(), slice(0, 5) if padding == "right" else slice(3, 8)
    mask[1] = 0
    mask[1, kept] = 1
    whole = run_of(IDS, mask)
    alone = {
        key: array[1:2, :, kept, kept]
        if array.ndim == 4
        else array[:, kept]
        if key == "0/places/output"
        else array[1:2]
        for key, array in whole.items()
        if "mask" not in key and "router" not in key
    }
    alone = {
        key: array[:, kept]
        if key != "0/places/output" and array.ndim in (2, 3) and array.shape[1] == 8
        else array
        for key, array in alone.items()
    }
    alone["0/router/output"] = alone["0/mixer/output"][0, :, :EXPERTS].copy()
    comparison = compared(tmp_path, whole, alone)
    assert [pair.key for pair in comparison.pairs if not pair.is_green] == ["0/@root/input.attention_mask"]
    first, last = kept.start, kept.stop - 1
    assert sentences(comparison) == [
        f"row 1 of the reference's batch of 3, positions {first} to {last} of 8; the others are padding: "
        f"{NO_MORE}"
    ]


@pytest.mark.spec("ALN-41")
@pytest.mark.parametrize(
    "mask",
    [
        pytest.param(None, id="no-mask"),
        pytest.param(MASK, id="all-attended"),
        pytest.param(np.where(np.arange(8) < 4, 1, 0) * MASK, id="too-few-attended"),
    ],
)
def test_tokens_that_are_no_padding_are_not_cut_off(tmp_path: Path, mask: Any) -> None:
    comparison = compared(tmp_path, run_of(IDS, mask), run_of(IDS[1:2, :5]))
    assert comparison.exit_status == 1
    assert "shape-mismatch" in statuses(comparison)


@pytest.mark.spec("ALN-41")
@pytest.mark.parametrize("name", ["input_ids", "words"])
def test_zeros_and_ones_that_part_unlike_tokens_are_no_mask_of_padding(tmp_path: Path, name: str) -> None:
    ids = np.where(np.arange(8) < 5, IDS, 1)  # padding has one number
    flags = np.where(np.arange(8) < 5, 1, 0) * MASK

    def flagged(ids: Any, flags: Any) -> Tensors:
        made = TABLE[ids]
        given = {f"0/@root/input.{name}": ids, "0/@root/input.flags": flags}
        return {**given, "0/@root/input.token_type_ids": np.zeros_like(ids), "0/embed/output": made}

    padded = compared(tmp_path, flagged(ids, flags), flagged(ids[1:2, :5], flags[1:2, :5]))
    assert padded.exit_status == 0
    assert "positions 0 to 4 of 8; the others are padding" in sentences(padded)[0]
    shortened = compared(tmp_path, flagged(IDS, flags), flagged(IDS[1:2, :5], flags[1:2, :5]))
    assert shortened.exit_status == 1
    assert "shape-mismatch" in statuses(shortened)


@pytest.mark.spec("ALN-41")
def test_rows_of_other_inputs_are_not_compared(tmp_path: Path) -> None:
    other = IDS[1:2].copy()
    other[0, 7] += 1
    comparison = compared(tmp_path, run_of(IDS), run_of(other))
    assert comparison.exit_status == 1
    assert comparison.mapping is None


@pytest.mark.spec("ALN-41")
def test_all_inputs_have_to_be_of_the_row(tmp_path: Path) -> None:
    one, other = run_of(IDS), run_of(IDS[1:2])
    one["0/@root/input.token_type_ids"] = np.array([[0] * 8, [1] * 8, [0] * 8])
    other["0/@root/input.token_type_ids"] = np.zeros((1, 8), np.int64)
    assert compared(tmp_path, one, other).exit_status == 1


@pytest.mark.spec("ALN-41")
def test_an_error_in_the_row_is_found(tmp_path: Path) -> None:
    other = run_of(IDS[1:2])
    other["0/mixer/output"] = other["0/mixer/output"][:, ::-1].copy()
    comparison = compared(tmp_path, run_of(IDS), other)
    assert [pair.key for pair in comparison.pairs if not pair.is_green] == ["0/mixer/output"]


@pytest.mark.spec("ALN-41")
def test_a_result_that_lacks_rows_of_its_own_run_is_an_error(tmp_path: Path) -> None:
    other = run_of(IDS)
    other["0/pooler/output"] = other["0/pooler/output"][:1]
    comparison = compared(tmp_path, run_of(IDS), other)
    assert [pair.key for pair in comparison.pairs if not pair.is_green] == ["0/pooler/output"]


@pytest.mark.spec("ALN-41")
def test_names_of_inputs_and_modules_may_differ(tmp_path: Path) -> None:
    names = {
        "input.input_ids": "input.x",
        "embed": "tok",
        "attention": "mix.attention",
        "mixer": "mix",
        "pooler": "cls",
    }
    other = {}
    for key, array in run_of(IDS[1:2]).items():
        for name, changed in names.items():
            key = (
                key.replace(name, changed)
                if key.split("/", 1)[1].startswith((name, f"@root/{name}"))
                else key
            )
        other[key] = array
    run = {"modules": [{"path": ""}]}
    comparison = compare(
        write_archive(tmp_path / "r.h5", run_of(IDS), run=run),
        write_archive(tmp_path / "t.h5", other, run=run),
        rtol=1e-4,
        atol=1e-5,
    )
    assert sentences(comparison)[0] == f"row 1 of the reference's batch of 3: {NO_MORE}"
    assert comparison.exit_status == 0


@pytest.mark.spec("ALN-41")
def test_generation_of_one_row_is_compared_step_by_step(tmp_path: Path) -> None:
    def generation(rows: list[int]) -> Tensors:
        step = {
            "1/@root/input.input_ids": IDS[rows, :1],
            "1/@root/input.cache.keys": TABLE[IDS[rows]] * np.float32(1 + 1e-7 * len(rows)),
            "1/embed/output": TABLE[IDS[rows, :1]],
        }
        return {**run_of(IDS[rows]), **step}

    comparison = compared(tmp_path, generation([0, 1, 2]), generation([1]))
    assert comparison.exit_status == 0
    step = {"1/@root/input.input_ids": IDS[:1, :1]}
    assert compared(tmp_path, generation([0, 1, 2]), {**generation([1]), **step}).exit_status == 1


@pytest.mark.spec("ALN-41")
def test_a_slice_of_a_capture_that_left_the_inputs_whole_is_compared(tmp_path: Path) -> None:
    """`capture --slice` keeps what the model is given whole, and a row of all else."""
    sliced = {**run_of(IDS[:1]), "0/@root/input.input_ids": IDS}
    comparison = compared(tmp_path, run_of(IDS[:1]), sliced)
    assert comparison.exit_status == 0
    assert compared(tmp_path, run_of(IDS[1:2]), sliced).exit_status == 1


@pytest.mark.spec("ALN-41")
def test_a_map_that_slices_cuts_by_itself(tmp_path: Path) -> None:
    reference = write_archive(tmp_path / "r.h5", {"0/embed/output": TABLE[IDS[2:]]})
    target = write_archive(tmp_path / "t.h5", {"0/embed/output": TABLE[IDS]})
    (tmp_path / "map.toml").write_text(
        '[[pair]]\nreference = "embed"\ntarget = "embed"\nsteps = ["slice 0 2:3"]\n'
    )
    comparison = compare(reference, target, rtol=0.0, mapping=tmp_path / "map.toml")
    assert (comparison.exit_status, sentences(comparison)) == (0, [])


@pytest.mark.spec("ALN-41")
def test_align_says_which_rows_it_took(tmp_path: Path) -> None:
    aligned = align(
        write_archive(tmp_path / "r.h5", run_of(IDS)), write_archive(tmp_path / "t.h5", run_of(IDS[:1]))
    )
    assert list(aligned.to_json()["tokens"]) == [f"row 0 of the reference's batch of 3: {NO_MORE}"]
    assert aligned.exit_status == 0


@pytest.mark.spec("ALN-210")
@pytest.mark.parametrize("width", [6, 8], ids=["heads", "heads as wide as a row is long"])
def test_positions_before_and_behind_heads_are_cut_off(tmp_path: Path, width: int) -> None:
    ids = np.array([[7, 8, 9, 10, 11, 0, 0, 0]])
    mask = (ids > 0).astype(np.int64)
    before = RANDOM.standard_normal((1, 8, HEADS, width)).astype(np.float32)
    behind = RANDOM.standard_normal((1, HEADS, 8, width)).astype(np.float32)
    target = {
        "0/@root/input.input_ids": ids,
        "0/@root/input.attention_mask": mask,
        "0/model.layers.0.self_attn.q_norm/output": before,
        "0/model.layers.0.self_attn.k_norm/output": behind,
    }
    reference = {
        "0/@root/input.input_ids": ids[:, :5],
        "0/@root/input.attention_mask": mask[:, :5],
        "0/layers.0.self_attn.q_norm/output": before[:, :5],
        "0/layers.0.self_attn.k_norm/output": behind[:, :, :5],
    }
    comparison = compared(tmp_path, reference, target)
    assert comparison.exit_status == 0
    assert statuses(comparison) <= {"identical", "match", "within-tolerance"}


@pytest.mark.spec("ALN-83")
def test_a_map_of_tokens_alone_reaches_equal_keys(tmp_path: Path) -> None:
    mask = MASK.copy()
    mask[1, 5:] = 0
    one, other = run_of(IDS, mask), run_of(IDS[1:2, :5])
    del one["0/pooler/output"], other["0/pooler/output"]
    other["0/@root/input.input_ids"] = np.concatenate([IDS[1:2, :5], [[1, 2]]], 1)  # tokens that no row has
    for key, array in list(other.items()):
        if array.ndim == 3:
            other[key] = np.concatenate([array, array[:, :2]], 1)
    del (
        other["0/router/output"],
        one["0/router/output"],
        other["0/attention/output"],
        one["0/attention/output"],
    )
    (tmp_path / "map.toml").write_text('[tokens]\nstep = "match_tokens"\n')
    comparison = compared(tmp_path, one, other, mapping=tmp_path / "map.toml")
    values = {pair.key: pair.status for pair in comparison.pairs if pair.key.endswith("output")}
    assert set(values.values()) <= {"identical", "match"}
    assert sentences(comparison)[0].startswith("5 tokens are on both sides; the reference has 16 more")


# --- Padded vocabularies


def run_with_head(head: np.ndarray[Any, Any], *, params: bool = False) -> tuple[Tensors, dict[str, Any]]:
    """A run whose head has these rows, and its metadata."""
    tensors = run_of(IDS)
    tensors["0/@root/output"] = tensors["0/head/output"] = tensors["0/mixer/output"] @ head.T
    if params:
        tensors["0/head/param.weight"] = head
    shape = list(head.shape)
    modules = [
        {"path": ""},
        {"path": "head", "parameters": {"weight": {"shape": shape, "dtype": "float32"}}},
    ]
    return tensors, {"modules": modules, "model": {"config": {"vocab_size": len(head)}}}


def compared_heads(
    tmp_path: Path, one: np.ndarray[Any, Any], other: np.ndarray[Any, Any], *, params: bool = False
) -> Comparison:
    paths = []
    for name, head in (("r", one), ("t", other)):
        tensors, run = run_with_head(head, params=params)
        paths.append(write_archive(tmp_path / f"{name}.h5", tensors, run=run))
    return compare(*paths, rtol=1e-4, atol=1e-5)


PADDED = np.concatenate([HEAD, np.zeros((5, SIZE), np.float32)])


@pytest.mark.spec("ALN-42")
@pytest.mark.parametrize("params", [False, True])
def test_a_padded_vocabulary_is_compared_in_the_words_of_both(tmp_path: Path, params: bool) -> None:
    comparison = compared_heads(tmp_path, HEAD, PADDED, params=params)
    assert comparison.exit_status == 0
    assert sentences(comparison) == [
        "the target's vocabulary is padded from 31 to 36, which the reference's is not: the first 31 of its "
        "logits agree, and no others were compared"
    ]
    comparison = compared_heads(tmp_path, PADDED, HEAD, params=params)
    assert comparison.exit_status == 0
    assert sentences(comparison)[0].startswith("the reference's vocabulary is padded from 31 to 36")


@pytest.mark.spec("ALN-42")
@pytest.mark.parametrize(
    "head",
    [
        pytest.param(np.concatenate([PADDED[-5:], HEAD]), id="padded-in-front"),
        pytest.param(np.concatenate([HEAD[::-1], PADDED[-5:]]), id="in-another-order"),
    ],
)
def test_words_in_other_places_are_no_padding(tmp_path: Path, head: np.ndarray[Any, Any]) -> None:
    comparison = compared_heads(tmp_path, HEAD, head)
    assert comparison.exit_status == 1
    assert comparison.mapping is None
    assert {p.key for p in comparison.pairs if p.status == "shape-mismatch"} == {
        "0/head/output",
        "0/@root/output",
    }


def weights_of(head: np.ndarray[Any, Any]) -> dict[str, Any]:
    """The run metadata of a head, as a capture has it."""
    known = {
        "minimum": float(head.min()),
        "maximum": float(head.max()),
        "mean": float(head.mean(dtype=np.float64)),
        "l2": float(np.sqrt((head.astype(np.float64) ** 2).sum())),
        "zeros": int((head == 0).sum()),
    }
    about: dict[str, Any] = {
        "shape": list(head.shape),
        "dtype": "float32",
        "digest": f"xxh3_128:{len(head):032}",
    }
    about["statistics"] = known | dict.fromkeys(("nan", "posinf", "neginf"), 0)
    return {"modules": [{"path": ""}, {"path": "head", "parameters": {"weight": about}}]}


@pytest.mark.spec("ALN-42")
@pytest.mark.parametrize("padding", ["zeros", "numbers"])
def test_a_padded_vocabulary_behind_a_mistake_accuses_no_head(tmp_path: Path, padding: str) -> None:
    """Logits agree nowhere, but the weights of the head say what was added to it."""
    padded = PADDED if padding == "zeros" else np.concatenate([HEAD, np.full((5, SIZE), 0.5, np.float32)])
    paths = []
    for name, head, sign in (("r", HEAD, 1), ("t", padded, -1)):
        tensors = run_with_head(head)[0]
        for key in ("0/mixer/output", "0/head/output", "0/@root/output"):
            tensors[key] = sign * tensors[key]
        paths.append(write_archive(tmp_path / f"{name}.h5", tensors, run=weights_of(head)))
    comparison = compare(*paths)
    by_key = {pair.key: pair.status for pair in comparison.pairs}
    if padding == "zeros":
        assert by_key["0/@root/output"] == by_key["0/head/output"] == "diverged"
        assert sentences(comparison) == [
            "the target's vocabulary is padded from 31 to 36, which the reference's is not: zeros are all "
            "that its weights have more, and no others were compared"
        ]
    else:
        assert by_key["0/@root/output"] == by_key["0/head/output"] == "shape-mismatch"


@pytest.mark.spec("ALN-42")
def test_padding_that_would_be_chosen_is_said(tmp_path: Path) -> None:
    head = np.concatenate([HEAD, 100 * HEAD[:1]])
    logits = run_with_head(head)[0]["0/@root/output"]
    chosen = int((logits.argmax(-1) == WORDS).sum())
    assert 0 < chosen < IDS.size
    comparison = compared_heads(tmp_path, HEAD, head)
    assert sentences(comparison)[0].endswith(
        f"no others were compared; a word of the padding has the largest logit of {chosen} rows"
    )


@pytest.mark.spec("ALN-42")
def test_a_word_whose_logit_is_wrong_is_found(tmp_path: Path) -> None:
    head = PADDED.copy()
    head[4] += 0.01
    comparison = compared_heads(tmp_path, HEAD, head)
    assert {p.key for p in comparison.pairs if not p.is_green} == {"0/head/output", "0/@root/output"}


# --- Chosen experts


def run_of_experts(ids: np.ndarray[Any, Any], weights: np.ndarray[Any, Any]) -> Tensors:
    """A router that returns weights and numbers of experts, which the experts are given."""
    chosen = {
        f"0/mlp.{slot}": array
        for name, array in (("weights", weights), ("chosen", ids))
        for slot in (f"gate/output.{name}", f"experts/input.{name}")
    }
    return {"0/embed/output": TABLE[IDS], **chosen, "0/mlp.experts/output": TABLE[ids].sum(1)}


CHOSEN = np.array([RANDOM.permutation(8)[:3] for _ in range(24)])
WEIGHTS = RANDOM.random((24, 3)).astype(np.float32)


@pytest.mark.spec("ALN-308")
@pytest.mark.parametrize("is_alike", [True, False], ids=["weights-too", "numbers-alone"])
def test_the_order_of_chosen_experts_is_no_difference(tmp_path: Path, is_alike: bool) -> None:
    """Unless the weights stay where they are: then each expert has the weight of another one."""
    order = np.array([RANDOM.permutation(3) for _ in CHOSEN])
    other = np.take_along_axis(CHOSEN, order, 1)
    weights = np.take_along_axis(WEIGHTS, order, 1) if is_alike else WEIGHTS
    ours = run_of_experts(CHOSEN, WEIGHTS)
    theirs = run_of_experts(other, weights) | {"0/mlp.experts/output": ours["0/mlp.experts/output"]}
    comparison = compared(tmp_path, ours, theirs)
    different = {pair.key for pair in comparison.pairs if pair.status not in ("identical", "match")}
    expected = {"0/mlp.gate/output.weights", "0/mlp.experts/input.weights"}
    assert different == (set() if is_alike else expected)


@pytest.mark.spec("ALN-308")
def test_an_order_by_weights_is_that_of_scores(tmp_path: Path) -> None:
    """Both routers sort what they choose: where the order differs, so do the scores."""
    falling = np.sort(WEIGHTS, axis=1)[:, ::-1]
    sides = (run_of_experts(chosen, falling) for chosen in (CHOSEN, CHOSEN[:, ::-1]))
    comparison = compared(tmp_path, *sides)
    assert {pair.key: pair.status for pair in comparison.pairs}["0/mlp.gate/output.chosen"] != "identical"


@pytest.mark.spec("ALN-308")
def test_other_experts_are_a_difference(tmp_path: Path) -> None:
    other = CHOSEN[:, ::-1].copy()
    other[3, 1] = next(number for number in range(8) if number not in CHOSEN[3])
    comparison = compared(tmp_path, run_of_experts(CHOSEN, WEIGHTS), run_of_experts(other, WEIGHTS[:, ::-1]))
    assert {pair.key: pair.status for pair in comparison.pairs}["0/mlp.gate/output.chosen"] != "identical"
    assert comparison.exit_status == 1
