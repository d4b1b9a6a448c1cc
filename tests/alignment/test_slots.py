"""Proposals on more than main results: second results, arguments, sums and fusions of what one site gave."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tensorcap.alignment import Alignment, resolve
from tensorcap.alignment.match import propose
from tensorcap_formats.archive import Archive
from tensorcap_formats.dtypes import Array
from tensorcap_formats.errors import UsageError
from tests.support.archives import new_archive

Tensors = Mapping[str, Array]  # by SITE/SLOT, in order
Found = dict[str, str]  # the target's records behind each of the reference's, and the steps

LAYERS, S, D = 3, 6, 16
_RNG = np.random.default_rng(11)


def drawn(*shape: int) -> Array:
    return (_RNG.standard_normal(shape or (1, S, D)) + 0.3 * _RNG.standard_normal()).astype(np.float32)


def archive(path: Path, tensors: Tensors, parameters: Mapping[str, tuple[int, ...]] | None = None) -> Archive:
    sites = dict.fromkeys(name.rpartition("/")[0] for name in tensors)
    listed = []
    for site in sites:
        shape = next((s for end, s in (parameters or {}).items() if site.endswith(end)), None)
        own = {} if shape is None else {"weight": {"shape": list(shape)}}
        listed.append({"path": site, "class": "Linear" if shape else "Block", "parameters": own})
    return new_archive(path, {f"0/{name}": array for name, array in tensors.items()}, run={"modules": listed})


def proposed(tmp_path: Path, one: Tensors, other: Tensors, **options: Any) -> tuple[Alignment, Found]:
    """The alignment and its links; `parameters` are shapes of weights by the ends of sites' names."""
    parameters = options.pop("parameters", None)
    reference = archive(tmp_path / "ref.h5", one, parameters)
    target = archive(tmp_path / "tgt.h5", other, parameters)
    alignment = propose(reference, target, **options).alignment
    found = {}
    for link in resolve(alignment, reference, target).links:
        names = [record.key.text.removeprefix("0/") for record in link.target]
        for i, record in enumerate(link.reference):
            sources = names if link.layout.steps else names[i : i + 1]
            key = record.key.text.removeprefix("0/")
            found[key] = "; ".join([" + ".join(sources), *link.layout.texts])
    return alignment, found


def left(alignment: Alignment, side: str) -> dict[str, str]:
    return {p: found.reason for found in alignment.left_over if found.side == side for p in found.places}


def unexplained(alignment: Alignment) -> list[str]:
    return [p for found in alignment.left_over if not found.is_explained for p in found.places]


@pytest.mark.spec("ALN-30")
def test_a_second_result_is_found_under_another_name(tmp_path: Path) -> None:
    hidden, pooled = drawn(), drawn(1, D)
    one = {"@root/output.last_hidden_state": hidden, "@root/output.pooler_output": pooled}
    alignment, found = proposed(tmp_path, one, {"@root/output.0": hidden, "@root/output.1": pooled[0]})
    assert found == {
        "@root/output.last_hidden_state": "@root/output.0",
        "@root/output.pooler_output": "@root/output.1; unsqueeze 0",
    }
    assert alignment.left_over == ()


@pytest.mark.spec("ALN-30")
def test_a_main_result_may_be_the_second_one_of_another_module(tmp_path: Path) -> None:
    one: dict[str, Array] = {}
    other: dict[str, Array] = {}
    for i in range(LAYERS):
        normed, layer = drawn(), drawn()
        one |= {f"layers.{i}/output": layer, f"norms.{i}/output": normed}
        other |= {f"fused.{i}/output.0": normed, f"fused.{i}/output.1": layer}
    alignment, found = proposed(tmp_path, one, other)
    assert found == {f"layers.{i}/output": f"fused.{i}/output.1" for i in range(LAYERS)} | {
        f"norms.{i}/output": f"fused.{i}/output.0" for i in range(LAYERS)
    }
    assert alignment.left_over == ()


@pytest.mark.spec("ALN-30")
def test_a_place_in_a_tuple_is_no_name_if_values_contradict_it_and_a_field_is(tmp_path: Path) -> None:
    main, u, v = drawn(), drawn(), drawn()
    one = {"attn/output.0": main, "attn/output.1": u, "attn/output.2": v}
    _, found = proposed(tmp_path, one, {"attn/output.0": main, "attn/output.1": v, "attn/output.2": u})
    assert found["attn/output.1"] == "attn/output.2"
    named = {"m/output.logits": main, "m/output.keys": u, "m/output.values": v}
    other = {"m/output.logits": main, "m/output.keys": v, "m/output.values": u}
    alignment, found = proposed(tmp_path, named, other)
    assert found == {key: key for key in named}
    assert any("but the values are those of m/output.values" in entry.reason for entry in alignment.entries)


@pytest.mark.spec("ALN-30")
def test_many_results_in_a_list_are_one_entry_with_an_offset(tmp_path: Path) -> None:
    states = [drawn() for _ in range(6)]
    one = {"m/output.logits": drawn(1, 9)} | {f"m/output.states.{i}": x for i, x in enumerate(states)}
    other = {"n/output.out": one["m/output.logits"]} | {
        f"n/output.all.{i + 1}": x for i, x in enumerate(states)
    }
    alignment, found = proposed(tmp_path, one, other)
    assert found == {"m/output.logits": "n/output.out"} | {
        f"m/output.states.{i}": f"n/output.all.{i + 1}" for i in range(6)
    }
    assert "m/output.states.{i} = n/output.all.{i+1}" in {entry.text for entry in alignment.entries}


@pytest.mark.spec("ALN-30")
def test_what_of_several_results_is_left_over_is_reported_by_its_slot(tmp_path: Path) -> None:
    x, y, z = drawn(), drawn(), drawn()
    one = {"a/output.0": x, "a/output.1": y, "b/output.0": drawn(), "b/output.1": drawn(), "c/output": z}
    alignment, found = proposed(tmp_path, one, {"u/output": x, "w/output": z})
    assert found == {"a/output.0": "u/output", "c/output": "w/output"}
    assert sorted(left(alignment, "reference")) == ["a/output.1", "b"]


@pytest.mark.spec("ALN-31")
def test_arguments_have_steps_of_their_own(tmp_path: Path) -> None:
    x, y = drawn(), drawn(1, S, 4 * 8)
    pairs = y.reshape(1, S, 4, 2, 4).swapaxes(-1, -2).reshape(y.shape)
    one = {"q/input.hidden": x, "q/output": y}
    _, found = proposed(tmp_path, one, {"p/input.x": x[0], "p/output": pairs})
    assert found == {"q/input.hidden": "p/input.x; unsqueeze 0", "q/output": "p/output; rope_halves 8"}


@pytest.mark.spec("ALN-31")
def test_an_argument_in_another_order_of_one_shape_is_not_taken_as_it_is(tmp_path: Path) -> None:
    x, y = drawn(8, 8), drawn()
    one = {"a/input.x": x, "a/output": y}
    _, found = proposed(tmp_path, one, {"b/input.z": x.T, "b/output": y})
    assert found == {"a/input.x": "b/input.z; transpose 0 1", "a/output": "b/output"}


@pytest.mark.spec("ALN-31")
@pytest.mark.parametrize("name", ["x", "hidden"])
def test_arguments_that_differ_are_not_paired_if_the_results_agree(tmp_path: Path, name: str) -> None:
    y = drawn()
    one = {"drop/input.hidden": y, "drop/output": y}
    _, found = proposed(tmp_path, one, {f"mixer/input.{name}": drawn(), "mixer/output": y})
    assert found == {"drop/output": "mixer/output"}


@pytest.mark.spec("ALN-31")
@pytest.mark.parametrize("dtype", ["int64", "int32", "uint32"])
def test_whole_numbers_that_alone_are_left_are_paired_if_they_are_equal(tmp_path: Path, dtype: str) -> None:
    ids, y = np.array([[7, 300, 7, 2, 9]]), drawn()
    one = {"e/input.input_ids": ids, "e/output": y}
    _, found = proposed(tmp_path, one, {"e/input.tokens": ids[0].astype(dtype), "e/output": y[0]})
    assert found == {"e/input.input_ids": "e/input.tokens; unsqueeze 0", "e/output": "e/output; unsqueeze 0"}


@pytest.mark.spec("ALN-31")
def test_whole_numbers_that_differ_are_paired_only_if_the_results_differ_too(tmp_path: Path) -> None:
    ids, y = np.array([7, 300, 7, 2, 9]), drawn()
    one = {"e/input.input_ids": ids, "e/output": y}
    other = {"e/input.positions": np.arange(5), "e/output": y}
    _, found = proposed(tmp_path, one, other)
    assert found == {"e/output": "e/output"}
    _, found = proposed(tmp_path, one, {**other, "e/output": drawn()})
    assert found["e/input.input_ids"] == "e/input.positions"


@pytest.mark.spec("ALN-31")
def test_behind_a_mistake_arguments_are_paired_as_in_layers_before_it(tmp_path: Path) -> None:
    one: dict[str, Array] = {}
    other: dict[str, Array] = {}
    for i in range(LAYERS):
        x, r, y = drawn(), drawn(), drawn()
        one |= {f"l.{i}.n/input.x": x, f"l.{i}.n/input.r": r, f"l.{i}.n/output": y}
        if i:
            x, r, y = drawn(), drawn(), drawn()
        other |= {f"k.{i}.m/input.res": r, f"k.{i}.m/input.new": x, f"k.{i}.m/output": y}
    _, found = proposed(tmp_path, one, other)
    for i in range(LAYERS):
        assert found[f"l.{i}.n/input.x"] == f"k.{i}.m/input.new"
        assert found[f"l.{i}.n/input.r"] == f"k.{i}.m/input.res"


@pytest.mark.spec("ALN-31")
def test_two_arguments_with_equal_values_are_not_guessed_at(tmp_path: Path) -> None:
    x, y = drawn(), drawn()
    _, found = proposed(
        tmp_path, {"a/input.x": x, "a/output": y}, {"b/input.q": x, "b/input.k": x, "b/output": y}
    )
    assert found == {"a/output": "b/output"}


@pytest.mark.spec("ALN-31")
def test_arguments_with_equal_values_pair_in_order_if_both_sides_have_as_many(tmp_path: Path) -> None:
    x, y, mask = drawn(), drawn(), drawn()
    one = {"attn/input.query": x, "attn/input.key": x, "attn/input.bias": mask, "attn/output": y}
    other = {"mha/input.q": x, "mha/input.args.0": mask, "mha/input.k": x, "mha/output": y}
    _, found = proposed(tmp_path, one, other)
    assert found == {
        "attn/input.query": "mha/input.q",
        "attn/input.key": "mha/input.k",
        "attn/input.bias": "mha/input.args.0",
        "attn/output": "mha/output",
    }


@pytest.mark.spec("ALN-31")
def test_small_and_constant_arguments_are_paired_by_their_bytes(tmp_path: Path) -> None:
    y = drawn()
    ones, two, mask = np.ones((2, 3), np.float32), np.zeros((2, 3), np.float32), np.ones((2, 3), bool)
    one = {"a/input.x": ones, "a/input.y": two, "a/input.mask": mask, "a/output": y}
    other = {"b/input.first": two, "b/input.second": ones, "b/input.keep": mask, "b/output": y}
    _, found = proposed(tmp_path, one, other)
    assert found == {
        "a/input.x": "b/input.second",
        "a/input.y": "b/input.first",
        "a/input.mask": "b/input.keep",
        "a/output": "b/output",
    }
    _, found = proposed(tmp_path, {**one, "a/output": y}, {**other, "a/output": y}, by="names")
    assert "a/input.x" not in found


@pytest.mark.spec("ALN-31")
def test_behind_a_mistake_arguments_pair_as_alone_of_their_size_or_in_order(tmp_path: Path) -> None:
    one = {"m/input.x": drawn(), "m/input.table": drawn(1, S, 4), "m/output": drawn()}
    other = {"m/input.args.0": drawn(), "m/input.args.1": drawn(1, S, 4), "m/output": drawn()}
    _, found = proposed(tmp_path, one, other)
    assert found == {
        "m/input.x": "m/input.args.0",
        "m/input.table": "m/input.args.1",
        "m/output": "m/output",
    }
    one = {"m/input.q": drawn(), "m/input.k": drawn(), "m/output": drawn()}
    other = {"m/input.query": drawn(), "m/input.key": drawn(), "m/output": drawn()}
    _, found = proposed(tmp_path, one, other)
    assert found == {"m/input.q": "m/input.query", "m/input.k": "m/input.key", "m/output": "m/output"}
    _, found = proposed(tmp_path, one, {**other, "m/input.value": drawn()})
    assert found == {"m/output": "m/output"}


@pytest.mark.spec("ALN-31")
@pytest.mark.parametrize(("drift", "is_paired"), [(0.006, True), (0.06, False)])
def test_an_argument_may_have_drifted_as_far_as_what_comes_of_it(
    tmp_path: Path, drift: float, is_paired: bool
) -> None:
    one = {f"l.{i}.n/output": drawn() for i in range(9)} | {"m/input.x": drawn(), "m/output": drawn()}
    factors = {"m/input.x": 1 + drift, "m/output": 1.003}
    other = {key: (array * factors.get(key, 1.001)).astype(np.float32) for key, array in one.items()}
    other = {key.replace("input.x", "input.args.0"): array for key, array in other.items()}
    _, found = proposed(tmp_path, one, other)
    assert found.get("m/input.x") == ("m/input.args.0" if is_paired else None)


@pytest.mark.spec("ALN-31")
def test_arguments_are_not_paired_twice_where_one_entry_says_it_all(tmp_path: Path) -> None:
    one: dict[str, Array] = {}
    other: dict[str, Array] = {}
    for i in range(LAYERS):
        x, y, z = drawn(), drawn(), drawn()
        one |= {f"l.{i}.m/input.x": x, f"l.{i}.m/output.0": y, f"l.{i}.m/output.1": z}
        other |= {f"k.{i}.n/input.y": x, f"k.{i}.n/output.0": y, f"k.{i}.n/output.1": z}
    alignment, found = proposed(tmp_path, one, other)
    assert len(found) == 3 * LAYERS
    assert [entry.text for entry in alignment.entries] == ["l.{i}.m = k.{i}.n"]


def residual_kept_apart(offset: float = 0.0) -> tuple[dict[str, Array], dict[str, Array]]:
    """Layers of the reference, whose target gives the last addend and the rest."""
    one: dict[str, Array] = {}
    other: dict[str, Array] = {}
    for i in range(LAYERS):
        mlp, rest = drawn(1, S, D), drawn(1, S, D)
        one |= {f"layers.{i}.mlp/output": mlp, f"layers.{i}/output": (mlp + rest + offset).astype(np.float32)}
        other |= {f"blocks.{i}.ff/output": mlp[0]}
        other |= {f"blocks.{i}/output.0": mlp[0], f"blocks.{i}/output.1": rest[0]}
    return one, other


@pytest.mark.spec("ALN-32")
def test_a_layer_may_be_the_sum_of_two_results(tmp_path: Path) -> None:
    alignment, found = proposed(tmp_path, *residual_kept_apart())
    for i in range(LAYERS):
        assert found[f"layers.{i}.mlp/output"] == f"blocks.{i}.ff/output; unsqueeze 0"
        assert found[f"layers.{i}/output"] == f"blocks.{i}/output.0 + blocks.{i}/output.1; sum; unsqueeze 0"
    assert "layers.{i} = blocks.{i}/output.0 + blocks.{i}/output.1" in {e.text for e in alignment.entries}
    assert unexplained(alignment) == []


@pytest.mark.spec("ALN-32")
def test_a_sum_outdoes_an_equal_name(tmp_path: Path) -> None:
    one, other = residual_kept_apart()
    other = {key.replace("blocks", "layers"): array for key, array in other.items()}
    _, found = proposed(tmp_path, one, other)
    assert found["layers.1/output"] == "layers.1/output.0 + layers.1/output.1; sum; unsqueeze 0"


def test_a_pass_of_matching_can_be_left_out_by_name(tmp_path: Path) -> None:
    _, found = proposed(tmp_path, *residual_kept_apart(), without={"sums"})
    assert found["layers.1.mlp/output"] == "blocks.1.ff/output; unsqueeze 0"
    assert "sum" not in found.get("layers.1/output", "")


def test_a_pass_that_does_not_exist_cannot_be_left_out(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"without 'sum': no pass of this name, expected .*sums"):
        proposed(tmp_path, *residual_kept_apart(), without={"sum"})


@pytest.mark.spec("ALN-32")
def test_what_is_no_sum_is_not_taken_as_one(tmp_path: Path) -> None:
    _, found = proposed(tmp_path, *residual_kept_apart(0.05))
    assert not any(key.startswith("layers.") and key.count(".") == 1 for key in found)


@pytest.mark.spec("ALN-32")
def test_means_of_zero_prove_no_sum_and_values_that_were_read_refute_one(tmp_path: Path) -> None:
    x, y, z = (a - a.mean(dtype=np.float64) for a in (drawn(), drawn(), drawn()))
    one = {"layer/output": (x * 1.2).astype(np.float32), "out/output": drawn()}
    other = {
        "u/output.0": y.astype(np.float32),
        "u/output.1": z.astype(np.float32),
        "v/output": one["out/output"],
    }
    _, found = proposed(tmp_path, one, other, by="values")
    assert found == {"out/output": "v/output"}
    shuffled = _RNG.permutation((y + z + 0.5).reshape(-1)).reshape(x.shape)  # the mean of the sum
    one["layer/output"] = shuffled.astype(np.float32)
    other["u/output.0"], other["u/output.1"] = (y + 0.3).astype(np.float32), (z + 0.2).astype(np.float32)
    _, found = proposed(tmp_path, one, other, by="values")
    assert found == {"out/output": "v/output"}


@pytest.mark.spec("ALN-32")
def test_a_sum_is_not_taken_where_structure_knows_its_parts(tmp_path: Path) -> None:
    one: dict[str, Array] = {}
    whole = drawn()
    for i in range(LAYERS):
        out, rest = drawn(), drawn()
        one |= {f"layers.{i}.norm/output.0": drawn(), f"layers.{i}.norm/output.1": whole}
        one |= {f"layers.{i}.mlp/output": out, f"layers.{i}/output.0": out, f"layers.{i}/output.1": rest}
        whole = out + rest

    def renamed(key: str) -> str:
        return key.replace("layers", "blocks").replace("norm", "ln").replace("mlp", "ff")

    _, found = proposed(tmp_path, one, {renamed(key): array for key, array in one.items()})
    assert found == {key: renamed(key) for key in one}


@pytest.mark.spec("ALN-32")
def test_a_part_may_be_something_by_itself_too(tmp_path: Path) -> None:
    out, rest = drawn(), drawn()
    one = {"last_linear/output": out, "whole/output": out + rest}
    _, found = proposed(tmp_path, one, {"blk/output.0": out, "blk/output.1": rest})
    assert found == {
        "last_linear/output": "blk/output.0",
        "whole/output": "blk/output.0 + blk/output.1; sum",
    }


@pytest.mark.spec("ALN-25")
def test_infinite_elements_that_are_equal_are_no_difference(tmp_path: Path) -> None:
    bias = drawn(6, 6)
    bias[np.triu_indices(6, 1)] = -np.inf
    _, found = proposed(tmp_path, {"bias/output": bias}, {"bias/output": bias.T})
    assert found == {"bias/output": "bias/output; transpose 0 1"}


@pytest.mark.spec("ALN-27")
def test_a_result_is_not_paired_with_one_behind_the_next_known_pair(tmp_path: Path) -> None:
    a, b = drawn(), drawn()
    one = {"a/output": a, "u/output": drawn(1, 3), "b/output": b}
    _, found = proposed(tmp_path, one, {"p/output": a, "q/output": b, "t/output": drawn(1, 3)})
    assert found == {"a/output": "p/output", "b/output": "q/output"}


def scanned() -> tuple[dict[str, Array], dict[str, Array]]:
    """Layers whose last module, its parent and a dropout give the same, and their scan."""
    one: dict[str, Array] = {}
    layers: list[dict[str, Array]] = []
    for i in range(LAYERS):
        q, o, whole = drawn(2, S, D), drawn(2, S, D), drawn(2, S, D)
        layers.append({"q": q, "o": o, "whole": whole})
        one |= {f"block.{i}.attn.q/output": q, f"block.{i}.attn.o/output": o, f"block.{i}.attn/output": o}
        one |= {f"block.{i}.drop/output": o, f"block.{i}.sub/output": whole, f"block.{i}/output.0": whole}
    stacked = {name: np.stack([layer[name] for layer in layers]) for name in ("q", "o", "whole")}
    other = {"scan.attn.q/output": stacked["q"], "scan.attn.o/output": stacked["o"]}
    return one, other | {"scan/output.0": layers[-1]["whole"], "scan/output.1": stacked["whole"]}


@pytest.mark.spec("ALN-33")
def test_of_equal_parts_those_are_stacked_that_are_like_the_whole(tmp_path: Path) -> None:
    weights: dict[str, tuple[int, ...]] = {f"block.{i}.attn.o": (D, D) for i in range(LAYERS)}
    weights |= {"scan.attn.o": (LAYERS, D, D)}
    _, found = proposed(tmp_path, *scanned(), parameters=weights)
    for i in range(LAYERS):
        assert found[f"block.{i}.attn.q/output"] == "scan.attn.q/output; unstack 0"
        assert found[f"block.{i}.attn.o/output"] == "scan.attn.o/output; unstack 0"
        assert found[f"block.{i}/output.0"] == "scan/output.1; unstack 0"


@pytest.mark.spec("ALN-33")
def test_a_list_is_stacked_as_a_whole_before_one_of_it_is_paired(tmp_path: Path) -> None:
    layers = [drawn(2, S, D) for _ in range(4)]
    one = {f"block.{i}/output": layer for i, layer in enumerate(layers)}
    alignment, found = proposed(
        tmp_path, one, {"scan/output.0": layers[-1], "scan/output.1": np.stack(layers)}
    )
    assert found == dict.fromkeys(one, "scan/output.1; unstack 0")
    assert "has another counterpart" in left(alignment, "target")["scan/output.0"]
    assert unexplained(alignment) == []


@pytest.mark.spec("ALN-33")
def test_results_of_one_site_are_joined(tmp_path: Path) -> None:
    one: dict[str, Array] = {}
    other: dict[str, Array] = {}
    for i in range(LAYERS):
        q, k, v = drawn(1, S, D), drawn(1, S, 8), drawn(1, S, 8)
        one[f"h.{i}.c_attn/output"] = np.concatenate([q, k, v], -1)
        other |= {f"b.{i}.qkv/output.0": q, f"b.{i}.qkv/output.1": k, f"b.{i}.qkv/output.2": v}
    alignment, found = proposed(tmp_path, one, other)
    for i in range(LAYERS):
        parts = " + ".join(f"b.{i}.qkv/output.{n}" for n in range(3))
        assert found[f"h.{i}.c_attn/output"] == f"{parts}; concat 2"
    assert alignment.left_over == ()


@pytest.mark.spec("ALN-33")
def test_results_of_one_site_are_taken_apart(tmp_path: Path) -> None:
    cos, sin = drawn(1, S, 8), drawn(1, S, 8)
    one = {"rotary/output.0": cos, "rotary/output.1": sin}
    _, found = proposed(tmp_path, one, {"rope/output": np.stack([sin, cos])})
    assert found == dict.fromkeys(one, "rope/output; unstack 0")


@pytest.mark.spec("ALN-45")
@pytest.mark.parametrize("is_wrong", [False, True])
def test_layers_that_the_other_side_counts_in_steps_of_two(tmp_path: Path, is_wrong: bool) -> None:
    one: dict[str, Array] = {}
    other: dict[str, Array] = {}
    for i in range(LAYERS):
        q, k, v, out, mlp = drawn(), drawn(), drawn(), drawn(), drawn()
        one |= {f"l.{i}.attn.q/output": q, f"l.{i}.attn.k/output": k, f"l.{i}.attn.v/output": v}
        one |= {f"l.{i}.attn.o/output": out, f"l.{i}.attn/output": out + 1, f"l.{i}.mlp/output": mlp}
        if is_wrong and i == LAYERS - 1:
            out, mlp = drawn(), drawn()
        attention, feed = f"s.{2 * i}.inner", f"s.{2 * i + 1}.inner"
        other |= {f"{attention}.to_q/output": q, f"{attention}.to_kv/output": np.concatenate((k, v), -1)}
        other |= {f"{attention}.to_out/output": out, f"{attention}/output": out + 1, f"{feed}/output": mlp}
    _, found = proposed(tmp_path, one, other)
    for i in range(LAYERS):
        whole = f"s.{2 * i}.inner.to_kv/output; split 2 2"
        assert found[f"l.{i}.attn.k/output"] == found[f"l.{i}.attn.v/output"] == whole
        assert found[f"l.{i}.attn.o/output"] == f"s.{2 * i}.inner.to_out/output"


@pytest.mark.spec("ALN-31")
def test_arguments_that_differ_in_a_layer_whose_results_agree_are_paired_in_no_layer(tmp_path: Path) -> None:
    # a scale that the target has in the projection before it, in layers right and, from the second on, wrong
    one: dict[str, Array] = {}
    other: dict[str, Array] = {}
    for i in range(LAYERS):
        x, mixed, scaled = drawn(), drawn(), drawn()
        wrong = 0.02 * drawn() if i else 0 * x
        one |= {f"layers.{i}.q/output": x, f"layers.{i}.scale/input.h": mixed}
        one |= {f"layers.{i}.scale/output": scaled, f"layers.{i}/output": x + scaled}
        other |= {f"blocks.{i}.a/output": x, f"blocks.{i}.o/input.x": drawn()}
        other |= {f"blocks.{i}.o/output": scaled + wrong, f"blocks.{i}/output": x + scaled + wrong}
    _, found = proposed(tmp_path, one, other)
    assert {key: found.get(key) for key in one if ".scale/" in key} == {
        f"layers.{i}.scale/{slot}": partner
        for i in range(LAYERS)
        for slot, partner in (("input.h", None), ("output", f"blocks.{i}.o/output"))
    }


@pytest.mark.spec("ALN-312")
@pytest.mark.parametrize("is_handed_on", [True, False], ids=["made-so-before-it-is-used", "wrong"])
def test_a_result_that_the_reference_hands_on_times_its_factor_is_not_paired(
    tmp_path: Path, is_handed_on: bool
) -> None:
    embedded, behind = drawn(), [drawn() for _ in range(4)]
    factor = np.float32(6 if is_handed_on else 5)
    one = {"embed/output": embedded, "first/input.x": 6 * embedded, "first/output": behind[0]}
    other = {"table/output": factor * embedded, "one/input.y": factor * embedded, "one/output": behind[1]}
    one |= {"last/output": behind[2]}
    other |= {"end/output": behind[3]}
    _, found = proposed(tmp_path, one, other)
    assert ("embed/output" in found) is not is_handed_on


@pytest.mark.spec("ALN-31")
@pytest.mark.parametrize("are_weights_known", [True, False])
def test_a_module_of_known_weights_is_given_its_argument_though_another_has_it_in_the_reference(
    tmp_path: Path, are_weights_known: bool
) -> None:
    """The target gives its shortcut what the convolution is given: both tensors are right elsewhere."""
    x, normed, made, short, wrong, out = (drawn() for _ in range(6))
    one = {
        "stem/output": x,
        "conv/input.input": normed,
        "conv/output": made,
        "short/input.input": x,
        "short/output": short,
        "head/output": out,
    }
    other = {
        "begin/output": x,
        "c1/input.x": normed,
        "c1/output": made,
        "sc/input.x": normed,
        "sc/output": wrong,
        "end/output": drawn(),
    }
    parameters: dict[str, tuple[int, ...]] = {"conv": (D, D, 3), "c1": (D, D, 3)}
    if are_weights_known:
        parameters |= {"short": (D, D), "sc": (D, D)}
    _, found = proposed(tmp_path, one, other, parameters=parameters)
    assert found["conv/input.input"] == "c1/input.x"
    assert found.get("short/input.input") == ("sc/input.x" if are_weights_known else None)
