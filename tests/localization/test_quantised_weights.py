"""Modules are suspected by their weights in few bits, each module once."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tensorcap.comparison import QuantisedLayers, QuantisedWeight, compare
from tensorcap.comparison.weight_mistakes import WeightMistake
from tensorcap.comparison.weight_rounding import Rounding
from tensorcap.localization import rank_suspects
from tensorcap.localization.quantised_weights import evidence_of_weights
from tests.comparison.conftest import MemoryArchive

X = np.random.default_rng(4).normal(size=(8, 64)).astype(np.float32)


@pytest.mark.spec("LCL-620")
def test_a_module_with_two_wrong_weights_is_one_suspect_that_names_both() -> None:
    keys = "0/m/param.down", "0/m/param.up", "0/n/param.weight"
    reference = MemoryArchive(dict.fromkeys(keys, X), is_ordered=True)
    target = MemoryArchive({keys[0]: X * 1.5, keys[1]: X * 1.5, keys[2]: X})
    found = compare(reference, target, mapping="none")
    wrong = QuantisedWeight("int8", Rounding(40.0, 40.0, 0, False), WeightMistake("weight-scales", "rolled"))
    pairs = [replace(p, status="diverged") if "/m/" in p.key else p for p in found.pairs]
    layers = QuantisedLayers(weights=dict.fromkeys(keys, wrong))
    found = replace(found, pairs=tuple(pairs), layers=layers)
    source = evidence_of_weights(reference, target, found)
    assert source is not None
    told = [(one.module, one.keys, one.reason) for one in source.evidence]
    down, up = (f"its parameter {name} is not the reference's, rounded to int8" for name in ("down", "up"))
    assert told == [("m", keys[:2], f"{down}; {up}")]
    (suspect,) = rank_suspects(reference, target, found, [replace(source, by="archives")]).suspects
    assert (suspect.module, suspect.by, suspect.cause) == ("m", ("weights",), "weight-scales")
