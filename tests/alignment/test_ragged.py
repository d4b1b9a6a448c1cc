"""Runs without an axis for rows, packed ones, and logits of last tokens: compared by rule, and told."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tensorcap import align, compare
from tensorcap.alignment.layout import Layout
from tensorcap.comparison import Comparison
from tests.support.archives import write_archive

RANDOM = np.random.default_rng(0)
HIDDEN = {f"layers.{i}": RANDOM.standard_normal((1, 5, 16)).astype(np.float32) for i in range(4)}
LOGITS = RANDOM.standard_normal((1, 5, 40)).astype(np.float32)
IDS = np.array([[7, 3, 9, 1, 4]])


def full() -> dict[str, Any]:
    """All of a run of one row, as torch gives it."""
    return {
        "0/@root/input.input_ids": IDS,
        **{f"0/{site}/output": array for site, array in HIDDEN.items()},
        "0/lm_head/output": LOGITS,
    }


def compared(tmp_path: Path, one: Mapping[str, Any], other: Mapping[str, Any], **options: Any) -> Comparison:
    return compare(write_archive(tmp_path / "r.h5", one), write_archive(tmp_path / "t.h5", other), **options)


def rows_left_out(tensors: Mapping[str, Any]) -> dict[str, Any]:
    return {text: array[0] for text, array in tensors.items()}


def statuses(found: Comparison) -> dict[str, str]:
    return {pair.key: pair.status for pair in found.pairs}


@pytest.mark.spec("ALN-39")
def test_a_run_without_an_axis_for_rows_is_compared_by_rule(tmp_path: Path) -> None:
    found = compared(tmp_path, full(), rows_left_out(full()), rtol=0.0, atol=0.0)
    assert found.exit_status == 0
    assert {pair.origin.steps for pair in found.pairs if pair.origin} == {("unsqueeze 0",)}
    assert {pair.origin.evidence for pair in found.pairs if pair.origin} == {"rule"}
    assert found.pairs[1].origin is not None
    assert found.pairs[1].origin.reason == "6 tensors of the target have no axis for rows, 0 have one"
    assert found.mapping is not None
    assert found.mapping.evidence == {"rule": 6}


@pytest.mark.spec("ALN-39")
def test_a_reference_without_an_axis_for_rows_is_compared_by_rule(tmp_path: Path) -> None:
    found = compared(tmp_path, rows_left_out(full()), full(), rtol=0.0, atol=0.0)
    assert found.exit_status == 0
    assert {pair.origin.steps for pair in found.pairs if pair.origin} == {("squeeze 0",)}


@pytest.mark.spec("ALN-39")
def test_an_error_in_a_run_without_rows_is_found(tmp_path: Path) -> None:
    other = rows_left_out(full())
    other["0/layers.2/output"] = other["0/layers.2/output"][::-1].copy()
    found = compared(tmp_path, full(), other, rtol=1e-6)
    assert [
        key for key, status in statuses(found).items() if status != "match" and status != "identical"
    ] == ["0/layers.2/output"]
    assert found.exit_status == 1


@pytest.mark.spec("ALN-39")
@pytest.mark.parametrize("lacking", [("layers.1",), ("layers.1", "layers.3")])
def test_single_modules_that_lose_the_axis_are_errors(tmp_path: Path, lacking: tuple[str, ...]) -> None:
    other = full()
    for site in lacking:
        other[f"0/{site}/output"] = other[f"0/{site}/output"][0]
    found = compared(tmp_path, full(), other)
    assert {key for key, status in statuses(found).items() if status == "shape-mismatch"} == {
        f"0/{site}/output" for site in lacking
    }
    assert found.exit_status == 1


@pytest.mark.spec("ALN-40")
def test_single_modules_of_several_rows_that_lose_an_axis_are_errors(tmp_path: Path) -> None:
    one = {text: np.concatenate([array, array[:, ::-1]]) for text, array in full().items()}
    other = dict(one)
    other["0/layers.1/output"] = other["0/layers.1/output"].reshape(10, 16)
    found = compared(tmp_path, one, other)
    assert [key for key, status in statuses(found).items() if status == "shape-mismatch"] == [
        "0/layers.1/output"
    ]
    flat = {text: array.reshape(-1, *array.shape[2:]) for text, array in one.items()}
    assert compared(tmp_path, one, flat, rtol=0.0).exit_status == 0


@pytest.mark.spec("ALN-39")
def test_one_tensor_of_max_is_enough(tmp_path: Path) -> None:
    one, other = {"0/norm/output": HIDDEN["layers.0"]}, {"0/norm/output": HIDDEN["layers.0"][0]}
    reference = write_archive(tmp_path / "r.h5", one)
    plain, of_max = (
        compare(
            reference,
            write_archive(tmp_path / f"{name}.h5", other, run={"framework": {"name": name}}),
            rtol=0.0,
        )
        for name in ("torch", "max")
    )
    assert (statuses(plain), plain.exit_status) == ({"0/norm/output": "shape-mismatch"}, 1)
    assert (statuses(of_max), of_max.exit_status) == ({"0/norm/output": "identical"}, 0)


@pytest.mark.spec("ALN-39")
def test_no_rule_is_asked_where_equal_keys_alone_are_wanted(tmp_path: Path) -> None:
    found = compared(tmp_path, full(), rows_left_out(full()), mapping="none")
    assert set(statuses(found).values()) == {"shape-mismatch"}


LAST = {"1,v": LOGITS[:, -1], "v": LOGITS[0, -1], "1,1,v": LOGITS[:, -1:]}


@pytest.mark.spec("ALN-40")
@pytest.mark.parametrize("form", LAST)
def test_logits_of_the_last_token_are_compared_with_that_one(tmp_path: Path, form: str) -> None:
    other = {**rows_left_out(full()), "0/lm_head/output": LAST[form]}
    found = compared(tmp_path, full(), other, rtol=0.0, atol=0.0)
    assert found.exit_status == 0
    assert set(statuses(found).values()) <= {"match", "identical"}
    assert found.warnings == ()
    assert found.mapping is not None
    reduced = "by rule, the tokens that both sides have were compared and no others, of: "
    assert f"{reduced}0/lm_head/output (1 of 5 tokens)" in found.mapping.tokens
    pair = next(pair for pair in found.pairs if pair.key == "0/lm_head/output")
    assert pair.origin is not None
    assert pair.origin.steps[-2:] == ("valid_tokens", "last_token")
    other["0/lm_head/output"] = np.roll(LAST[form], 1, axis=-1)
    assert compared(tmp_path, full(), other, rtol=1e-3).exit_status == 1


@pytest.mark.spec("ALN-40")
def test_several_modules_at_the_end_may_have_last_tokens_only(tmp_path: Path) -> None:
    other = rows_left_out(full())
    other["0/layers.3/output"] = other["0/layers.3/output"][-1:]
    other["0/lm_head/output"] = LAST["v"]
    found = compared(tmp_path, full(), other, rtol=0.0)
    assert found.exit_status == 0
    assert found.mapping is not None
    reduced = "0/layers.3/output (1 of 5 tokens), 0/lm_head/output (1 of 5 tokens)"
    assert reduced in found.mapping.tokens[-1]


@pytest.mark.spec("ALN-211")
@pytest.mark.parametrize("token", [-1, 2], ids=["last", "another"])
def test_what_a_head_of_last_tokens_was_given_is_compared_with_that_token(tmp_path: Path, token: int) -> None:
    renamed = {text.replace("/layers", "/model.layers"): array for text, array in full().items()}
    one = {**renamed, "0/lm_head/input.input": HIDDEN["layers.3"]}
    chosen = HIDDEN["layers.3"][:, [token]]
    other = {**full(), "0/lm_head/input.input": chosen, "0/lm_head/output": LOGITS[:, -1:]}
    reference, target = write_archive(tmp_path / "r.h5", one), write_archive(tmp_path / "t.h5", other)
    alignment = align(reference, target).alignment
    found = compare(reference, target, mapping=alignment, rtol=0.0, atol=0.0)
    pair = next(pair for pair in found.pairs if pair.key == "0/lm_head/input.input")
    assert pair.origin is not None
    assert pair.origin.steps[-2:] == ("valid_tokens", "last_token")
    assert pair.status == ("identical" if token == -1 else "diverged")


@pytest.mark.spec("ALN-212")
def test_a_model_of_last_logits_keeps_the_mask_that_says_what_is_padding(tmp_path: Path) -> None:
    mask = np.array([[1, 1, 1, 0, 0]])
    given = {"0/@root/input.input_ids": IDS, "0/@root/input.attention_mask": mask}
    renamed = {text.replace("/layers", "/model.layers"): array for text, array in full().items()}
    one = {**renamed, **given, "0/@root/output": LOGITS}
    other = {**full(), **given, "0/@root/output": LOGITS[:, 2:3], "0/lm_head/output": LOGITS[:, 2:3]}
    other["0/layers.2/output"] = other["0/layers.2/output"].copy()
    other["0/layers.2/output"][0, 3:] += 1
    reference = write_archive(tmp_path / "r.h5", one, run={"dtype": "float32"})
    target = write_archive(tmp_path / "t.h5", other, run={"dtype": "float32"})
    found = compare(reference, target, mapping=align(reference, target).alignment)
    assert found.exit_status == 0
    assert statuses(found)["0/@root/input.attention_mask"] == "identical"
    assert statuses(found)["0/model.layers.2/output"] == "within-rounding"  # but for padding


@pytest.mark.spec("ALN-40")
def test_logits_of_another_token_are_an_error(tmp_path: Path) -> None:
    other = {**rows_left_out(full()), "0/lm_head/output": LOGITS[:, 3]}
    assert compared(tmp_path, full(), other, rtol=1e-3).exit_status == 1


@pytest.mark.spec("ALN-40")
def test_a_module_that_loses_tokens_before_the_end_is_an_error(tmp_path: Path) -> None:
    other = rows_left_out(full())
    other["0/layers.1/output"] = other["0/layers.1/output"][-1:]
    found = compared(tmp_path, full(), other)
    assert statuses(found)["0/layers.1/output"] == "shape-mismatch"
    assert found.exit_status == 1


@pytest.mark.spec("ALN-40")
def test_without_ids_the_embedding_tells_the_tokens(tmp_path: Path) -> None:
    one = {f"0/{k.split('/')[1].replace('layers.0', 'embed_tokens')}/output": v for k, v in full().items()}
    del one["0/@root/output"]
    other = {**rows_left_out(one), "0/lm_head/output": LOGITS[:, -1]}
    assert compared(tmp_path, one, other, rtol=0.0).exit_status == 0
    for tensors in (one, other):
        tensors["0/other/output"] = tensors.pop("0/embed_tokens/output")
    found = compared(tmp_path, one, other, rtol=0.0)
    assert statuses(found)["0/lm_head/output"] == "shape-mismatch"


def padded() -> dict[str, Any]:
    """Two sequences, of 5 and of 3 tokens, the second padded on the left."""
    hidden = {site: RANDOM.standard_normal((2, 5, 16)).astype(np.float32) for site in HIDDEN}
    return {
        "0/@root/input.input_ids": np.array([[7, 3, 9, 1, 4], [0, 0, 5, 6, 8]]),
        "0/@root/input.attention_mask": np.array([[1, 1, 1, 1, 1], [0, 0, 1, 1, 1]]),
        **{f"0/{site}/output": array for site, array in hidden.items()},
        "0/lm_head/output": RANDOM.standard_normal((2, 5, 40)).astype(np.float32),
    }


def packed(one: Mapping[str, Any]) -> dict[str, Any]:
    """The same without padding, one after the other, with logits of last tokens, as MAX makes them."""
    mask = one["0/@root/input.attention_mask"] == 1
    found = {text: array[mask] for text, array in one.items() if "mask" not in text}
    found["0/@root/input.input_row_offsets"] = np.array([0, 5, 8], np.uint32)
    found["0/lm_head/output"] = one["0/lm_head/output"][:, -1]
    return found


@pytest.mark.spec("ALN-40")
def test_a_packed_run_is_compared_with_a_padded_one_by_its_tokens(tmp_path: Path) -> None:
    one = padded()
    found = compared(tmp_path, one, packed(one), rtol=0.0, exclude="0/@root/input.*")
    assert found.exit_status == 0
    assert found.mapping is not None
    assert "0/layers.0/output (8 of 10 tokens)" in found.mapping.tokens[-1]
    wrong = packed(one)
    wrong["0/layers.3/output"] = wrong["0/layers.3/output"][[0, 1, 2, 3, 4, 7, 6, 5]]
    red = compared(tmp_path, one, wrong, rtol=1e-3, exclude="0/@root/input.*")
    assert [key for key, status in statuses(red).items() if status == "diverged"] == ["0/layers.3/output"]


@pytest.mark.spec("ALN-40")
def test_runs_that_were_fed_other_tokens_are_not_cut_to_what_they_share(tmp_path: Path) -> None:
    other = {text: array[:3] for text, array in rows_left_out(full()).items()}
    found = compared(tmp_path, full(), other)
    assert set(statuses(found).values()) == {"shape-mismatch"}
    assert found.exit_status == 1


@pytest.mark.spec("ALN-10")
@pytest.mark.parametrize(
    ("called", "plain"),
    [
        ("squeeze(0)", "squeeze 0"),
        ("transpose(1, 2)", "transpose 1 2"),
        ("slice(1, -1:)", "slice 1 -1:"),
        ('split(-1, "4,2,2")', "split -1 4,2,2"),
        ("rope_halves(8, axis=0)", "rope_halves 8 axis=0"),
        ('rearrange("b (h d) -> b h d", d=2)', 'rearrange "b (h d) -> b h d" d=2'),
    ],
)
def test_a_step_may_be_written_as_a_call(called: str, plain: str) -> None:
    assert Layout.parse([called]) == Layout.parse([plain])


@pytest.mark.spec("ALN-40")
def test_steps_of_one_token_have_last_tokens_where_all_others_do(tmp_path: Path) -> None:
    """The prompt's logits are of the last token on one side; those of decoding are of all tokens on both."""
    decoding = {
        "1/@root/input.input_ids": IDS[:, :1],
        "1/layers.0/output": HIDDEN["layers.0"][:, :1],
        "1/lm_head/output": LOGITS[:, :1],
    }
    whole = {**full(), **decoding}
    last = {**whole, "0/lm_head/output": LOGITS[:, -1:]}
    for one, other in ((whole, last), (last, whole)):
        assert compared(tmp_path, one, other, rtol=0.0, atol=0.0).exit_status == 0
    wrong = {**last, "1/lm_head/output": LOGITS[:, 1:2]}
    found = compared(tmp_path, whole, wrong, rtol=1e-3)
    assert [key for key, status in statuses(found).items() if status == "diverged"] == ["1/lm_head/output"]


@pytest.mark.spec("ALN-40")
@pytest.mark.parametrize("are_other_ids_made", [False, True])
def test_a_prompt_of_last_logits_is_compared_with_ids_of_any_name(
    tmp_path: Path, are_other_ids_made: bool
) -> None:
    """The target calls its ids x, and may go on with a token that it made itself, and not the reference."""
    last = {
        **full(),
        "0/lm_head/output": LAST["1,1,v"],
        "0/@root/input.position_ids": np.arange(5)[None],
        "1/@root/input.input_ids": IDS[:, :1],
        "1/@root/input.position_ids": np.array([[5]]),
        "1/lm_head/output": LOGITS[:, :1],
    }
    whole = {**last, "0/lm_head/output": LOGITS}
    whole["1/@root/input.input_ids"] = IDS[:, 1:2] if are_other_ids_made else IDS[:, :1]
    names = {"input_ids": "x", "position_ids": "p"}
    for name, other in names.items():
        whole = {key.replace(name, other): array for key, array in whole.items()}
    found = compared(tmp_path, last, whole, rtol=0.0, atol=0.0)
    pair = next(pair for pair in found.pairs if pair.key == "0/lm_head/output")
    assert pair.status == "identical"
    given = {key.replace("x", "input_ids"): array for key, array in whole.items()}
    given["0/@root/input.input_ids"] = IDS + 1
    found = compared(tmp_path, last, given, rtol=0.0, atol=0.0)
    assert statuses(found)["0/lm_head/output"] == "shape-mismatch"


@pytest.mark.spec("ALN-220")
def test_the_argument_of_a_result_of_last_tokens_is_compared_with_those(tmp_path: Path) -> None:
    noise = np.random.default_rng(3).normal(size=(1, 5, 16)).astype("f4")
    one = {**full(), "0/lm_head/input.x": HIDDEN["layers.3"]}
    other = {**full(), "0/lm_head/output": LAST["1,1,v"]}
    other["0/layers.3/output"] = (
        other["0/layers.3/output"] + 1e-3 * noise
    )  # else it holds the values of the norm
    other["0/lm_head/input.x"] = other["0/layers.3/output"][:, -1:]
    found = compared(tmp_path, one, other, rtol=0.1, atol=0.1)
    pair = next(pair for pair in found.pairs if pair.key == "0/lm_head/input.x")
    assert (pair.status, found.exit_status) == ("match", 0)
    assert pair.origin is not None
    assert pair.origin.steps == ("valid_tokens", "last_token")
    other["0/lm_head/input.x"] = -other["0/layers.3/output"][:, -1:]
    assert statuses(compared(tmp_path, one, other, rtol=0.1))["0/lm_head/input.x"] == "diverged"


@pytest.mark.spec("ALN-220")
def test_so_is_one_of_another_name_if_it_is_the_only_one_of_its_call(tmp_path: Path) -> None:
    noise = np.random.default_rng(3).normal(size=(1, 5, 16)).astype("f4")
    one = {**full(), "0/lm_head/input.hidden": HIDDEN["layers.3"]}
    other = {**full(), "0/lm_head/output": LAST["1,1,v"]}
    other["0/layers.3/output"] = other["0/layers.3/output"] + 1e-3 * noise
    other["0/lm_head/input.x"] = other["0/layers.3/output"][:, -1:]
    found = compared(tmp_path, one, other, rtol=0.1, atol=0.1)
    (pair,) = (pair for pair in found.pairs if pair.key == "0/lm_head/input.hidden")
    assert (pair.status, found.exit_status) == ("match", 0)
    assert pair.origin is not None
    assert (pair.origin.target, pair.origin.steps) == (
        ("0/lm_head/input.x",),
        ("valid_tokens", "last_token"),
    )
    wrong = {**other, "0/lm_head/input.x": -other["0/lm_head/input.x"]}
    assert statuses(compared(tmp_path, one, wrong, rtol=0.1))["0/lm_head/input.hidden"] == "diverged"
    two = {**other, "0/lm_head/input.y": -other["0/lm_head/input.x"]}
    assert statuses(compared(tmp_path, one, two, rtol=0.1))["0/lm_head/input.hidden"] != "match"
