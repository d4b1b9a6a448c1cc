"""What a proposal says of its pairs and of what it leaves over, in two archives written here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pytest

from tensorcap.alignment import Alignment, Entry, LeftOver, resolve
from tensorcap.alignment.match import order_doubt, propose
from tensorcap_formats.archive import Archive
from tensorcap_formats.dtypes import Array
from tensorcap_formats.open import open_archive
from tests.support.archives import new_archive
from tests.support.floats import bfloat16

Tensors = Mapping[str, Array]  # by key


def _drawn(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng((seed, *shape)).standard_normal(shape).astype(np.float32)


def _proposed(tmp_path: Path, one: Tensors, other: Tensors) -> tuple[Alignment, Archive, Archive]:
    reference, target = new_archive(tmp_path / "ref.h5", one), new_archive(tmp_path / "tgt.h5", other)
    return propose(reference, target).alignment, reference, target


def _entry(alignment: Alignment, place: str) -> Entry:
    (found,) = (entry for entry in alignment.entries if place in entry.reference)
    return found


def _left(alignment: Alignment, place: str, side: str = "reference") -> LeftOver:
    (found,) = (left for left in alignment.left_over if left.side == side and place in left.places)
    return found


X, Y, Z = (_drawn(2, 5, 8, seed=i) for i in (1, 2, 3))


@pytest.mark.spec("ALN-34")
def test_values_that_differ_by_more_than_rounding_are_reported_with_both_numbers(tmp_path: Path) -> None:
    one, other = {"0/a/output": X, "0/b/output": Y}, {"0/u/output": X * np.float32(1.001), "0/v/output": Y}
    alignment, _, _ = _proposed(tmp_path, one, other)
    assert _entry(alignment, "a").reason.endswith("; but values differ by 0.001, expected at most 2e-05")
    assert "but" not in _entry(alignment, "b").reason


@pytest.mark.spec("ALN-34")
@pytest.mark.parametrize(("factor", "is_told"), [(1.004, False), (1.05, True)])
def test_what_is_rounding_is_that_of_the_coarser_run(tmp_path: Path, factor: float, is_told: bool) -> None:
    one = {"0/a/output": X, "0/b/output": Y}
    other = {"0/a/output": bfloat16(X * np.float32(factor)), "0/b/output": bfloat16(Y)}
    alignment, _, _ = _proposed(tmp_path, one, other)
    assert ("but values differ" in _entry(alignment, "a").reason) == is_told  # 8 times 2^-8 is 0.03


@pytest.mark.spec("ALN-34")
@pytest.mark.parametrize(("factor", "is_told"), [(1.003, False), (1.006, True)])
def test_what_is_rounding_in_float16_is_eight_times_its_unit_roundoff(
    tmp_path: Path, factor: float, is_told: bool
) -> None:
    one = {"0/a/output": X, "0/b/output": Y}
    other = {"0/a/output": (X * factor).astype(np.float16), "0/b/output": Y.astype(np.float16)}
    alignment, _, _ = _proposed(tmp_path, one, other)
    assert ("but values differ" in _entry(alignment, "a").reason) == is_told  # 8 times 2^-11 is 0.004


@pytest.mark.spec("ALN-34")
def test_one_layer_of_many_that_differs_is_counted(tmp_path: Path) -> None:
    layers = {f"0/layers.{i}/output": _drawn(4, 8, seed=i) for i in range(4)}
    other = {key: a + np.float32(key == "0/layers.2/output") for key, a in layers.items()}
    alignment, _, _ = _proposed(tmp_path, layers, other)
    assert "but values of 1 of 4 differ by " in _entry(alignment, "layers.{i}").reason


@pytest.mark.spec("ALN-34")
@pytest.mark.parametrize(
    "wrong",
    [
        pytest.param(lambda x: x[::-1], id="same-elements-in-another-order"),
        pytest.param(np.zeros_like, id="nothing-but-zeros"),
        pytest.param(lambda x: np.where(x > 1, np.float32("inf"), x), id="infinite"),
    ],
)
def test_a_layer_is_doubted_that_is_not_the_one_that_layouts_are_tried_on(
    tmp_path: Path, wrong: Callable[[Array], Array]
) -> None:
    layers = {f"0/layers.{i}/output": _drawn(4, 9, seed=i) for i in range(4)}
    for key in layers:
        folder = tmp_path / key.split("/")[1]
        folder.mkdir()
        alignment, _, _ = _proposed(folder, layers, {**layers, key: wrong(layers[key])})
        assert " but " in _entry(alignment, "layers.{i}").reason


@pytest.mark.spec("ALN-34")
def test_masks_that_are_infinite_in_the_same_places_are_equal(tmp_path: Path) -> None:
    mask = np.where(np.tri(6, dtype=np.bool_), np.float32(0), np.float32("-inf"))
    alignment, _, _ = _proposed(tmp_path, {"0/a/output": mask}, {"0/a/output": mask.copy()})
    assert "but" not in _entry(alignment, "a").reason


@pytest.mark.spec("ALN-34")
def test_whole_numbers_may_not_differ_at_all(tmp_path: Path) -> None:
    ids = np.arange(1 << 40, (1 << 40) + 16).reshape(2, 8)
    one, other = {"0/a/output": ids}, {"0/a/output": ids + 1}
    alignment, _, _ = _proposed(tmp_path, one, other)
    assert "expected at most 0" in _entry(alignment, "a").reason


@pytest.mark.spec("ALN-34")
def test_an_argument_that_differs_is_named(tmp_path: Path) -> None:
    one = {"0/a/input.x": Y, "0/a/output": X}
    alignment, _, _ = _proposed(tmp_path, one, {**one, "0/a/input.x": Y * np.float32(1.25)})
    assert "but its argument x differs by 0.2" in " ".join(e.reason for e in alignment.entries)


@pytest.mark.spec("ALN-34")
def test_a_layout_of_equal_shapes_is_reported_and_one_of_unlike_shapes_is_not(tmp_path: Path) -> None:
    square = _drawn(1, 8, 8)
    one = {"0/a/output": square, "0/b/output": X}
    other = {"0/a/output": square.swapaxes(1, 2), "0/b/output": X.swapaxes(1, 2)}
    alignment, _, _ = _proposed(tmp_path, one, other)
    told = "but shapes are equal, so that values alone ask for these steps"
    assert told in _entry(alignment, "a").reason
    assert told not in _entry(alignment, "b").reason


@pytest.mark.spec("ALN-35")
def test_equal_values_are_settled_by_order_and_told(tmp_path: Path) -> None:
    one = {"0/a/output": X, "0/b/output": X, "0/c/output": Y}
    other = {"0/u/output": X, "0/v/output": X, "0/w/output": Y}
    alignment, _, _ = _proposed(tmp_path, one, other)
    for place in ("a", "b"):
        assert _entry(alignment, place).evidence == "structure"
        assert "ambiguous by values: others have the same" in _entry(alignment, place).reason
    assert _entry(alignment, "c").evidence == "values"


@pytest.mark.spec("ALN-35")
def test_values_that_fit_in_several_layouts_are_no_evidence(tmp_path: Path) -> None:
    symmetric = _drawn(8, 8) + _drawn(8, 8).T
    alignment, _, _ = _proposed(tmp_path, {"0/a/output": symmetric}, {"0/u/output": symmetric})
    entry = _entry(alignment, "a")
    assert (entry.evidence, entry.steps) == ("shape", ())
    assert "ambiguous: other layouts fit as well" in entry.reason


@pytest.mark.spec("ALN-35")
def test_numbers_in_another_order_are_told(tmp_path: Path) -> None:
    layers = [_drawn(2, 9, seed=i) for i in range(4)]
    one = {f"0/layers.{i}/output": layer for i, layer in enumerate(layers)}
    straight = {f"0/blocks.{i + 3}/output": layer for i, layer in enumerate(layers)}
    crossed = {f"0/blocks.{j}/output": layers[i] for i, j in enumerate((1, 0, 2, 3))}
    (tmp_path / "crossed").mkdir()
    for path, other, is_told in ((tmp_path, straight, False), (tmp_path / "crossed", crossed, True)):
        alignment, _, _ = _proposed(path, one, other)
        assert len(alignment.left_over) == 0
        assert all(("but their numbers do not rise" in e.reason) == is_told for e in alignment.entries)


@pytest.mark.spec("ALN-36")
@pytest.mark.parametrize(
    ("parts", "whole", "is_told"),
    [
        (["mlp.up_proj", "mlp.gate_proj"], "mlp.gate_up_proj", True),
        (["mlp.up_proj", "mlp.gate_proj"], "mlp.up_gate_proj", False),
        (["mlp.up_proj", "mlp.gate_proj"], "mlp.fc1", True),  # mostly, gate is first
        (["mlp.gate_proj", "mlp.up_proj"], "mlp.gateup", False),
        (["attn.query", "attn.key", "attn.value"], "attn.qkv", False),
        (["attn.query", "attn.value", "attn.key"], "mixer.Wqkv", True),
        (["attn.wk", "attn.wv"], "attn.kv_proj", False),
        (["attn.wv", "attn.wk"], "attn.kv_proj", True),
        (["attn.v_proj", "attn.q_proj", "attn.k_proj"], "attn.vqk", False),
        (["h.{0}.k/param.weight", "h.{0}.q/param.weight"], "h.{0}.w/param.weight", True),
        (["mlp.w3", "mlp.w1"], "mlp.w13", True),
        (["mlp.w3", "mlp.w1"], "mlp.fc", False),  # words that say nothing
        (["a", "b"], "c", False),
    ],
)
def test_an_order_of_parts_that_names_contradict_is_reported(
    parts: list[str], whole: str, is_told: bool
) -> None:
    assert bool(order_doubt(parts, whole)) == is_told


@pytest.mark.spec("ALN-37")
def test_parameters_of_paired_modules_are_paired_with_their_own_layouts(tmp_path: Path) -> None:
    weight, bias, scale = _drawn(9, 4), _drawn(9), _drawn(1)
    one = {"0/a/output": X, "0/a/param.weight": weight, "0/a/param.bias": bias, "0/a/buffer.s": scale}
    other = {"0/u/output": X[0:2], "0/u/param.w": weight.T, "0/u/param.b": bias, "0/u/buffer.t": scale}
    alignment, _, _ = _proposed(tmp_path, one, other)
    found = {(e.text, e.steps, e.evidence) for e in alignment.entries}
    assert found == {
        ("a/output = u/output", (), "values"),
        ("a/param.weight = u/param.w", ("transpose 0 1",), "values"),
        ("a/param.bias = u/param.b", (), "values"),
        ("a/buffer.s = u/buffer.t", (), "structure"),  # one element proves nothing
    }
    assert alignment.left_over == ()


@pytest.mark.spec("ALN-37")
def test_square_weights_are_transposed_as_those_of_unlike_sizes_are(tmp_path: Path) -> None:
    square, wide = _drawn(6, 6), _drawn(6, 18)
    one = {"0/a/param.w": square, "0/b/param.w": wide}
    reasons = {}
    for name, turned in (("both", (True, True)), ("none", (False, False)), ("wide", (False, True))):
        (tmp_path / name).mkdir()
        weights = [w.T if is_turned else w for w, is_turned in zip((square, wide), turned, strict=True)]
        other = dict(zip(one, weights, strict=True))
        alignment, _, _ = _proposed(tmp_path / name, one, other)
        entry = _entry(alignment, "a/param.w")
        assert entry.steps == (("transpose 0 1",) if turned[0] else ())
        reasons[name] = "but" in entry.reason
    assert reasons == {"both": False, "none": False, "wide": True}


@pytest.mark.spec("ALN-37")
def test_fused_parameters_without_values_of_their_own_are_laid_out_as_results(tmp_path: Path) -> None:
    parts = [_drawn(2, 5, n, seed=n) for n in (8, 4, 4)]
    parts[2] = parts[2] + 1
    names, zeros = "qkv", [np.zeros(n, np.float32) for n in (8, 4, 4)]
    one: dict[str, Array] = {}
    for name, part, bias in zip(names, parts, zeros, strict=True):
        one |= {f"0/m.{name}/output": part, f"0/m.{name}/param.bias": bias}
    fused = np.concatenate([parts[0], parts[2], parts[1]], -1)
    other = {"0/m.qvk/output": fused, "0/m.qvk/param.bias": np.zeros(16, np.float32)}
    alignment, _, _ = _proposed(tmp_path, one, other)
    entry = _entry(alignment, "m.q/param.bias")
    assert entry.reference == ("m.q/param.bias", "m.v/param.bias", "m.k/param.bias")
    assert entry.steps == ("split 0 8,4,4",)


@pytest.mark.spec("ALN-37")
def test_weights_of_ranks_are_joined(tmp_path: Path) -> None:
    weight = _drawn(12, 4)
    one = {"0/a/output": X, "0/a/param.weight": weight}
    other = {"0/u/output": X, "rank1/0/u/output": X}
    other |= {"0/u/param.weight": weight[:6], "rank1/0/u/param.weight": weight[6:]}
    alignment, reference, target = _proposed(tmp_path, one, other)
    entry = _entry(alignment, "a/param.weight")
    assert (entry.target, entry.steps) == (("rank*/u/param.weight",), ("concat 0",))
    (link,) = (k for k in resolve(alignment, reference, target).links if k.entry == entry)
    assert np.array_equal(link.make(target.read)[0], weight)


@pytest.mark.spec("ALN-37")
def test_gradients_are_paired_as_what_they_are_gradients_of(tmp_path: Path) -> None:
    g, h = _drawn(2, 5, 8, seed=8), _drawn(2, 5, 8, seed=9)
    one = {"0/a/input.x": Z, "0/a/output.0": X, "0/a/output.1": Y}
    one |= {"0/a@1/grad_output.0": h, "0/a/grad_output.0": g, "0/a/grad_input.x": Z * 2}
    other = {"0/a/input.y": Z, "0/a/output": X}
    other |= {"0/a/grad_output": g, "0/a@1/grad_output": h, "0/a/grad_input.y": Z * 2}
    alignment, reference, target = _proposed(tmp_path, one, other)
    found = {
        (r.key.text, t.key.text)
        for link in resolve(alignment, reference, target).links
        for r, t in zip(link.reference, link.target, strict=True)
        if "grad" in r.key.text
    }
    assert found == {
        ("0/a/grad_output.0", "0/a/grad_output"),
        ("0/a@1/grad_output.0", "0/a@1/grad_output"),
        ("0/a/grad_input.x", "0/a/grad_input.y"),
    }
    assert "but" not in _entry(alignment, "a/grad_output.0").reason


@pytest.mark.spec("ALN-37")
def test_a_wrong_gradient_is_paired_and_reported_for_the_main_output_only(
    tmp_path: Path,
) -> None:
    g = _drawn(2, 5, 8, seed=8)
    one = {"0/a/output.0": X, "0/a/output.1": Y, "0/a/grad_output.0": g, "0/a/grad_output.1": g + 1}
    one["0/a/grad_input.x"] = Z
    other = {"0/u/output": X, "0/u/grad_output": g * 3, "0/u/grad_input.y": Z + 1}
    alignment, _, _ = _proposed(tmp_path, one, other)
    entry = _entry(alignment, "a/grad_output.0")
    assert entry.target == ("u/grad_output",)
    assert "but values differ by 2, expected" in entry.reason
    assert not _left(alignment, "a/grad_input.x").is_explained


@pytest.mark.spec("ALN-37")
def test_weights_in_a_coarser_dtype_than_the_run_are_not_doubted(tmp_path: Path) -> None:
    weight = _drawn(9, 4)
    one = {"0/a/output": X, "0/a/param.weight": weight}
    other = {"0/u/output": X, "0/u/param.w": bfloat16(weight)}
    alignment, _, _ = _proposed(tmp_path, one, other)
    assert "but" not in _entry(alignment, "a/param.weight").reason


@pytest.mark.spec("ALN-37")
def test_a_symmetric_weight_of_paired_modules_is_ambiguous(tmp_path: Path) -> None:
    symmetric = _drawn(8, 8) + _drawn(8, 8).T
    one, other = ({f"0/{name}/output": X, f"0/{name}/param.weight": symmetric} for name in "au")
    alignment, _, _ = _proposed(tmp_path, one, other)
    entry = _entry(alignment, "a/param.weight")
    assert (entry.evidence, entry.steps) == ("structure", ())
    assert "ambiguous: other layouts fit as well" in entry.reason


@pytest.mark.spec("ALN-37")
def test_weights_of_paired_modules_say_how_those_of_others_are_laid_out(tmp_path: Path) -> None:
    wide, square = _drawn(5, 7), _drawn(6, 6)
    one = {"0/a/output": X, "0/a/param.w": wide, "0/b/param.w": square}
    other = {"0/a/output": X, "0/a/param.w": wide.T, "0/b/param.w": square.T}
    alignment, _, _ = _proposed(tmp_path, one, other)
    entry = _entry(alignment, "b/param.w")
    assert entry.steps == ("transpose 0 1",)
    assert "but" not in entry.reason


@pytest.mark.spec("ALN-25")
def test_weights_that_are_nearly_one_are_laid_out_by_what_differs_in_them(tmp_path: Path) -> None:
    weight = 1 + 0.1 * _drawn(16)
    pairs = weight.reshape(2, 2, 4).swapaxes(1, 2).reshape(-1)  # halves of heads of 8 side by side
    one = {"0/a/output": X, "0/a/param.weight": weight}
    alignment, _, _ = _proposed(tmp_path, one, {"0/a/output": X, "0/a/param.weight": pairs})
    assert _entry(alignment, "a/param.weight").steps == ("rope_halves 8",)


@pytest.mark.spec("ALN-34")
def test_statistics_alone_tell_that_a_layer_is_constant(tmp_path: Path) -> None:
    layers = {f"0/layers.{i}/output": _drawn(4, 9, seed=i) for i in range(4)}
    wrong = {**layers, "0/layers.3/output": np.zeros((4, 9), np.float32)}
    reference, target = new_archive(tmp_path / "ref.h5", layers), new_archive(tmp_path / "tgt.h5", wrong)
    alignment = propose(reference, target, read_values=False).alignment
    assert "but values of 1 of 4 differ by 1, expected" in _entry(alignment, "layers.{i}").reason


@pytest.mark.spec("ALN-28")
def test_names_alone_pair_arguments_whatever_their_values(tmp_path: Path) -> None:
    one = {"0/a/input.x": Y, "0/a/output": X}
    reference = new_archive(tmp_path / "ref.h5", one)
    target = new_archive(tmp_path / "tgt.h5", {**one, "0/a/input.x": Z})
    alignment = propose(reference, target, by="names").alignment
    assert [entry.text for entry in alignment.entries] == ["a = a"]
    assert alignment.left_over == ()


@pytest.mark.spec("ALN-38")
def test_an_argument_shares_the_reason_of_the_site_that_gave_it(tmp_path: Path) -> None:
    one = {"0/r/output": Z, "0/b/input.cos": Z, "0/b/output": Y}
    alignment, _, _ = _proposed(tmp_path, one, {"0/v/output": Y})
    site, argument = _left(alignment, "r"), _left(alignment, "b/input.cos")
    assert argument.reason == f"it is what r gave: {site.reason}"
    assert argument.is_explained == site.is_explained


@pytest.mark.spec("ALN-38")
@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        pytest.param(-X, "has the values of u times -1", id="sign"),
        pytest.param(X / 2, "has the values of u times 2", id="factor"),
        pytest.param(
            np.where(np.arange(8) < 3, X, -X), "has the magnitudes of u with other signs", id="signs"
        ),
    ],
)
def test_what_only_a_factor_or_signs_are_wrong_of_is_not_explained(
    tmp_path: Path, wrong: Array, reason: str
) -> None:
    one = {"0/a/output": X, "0/b/output": Y, "0/c/output": Z}
    alignment, _, _ = _proposed(tmp_path, one, {"0/u/output": wrong, "0/v/output": Y, "0/w/output": Z})
    left = _left(alignment, "a")
    assert (left.reason, left.is_explained) == (reason, False)


@pytest.mark.spec("ALN-38")
def test_nothing_comes_of_weights_in_a_file_that_has_no_order(tmp_path: Path) -> None:
    parts = [f"layers.{i}.{part}.weight" for i in range(3) for part in ("q", "norm")]
    one = {name: _drawn(4, 9, seed=seed) for seed, name in enumerate(parts)}
    other = {name: array + np.float32("norm" in name) for name, array in one.items()}
    np.savez(tmp_path / "ref.npz", **one)  # type: ignore[arg-type]  # names are keywords
    np.savez(tmp_path / "tgt.npz", **{n.replace("norm", "ln"): a for n, a in other.items()})  # type: ignore[arg-type]
    alignment = propose(open_archive(tmp_path / "ref.npz"), open_archive(tmp_path / "tgt.npz")).alignment
    assert [entry.text for entry in alignment.entries] == ["layers.{i}.q.weight = layers.{i}.q.weight"]
    assert [left.is_explained for left in alignment.left_over] == [False, False]


@pytest.mark.spec("ALN-37")
def test_weights_of_a_file_without_slots_are_fused_too(tmp_path: Path) -> None:
    parts = {
        f"layers.{i}.{n}.weight": _drawn(5, 4, seed=9 * i + j) for i in (0, 1) for j, n in enumerate("qkv")
    }
    other = {
        f"h.{i}.qkv.weight": np.concatenate([parts[f"layers.{i}.{n}.weight"] for n in "qkv"]).T
        for i in (0, 1)
    }
    np.savez(tmp_path / "ref.npz", **parts)  # type: ignore[arg-type]  # names are keywords
    np.savez(tmp_path / "tgt.npz", **other)  # type: ignore[arg-type]
    alignment = propose(open_archive(tmp_path / "ref.npz"), open_archive(tmp_path / "tgt.npz")).alignment
    (entry,) = alignment.entries
    assert entry.target == ("h.{i}.qkv.weight",)
    assert entry.reference == tuple(f"layers.{{i}}.{n}.weight" for n in "qkv")
    assert "but" not in entry.reason


@pytest.mark.spec("ALN-38")
def test_an_unmatched_argument_is_explained_by_its_values(tmp_path: Path) -> None:
    one = {"0/a/output": X, "0/b/input.x": X, "0/b/input.mask": Z, "0/b/output": Y}
    alignment, _, _ = _proposed(tmp_path, one, {"0/u/output": X, "0/v/output": Y})
    known = _left(alignment, "b/input.x")
    assert (known.reason, known.is_explained) == (
        "it holds what a/output holds, which has a counterpart",
        True,
    )
    harmless = _left(alignment, "b/input.mask")
    assert harmless.reason == "no counterpart was found at v, and what comes of it agrees"
    assert harmless.is_explained


@pytest.mark.spec("ALN-38")
def test_an_argument_is_not_explained_where_what_comes_of_it_differs(tmp_path: Path) -> None:
    one = {"0/a/output": X, "0/b/input.mask": Z, "0/b/output": Y}
    alignment, _, _ = _proposed(tmp_path, one, {"0/a/output": X, "0/b/output": Y + 1})
    left = _left(alignment, "b/input.mask")
    assert (left.reason, left.is_explained) == ("no counterpart was found at b", False)


@pytest.mark.spec("ALN-38")
def test_parameters_and_gradients_that_are_missing_are_told(tmp_path: Path) -> None:
    one = {"0/a/output": X, "0/a/grad_output": Z, "0/b/param.weight": Y}
    alignment, _, _ = _proposed(tmp_path, one, {"0/a/output": X})
    for place in ("a/grad_output", "b/param.weight"):
        left = _left(alignment, place)
        assert (left.reason, left.is_explained) == ("no counterpart was found", False)


@pytest.mark.spec("ALN-38")
def test_what_a_later_call_contradicts_is_left_over_with_the_reason(tmp_path: Path) -> None:
    one = {"0/a/output": X, "0/a@1/output": X, "0/b/output": Y}
    other = {"0/a/output": X[None], "0/a@1/output": np.stack([X, Z]), "0/b/output": Y}
    alignment, _, _ = _proposed(tmp_path, one, other)
    left = _left(alignment, "a")
    assert "'squeeze 0': axis 0 has 2 elements, expected 1" in left.reason
    assert not left.is_explained
    assert [entry.text for entry in alignment.entries] == ["b = b"]


@pytest.mark.spec("ALN-38")
def test_steps_and_calls_that_one_side_has_alone_are_told(tmp_path: Path) -> None:
    one = {"0/a/output": X, "0/a@1/output": Z, "1/a/output": Y}
    alignment, _, _ = _proposed(tmp_path, one, {"0/a/output": X})
    said = {(left.reason, left.is_explained) for left in alignment.left_over if left.places == ("a/output",)}
    assert said == {("the target has no step 1", True), ("the target has fewer calls", False)}
