"""Proposals: two runs of tensors drawn here, the one laid out and named as ports do; what is found."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tensorcap import compare
from tensorcap.alignment import Alignment, resolve
from tensorcap.alignment.match import propose
from tensorcap.alignment.names import Rules, plain_name
from tensorcap_formats.archive import Archive
from tensorcap_formats.dtypes import Array
from tensorcap_formats.keys import Key
from tensorcap_formats.open import open_archive
from tests.support.archives import new_archive
from tests.support.floats import bfloat16

Tensors = Mapping[str, Array]
Renaming = Callable[[str], str]

LAYERS = 3
S, D, KV, F = 6, 16, 8, 24
_PARTS = (
    "norm_in",
    "attn.q",
    "attn.k",
    "attn.v",
    "attn.o",
    "attn",
    "norm_out",
    "mlp.up",
    "mlp.down",
    "mlp",
    "",
)


def _rng() -> np.random.Generator:
    return np.random.default_rng(7)


def _run(layers: int = LAYERS) -> dict[str, Array]:
    """A decoder's results by site, in order; a composite gives what its last child gave."""
    rng = _rng()
    widths = {"attn.k": KV, "attn.v": KV, "mlp.up": F}
    found = {"embed": _drawn(rng, D)}
    for layer in range(layers):
        for part in _PARTS:
            site = f"layers.{layer}.{part}".rstrip(".")
            last = {"attn": "attn.o", "mlp": "mlp.down"}.get(part)
            found[site] = found[f"layers.{layer}.{last}"] if last else _drawn(rng, widths.get(part, D))
    found["norm"] = _drawn(rng, D)
    found["head"] = _drawn(rng, 40)
    return found


def _drawn(rng: np.random.Generator, width: int) -> Array:
    return (rng.standard_normal((1, S, width)) * rng.uniform(0.5, 2)).astype(np.float32)


def _archive(path: Path, tensors: Tensors, *, modules: Iterable[str] | None = None, **run: Any) -> Archive:
    sites = list(dict.fromkeys(name.split("/")[0] for name in tensors)) if modules is None else list(modules)
    listed = [{"path": site, "class": _class(site), "parameters": {}} for site in sites]
    keyed = {}
    for name, array in tensors.items():
        rank, _, rest = name.rpartition("|")
        site, _, slot = rest.partition("/")
        keyed[Key(site, slot or "output", rank=int(rank or 0)).text] = array
    return new_archive(path, keyed, run={"modules": listed, **run})


def _class(site: str) -> str:
    """A class that tells norms, embeddings and linear modules apart."""
    last = site.rpartition(".")[2]
    kinds = {
        "norm_in": "Norm",
        "norm_out": "Norm",
        "ln_a": "Norm",
        "ln_b": "Norm",
        "norm": "Norm",
        "last": "Norm",
    }
    kinds |= {"embed": "Embedding", "tok": "Embedding", "attn": "Attention", "mixer": "Attention"}
    kinds |= {"mlp": "Mlp", "ff": "Mlp", "layers": "", "blocks": ""}
    return kinds.get(last, "" if last.isdigit() else "Linear")


def _proposed(
    tmp_path: Path, one: Tensors, other: Tensors, **options: Any
) -> tuple[Alignment, dict[str, str]]:
    """The alignment, and the target's sites behind each of the reference's, with the steps."""
    reference, target = _archive(tmp_path / "ref.h5", one), _archive(tmp_path / "tgt.h5", other)
    alignment = propose(reference, target, **options).alignment
    return alignment, _found(alignment, reference, target)


def _found(alignment: Alignment, reference: Archive, target: Archive) -> dict[str, str]:
    found = {}
    for link in resolve(alignment, reference, target).links:
        sites = "+".join(dict.fromkeys(record.key.site for record in link.target))
        for record in link.reference:
            found[record.key.site] = "; ".join([sites, *link.entry.steps])
    return found


def _unexplained(alignment: Alignment) -> list[str]:
    return [place for left in alignment.left_over if not left.is_explained for place in left.places]


def _renamed(tensors: Tensors, rename: Renaming) -> dict[str, Array]:
    return {rename(site): array for site, array in tensors.items()}


_WORDS = {
    "embed": "tok", "layers": "blocks", "norm_in": "ln_a", "attn": "mixer", "q": "wa", "k": "wb", "v": "wc",
    "o": "wd", "norm_out": "ln_b", "mlp": "ff", "up": "w1", "down": "w2", "norm": "last", "head": "out",
}  # fmt: skip


def _worded(site: str) -> str:
    return ".".join(_WORDS.get(part, part) for part in site.split("."))


def _noisy(tensors: Tensors, relative: float) -> dict[str, Array]:
    """The same with noise; equal tensors stay equal."""
    rng, made = np.random.default_rng(1), {}
    for array in tensors.values():
        if id(array) not in made:
            noise = 1 + relative * rng.standard_normal(array.shape)
            made[id(array)] = (array * noise).astype(np.float32)
    return {site: made[id(array)] for site, array in tensors.items()}


@pytest.mark.spec("ALN-20")
@pytest.mark.parametrize("noise", [0.0, 1e-6, 2e-3])
def test_a_run_under_other_names_is_found_with_composites_and_leaves_apart(
    tmp_path: Path, noise: float
) -> None:
    one = _run()
    alignment, found = _proposed(tmp_path, one, _renamed(_noisy(one, noise), _worded))
    assert found == {site: _worded(site) for site in one}
    assert alignment.left_over == ()
    assert {entry.evidence for entry in alignment.entries} == {"values"}


@pytest.mark.spec("ALN-20")
def test_a_bfloat16_target_is_found(tmp_path: Path) -> None:
    one = _run()
    noisy = {site: bfloat16(array) for site, array in _noisy(one, 2e-3).items()}
    _, found = _proposed(tmp_path, one, _renamed(noisy, _worded))
    assert found == {site: _worded(site) for site in one}


@pytest.mark.spec("ALN-130")
@pytest.mark.parametrize("noise", [0.0, 2e-3])
def test_a_layer_whose_shapes_differ_has_steps_of_its_own(tmp_path: Path, noise: float) -> None:
    one = _run()
    other = _renamed(_noisy(one, noise), _worded)
    for site in ("layers.1.mlp", "layers.1.mlp.down"):  # as a mixture of experts in every other layer
        one[site] = one[site][0]
    _, found = _proposed(tmp_path, one, other)
    own = {"layers.1.mlp": "blocks.1.ff; squeeze 0", "layers.1.mlp.down": "blocks.1.ff.w2; squeeze 0"}
    assert found == {site: _worded(site) for site in one} | own


@pytest.mark.spec("ALN-20")
def test_the_reason_says_how_many_agree_how_closely_and_what_came_next(tmp_path: Path) -> None:
    one = _run()
    alignment, _ = _proposed(tmp_path, one, _renamed(_noisy(one, 1e-6), _worded))
    (entry,) = (e for e in alignment.entries if e.reference == ("layers.{i}.attn.q",))
    assert entry.target == ("blocks.{i}.mixer.wa",)
    assert entry.variables == {"i": ("0", "1", "2")}
    assert entry.reason.startswith("values: 3 of 3 agree within ")
    assert ", next best 0." in entry.reason


@pytest.mark.spec("ALN-21")
def test_nothing_depends_on_the_order_in_which_modules_are_listed(tmp_path: Path) -> None:
    one = _run()
    other = _renamed(_noisy(one, 2e-3), _worded)
    texts = []
    for seed in range(3):
        shuffle = np.random.default_rng(seed).permutation
        sides = [
            _archive(tmp_path / f"{name}{seed}.h5", side, modules=shuffle(list(side)).tolist())
            for name, side in (("ref", one), ("tgt", other))
        ]
        alignment = propose(*sides).alignment
        texts.append(
            ([(e.text, dict(e.variables), e.reason) for e in alignment.entries], alignment.left_over)
        )
    assert texts[0] == texts[1] == texts[2]


@pytest.mark.spec("ALN-22")
def test_layers_that_count_from_one_are_found_by_an_offset(tmp_path: Path) -> None:
    def later(site: str) -> str:
        return ".".join(str(int(p) + 1) if p.isdigit() else p for p in site.split("."))

    one = _run()
    alignment, found = _proposed(tmp_path, one, _renamed(_noisy(one, 1e-6), later))
    assert found == {site: later(site) for site in one}
    assert "layers.{i} = layers.{i+1}" in {entry.text for entry in alignment.entries}


@pytest.mark.spec("ALN-22")
def test_two_kinds_of_layers_are_two_sets_of_indices(tmp_path: Path) -> None:
    def kinds(site: str) -> str:
        kind = "full" if ".1." in site else "local"
        return _worded(site).replace("mixer", kind)

    one = _run(4)
    alignment, found = _proposed(tmp_path, one, _renamed(one, kinds))
    assert found == {site: kinds(site) for site in one}
    indices = {
        e.target[0]: e.variables.get("i") for e in alignment.entries if e.reference[0].endswith("attn.q")
    }
    assert indices == {"blocks.{i}.local.wa": ("0", "2", "3"), "blocks.{i}.full.wa": ("1",)}


@pytest.mark.spec("ALN-22")
def test_a_layer_that_repeats_another_one_is_paired_by_its_number_even_without_an_order(
    tmp_path: Path,
) -> None:
    rng = _rng()
    layers = [rng.standard_normal((2, 3, 8)) for _ in range(4)]
    one = {f"layers.{i}": layers[i] for i in range(4)}
    other = {f"blocks.{i}": layers[j] for i, j in enumerate((0, 1, 1, 3))}
    reference, target = (
        new_archive(tmp_path / file, tensors, ordered=False)
        for file, tensors in (("r.h5", one), ("t.h5", other))
    )
    (entry,) = propose(reference, target, by="values").alignment.entries
    assert (entry.reference, entry.target) == (("layers.{i}",), ("blocks.{i}",))
    assert entry.variables == {"i": ("0", "1", "2", "3")}
    assert "values: 3 of 4 agree" in entry.reason
    assert "but values of 1 of 4 differ" in entry.reason


@pytest.mark.spec("ALN-23")
def test_all_names_replaced_by_others_without_any_order_are_found_by_values(tmp_path: Path) -> None:
    rng = _rng()
    one = {f"w{i}": rng.standard_normal((4, 8)).astype(np.float32) for i in range(30)}
    names = {f"w{i}": f"r{(i * 7919) % 1009}" for i in range(30)}
    np.savez(tmp_path / "ref.npz", **one)  # type: ignore[arg-type]  # names are keywords
    np.savez(tmp_path / "tgt.npz", **{names[n]: (a * 1.0000005).astype(np.float32) for n, a in one.items()})  # type: ignore[arg-type]  # names are keywords
    reference, target = open_archive(tmp_path / "ref.npz"), open_archive(tmp_path / "tgt.npz")
    assert _found(propose(reference, target, by="values").alignment, reference, target) == names


def _without(tensors: Tensors, *parts: str) -> dict[str, Array]:
    return {site: a for site, a in tensors.items() if site.partition(".")[2].partition(".")[2] not in parts}


_Q, _K, _V = (np.arange(S * n, dtype=np.float32).reshape(1, S, n) for n in (D, KV, KV))


@pytest.mark.spec("ALN-24")
@pytest.mark.parametrize(
    ("fuse", "steps"),
    [
        pytest.param(lambda q, k, v: np.concatenate([q, k, v], -1), ("split 2 16,8,8",), id="block"),
        pytest.param(lambda q, k, v: np.concatenate([v, k, q], -1), ("split 2 8,8,16",), id="other-order"),
        pytest.param(
            lambda q, k, v: np.concatenate([x.reshape(1, S, 2, -1) for x in (q, k, v)], -1).reshape(1, S, -1),
            ('rearrange "a b (g x) -> a b g x" g=2', "split 3 8,4,4", 'rearrange "a b g x -> a b (g x)"'),
            id="grouped-by-kv-head",
        ),
    ],
)
def test_a_fused_projection_is_found_with_its_layout(
    tmp_path: Path, fuse: Callable[..., Array], steps: tuple[str, ...]
) -> None:
    one = _run()
    other = _without(one, "attn.q", "attn.k", "attn.v")
    ordered = {}
    for site, array in other.items():
        if site.endswith(".attn.o"):
            parts = [one[site.replace("attn.o", f"attn.{n}")] for n in "qkv"]
            ordered[site.replace("attn.o", "attn.qkv")] = fuse(*parts)
        ordered[site] = array
    alignment, found = _proposed(tmp_path, one, _noisy(ordered, 1e-6))
    for layer in range(LAYERS):
        for name in "qkv":
            assert found[f"layers.{layer}.attn.{name}"] == "; ".join([f"layers.{layer}.attn.qkv", *steps])
    assert _unexplained(alignment) == []


@pytest.mark.spec("ALN-24")
@pytest.mark.parametrize("axis", [0, 1])
def test_layers_stacked_in_one_tensor_are_taken_apart_on_the_right_axis(tmp_path: Path, axis: int) -> None:
    rng = _rng()
    one = {f"layers.{i}": rng.standard_normal((3, 5, 8)).astype(np.float32) for i in range(3)}  # L equals B
    alignment, found = _proposed(tmp_path, one, {"scan": np.stack(list(one.values()), axis)})
    assert found == dict.fromkeys(one, f"scan; unstack {axis}")
    assert alignment.entries[0].reference == ("layers.0", "layers.1", "layers.2")


@pytest.mark.spec("ALN-24")
def test_experts_that_are_stacked_in_each_layer_are_found(tmp_path: Path) -> None:
    rng = _rng()
    one = {
        f"layers.{i}.experts.{e}.w": rng.standard_normal((5, 8)).astype(np.float32)
        for i in range(2)
        for e in range(4)
    }
    other = {f"l.{i}.moe": np.stack([one[f"layers.{i}.experts.{e}.w"].T for e in range(4)]) for i in range(2)}
    alignment, found = _proposed(tmp_path, one, other)
    assert found == {site: f"l.{site.split('.')[1]}.moe; unstack 0; transpose 0 1" for site in one}
    assert alignment.entries[0].target == ("l.{i}.moe",)


@pytest.mark.spec("ALN-24")
def test_a_list_of_stages_one_of_which_has_one_block_is_no_stack(tmp_path: Path) -> None:
    rng = _rng()
    one, other, right = {}, {}, {}
    for number, (stage, block) in enumerate([(0, 0), (1, 0), (1, 1), (1, 2)]):
        for part, cell in (("up", 0), ("down", 1)):
            site, partner = f"stages.{stage}.blocks.{block}.{part}.act", f"early.{number}.cells.{cell}"
            one[site] = other[partner] = _drawn(rng, D)
            one[f"{site}/input.input"], other[f"{partner}/input.x"] = _drawn(rng, D), _drawn(rng, D)
            right[site] = partner
    _, found = _proposed(tmp_path, one, other)
    assert found == right


@pytest.mark.spec("ALN-25")
@pytest.mark.parametrize(
    ("lay", "steps"),
    [
        pytest.param(lambda x: x[0], "unsqueeze 0", id="no-batch"),
        pytest.param(lambda x: x.swapaxes(1, 2), 'rearrange "1 b c -> 1 c b"', id="transposed"),
        pytest.param(
            lambda x: x.reshape(1, S, 4, -1).swapaxes(1, 2), 'rearrange "1 b c d -> 1 c (b d)"', id="heads"
        ),
    ],
)
def test_another_layout_is_found_by_values(tmp_path: Path, lay: Callable[[Array], Array], steps: str) -> None:
    one = _run(2)
    other = {
        _worded(s): lay(a) if s.endswith((".q", ".k", ".v")) else a for s, a in _noisy(one, 1e-6).items()
    }
    _, found = _proposed(tmp_path, one, other)
    assert found["layers.1.attn.k"] == f"blocks.1.mixer.wb; {steps}"
    assert found["layers.1.attn.o"] == "blocks.1.mixer.wd"


@pytest.mark.spec("ALN-25")
def test_images_with_channels_last_are_found_though_two_axes_are_equal(tmp_path: Path) -> None:
    x = _rng().standard_normal((2, 3, 8, 8)).astype(np.float32)
    _, found = _proposed(tmp_path, {"conv": x}, {"conv": np.moveaxis(x, 1, -1).copy()})
    assert found == {"conv": 'conv; rearrange "a b c d -> a d b c"'}


@pytest.mark.spec("ALN-25")
def test_a_square_weight_is_transposed_by_its_values_and_not_left_as_it_is(tmp_path: Path) -> None:
    w = _rng().standard_normal((6, 6)).astype(np.float32)
    _, found = _proposed(tmp_path, {"c_proj": w}, {"c_proj": w.T.copy()})
    assert found == {"c_proj": "c_proj; transpose 0 1"}


@pytest.mark.spec("ALN-25")
def test_interleaved_rotary_halves_are_found(tmp_path: Path) -> None:
    x = _rng().standard_normal((1, S, 4 * 8)).astype(np.float32)
    pairs = x.reshape(1, S, 4, 2, 4).swapaxes(-1, -2).reshape(x.shape)  # halves (0..3 | 4..7) side by side
    _, found = _proposed(tmp_path, {"q": x}, {"q": pairs})
    assert found == {"q": "q; rope_halves 8"}


@pytest.mark.spec("ALN-25")
def test_a_fused_projection_that_is_interleaved_on_one_side_only_is_found(tmp_path: Path) -> None:
    parts = _rng().standard_normal((1, S, 3, 4, 5)).astype(np.float32)  # q, k, v; heads; elements
    one, other = parts.reshape(1, S, -1), parts.swapaxes(2, 3).reshape(S, -1)
    _, found = _proposed(tmp_path, {"c_attn": one}, {"c_attn": other})
    assert found == {"c_attn": 'c_attn; unsqueeze 0; rearrange "a b (g p x) -> a b (p g x)" g=4 p=3'}


@pytest.mark.spec("ALN-25")
def test_elements_in_an_order_that_no_layout_explains_are_told(tmp_path: Path) -> None:
    x = _rng().standard_normal((1, S, 24)).astype(np.float32)
    shuffled = x[..., np.random.default_rng(0).permutation(24)][0]
    alignment, found = _proposed(tmp_path, {"a": x}, {"b": shuffled})
    assert found == {"a": "b; unsqueeze 0"}
    assert "but their elements are in different orders and no layout brings them together" in (
        alignment.entries[0].reason
    )
    (tmp_path / "turned").mkdir()
    alignment, found = _proposed(tmp_path / "turned", {"a": x}, {"b": shuffled.T})
    assert found == {}
    assert _unexplained(alignment) == ["a", "b"]


@pytest.mark.spec("ALN-25")
def test_a_layout_that_values_cannot_tell_is_reported_and_not_chosen(tmp_path: Path) -> None:
    x = np.full((4, 4, 4), 2.0, np.float32)
    x[0, 0, 0] = 1.0  # equal under any exchange of axes
    y = x.reshape(2, 2, 4, 4)
    alignment, found = _proposed(tmp_path, {"a": x}, {"a": np.moveaxis(y, 0, -1).copy()})
    assert found == {}
    assert _unexplained(alignment) == ["a", "a"]


@pytest.mark.spec("ALN-26")
def test_shards_of_ranks_are_joined_replicas_are_kept_once(tmp_path: Path) -> None:
    one = _run(1)
    other: dict[str, Array] = {}
    for site, array in one.items():
        for rank in range(4):
            place = f"{rank}|{_worded(site)}"
            if site.endswith(".q"):
                other[place] = np.split(array, 4, -1)[rank]
            elif site.endswith((".k", ".v")):
                other[place] = np.split(array, 2, -1)[rank // 2]  # two KV heads, each on two ranks
            else:
                other[place] = array
    _, found = _proposed(tmp_path, one, other)
    assert found["layers.0.attn.q"] == "blocks.0.mixer.wa; concat 2"
    assert found["layers.0.attn.k"] == "blocks.0.mixer.wb; dereplicate 2; concat 2"
    assert found["layers.0.mlp.up"] == "blocks.0.ff.w1"


@pytest.mark.spec("ALN-26")
def test_partial_sums_of_ranks_are_added(tmp_path: Path) -> None:
    one = _run(1)
    part = _rng().standard_normal((1, S, D)).astype(np.float32)
    other: dict[str, Array] = {}
    for site, array in one.items():
        is_partial = site == "layers.0.attn.o"
        other[f"0|{site}"] = array - part if is_partial else array
        other[f"1|{site}"] = part if is_partial else array
    alignment, found = _proposed(tmp_path, one, other)
    assert found["layers.0.attn.o"] == "layers.0.attn.o; sum"
    assert found["layers.0.mlp.up"] == "layers.0.mlp.up"
    assert _unexplained(alignment) == []


@pytest.mark.spec("ALN-27")
def test_a_target_that_is_wrong_from_some_layer_on_is_found_by_what_came_before(tmp_path: Path) -> None:
    one = _run()
    rng = np.random.default_rng(3)
    wrong = {
        site: array if site == "embed" or ".0" in site else _drawn(rng, array.shape[-1])
        for site, array in one.items()
    }
    for layer in range(1, LAYERS):
        for whole, last in (("attn", "attn.o"), ("mlp", "mlp.down")):
            wrong[f"layers.{layer}.{whole}"] = wrong[f"layers.{layer}.{last}"]
    _, found = _proposed(tmp_path, one, _renamed(wrong, _worded))
    assert found == {site: _worded(site) for site in one}


@pytest.mark.spec("ALN-27")
def test_a_target_that_is_wrong_everywhere_is_found_by_order_and_shapes(tmp_path: Path) -> None:
    one = _run()
    rng = np.random.default_rng(3)
    wrong = {site: _drawn(rng, array.shape[-1]) for site, array in one.items()}
    alignment, found = _proposed(tmp_path, one, _renamed(wrong, _worded))
    assert found == {site: _worded(site) for site in one}
    assert {entry.evidence for entry in alignment.entries} == {"structure"}


@pytest.mark.spec("ALN-27")
def test_a_tensor_that_differs_is_no_counterpart_where_what_comes_of_it_agrees(tmp_path: Path) -> None:
    one = _run()
    other = _renamed(one, _worded)
    rng = np.random.default_rng(3)
    for layer in range(LAYERS):
        other[f"blocks.{layer}.mixer.wa"] = _drawn(rng, D)  # another tensor of q's shape, in q's place
    alignment, found = _proposed(tmp_path, one, other)
    assert not any(site.endswith(".q") for site in found)
    (left,) = (left for left in alignment.left_over if left.side == "reference")
    assert left.places == tuple(f"layers.{i}.attn.q" for i in range(LAYERS))
    assert left.reason == "nothing in the target has its values, and what comes of them agrees"


@pytest.mark.spec("ALN-28")
def test_equal_names_win_over_values_and_the_conflict_is_reported(tmp_path: Path) -> None:
    one = _run()
    swapped = {"k": "v", "v": "k"}
    other = {
        ".".join(swapped.get(part, part) for part in site.split(".")): array for site, array in one.items()
    }
    alignment, found = _proposed(tmp_path, one, other)
    assert found == {site: site for site in one}
    (entry,) = (e for e in alignment.entries if e.reference == ("layers.{i}.attn.k",))
    assert entry.evidence == "name"
    assert "but the values are those of layers.{0}.attn.v" in entry.reason


@pytest.mark.spec("ALN-28")
def test_equal_names_belong_together_even_if_no_layout_fits(tmp_path: Path) -> None:
    one = _run(1)
    other = {**one, "head": one["head"][..., :33]}
    alignment, found = _proposed(tmp_path, one, other)
    assert found["head"] == "head"
    (entry,) = (e for e in alignment.entries if e.reference == ("head",))
    assert "shapes [1, 6, 40] and [1, 6, 33] differ" in entry.reason


@pytest.mark.spec("ALN-29")
def test_what_is_contested_to_the_end_is_reported_with_its_candidates(tmp_path: Path) -> None:
    rng = _rng()
    x, y = (rng.standard_normal((1, S, D)).astype(np.float32) for _ in range(2))
    one = {"start": x, "a": _drawn(rng, D)}
    other = {"begin": x, "b": _drawn(rng, D), "c": _drawn(rng, D)}
    alignment, found = _proposed(tmp_path, one, other, by="values")
    assert found == {"start": "begin"}
    assert _unexplained(alignment) == ["a", "b", "c"]
    del y


@pytest.mark.spec("ALN-29")
def test_a_dump_without_order_has_the_last_layer_though_the_model_hands_its_result_on(tmp_path: Path) -> None:
    """Names count nothing here: the last layer's result is the encoder's and the model's, too."""
    rng, one = _rng(), {}
    for stage, layers in enumerate((1, 2)):
        for layer in range(layers):
            for part in ("conv", "norm", ""):
                one[f"layers.blocks.{stage}.{layer}.{part}".rstrip(".")] = _drawn(rng, D)
    dump: dict[str, Any] = {
        f"stage{site[14]}.block{site[16]}.{site[18:] or 'out'}": array for site, array in one.items()
    }
    one["layers.blocks"] = one["layers"] = one["layers.blocks.1.1"]
    np.savez(tmp_path / "dump.npz", **dump)
    reference = _archive(tmp_path / "ref.h5", one)
    alignment = propose(reference, open_archive(tmp_path / "dump.npz")).alignment
    assert _unexplained(alignment) == []
    found = _found(alignment, reference, open_archive(tmp_path / "dump.npz"))
    assert found["layers.blocks.1.1"] == "stage1.block1.out"
    (entry,) = (entry for entry in alignment.entries if "stage1.block1.out" in entry.text)
    assert entry.evidence == "structure"
    assert "others have the same, so that it makes no difference which" in entry.reason


@pytest.mark.spec("ALN-29")
def test_what_was_never_called_and_what_repeats_values_is_explained(tmp_path: Path) -> None:
    one = _run(1)
    both = {}
    for site, array in one.items():
        both[site] = array
        if site == "layers.0.mlp":
            both["layers.0.dropout"] = array  # passes on what it was given
    points = [{"site": "vision", "status": "never-called", "calls": 0}]
    reference = _archive(tmp_path / "ref.h5", both, modules=[*both, "vision"], points=points)
    alignment = propose(reference, _archive(tmp_path / "tgt.h5", one)).alignment
    told = {left.places: left.reason for left in alignment.left_over}
    assert told[("vision",)] == "never called"
    assert told[("layers.0.dropout",)].startswith("it has the values of layers.{0}.mlp")
    assert _unexplained(alignment) == []


@pytest.mark.spec("ALN-29")
@pytest.mark.parametrize("is_right", [True, False])
def test_a_module_that_the_other_side_never_calls_is_reported_as_such(tmp_path: Path, is_right: bool) -> None:
    rng, one = np.random.default_rng(99), {}
    for site, array in _run().items():
        if site == "layers.1.mlp.up":
            one["model.layers.1.mlp.gate"] = _drawn(rng, D)
        one[f"model.{site}"] = array
    other = {
        site: array if is_right or site < "layers.1" else array + 0.3 * _drawn(rng, array.shape[-1])
        for site, array in _run().items()
    }
    points = [{"site": "layers.1.mlp.gate", "status": "never-called", "calls": 0, "reason": "fused"}]
    reference = _archive(tmp_path / "ref.h5", one)
    target = _archive(tmp_path / "tgt.h5", other, modules=[*other, "layers.1.mlp.gate"], points=points)
    alignment = propose(reference, target).alignment
    left = next(left for left in alignment.left_over if "model.layers.1.mlp.gate" in left.places)
    assert left.reason.startswith("the target never calls the module of this name (fused)")
    assert left.is_explained is is_right


@pytest.mark.spec("ALN-29")
def test_a_result_that_the_target_only_hands_on_is_found_among_its_arguments(tmp_path: Path) -> None:
    one = {}
    for site, array in _run().items():
        one[site] = array
        if site.endswith("mlp.up"):
            one[site.replace("up", "act")] = np.maximum(array, 0)
    other: dict[str, Array] = {}
    for site, array in _renamed(one, _worded).items():
        if not site.endswith("act"):
            if site.endswith("w2"):
                other[f"{site}/input.x"] = one[f"layers.{site.split('.')[1]}.mlp.act"][0]
            other[site] = array
    alignment, found = _proposed(tmp_path, one, other)
    assert found["layers.2.mlp.act"] == "blocks.2.ff.w2; unsqueeze 0"
    assert "layers.{i}.mlp.act/output = blocks.{i}.ff.w2/input.x" in {e.text for e in alignment.entries}
    assert alignment.left_over == ()


@pytest.mark.spec("ALN-28")
def test_names_that_only_rules_make_equal_say_so(tmp_path: Path) -> None:
    rules = Rules(functions=(lambda site: site.replace("blocks", "layers"),))
    one = {"layers.0.mlp": _drawn(_rng(), D), "head": _drawn(_rng(), D)}
    other = {"blocks.0.mlp": _drawn(np.random.default_rng(1), D), "head": one["head"]}
    alignment, found = _proposed(tmp_path, one, other, rules=rules)
    assert found == {"layers.0.mlp": "blocks.0.mlp", "head": "head"}
    assert {e.target[0]: e.evidence for e in alignment.entries} == {"blocks.{i}.mlp": "rule", "head": "name"}


@pytest.mark.spec("ALN-29")
def test_constant_tensors_prove_nothing(tmp_path: Path) -> None:
    rng = _rng()
    one = {"a": np.ones((4, 8), np.float32), "z": _drawn(rng, D)}
    other = {"b": np.ones((4, 8), np.float32), "c": np.ones((4, 8), np.float32), "y": one["z"]}
    alignment, found = _proposed(tmp_path, one, other)
    assert found == {"z": "y"}
    assert sorted(_unexplained(alignment)) == ["a", "b", "c"]


@pytest.mark.parametrize(
    ("site", "name"),
    [
        ("module._orig_mod.layers.2.mlp", "layers.2.mlp"),
        ("_orig_mod.module.layers.2.attn", "layers.2.attn"),
        ("base_model.model.model.layers.0.mlp", "model.layers.0.mlp"),
        ("submodule.fc", "submodule.fc"),
        ("model.layers.1._orig_mod.mlp", "model.layers.1.mlp"),
        ("layers.layers.0.o_proj.o_proj", "layers.0.o_proj"),
    ],
)
def test_wrappers_are_left_out_of_names(site: str, name: str) -> None:
    assert plain_name(site) == name


def test_names_alone_need_no_values(tmp_path: Path) -> None:
    one = _run()
    wrapped = _renamed(_noisy(one, 3.0), lambda site: f"module.{site}")
    alignment, found = _proposed(tmp_path, one, wrapped, by="names", read_values=False)
    assert found == {site: f"module.{site}" for site in one}
    assert {entry.evidence for entry in alignment.entries} == {"name"}


@pytest.mark.spec("ALN-301")
@pytest.mark.parametrize("grows", [True, False], ids=["cache", "second-result"])
def test_what_a_cache_holds_is_no_pair_of_what_one_step_makes(tmp_path: Path, grows: bool) -> None:
    rng = np.random.default_rng(3)
    keys, mixed = rng.standard_normal((1, S, D), np.float32), rng.standard_normal((1, S, D), np.float32)
    new_key, new = keys[:, :1] + 1, mixed[:, :1] + 1
    kept = np.concatenate((keys, new_key), 1) if grows else new_key
    one = {"0/k/output": keys, "0/out/output": mixed, "1/k/output": new_key, "1/out/output": new}
    other = {
        "0/mix/output.0": mixed,
        "0/mix/output.1": keys,
        "1/mix/output.0": new,
        "1/mix/output.1": kept,
    }
    reference = new_archive(tmp_path / "ref.h5", one)
    target = new_archive(tmp_path / "tgt.h5", other)
    entries = propose(reference, target).alignment.entries
    assert any("mix/output.1" in entry.target[0] for entry in entries) is not grows


@pytest.mark.spec("ALN-302")
@pytest.mark.parametrize("is_sum", [True, False], ids=["sum", "term"])
def test_what_is_handed_on_as_a_sum_is_no_pair_of_one_of_its_terms(tmp_path: Path, is_sum: bool) -> None:
    rng = np.random.default_rng(5)
    start, words, end, other = (_drawn(rng, D) for _ in range(4))
    places = 3 + _drawn(rng, D)
    summed = words + places if is_sum else 1.5 * words
    one = {"first": start, "words": words, "layer/input.x": words + places, "layer": end}
    target = summed + np.float32(0.01)
    two = {"first": start, "both": target, "layer/input.x": target, "layer": other}
    _, found = _proposed(tmp_path, one, two, without={"scaled_values"})
    assert (found.get("words") == "both") is not is_sum


@pytest.mark.spec("ALN-25", "CMP-70")
@pytest.mark.parametrize("is_reference", [True, False])
@pytest.mark.parametrize("site", ["layers.0.attn.q", "head"])
def test_a_damaged_tensor_is_paired_by_what_else_is_known(
    tmp_path: Path, site: str, *, is_reference: bool
) -> None:
    one = _run()
    other = {name: x.transpose(0, 2, 1).copy() for name, x in _noisy(one, 1e-6).items()}
    archives = [
        _archive(tmp_path / "ref.zarr", one),
        _archive(tmp_path / "tgt.zarr", _renamed(other, _worded)),
    ]
    damaged = archives[0 if is_reference else 1].path / "steps" / "0"
    (chunk,) = (damaged / (site if is_reference else _worded(site)) / "output" / "c").rglob("0/0/0")
    chunk.write_bytes(chunk.read_bytes()[:-1])
    found = compare(*(archive.path for archive in archives))
    assert [(pair.key, pair.status) for pair in found.pairs if not pair.is_green] == [
        (f"0/{site}/output", "unreadable")
    ]
    assert found.exit_status == 3
