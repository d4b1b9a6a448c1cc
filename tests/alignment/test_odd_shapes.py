"""Matching of odd shapes and values: no pass fails, and one that does costs no other."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
from click.testing import CliRunner

from tensorcap.alignment import align
from tensorcap.alignment.match import proposal
from tensorcap.alignment.match.pairs import Pairs
from tensorcap.comparison import compare
from tensorcap_cli.main import main as tcap
from tensorcap_formats.dtypes import Array
from tests.support.archives import write_archive
from tests.support.odd_tensors import odd_shape, odd_tensor

NAMES: Final = (
    ("layers.{}", ".attn.q", ".mlp.experts.{}.w1", ".mlp.experts.{}.w2"),
    ("h.{}", ".self.query", ".moe.experts", ".moe.gate"),
    ("model.layers.{}", ".attn.wq", ".mlp.up", ".mlp.down"),
    ("block_{}", ".attn.qkv", ".experts.gate_up", ".experts.{}.down"),
)


def odd_run(rng: np.random.Generator, pool: list[Array]) -> dict[str, Array]:
    """A run of a model with some names, blocks and experts, whose values are of a pool, or altered."""
    block, attention, *inner = NAMES[int(rng.integers(len(NAMES)))]
    sites = ["@root"]
    for number in range(int(rng.integers(1, 4))):
        site = block.format(number)
        sites += [site, f"{site}{attention}", f"{site}.norm"]
        sites += [site + name.format(expert) for expert in range(int(rng.integers(1, 4))) for name in inner]
    run: dict[str, Array] = {}
    for site in dict.fromkeys(sites):
        for slot in ("input.x", "output", "output.0", "output.1", "param.weight", "param.bias"):
            if rng.random() > 0.5:
                continue
            values = pool[int(rng.integers(len(pool)))]
            change = int(rng.integers(8))
            with np.errstate(all="ignore"):
                if change == 0:
                    values = odd_tensor(rng, odd_shape(rng))
                elif change == 1:
                    values = values.T
                elif change == 2 and values.ndim:
                    values = np.concatenate([values, values], -1)
                elif change == 3 and values.dtype.kind == "f":
                    values = (values * (1 + 1e-6 * rng.standard_normal())).astype(values.dtype)
            run[f"0/{site}/{slot}"] = np.ascontiguousarray(values)
    return run


def modules_of(tensors: dict[str, Array]) -> dict[str, Any]:
    sites = dict.fromkeys(key.split("/")[1] for key in tensors)
    modules = [{"path": site, "class": "torch.nn.Linear", "parameters": [], "buffers": []} for site in sites]
    return {"modules": modules}


@pytest.mark.spec("ALN-120")
@pytest.mark.parametrize("seed", range(24))
def test_no_pass_fails_on_odd_shapes_and_values(seed: int, tmp_path: Path) -> None:
    rng = np.random.default_rng(seed)
    shapes = [odd_shape(rng) for _ in range(6)]
    pool = [odd_tensor(rng, shapes[int(rng.integers(6))]) for _ in range(25)]
    paths = []
    for name in ("ref.h5", "tgt.h5"):
        tensors = odd_run(rng, pool)
        paths.append(write_archive(tmp_path / name, tensors, run=modules_of(tensors)))
    assert align(*paths).alignment.failed == ()
    assert align(*paths, by="values").alignment.failed == ()
    compare(*paths)


def twins(tmp_path: Path, dtype: str = "float32") -> list[Path]:
    """Two runs of two modules that have other names, `a.x` and `b.y`."""
    rng = np.random.default_rng(3)
    values = [rng.standard_normal((3, 4, 8)).astype(dtype) for _ in range(3)]
    paths = []
    for name, sites in (("ref.h5", ("@root", "a", "a.x")), ("tgt.h5", ("@root", "b", "b.y"))):
        tensors = {f"0/{site}/output": one for site, one in zip(sites, values, strict=True)}
        paths.append(write_archive(tmp_path / name, tensors, run=modules_of(tensors)))
    return paths


@pytest.mark.spec("ALN-120")
def test_tensors_so_coarse_that_any_two_are_near_are_matched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scales of powers of two alone, one rounding of which is half of the value, lie beside experts."""
    monkeypatch.setattr(Pairs, "_near", property(lambda pairs: 4 * 0.5))
    assert align(*twins(tmp_path)).alignment.failed == ()


FAULT: Final = (
    "Matching by main values could not be run: a fault of tensorcap, please report it "
    "(ValueError: math domain error)."
)


@pytest.mark.spec("ALN-120")
def test_a_pass_that_fails_is_named_and_costs_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(state: object) -> None:
        raise ValueError("math domain error")

    passes = [replace(p, run=fail) if p.name == "main_values" else p for p in proposal.PASSES]
    monkeypatch.setattr(proposal, "PASSES", tuple(passes))
    paths = twins(tmp_path)
    aligned = align(*paths)
    assert aligned.alignment.failed == (FAULT,)
    assert {"a", "a.x"} <= {entry.reference[0].partition("/")[0] for entry in aligned.alignment.entries}
    assert FAULT in compare(*paths).warnings
    printed = CliRunner().invoke(tcap, ["align", *map(str, paths)])
    assert FAULT in " ".join(printed.output.split())
    as_json = json.loads(CliRunner().invoke(tcap, ["align", *map(str, paths), "--json"]).stdout)
    assert as_json["failed"] == [FAULT]
