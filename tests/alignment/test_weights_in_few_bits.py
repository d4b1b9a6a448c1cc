"""Modules and operations of a graph without names, behind quantised layers: weights and numbers pair them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tensorcap.alignment import Alignment, Entry, resolve
from tensorcap.alignment.match import propose
from tensorcap.comparison import compare
from tensorcap_formats.archive import Archive
from tensorcap_formats.dtypes import Array
from tensorcap_formats.keys import Key
from tensorcap_formats.open import open_archive
from tests.support.archives import new_archive

LAYERS = 3
PARTS = ("q", "k", "up")
RNG = np.random.default_rng(5)
WEIGHTS = {f"layers.{i}.{part}": RNG.standard_normal((24, 16)) for i in range(LAYERS) for part in PARTS}
RESULTS = {site: RNG.standard_normal((6, 24)) for site in WEIGHTS}
GIVEN = {site: RNG.standard_normal((6, 16)) for site in WEIGHTS}


def noisy(values: Array, relative: float) -> Array:
    """Values so far off that statistics prove nothing."""
    off = RNG.standard_normal(values.shape) * values.std()
    made: Array = (values + relative * off).astype(np.float32)
    return made


def in_bits(weight: Array, bits: int, times: float = 1.0) -> tuple[Array, Array]:
    """A weight in whole numbers, as floats, and its step."""
    step = np.abs(weight).max() / (2 ** (bits - 1) - 1) * times
    return (np.rint(weight / step * times) * step).astype(np.float32), np.full((1, 1), step, np.float32)


def archive(path: Path, tensors: Mapping[str, Array], **settings: Any) -> Archive:
    sites = dict.fromkeys(name.partition("/")[0] for name in tensors if ":" not in name)
    shapes = {name.partition("/")[0]: a.shape for name, a in tensors.items() if name.endswith("param.weight")}
    modules = [
        {
            "path": site,
            "class": "",
            "parameters": {"weight": {"shape": [*shapes[site]], "dtype": "float32"}}
            if site in shapes
            else {},
            "settings": settings if site in shapes else {},
        }
        for site in sites
    ]
    keyed = {
        Key(name.partition("/")[0], name.partition("/")[2]).text: np.asarray(a, np.float32)
        for name, a in tensors.items()
    }
    return new_archive(path, keyed, run={"modules": modules})


def runs(path: Path, *, bits: int = 8, times: Mapping[str, float] | None = None) -> tuple[Archive, Archive]:
    """A run, and a graph with its layers as `linear`, `linear_1`, …, those of a block the other way round."""
    ours: dict[str, Array] = {}
    theirs: dict[str, Array] = {}
    order = [f"layers.{i}.{part}" for i in range(LAYERS) for part in PARTS[::-1]]
    for number, site in enumerate(order):
        name = f"linear_{number}" if number else "linear"
        weight, step = in_bits(WEIGHTS[site], bits, (times or {}).get(site, 1.0))
        theirs |= {f"{name}/param.weight": weight, f"{name}/param.weight_step": step}
        theirs |= {f"{name}/input.0": noisy(GIVEN[site], 0.001), f"{name}/output": noisy(RESULTS[site], 0.4)}
    for site in WEIGHTS:
        ours |= {f"{site}/param.weight": WEIGHTS[site], f"{site}/input.x": GIVEN[site]}
        ours[f"{site}/output"] = RESULTS[site]
    return archive(path / "ref.h5", ours), archive(path / "tgt.h5", theirs, dequantised=["weight"])


def found(reference: Archive, target: Archive) -> dict[str, str]:
    """The target's site behind each result of the reference."""
    links = resolve(propose(reference, target).alignment, reference, target).links
    outputs = [link for link in links if link.reference[0].key.slot == "output"]
    return {link.reference[0].key.site: link.target[0].key.site for link in outputs}


EXPECTED = {
    f"layers.{i}.{part}": "linear" if not (number := len(PARTS) * i + place) else f"linear_{number}"
    for i in range(LAYERS)
    for place, part in enumerate(PARTS[::-1])
}


@pytest.mark.spec("ALN-330")
@pytest.mark.parametrize("bits", [8, 4])
def test_layers_without_names_are_known_by_their_weights(tmp_path: Path, bits: int) -> None:
    assert found(*runs(tmp_path, bits=bits)) == EXPECTED


@pytest.mark.spec("ALN-331")
def test_a_wrong_step_is_held_against_the_layer_that_is_left(tmp_path: Path) -> None:
    reference, target = runs(tmp_path, times={"layers.1.up": 1.5, "layers.2.q": 0.6})
    assert found(reference, target) == EXPECTED


def attention(count: int, *, numbers: range, noise: float) -> tuple[dict[str, Array], dict[str, Array]]:
    """Probabilities of layers that are nearly alike, and operations that make them, with others between."""
    drawn = [RNG.dirichlet(np.ones(8), size=(4, 8)) for _ in range(count)]
    ours = {f"layers.{i}.attention/output": values for i, values in enumerate(drawn)}
    theirs: dict[str, Array] = {}
    for i, values in enumerate(drawn):
        end = f"_{numbers[i]}" if numbers[i] else ""
        theirs[f"@root:scores{end}/output"] = RNG.standard_normal((4, 8, 8)) * 3
        theirs[f"@root:softmax{end}/output"] = np.abs(noisy(values, noise))
    return ours, theirs


@pytest.mark.spec("ALN-332")
def test_operations_of_one_name_are_those_of_layers_in_their_order(tmp_path: Path) -> None:
    ours, theirs = attention(4, numbers=range(4), noise=0.02)
    paired = found(archive(tmp_path / "ref.h5", ours), archive(tmp_path / "tgt.h5", theirs))
    assert paired == {f"layers.{i}.attention": f"@root:softmax{f'_{i}' if i else ''}" for i in range(4)}


@pytest.mark.spec("ALN-332")
def test_operations_are_found_for_each_list_of_a_file_without_digests(tmp_path: Path) -> None:
    ours, theirs = attention(4, numbers=range(4), noise=0.02)
    first = {f"layers.{i}.a/output": RNG.standard_normal((4, 8, 8)) for i in range(4)}
    named = {name.partition("/")[0]: values.astype(np.float32) for name, values in (first | ours).items()}
    np.savez(tmp_path / "ref.npz", allow_pickle=False, **named)
    alignment = propose(open_archive(tmp_path / "ref.npz"), archive(tmp_path / "tgt.h5", theirs)).alignment
    paired = {entry.reference[0]: entry.target[0] for entry in alignment.entries}
    assert paired == {f"layers.{i}.attention": f"@root:softmax{f'_{i}' if i else ''}" for i in range(4)}


@pytest.mark.spec("ALN-332")
def test_operations_that_hold_something_else_are_none(tmp_path: Path) -> None:
    ours, theirs = attention(4, numbers=range(4), noise=3.0)
    assert found(archive(tmp_path / "ref.h5", ours), archive(tmp_path / "tgt.h5", theirs)) == {}


@pytest.mark.spec("ALN-334")
def test_an_argument_that_the_target_makes_elsewhere_is_explained(tmp_path: Path) -> None:
    mask = RNG.standard_normal((4, 8, 8))
    ours, theirs = attention(3, numbers=range(3), noise=0.001)
    ours["layers.1.attention/input.mask"] = mask
    reference = archive(tmp_path / "ref.h5", ours)
    for values, is_there in ((mask, True), (mask + 1, False)):
        target = archive(tmp_path / f"{is_there}.h5", theirs | {"@root:where/output": values})
        left = propose(reference, target).alignment.left_over
        reasons = [each.reason for each in left if "layers.1.attention/input.mask" in each.places]
        assert ["of the target gave" in reason for reason in reasons] == [is_there]


@pytest.mark.spec("ALN-335")
@pytest.mark.parametrize("noise", [0.02, 1.5], ids=["right", "wrong"])
def test_weights_in_few_bits_that_are_all_transposed_are_a_layout(tmp_path: Path, noise: float) -> None:
    """A Conv1D has inputs first; results of the wrong ones do not bear the layout out."""
    ours: dict[str, Array] = {"words/output": RNG.standard_normal((6, 16))}
    theirs: dict[str, Array] = {"table/output": ours["words/output"]}
    for site, weight in WEIGHTS.items():
        rounded, step = in_bits(weight.T, 8)
        ours |= {f"{site}/param.weight": weight, f"{site}/output": RESULTS[site]}
        theirs |= {f"{site}/param.weight": rounded, f"{site}/param.weight_step": step}
        theirs[f"{site}/output"] = noisy(RESULTS[site], noise)
    reference = archive(tmp_path / "ref.h5", ours)
    target = archive(tmp_path / "tgt.h5", theirs, dequantised=["weight"], numbers={"weight": "int8"})
    found = compare(reference, target)
    shapes = {pair.status for pair in found.pairs if pair.key.endswith("param.weight")}
    assert shapes == ({"within-rounding"} if noise < 1 else {"shape-mismatch"})


@pytest.mark.spec("ALN-336")
@pytest.mark.parametrize("has_rows", [True, False], ids=["a-step-a-row", "one-step"])
@pytest.mark.parametrize("times", [1.0, 1.3], ids=["right", "a-row-in-another-step"])
def test_parts_of_a_fused_weight_are_in_few_bits(tmp_path: Path, *, has_rows: bool, times: float) -> None:
    weights = {site: RNG.standard_normal((24, 16)).astype(np.float32) for site in ("q", "k")}
    fused = np.concatenate(list(weights.values())).astype(np.float64)
    steps = np.abs(fused).max(axis=1 if has_rows else None, keepdims=True) / 127
    rounded = np.rint(fused / steps) * steps
    rounded[30] *= times  # a row of k
    held = {"shape": [48, 16], "dtype": "float32"}
    settings = {"dequantised": ["weight"], "numbers": {"weight": "int8"}}
    modules = [{"path": "qk", "class": "Linear", "parameters": {"weight": held}, "settings": settings}]
    ours = {f"0/{site}/param.weight": weight for site, weight in weights.items()}
    theirs = {"0/qk/param.weight": rounded.astype(np.float32), "0/qk/param.weight_step": steps}
    trusted = [
        {"path": site, "class": "Linear", "parameters": {"weight": {"shape": [24, 16], "dtype": "float32"}}}
        for site in weights
    ]
    mapping = Alignment(
        (Entry(("q/param.weight", "k/param.weight"), ("qk/param.weight",), steps=("split 0 24,24",)),)
    )
    run = {"dtype": "float32", "modules": modules}
    with (
        new_archive(tmp_path / "ref.h5", ours, run={"dtype": "float32", "modules": trusted}) as reference,
        new_archive(tmp_path / "tgt.h5", theirs, run=run) as target,
    ):
        found = {pair.key: pair.status for pair in compare(reference, target, mapping=mapping).pairs}
    assert found["0/q/param.weight"] == "within-rounding"
    assert (found["0/k/param.weight"] == "within-rounding") is (times == 1)


@pytest.mark.spec("ALN-361")
@pytest.mark.parametrize("is_there", [True, False], ids=["with-other-values", "not-computed"])
def test_a_result_that_the_target_has_with_other_values_is_not_explained_by_what_comes_of_it(
    tmp_path: Path, *, is_there: bool
) -> None:
    """A norm by the variance is no fusion, though few bits hide what comes of it."""
    words, normed, hidden = (RNG.standard_normal((6, 16)) for _ in range(3))
    weight, step = in_bits(WEIGHTS["layers.0.q"], 8)
    ours = {"words/output": words, "norm/output": normed, "mix/output": hidden}
    ours |= {"head/param.weight": WEIGHTS["layers.0.q"], "head/output": RESULTS["layers.0.q"]}
    theirs = {"w/output": noisy(words, 0.01)}
    theirs |= {f"@root:{op}/output": noisy(normed, 0.2) for op in ("Sub", "Div") if is_there}
    theirs |= {"m/output": noisy(hidden, 0.003), "h/output": noisy(RESULTS["layers.0.q"], 0.003)}
    theirs |= {"h/param.weight": weight, "h/param.weight_step": step}
    target = archive(tmp_path / "tgt.h5", theirs, dequantised=["weight"], numbers={"weight": "int8"})
    found = {pair.key: pair for pair in compare(archive(tmp_path / "ref.h5", ours), target).pairs}
    norm = next(pair for key, pair in found.items() if key.endswith("norm/output"))
    assert (norm.status, "with other values it may be @root:" in norm.reason) == (
        ("unmapped", True) if is_there else ("explained", False)
    )
