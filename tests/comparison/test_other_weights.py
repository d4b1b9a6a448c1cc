"""A weight of another layer is named, whatever it was rounded to."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tensorcap.comparison import Comparison, compare
from tensorcap.comparison.other_weights import OtherWeights
from tensorcap.comparison.preflight import item_text, preflight
from tensorcap.localization import localize
from tensorcap_formats.dtypes import Array
from tensorcap_formats.records import Record
from tests.comparison.conftest import MakeArchive

RNG = np.random.default_rng(31)
SITES = ("layers.0", "layers.1", "layers.2")
WEIGHTS = {site: RNG.normal(size=(48, 64)).astype(np.float32) for site in SITES}
ELSE = RNG.normal(size=(48, 64)).astype(np.float32)  # of another checkpoint


def in_steps(weight: Array, bits: int, group: int) -> tuple[Array, Array]:
    """A weight rounded to whole numbers with a scale for each group of a row, and the scales."""
    parts = weight.astype(np.float64).reshape(len(weight), -1, group)
    steps = np.abs(parts).max(axis=-1, keepdims=True) / (2 ** (bits - 1) - 1)
    return (np.rint(parts / steps) * steps).reshape(weight.shape).astype(np.float32), steps[..., 0]


def run_of(settings: dict[str, Any]) -> dict[str, Any]:
    modules = [{"path": site, "class": "torch.nn.Linear", "settings": settings} for site in SITES]
    return {"modules": [{"path": "", "class": "my.Net"}, *modules], "dtype": "float32"}


def reference(make: MakeArchive) -> Any:
    return make({f"0/{s}/param.weight": weight for s, weight in WEIGHTS.items()}, run=run_of({}))


def packed(make: MakeArchive, weights: dict[str, Array], bits: int) -> Any:
    tensors: dict[str, Array] = {}
    for site, weight in weights.items():
        values, steps = in_steps(weight, bits, 64 if bits == 8 else 16)
        tensors |= {
            f"0/{site}/param.weight": values,
            f"0/{site}/param.weight_step": steps.astype(np.float32),
        }
    settings = {"dequantised": ["weight"], "numbers": {"weight": f"int{bits}"}}
    return make(tensors, run=run_of(settings))


def reason(comparison: Comparison, key: str) -> str:
    pair = next(pair for pair in comparison.pairs if pair.key == key)
    return next((f.text for f in pair.findings if f.test == "weight_rounding"), "")


@pytest.mark.spec("POL-282", "PRE-11", "LCL-620")
@pytest.mark.parametrize("bits", [8, 4])
def test_a_quantised_weight_of_another_layer_is_named(make_archive: MakeArchive, bits: int) -> None:
    ours = reference(make_archive)
    key, other = "0/layers.1/param.weight", "0/layers.2/param.weight"
    wrong = packed(make_archive, {**WEIGHTS, "layers.1": WEIGHTS["layers.2"]}, bits)
    found = compare(ours, wrong)
    assert [pair.status for pair in found.pairs if pair.key in WEIGHTS or pair.key == key] == ["diverged"]
    assert reason(found, key).endswith(f": it is the reference's {other}, rounded")
    text = "".join(map(item_text, preflight(ours, wrong).items))
    assert f"{key} holds what {other} holds in the reference, rounded." in text
    (suspect,) = localize(ours, wrong).suspects
    assert (suspect.module, suspect.cause) == ("layers.1", "other-weights")
    assert suspect.diagnosis is not None
    assert suspect.diagnosis.text == f"in its parameter weight: it is the reference's {other}, rounded"
    assert compare(ours, packed(make_archive, WEIGHTS, bits)).exit_status == 0


@pytest.mark.spec("POL-282", "PRE-11")
def test_a_weight_of_no_layer_is_none_of_another_one(make_archive: MakeArchive) -> None:
    found = compare(reference(make_archive), packed(make_archive, {**WEIGHTS, "layers.1": ELSE}, 8))
    assert found.exit_status == 1
    assert "it is the reference's" not in reason(found, "0/layers.1/param.weight")
    assert "holds what" not in "".join(
        map(
            item_text,
            preflight(reference(make_archive), packed(make_archive, {**WEIGHTS, "layers.1": ELSE}, 8)).items,
        )
    )


@pytest.mark.spec("PRE-11")
@pytest.mark.parametrize(
    ("weight", "ending"),
    [
        pytest.param(WEIGHTS["layers.2"], ".", id="the-same"),
        pytest.param(WEIGHTS["layers.2"].astype(np.float16), ", rounded.", id="float16"),
        pytest.param(in_steps(WEIGHTS["layers.2"], 8, 64)[0], ", rounded.", id="in-steps"),
        pytest.param(ELSE, "", id="of-no-layer"),
    ],
)
def test_a_weight_of_floats_of_another_layer_is_named(
    make_archive: MakeArchive, weight: Array, ending: str
) -> None:
    tensors = {f"0/{site}/param.weight": value for site, value in {**WEIGHTS, "layers.1": weight}.items()}
    found = preflight(reference(make_archive), make_archive(tensors, run=run_of({})))
    text = "".join(map(item_text, found.items))
    words = "0/layers.1/param.weight holds what 0/layers.2/param.weight holds in the reference"
    assert (words + ending in text) if ending else (words not in text)


@pytest.mark.spec("PRE-11")
def test_of_each_large_weight_a_few_elements_are_read(
    make_archive: MakeArchive, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = {f"0/{n}/param.weight": RNG.normal(size=(128, 256)).astype(np.float32) for n in range(6)}
    ours, theirs = make_archive(weights), make_archive(weights)
    read: list[int] = []
    read_range = ours.read_range

    def counted(record: Record, start: int, stop: int) -> Array:
        read.append(stop - start)
        return read_range(record, start, stop)

    monkeypatch.setattr(ours, "read_range", counted)
    others = OtherWeights(ours)
    own = ours.get("0/1/param.weight")
    held = [others.find(own, theirs, theirs.get(f"0/{n}/param.weight"), lambda _: True) for n in (4, 2, 1)]
    assert [record and record.key.site for record in held] == ["4", "2", None]
    assert sum(read) <= 6 * 4096
