"""Tokens of two runs that padded, packed or stepped unlike: which are compared, which are left over."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tensorcap import compare
from tensorcap.alignment import (
    Alignment,
    Entry,
    GatheredArchive,
    MappedArchive,
    map_text,
    read_mapping,
    resolve,
)
from tensorcap.alignment.tokens import TokenAlignment, TokenRule, Tokens
from tensorcap.comparison import Comparison
from tensorcap_formats.archive import Archive
from tensorcap_formats.dtypes import Array
from tensorcap_formats.errors import UsageError
from tensorcap_formats.open import open_archive
from tests.support.archives import new_archive

VALID, MATCH = TokenRule("valid_tokens"), TokenRule("match_tokens")
VECTORS = np.random.default_rng(0).standard_normal((100, 16)).astype(np.float32)  # a vector for each id
IDS, MASK = "@root/input.input_ids", "@root/input.attention_mask"


def _archive(path: Path, tensors: Mapping[str, Any]) -> Archive:
    path.parent.mkdir(exist_ok=True)
    return new_archive(path, {key: np.asarray(array) for key, array in tensors.items()})


def _fed(*steps: tuple[Any, Any] | Any, site: str = "net") -> dict[str, Array]:
    """What a model that gives each token a vector of its own keeps of steps of ids, or of ids and mask."""
    kept: dict[str, Array] = {}
    for step, given in enumerate(steps):
        ids, mask = given if isinstance(given, tuple) else (given, None)
        kept[f"{step}/{IDS}"] = np.array(ids)
        if mask is not None:
            kept[f"{step}/{MASK}"] = np.array(mask)
        kept[f"{step}/{site}/output"] = VECTORS[np.array(ids)]
    return kept


def _sides(
    tmp_path: Path,
    one: Mapping[str, Any],
    other: Mapping[str, Any],
    *entries: Entry,
    tokens: TokenRule | None = VALID,
) -> tuple[GatheredArchive, MappedArchive]:
    reference, target = _archive(tmp_path / "ref.h5", one), _archive(tmp_path / "tgt.h5", other)
    links = resolve(
        Alignment(entries or (Entry(("net",), ("net",)),), tokens=tokens), reference, target
    ).links
    return GatheredArchive(reference, links), MappedArchive(reference, target, links)


def _both(sides: tuple[Archive, Archive], key: str) -> list[Array]:
    return [side.read(side.get(key)) for side in sides]


def _matched(
    tmp_path: Path, one: Mapping[str, Any], other: Mapping[str, Any], rule: TokenRule
) -> TokenAlignment:
    return TokenAlignment.of(_archive(tmp_path / "r.h5", one), _archive(tmp_path / "t.h5", other), rule)


RIGHT = ([[5, 6, 7, 8, 9], [11, 12, 13, 0, 0]], [[1] * 5, [1, 1, 1, 0, 0]])
LEFT = ([[5, 6, 7, 8, 9], [0, 0, 11, 12, 13]], [[1] * 5, [0, 0, 1, 1, 1]])


@pytest.mark.spec("ALN-70")
def test_padding_on_either_side_is_left_out_and_the_rest_lies_in_one_order(tmp_path: Path) -> None:
    sides = _sides(tmp_path, _fed(RIGHT), _fed(LEFT))
    ours, theirs = _both(sides, "0/net/output")
    assert np.array_equal(ours, VECTORS[[5, 6, 7, 8, 9, 11, 12, 13]])
    assert np.array_equal(theirs, ours)


@pytest.mark.spec("ALN-70", "ALN-320")
@pytest.mark.parametrize("mask", ["attention_mask", "valid"])
@pytest.mark.parametrize("ids", ["input_ids", "words"])
def test_padding_on_the_other_side_is_found_by_inputs_of_any_names(
    tmp_path: Path, ids: str, mask: str
) -> None:
    sides = [
        {
            key.replace(IDS, f"@root/input.{ids}").replace(MASK, f"@root/input.{mask}"): array
            for key, array in _fed(given).items()
        }
        for given in (RIGHT, LEFT)
    ]
    found = compare(_archive(tmp_path / "ref.h5", sides[0]), _archive(tmp_path / "tgt.h5", sides[1]))
    pair = next(pair for pair in found.pairs if pair.key == "0/net/output")
    assert (pair.status, found.exit_status) == ("identical", 0)


@pytest.mark.spec("ALN-77")
def test_what_was_matched_and_what_was_not_is_reported(tmp_path: Path) -> None:
    found = _matched(tmp_path, _fed(RIGHT), _fed(LEFT), VALID)
    assert found.text == (
        "8 tokens are on both sides; the reference has 0 more and 2 of padding; "
        "the target has 0 more and 2 of padding"
    )
    less = _matched(tmp_path, _fed([[5, 6, 7]]), _fed([[5, 6, 8, 9]]), VALID)
    assert less.text == (
        "3 tokens are on both sides; the target has 1 more; 1 of them have other ids in the target"
    )


@pytest.mark.spec("ALN-77")
def test_a_comparison_tells_which_tokens_it_is_of(tmp_path: Path) -> None:
    sides = _archive(tmp_path / "ref.h5", _fed(RIGHT)), _archive(tmp_path / "tgt.h5", _fed(LEFT))
    found = compare(*sides, mapping=Alignment((Entry(("net",), ("net",)),), tokens=VALID))
    assert found.mapping is not None
    assert list(found.mapping.tokens) == [
        "8 tokens are on both sides; the reference has 0 more and 2 of padding; "
        "the target has 0 more and 2 of padding"
    ]


@pytest.mark.spec("ALN-74")
def test_one_prefill_is_made_of_a_prefill_and_steps(tmp_path: Path) -> None:
    sides = _sides(tmp_path, _fed([[5, 6, 7, 8, 9]]), _fed([[5, 6, 7]], [[8]], [[9]]))
    ours, theirs = _both(sides, "0/net/output")
    assert theirs.shape == (1, 5, 16)
    assert np.array_equal(theirs, ours)
    assert sides[0].get("0/net/output").digest
    assert sides[1].get("0/net/output").digest == ""
    assert [s.key.text for s in sides[1].sources["0/net/output"]] == [f"{i}/net/output" for i in range(3)]


@pytest.mark.spec("ALN-74")
def test_steps_are_made_of_one_prefill_each_under_its_own_key(tmp_path: Path) -> None:
    sides = _sides(tmp_path, _fed([[5, 6, 7]], [[8]], [[9]]), _fed([[5, 6, 7, 8, 9]]))
    for step, ids in enumerate(([[5, 6, 7]], [[8]], [[9]])):
        assert np.array_equal(_both(sides, f"{step}/net/output")[1], VECTORS[ids])
    assert [record.key.step for record in sides[1].records if record.key.site == "net"] == [0, 1, 2]


@pytest.mark.spec("ALN-72")
def test_steps_of_padded_rows_go_on_with_their_rows(tmp_path: Path) -> None:
    stepped = _fed(LEFT, ([[10], [14]], [[1] * 6, [0, 0, 1, 1, 1, 1]]))
    whole = _fed(([[5, 6, 7, 8, 9, 10], [11, 12, 13, 14, 0, 0]], [[1] * 6, [1] * 4 + [0] * 2]))
    sides = _sides(tmp_path, whole, stepped)
    ours, theirs = _both(sides, "0/net/output")
    assert np.array_equal(ours, VECTORS[[5, 6, 7, 8, 9, 10, 11, 12, 13, 14]])
    assert np.array_equal(theirs, ours)


@pytest.mark.spec("ALN-72")
@pytest.mark.parametrize(
    ("second", "sequences"),
    [
        ({}, 1),
        ({"1/@root/input.position_ids": [[3]]}, 1),
        ({"1/@root/input.position_ids": [[0]]}, 2),
        ({f"1/{MASK}": [[1, 1, 1, 1]]}, 1),
        ({f"1/{MASK}": [[1]]}, 2),
    ],
    ids=["one token a row", "at 3", "at 0", "mask of all", "mask of its own"],
)
def test_a_step_goes_on_by_mask_by_position_or_as_one_token_a_row(
    tmp_path: Path, second: dict[str, Any], sequences: int
) -> None:
    found = Tokens.of(_archive(tmp_path / "a.h5", {**_fed([[5, 6, 7]], [[8]]), **second}))
    assert len(found.sequences) == sequences
    assert found.count == 4


@pytest.mark.spec("ALN-72")
def test_a_mask_grows_by_the_positions_of_each_step(tmp_path: Path) -> None:
    steps = ([[5, 6, 7]], [[1, 0, 1]]), ([[8]], [[1, 0, 1, 1]]), ([[9]], [[1, 0, 1, 1, 1]])
    (found,) = Tokens.of(_archive(tmp_path / "a.h5", _fed(*steps))).sequences
    assert found.ids is not None
    assert found.ids.tolist() == [5, 7, 8, 9]
    assert found.steps.tolist() == [0, 0, 1, 2]
    assert found.cells.tolist() == [0, 2, 0, 0]


@pytest.mark.spec("ALN-72")
def test_a_step_goes_on_with_all_sequences(tmp_path: Path) -> None:
    fed = {**_fed([[5, 6], [7, 8]], [[9]]), "1/@root/input.position_ids": [[2]]}
    with pytest.raises(UsageError, match="goes on with 1 sequences, expected the 2 before"):
        Tokens.of(_archive(tmp_path / "a.h5", fed))


@pytest.mark.spec("ALN-72")
def test_a_run_without_a_cache_feeds_each_step_anew(tmp_path: Path) -> None:
    grown = _fed([[5, 6]], [[5, 6, 7]], [[5, 6, 7, 8]])
    sides = _sides(tmp_path, _fed([[5, 6]], [[7]], [[8]]), grown, tokens=MATCH)
    assert np.array_equal(_both(sides, "2/net/output")[1], VECTORS[[[8]]])
    found = _matched(tmp_path, _fed([[5, 6]], [[7]], [[8]]), grown, MATCH)
    assert found.text == "4 tokens are on both sides; the target has 5 more"


PACKED = [5, 6, 7, 8, 9, 11, 12, 13]


@pytest.mark.spec("ALN-73")
@pytest.mark.parametrize(
    "bounds",
    [
        {},
        {"0/@root/input.position_ids": [0, 1, 2, 3, 4, 0, 1, 2]},
        {"0/@root/input.cu_seqlens": [0, 5, 8]},
    ],
    ids=["by the other side", "by positions", "by starts"],
)
def test_a_batch_is_compared_with_its_tokens_one_after_the_other(
    tmp_path: Path, bounds: dict[str, Any]
) -> None:
    for packed in (PACKED, [PACKED]):
        if packed == [PACKED] and "0/@root/input.position_ids" not in bounds:
            continue  # a batch of one row is one sequence
        sides = _sides(tmp_path, _fed(RIGHT), {**_fed(packed), **bounds})
        ours, theirs = _both(sides, "0/net/output")
        assert np.array_equal(ours, VECTORS[PACKED])
        assert np.array_equal(theirs, ours)
        for path in tmp_path.iterdir():
            path.unlink()


@pytest.mark.spec("ALN-73")
def test_steps_of_packed_sequences_go_on_with_each(tmp_path: Path) -> None:
    packed = {**_fed(PACKED, [10, 14]), "0/@root/input.cu_seqlens": [0, 5, 8]}
    whole = _fed(([[5, 6, 7, 8, 9, 10], [11, 12, 13, 14, 0, 0]], [[1] * 6, [1] * 4 + [0] * 2]))
    ours, theirs = _both(_sides(tmp_path, whole, packed), "0/net/output")
    assert np.array_equal(ours, VECTORS[[5, 6, 7, 8, 9, 10, 11, 12, 13, 14]])
    assert np.array_equal(theirs, ours)


@pytest.mark.spec("ALN-73")
def test_positions_that_do_not_count_tell_no_sequences_apart(tmp_path: Path) -> None:
    fed = {**_fed([[0, 0, 5, 6]]), "0/@root/input.position_ids": [[0, 0, 0, 2]]}
    assert len(Tokens.of(_archive(tmp_path / "a.h5", fed)).sequences) == 1


@pytest.mark.spec("ALN-73")
def test_packed_embeddings_of_another_number_are_not_taken_apart_by_lengths(tmp_path: Path) -> None:
    one = {"0/@root/input.inputs_embeds": VECTORS[:8].reshape(2, 4, 16)}
    with pytest.raises(UsageError, match="7 tokens follow each other, nothing says where"):
        _matched(tmp_path, one, _fed([1, 2, 3, 4, 5, 6, 7]), VALID)


@pytest.mark.spec("ALN-73")
def test_packed_sequences_are_told_apart_where_the_target_orders_them_otherwise(tmp_path: Path) -> None:
    packed = {**_fed([11, 12, 13, 5, 6, 7, 8, 9]), "0/@root/input.cu_seqlens": [0, 3, 8]}
    ours, theirs = _both(_sides(tmp_path, _fed(RIGHT), packed, tokens=MATCH), "0/net/output")
    assert np.array_equal(theirs, ours)


@pytest.mark.spec("ALN-73")
def test_packed_tokens_of_other_ids_are_not_taken_apart_by_lengths(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="8 tokens follow each other, nothing says where sequences begin"):
        _matched(tmp_path, _fed(RIGHT), _fed([11, 12, 13, 5, 6, 7, 8, 9]), VALID)


@pytest.mark.spec("ALN-73")
def test_packed_tokens_of_several_steps_are_not_taken_apart_by_lengths(tmp_path: Path) -> None:
    stepped = _fed([[5, 6, 7], [8, 9, 10]], [[1], [2]])
    one = {key: array for key, array in stepped.items() if "input_ids" not in key}
    one |= {f"{step}/@root/input.inputs_embeds": stepped[f"{step}/net/output"] for step in (0, 1)}
    with pytest.raises(UsageError, match="8 tokens follow each other, nothing says where sequences begin"):
        _matched(tmp_path, one, {**_fed([5, 6, 7, 8, 9, 10], [1, 2]), **GOES_ON}, VALID)


GOES_ON = {"0/@root/input.input_pos": np.array([0]), "1/@root/input.input_pos": np.array([3])}


@pytest.mark.spec("ALN-71")
def test_rows_are_found_by_their_ids_first_the_same_then_the_longest_beginning(tmp_path: Path) -> None:
    one = _fed([[1, 5, 6, 7], [1, 8, 9, 10], [1, 2, 3, 4]])
    other = _fed([[1, 2, 3, 4], [1, 5, 6, 50], [1, 8, 51, 52]])
    found = _matched(tmp_path, one, other, MATCH)
    assert found.pairs.tolist() == [
        *([0, cell, 0, 4 + cell] for cell in range(3)),
        *([0, 4 + cell, 0, 8 + cell] for cell in range(2)),
        *([0, 8 + cell, 0, cell] for cell in range(4)),
    ]
    assert found.text == "9 tokens are on both sides; the reference has 3 more; the target has 3 more"


@pytest.mark.spec("ALN-71")
def test_equal_rows_come_first_and_in_their_order(tmp_path: Path) -> None:
    found = _matched(tmp_path, _fed([[1, 2, 3, 4]], [[1, 2, 3]]), _fed([[1, 2, 3]]), MATCH)
    assert found.pairs[:, 0].tolist() == [1, 1, 1]  # not the longer one, which begins alike
    again = _matched(tmp_path / "again", _fed([[1, 2], [1, 2]]), _fed([[1, 2], [1, 2]]), MATCH)
    assert again.pairs[:, 1].tolist() == again.pairs[:, 3].tolist() == [0, 1, 2, 3]


@pytest.mark.spec("ALN-71")
def test_a_beginning_that_two_rows_have_belongs_to_neither(tmp_path: Path) -> None:
    found = _matched(tmp_path, _fed([[1, 5, 6], [2, 7, 8]]), _fed([[1, 9, 9], [1, 8, 8], [2, 7, 8]]), MATCH)
    assert found.pairs[:, 1].tolist() == [3, 4, 5]
    assert found.text == "3 tokens are on both sides; the reference has 3 more; the target has 6 more"


@pytest.mark.spec("ALN-77")
@pytest.mark.parametrize(
    ("one", "other", "rule", "message"),
    [
        ({"0/net/output": VECTORS[:3]}, _fed([[1]]), VALID, "has no tokens, expected @root/input.input_ids"),
        (_fed([[1, 2]]), _fed([[3, 4]]), MATCH, "match_tokens: .* has none of the 2 tokens of"),
        (_fed(([[1]], [[0]])), _fed([[3]]), VALID, "has none of the 0 tokens of"),
        (
            _fed(([[1, 2]], [[1, 1, 1]])),
            _fed([[1, 2]]),
            VALID,
            r"0/@root/input.attention_mask: int64 \[1, 3\], expected a mask of the tokens \[1, 2\]",
        ),
        (_fed(([[1, 2]], [[0.0, -1e9]])), _fed([[1, 2]]), VALID, "expected ones and zeros"),
        (
            {"0/@root/input.inputs_embeds": VECTORS[:4][None]},
            _fed([[1, 2, 3, 4]]),
            MATCH,
            "match_tokens: .*r.h5 has no ids",
        ),
        (
            {**_fed([1, 2, 3]), "0/@root/input.cu_seqlens": [0, 2]},
            _fed([[1, 2, 3]]),
            VALID,
            r"cu_seqlens: int64 \[2\], expected rising numbers from 0 to 3",
        ),
        (
            {**_fed([1, 2, 3]), "0/@root/input.cu_seqlens": [0, 4, 3]},
            _fed([[1, 2, 3]]),
            VALID,
            r"cu_seqlens: int64 \[3\], expected rising numbers from 0 to 3",
        ),
        (
            {**_fed([[1, 2], [3, 4]], [[5], [6]]), "1/@root/input.position_ids": [[2], [0]]},
            _fed([[1]]),
            VALID,
            "begins some sequences and goes on with others",
        ),
    ],
)
def test_tokens_that_cannot_be_matched_are_an_error(
    tmp_path: Path, one: dict[str, Any], other: dict[str, Any], rule: TokenRule, message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        _matched(tmp_path, one, other, rule)


@pytest.mark.spec("ALN-75")
def test_the_axes_of_tokens_are_found_by_size_where_one_way_fits(tmp_path: Path) -> None:
    one = {**_fed(RIGHT), "0/net/output": _heads(RIGHT[0])}
    other = {**_fed(LEFT), "0/net/output": _heads(LEFT[0])}
    ours, theirs = _both(_sides(tmp_path, one, other), "0/net/output")
    assert np.array_equal(ours.reshape(8, 16), VECTORS[PACKED])
    assert np.array_equal(theirs, ours)


@pytest.mark.spec("ALN-75")
def test_tokens_that_were_flattened_are_found(tmp_path: Path) -> None:
    one = {**_fed(RIGHT), "0/net/output": VECTORS[np.array(RIGHT[0]).reshape(-1)]}
    other = {**_fed(LEFT), "0/net/output": VECTORS[np.array(LEFT[0]).reshape(-1)]}
    ours, theirs = _both(_sides(tmp_path, one, other), "0/net/output")
    assert np.array_equal(ours, VECTORS[PACKED])
    assert np.array_equal(theirs, ours)
    for side in (one, other):  # as many elements as there are positions
        side["0/net/output"] = side["0/net/output"][:, :5]
    ours, theirs = _both(_sides(tmp_path / "five", one, other), "0/net/output")
    assert np.array_equal(ours, VECTORS[PACKED][:, :5])
    assert np.array_equal(theirs, ours)


def _square(ids: Any) -> Array:
    """Vectors of as many elements as there are positions."""
    return np.ascontiguousarray(VECTORS[np.array(ids)][..., :5])


@pytest.mark.spec("ALN-75")
def test_two_axes_of_one_size_are_not_guessed_at_and_the_pair_is_suspect(tmp_path: Path) -> None:
    one = {**_fed(RIGHT), "0/net/output": _square(RIGHT[0])}
    other = {**_fed(LEFT), "0/net/output": _square(LEFT[0])}
    sides = _sides(tmp_path, one, other)
    remark = "tokens were not matched: axes 1 and 2 of [2, 5, 5] may both count the tokens [2, 5]"
    assert sides[1].remark(sides[1].get("0/net/output")) == remark
    pair = next(p for p in compare(*sides).pairs if p.key == "0/net/output")
    assert (pair.status, pair.reason) == ("suspect", remark)
    with pytest.raises(UsageError, match="net = net: 0/net/output: axes 1 and 2") as caught:
        resolve(Alignment((Entry(("net",), ("net",), steps=("valid_tokens",)),)), *_reopened(tmp_path))
    assert caught.value.hint == "Say which by dims: 'b s ...' or 'b h s d'."


@pytest.mark.spec("ALN-75")
def test_any_axis_of_one_serves_one_token(tmp_path: Path) -> None:
    one = {**_fed([[5, 6]], [[7]]), "1/net/output": VECTORS[[[[7]]]]}
    other = {**_fed([[5, 6, 7]]), "0/net/output": VECTORS[[[[5, 6, 7]]]]}
    ours, theirs = _both(_sides(tmp_path, one, other), "1/net/output")
    assert np.array_equal(theirs, ours)
    alone = {**_fed([[7]]), "0/net/output": VECTORS[[[[7]]]]}
    later = {**_fed([[9, 9]], [[7]]), "1/@root/input.position_ids": [[0]], "1/net/output": VECTORS[[[[7]]]]}
    ours, theirs = _both(_sides(tmp_path / "later", alone, later, tokens=MATCH), "0/net/output")
    assert np.array_equal(theirs, ours)


@pytest.mark.spec("ALN-75")
def test_a_tensor_without_tokens_is_compared_in_its_own_step_only(tmp_path: Path) -> None:
    scale = {f"{step}/scale/output": VECTORS[0] for step in (0, 1)}
    entries = Entry(("net",), ("net",)), Entry(("scale",), ("scale",))
    one, other = {**_fed([[5, 6]], [[7]]), **scale}, {**_fed([[5, 6, 7]]), "0/scale/output": VECTORS[0]}
    sides = _sides(tmp_path, one, other, *entries)
    statuses = {pair.key: pair.status for pair in compare(*sides, only=["scale"]).pairs}
    assert (statuses["0/scale/output"], statuses["1/scale/output"]) == ("identical", "missing-in-target")
    with pytest.raises(UsageError, match=r"the reference's \[16\] has no axes for the tokens \[1, 2\]"):
        _sides(tmp_path / "said", one, other, Entry(("scale",), ("scale",), steps=("valid_tokens",)))


@pytest.mark.spec("ALN-75")
def test_two_axes_of_one_size_are_not_compared_in_grids_of_two_sizes(tmp_path: Path) -> None:
    one = {**_fed(([[5, 6, 7]], [[1, 1, 1]])), "0/net/output": VECTORS[[[5, 6, 7]]][..., :3]}
    other = {**_fed(([[5, 6, 7, 0]], [[1, 1, 1, 0]])), "0/net/output": VECTORS[[[5, 6, 7]]][..., :3]}
    sides = _sides(tmp_path, one, other)
    assert "has no axes for the tokens [1, 4]" in sides[1].remark(sides[1].get("0/net/output"))
    longer = {**other, "0/net/output": VECTORS[[[5, 6, 7, 0]]][..., :4]}
    sides = _sides(tmp_path / "both", one, longer)
    assert "axes 1 and 2 of [1, 3, 3]" in sides[1].remark(sides[1].get("0/net/output"))


@pytest.mark.spec("ALN-75")
def test_an_axis_that_only_one_reading_of_both_sides_has_is_found(tmp_path: Path) -> None:
    one = {**_fed(RIGHT), "0/net/output": _square(RIGHT[0])}
    ids, mask = [[5, 6, 7, 8, 9, 0], [0, 0, 0, 11, 12, 13]], [[1] * 5 + [0], [0, 0, 0, 1, 1, 1]]
    other = {**_fed((ids, mask)), "0/net/output": _square(ids)}
    ours, theirs = _both(_sides(tmp_path, one, other), "0/net/output")
    assert np.array_equal(ours, VECTORS[PACKED][:, :5])
    assert np.array_equal(theirs, ours)


@pytest.mark.spec("ALN-75")
@pytest.mark.parametrize("is_target", [True, False], ids=["target", "reference"])
def test_one_row_stands_for_all(tmp_path: Path, is_target: bool) -> None:
    """Positions of right padding are the same in each row, those of left padding are not."""
    right = {**_fed(RIGHT), "0/net/output": np.arange(5)[None]}
    left = {**_fed(LEFT), "0/net/output": np.array([[0, 1, 2, 3, 4], [0, 0, 0, 1, 2]])}
    sides = _sides(tmp_path, left, right) if is_target else _sides(tmp_path, right, left)
    ours, theirs = _both(sides, "0/net/output")
    assert ours.tolist() == theirs.tolist() == [0, 1, 2, 3, 4, 0, 1, 2]


@pytest.mark.spec("ALN-75")
def test_one_row_on_both_sides_stays_one(tmp_path: Path) -> None:
    full = ([[5, 6, 7], [8, 9, 10]], [[1] * 3] * 2)
    fed = {**_fed(full), "0/net/output": np.arange(3)[None]}
    sides = _sides(tmp_path, fed, fed)
    assert all(side.get("0/net/output").shape == (1, 3) and side.get("0/net/output").digest for side in sides)
    other = _sides(tmp_path / "other", fed, {**fed, "0/net/output": np.array([[0, 1, 2]] * 2)})
    ours, theirs = _both(other, "0/net/output")
    assert ours.tolist() == theirs.tolist() == [0, 1, 2, 0, 1, 2]


@pytest.mark.spec("ALN-76")
def test_logits_that_a_run_kept_of_the_last_token_need_no_step(tmp_path: Path) -> None:
    reference = _archive(tmp_path / "ref.h5", _fed(RIGHT))
    last = {**_fed(LEFT), "0/net/output": VECTORS[[[9], [13]]]}
    target = new_archive(tmp_path / "tgt.h5", last, values={"0/@root/input.logits_to_keep": 1})
    links = resolve(Alignment((Entry(("net",), ("net",)),), tokens=VALID), reference, target).links
    ours, theirs = _both(
        (GatheredArchive(reference, links), MappedArchive(reference, target, links)), "0/net/output"
    )
    assert np.array_equal(ours, VECTORS[[9, 13]])
    assert np.array_equal(theirs, ours)


@pytest.mark.spec("ALN-75")
def test_tokens_in_the_same_places_need_no_axes(tmp_path: Path) -> None:
    one = {**_fed(RIGHT), "0/net/output": _square(RIGHT[0])}
    sides = _sides(tmp_path, one, one)
    assert sides[1].remark(sides[1].get("0/net/output")) == ""
    assert compare(*sides, only=["net"]).exit_status == 0


def _reopened(tmp_path: Path) -> tuple[Archive, Archive]:
    return open_archive(tmp_path / "ref.h5"), open_archive(tmp_path / "tgt.h5")


@pytest.mark.spec("ALN-75")
@pytest.mark.parametrize(
    ("entry", "rule"),
    [
        (Entry(("net",), ("net",), reference_dims="b s d"), VALID),
        (Entry(("net",), ("net",), dims="b s d"), VALID),
        (Entry(("net",), ("net",)), TokenRule("valid_tokens", "b s ...")),
    ],
    ids=["of the reference", "of the target", "of the map"],
)
def test_dims_say_which_axes_count_tokens(tmp_path: Path, entry: Entry, rule: TokenRule) -> None:
    one = {**_fed(RIGHT), "0/net/output": _square(RIGHT[0])}
    other = {**_fed(LEFT), "0/net/output": _square(LEFT[0])}
    ours, theirs = _both(_sides(tmp_path, one, other, entry, tokens=rule), "0/net/output")
    assert np.array_equal(ours, VECTORS[PACKED][:, :5])
    assert np.array_equal(theirs, ours)


@pytest.mark.spec("ALN-75")
@pytest.mark.parametrize("side", ["target", "reference"])
def test_dims_of_an_entry_that_do_not_fit_are_an_error(tmp_path: Path, side: str) -> None:
    wrong = {**_fed(LEFT), "0/net/output": VECTORS[:10]}  # flattened, which would be found without dims
    one, other = (_fed(RIGHT), wrong) if side == "target" else (wrong, _fed(RIGHT))
    entry = Entry(("net",), ("net",), reference_dims="b s d")
    message = rf"net = net: 0/net/output: the {side}'s \[10, 16\] has no axes for the tokens \[2, 5\]"
    with pytest.raises(UsageError, match=message):
        _sides(tmp_path, one, other, entry)


@pytest.mark.spec("ALN-75")
def test_dims_of_a_map_serve_those_tensors_that_they_fit(tmp_path: Path) -> None:
    one = {**_fed(RIGHT), "0/net/output": _heads(RIGHT[0])}
    other = {**_fed(LEFT), "0/net/output": _heads(LEFT[0])}
    ours, theirs = _both(
        _sides(tmp_path, one, other, tokens=TokenRule("valid_tokens", "b s ...")), "0/net/output"
    )
    assert ours.shape == (8, 4, 4)
    assert np.array_equal(theirs, ours)


@pytest.mark.spec("ALN-75")
def test_a_tensor_that_dims_give_no_tokens_is_compared_as_it_is(tmp_path: Path) -> None:
    pooled = {**_fed(RIGHT), "0/net/output": VECTORS[:2]}
    entry = Entry(("net",), ("net",), reference_dims="b d")
    assert compare(*_sides(tmp_path, pooled, pooled, entry), only=["net"]).exit_status == 0


@pytest.mark.spec("ALN-75")
def test_dims_of_a_batch_say_where_packed_tokens_are(tmp_path: Path) -> None:
    one = {**_fed(RIGHT), "0/net/output": _square(RIGHT[0])}
    other = {**_fed(PACKED), "0/net/output": VECTORS[PACKED][:, :5]}
    entry = Entry(("net",), ("net",), reference_dims="b s d")
    ours, theirs = _both(_sides(tmp_path, one, other, entry), "0/net/output")
    assert np.array_equal(theirs, VECTORS[PACKED][:, :5])
    assert np.array_equal(ours, theirs)


def _heads(ids: Any) -> Array:
    """Vectors as (batch, head, token, element)."""
    whole = VECTORS[np.array(ids)]
    heads: Array = whole.reshape(*whole.shape[:2], 4, 4).transpose(0, 2, 1, 3)
    return heads


@pytest.mark.spec("ALN-74")
def test_tokens_of_several_steps_lie_where_the_reference_has_them(tmp_path: Path) -> None:
    one = {**_fed([[5, 6, 7, 8, 9]]), "0/net/output": _heads([[5, 6, 7, 8, 9]])}
    other = {**_fed([[5, 6, 7]], [[8]], [[9]])}
    other |= {f"{i}/net/output": _heads(ids) for i, ids in enumerate(([[5, 6, 7]], [[8]], [[9]]))}
    ours, theirs = _both(_sides(tmp_path, one, other), "0/net/output")
    assert theirs.shape == (1, 4, 5, 4)
    assert np.array_equal(theirs, ours)


@pytest.mark.spec("ALN-74")
def test_a_step_that_the_target_does_later_is_found(tmp_path: Path) -> None:
    sides = _sides(tmp_path, _fed([[5, 6]]), _fed([[7, 8]], [[5, 6]]), tokens=MATCH)
    assert [s.key.text for s in sides[1].sources["0/net/output"]] == ["1/net/output"]
    ours, theirs = _both(sides, "0/net/output")
    assert np.array_equal(theirs, ours)


@pytest.mark.spec("ALN-74")
def test_axes_of_tokens_may_lie_elsewhere_in_the_target(tmp_path: Path) -> None:
    one = {**_fed([[5, 6, 7]]), "0/net/output": _heads([[5, 6, 7]])}
    other = {**_fed([[5, 6, 7]]), "0/net/output": _heads([[5, 6, 7]]).transpose(0, 2, 1, 3)}
    ours, theirs = _both(_sides(tmp_path, one, other), "0/net/output")
    assert np.array_equal(theirs, ours)


@pytest.mark.spec("ALN-74")
def test_shards_of_positions_are_joined_where_sides_padded_to_other_lengths(tmp_path: Path) -> None:
    ids, mask = [[5, 6, 7, 8, 9, 0], [0, 0, 0, 11, 12, 13]], [[1] * 5 + [0], [0, 0, 0, 1, 1, 1]]
    halves = {
        f"{rank}0/net/output": VECTORS[np.array(ids)[:, part]]
        for rank, part in (("", slice(0, 3)), ("rank1/", slice(3, 6)))
    }
    entry = Entry(("net",), ("rank*/net",), dims="b s[sp] d")
    ours, theirs = _both(
        _sides(tmp_path, _fed(RIGHT), {**_fed((ids, mask)), **halves}, entry), "0/net/output"
    )
    assert np.array_equal(ours, VECTORS[PACKED])
    assert np.array_equal(theirs, ours)


@pytest.mark.spec("ALN-74")
@pytest.mark.parametrize(
    ("second", "message"),
    [
        (np.zeros((1, 1, 16)), "net = net: 0/net/output: is float32 and float64 in the steps"),
        (np.zeros((1, 1, 8), np.float32), r"a token is \[16\] in the reference, \[8\] in the target"),
    ],
    ids=["dtype", "shape"],
)
def test_steps_that_are_put_together_agree(tmp_path: Path, second: Array, message: str) -> None:
    other = {**_fed([[5, 6]], [[7]]), "1/net/output": second}
    entry = Entry(("net",), ("net",), steps=("valid_tokens",))
    with pytest.raises(UsageError, match=message):
        _sides(tmp_path, _fed([[5, 6, 7]]), other, entry)


@pytest.mark.spec("ALN-74")
def test_layout_steps_are_done_on_whole_tensors_before_tokens_are_taken(tmp_path: Path) -> None:
    halves = {
        f"{rank}0/net/output": VECTORS[
            np.array(LEFT[0])[:, part]
        ]  # sequence parallel: each rank some positions
        for rank, part in (("", slice(0, 3)), ("rank1/", slice(3, 5)))
    }
    other = {**_fed(LEFT, site="other"), **halves}
    entry = Entry(("net",), ("rank*/net",), steps=("concat 1", "valid_tokens"))
    ours, theirs = _both(_sides(tmp_path, _fed(RIGHT), other, entry, tokens=None), "0/net/output")
    assert np.array_equal(ours, VECTORS[PACKED])
    assert np.array_equal(theirs, ours)


@pytest.mark.spec("ALN-74")
def test_dims_of_packed_tokens_and_heads_become_those_of_a_batch(tmp_path: Path) -> None:
    one = {**_fed(RIGHT), "0/net/output": VECTORS[np.array(RIGHT[0])]}
    packed = VECTORS[PACKED].reshape(8, 4, 4).transpose(1, 0, 2)  # (head, token, element)
    other = {**_fed(PACKED), "0/net/output": packed}
    entry = Entry(("net",), ("net",), dims="h t d h=4", reference_dims="b s (h d)")
    ours, theirs = _both(_sides(tmp_path, one, other, entry), "0/net/output")
    assert np.array_equal(ours, VECTORS[PACKED])
    assert np.array_equal(theirs, ours)


@pytest.mark.spec("ALN-76")
@pytest.mark.parametrize("is_target", [True, False], ids=["target", "reference"])
@pytest.mark.parametrize("shape", [(2, 1, 16), (2, 16)], ids=["axis of one", "no axis"])
def test_a_side_that_has_the_last_token_of_each_row_only_is_compared_with_it(
    tmp_path: Path, is_target: bool, shape: tuple[int, ...]
) -> None:
    last = {**_fed(RIGHT), "0/net/output": VECTORS[[9, 13]].reshape(shape)}
    one, other = (_fed(LEFT), last) if is_target else (last, _fed(LEFT))
    entry = Entry(("net",), ("net",), steps=("last_token",))
    ours, theirs = _both(_sides(tmp_path, one, other, entry, tokens=None), "0/net/output")
    assert np.array_equal(theirs.reshape(2, 16), VECTORS[[9, 13]])
    assert np.array_equal(theirs, ours)


@pytest.mark.spec("ALN-76")
def test_the_last_token_is_that_of_each_row(tmp_path: Path) -> None:
    last = {**_fed(RIGHT), "0/net/output": VECTORS[[9, 13, 0]]}
    entry = Entry(("net",), ("net",), steps=("last_token",))
    with pytest.raises(UsageError, match=r"the target's \[3, 16\] has no axes for the tokens \[2, 5\]"):
        _sides(tmp_path, _fed(LEFT), last, entry)


@pytest.mark.spec("ALN-76")
def test_last_tokens_and_all_tokens_are_taken_of_one_step(tmp_path: Path) -> None:
    one = {**_fed(RIGHT), "0/head/output": VECTORS[np.array(RIGHT[0])]}
    other = {**_fed(LEFT), "0/head/output": VECTORS[[[9], [13]]]}
    entries = Entry(("net",), ("net",)), Entry(("head",), ("head",), steps=("last_token",))
    sides = _sides(tmp_path, one, other, *entries)
    assert [a.tolist() for a in _both(sides, "0/head/output")] == [VECTORS[[9, 13]].tolist()] * 2
    assert [a.tolist() for a in _both(sides, "0/net/output")] == [VECTORS[PACKED].tolist()] * 2


@pytest.mark.spec("ALN-76")
def test_last_tokens_of_other_steps_are_not_compared(tmp_path: Path) -> None:
    one = {**_fed([[5, 6, 7]]), "0/net/output": VECTORS[[[7]]]}
    other = {**_fed([[5, 6]]), "0/net/output": VECTORS[[[6]]]}
    with pytest.raises(UsageError, match="the two tensors have no token in common"):
        _sides(tmp_path, one, other, Entry(("net",), ("net",), steps=("last_token",)))


@pytest.mark.spec("ALN-76")
def test_the_last_tokens_of_steps_are_those_of_one_prefill(tmp_path: Path) -> None:
    other = {**_fed([[5, 6, 7]], [[8]]), "0/net/output": VECTORS[[[7]]]}
    entry = Entry(("net",), ("net",), steps=("last_token",))
    ours, theirs = _both(_sides(tmp_path, _fed([[5, 6, 7, 8]]), other, entry), "0/net/output")
    assert np.array_equal(ours, VECTORS[[7, 8]])
    assert np.array_equal(theirs, ours)


@pytest.mark.spec("ALN-76")
def test_the_last_token_is_taken_only_where_it_is_said(tmp_path: Path) -> None:
    last = {**_fed(RIGHT), "0/net/output": VECTORS[[9, 13]][:, None]}
    entry = Entry(("net",), ("net",), steps=("valid_tokens",))
    with pytest.raises(UsageError, match=r"the target's \[2, 1, 16\] has no axes for the tokens \[2, 5\]"):
        _sides(tmp_path, _fed(LEFT), last, entry)


@pytest.mark.spec("ALN-77")
def test_what_is_the_same_on_both_sides_keeps_its_digest(tmp_path: Path) -> None:
    fed = {**_fed(([[5, 6]], [[1, 1]])), "0/scale/output": VECTORS[0]}
    entries = Entry(("net",), ("net",)), Entry(("scale",), ("scale",))
    sides = _sides(tmp_path, fed, fed, *entries)
    found = compare(*sides, only=["net", "scale"])
    assert [p.status for p in found.pairs if p.status != "excluded"] == ["identical", "identical"]
    assert all(record.digest for side in sides for record in side.records)


@pytest.mark.spec("ALN-77")
def test_a_row_of_a_gathered_tensor_says_which_token_it_is(tmp_path: Path) -> None:
    sides = _sides(tmp_path, _fed(RIGHT), _fed(LEFT))
    gather = sides[0].gathers["0/net/output"]
    assert gather.where(6) == "row 1, position 1; in the target's step 0 row 1, position 3"
    stepped = _sides(tmp_path / "steps", _fed([[5, 6, 7, 8]]), _fed([[5, 6]], [[7]]))
    place = "row 0, position 2; in the target's step 1 row 0, position 0"
    assert stepped[0].gathers["0/net/output"].where(2) == place


@pytest.mark.spec("ALN-77")
def test_a_step_of_the_reference_without_common_tokens_is_missing(tmp_path: Path) -> None:
    sides = _sides(tmp_path, _fed([[5, 6]], [[7]]), _fed([[5, 6]]))
    alignment = Alignment((Entry(("net",), ("net",)),), tokens=VALID)
    (tokens,) = resolve(alignment, *_reopened(tmp_path)).tokens
    assert tokens.text == "2 tokens are on both sides; the reference has 1 more"
    statuses = {pair.key: pair.status for pair in compare(*sides).pairs}
    assert statuses["1/net/output"] == "missing-in-target"
    assert statuses["0/net/output"] == "identical"


@pytest.mark.spec("ALN-70")
def test_a_map_file_says_how_tokens_are_matched(tmp_path: Path) -> None:
    rule = TokenRule(
        "match_tokens", "b s ...", {}, {"ids": "@root/input.prompt", "mask": "@root/input.valid"}
    )
    entry = Entry(("a",), ("b",), dims="b s h[tp]", reference_dims="b s h")
    text = map_text(Alignment((entry,), tokens=rule))
    assert text == (
        "[tokens]\n"
        'step = "match_tokens"\n'
        'dims = "b s ..."\n'
        'target = {ids = "@root/input.prompt", mask = "@root/input.valid"}\n\n'
        "[[pair]]\n"
        'reference = "a"\n'
        'target = "b"\n'
        'dims = "b s h[tp]"\n'
        'reference_dims = "b s h"\n'
        'evidence = "user"\n'
    )
    path = tmp_path / "map.toml"
    path.write_text(text)
    assert map_text(read_mapping(path)) == text
    assert read_mapping(path).tokens == rule


@pytest.mark.spec("ALN-70")
def test_ids_and_masks_of_unusual_names_are_named(tmp_path: Path) -> None:
    other = {key.replace("input_ids", "x").replace("attention_mask", "y"): a for key, a in _fed(LEFT).items()}
    rule = TokenRule("valid_tokens", target={"ids": "@root/input.x", "mask": "@root/input.y"})
    ours, theirs = _both(_sides(tmp_path, _fed(RIGHT), other, tokens=rule), "0/net/output")
    assert np.array_equal(theirs, ours)
    wrong = TokenRule("valid_tokens", target={"ids": "@root/input.z"})
    with pytest.raises(UsageError, match=r"has no '@root/input.z', which \[tokens\] names as the ids"):
        TokenAlignment.of(*_reopened(tmp_path), wrong)


@pytest.mark.spec("ALN-70")
@pytest.mark.parametrize(
    ("table", "message"),
    [
        ('step = "by_ids"', "step 'by_ids', expected 'valid_tokens' or 'match_tokens'"),
        ('step = "valid_tokens"\nby = "x"', "has 'by', expected step, dims, reference, target"),
        ('step = "valid_tokens"\ntarget = "x"', "expected places by role"),
        ('step = "valid_tokens"\ntarget = { id = "x" }', "'id' is unknown, expected one of ids, mask"),
        ('step = "valid_tokens"\ndims = "b (s"', r"map.toml: \[tokens\]: dims 'b \(s': a parenthesis"),
    ],
)
def test_a_table_of_tokens_that_makes_no_sense_is_refused(tmp_path: Path, table: str, message: str) -> None:
    path = tmp_path / "map.toml"
    path.write_text(f'[tokens]\n{table}\n[[pair]]\nreference = "a"\ntarget = "b"\n')
    with pytest.raises(UsageError, match=message):
        read_mapping(path)


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        (
            Entry(("net",), ("net",), steps=("valid_tokens", "concat 0")),
            "'valid_tokens' is done on both sides",
        ),
        (Entry(("net",), ("net",), steps=("valid_tokens", "match_tokens")), "expected one of them"),
        (Entry(("net",), ("net",), steps=("concat 0",), dims="b s d"), "has dims and steps"),
    ],
)
def test_steps_on_tokens_come_last_and_once(tmp_path: Path, entry: Entry, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        _sides(tmp_path, _fed(RIGHT), _fed(LEFT), entry)


def _case_31(tmp_path: Path, *, has_positions: bool) -> Comparison:
    """A GPT-2 fed two prompts, padded on the right, then on the left with positions or without."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    from tensorcap import capture

    torch.manual_seed(0)
    sizes = {"vocab_size": 50, "n_positions": 16, "n_embd": 16, "n_layer": 2, "n_head": 2}
    config = transformers.GPT2Config(**sizes, bos_token_id=1, eos_token_id=1)
    model = transformers.GPT2LMHeadModel(config).eval()
    torch.nn.init.normal_(model.transformer.wpe.weight, std=0.5)
    with capture(model, tmp_path / "ref.h5"), torch.no_grad():
        model(torch.tensor(RIGHT[0]), attention_mask=torch.tensor(RIGHT[1]))
    mask = torch.tensor(LEFT[1])
    arranged = torch.arange(5)[None].expand(2, 5)
    positions = (mask.cumsum(-1) - 1).clamp(min=0) if has_positions else arranged
    with capture(model, tmp_path / "tgt.h5"), torch.no_grad():
        model(torch.tensor(LEFT[0]), attention_mask=mask, position_ids=positions)
    reference, target = _reopened(tmp_path)
    names = ("transformer.wte", "transformer.drop", *(f"transformer.h.{i}.mlp" for i in range(2)), "lm_head")
    entries = [Entry((f"{name}/output",), (f"{name}/output",)) for name in names]
    links = resolve(Alignment(tuple(entries), tokens=VALID), reference, target).links
    sides = GatheredArchive(reference, links), MappedArchive(reference, target, links)
    return compare(*sides, atol=1e-4, only=[f"0/{name}/output" for name in names])


@pytest.mark.spec("ALN-70")
def test_a_batch_padded_left_and_right_agrees_on_its_eight_tokens(tmp_path: Path) -> None:
    pairs = {pair.key: pair for pair in _case_31(tmp_path, has_positions=True).pairs if pair.difference}
    logits = pairs["0/lm_head/output"]
    assert logits.reference is not None
    assert logits.reference.shape == (8, 50)
    assert all(pair.status in ("match", "identical") for pair in pairs.values())


@pytest.mark.spec("ALN-70")
def test_wrong_positions_of_a_padded_row_are_seen_where_positions_are_embedded(tmp_path: Path) -> None:
    found = _case_31(tmp_path, has_positions=False)
    assert found.divergence is not None
    assert found.divergence.pair.key == "0/transformer.drop/output"  # the sum of both embeddings
    logits = next(pair for pair in found.pairs if pair.key == "0/lm_head/output")
    assert logits.difference is not None
    largest, index = logits.difference.max_abs, logits.difference.max_abs_index
    assert largest is not None
    assert largest > 1e-2
    assert index is not None
    assert index[0] >= 5  # tokens of the padded row


def _left_padded(tmp_path: Path, *, wrong: bool) -> Comparison:
    """A Llama with two ways of attention, which leave other things at positions that are padding."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    from tensorcap import capture

    sizes = {"vocab_size": 50, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2}
    ids = torch.randint(3, 50, (2, 20), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    ids[1, :9] = mask[1, :9] = 0
    for name, way in (("ref.h5", "sdpa"), ("tgt.h5", "eager")):
        torch.manual_seed(0)
        config = transformers.LlamaConfig(**sizes, num_hidden_layers=2, attn_implementation=way)
        model = transformers.LlamaForCausalLM(config).eval()
        if wrong and way == "eager":
            with torch.no_grad():
                model.model.layers[1].mlp.up_proj.weight *= 1.5
        with capture(model, tmp_path / name), torch.no_grad():
            model(ids, attention_mask=mask, use_cache=False)
    return compare(tmp_path / "ref.h5", tmp_path / "tgt.h5")


@pytest.mark.spec("POL-31")
def test_what_is_left_at_padding_is_no_difference(tmp_path: Path) -> None:
    assert _left_padded(tmp_path, wrong=False).exit_status == 0


@pytest.mark.spec("POL-31")
def test_a_mistake_beside_padding_is_still_one(tmp_path: Path) -> None:
    found = _left_padded(tmp_path, wrong=True)
    assert found.exit_status == 1
    assert found.divergence is not None
    assert found.divergence.module == "model.layers.1.mlp.up_proj"
