"""Hypotheses about odd shapes and values: none of them fails, and one that does costs no other."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
from click.testing import CliRunner

from tensorcap.diagnosis import diagnose, diagnosis
from tensorcap.diagnosis.context import PairContext
from tensorcap.diagnosis.diagnosis import Family
from tensorcap.diagnosis.hypothesis import Hypothesis
from tensorcap.localization import localize
from tensorcap_cli.main import main as tcap
from tensorcap_formats.dtypes import Array
from tensorcap_formats.errors import UsageError
from tensorcap_formats.open import open_archive
from tests.diagnosis.conftest import Diagnose
from tests.support.archives import write_archive
from tests.support.odd_tensors import odd_shape, odd_tensor

SITES: Final = (
    *("m", "m.attn", "m.attn.q_proj", "m.attn.k_proj", "m.attn.v_proj", "m.attn.o_proj", "m.attn.qkv"),
    *("m.norm", "m.router", "m.act", "m.mlp", "m.experts", "m.mlp.gate_proj", "m.mlp.up_proj", "m.embed"),
)
SLOTS: Final = (
    *("output", "output.0", "output.1", "input.x", "input.hidden_states", "input.attention_mask"),
    *("input.position_embeddings.0", "input.position_embeddings.1", "input.position_bias"),
    *("param.weight", "param.bias", "param.sinks", "buffer.running_mean"),
)
CONFIGS: Final[tuple[dict[str, Any], ...]] = (
    {},
    {
        **{"hidden_size": 8, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 4},
        **{"num_experts": 4, "num_experts_per_tok": 2, "sliding_window": 3, "attn_logit_softcapping": 2.0},
    },
    {"hidden_size": 4, "num_attention_heads": 4, "num_experts": 1},
    {"hidden_size": 0, "num_attention_heads": 0},
)


def odd_pair(rng: np.random.Generator) -> tuple[dict[str, Array], dict[str, Array]]:
    """Two runs of one model: results that are missing, equal, of another shape, other values, or altered."""
    ours: dict[str, Array] = {}
    theirs: dict[str, Array] = {}
    usual = odd_shape(rng)
    for site in SITES:
        for slot in SLOTS:
            if rng.random() > 0.25:
                continue
            shape = usual if rng.random() < 0.4 else odd_shape(rng)
            key, values = f"0/{site}/{slot}", odd_tensor(rng, shape)
            ours[key] = values
            with np.errstate(all="ignore"):
                others = {
                    "equal": values,
                    "of another shape": odd_tensor(rng, odd_shape(rng)),
                    "other": odd_tensor(rng, shape),
                    "turned": np.flip(values).copy(),
                    "scaled": ~values if values.dtype == bool else (values * 1.5).astype(values.dtype),
                }
            change = str(rng.choice(["missing", *others]))
            if change in others:
                theirs[key] = others[change]
    return ours, theirs


@pytest.mark.spec("DIA-90")
@pytest.mark.parametrize("seed", range(24))
def test_no_hypothesis_fails_on_odd_shapes_and_values(seed: int, tmp_path: Path) -> None:
    rng = np.random.default_rng(seed)
    tensors = odd_pair(rng)
    about = {"model": {"config": CONFIGS[seed % len(CONFIGS)]}, "compute_dtype": "float32"}
    paths = [
        write_archive(tmp_path / name, side, run=about)
        for name, side in zip(("ref.h5", "tgt.h5"), tensors, strict=True)
    ]
    with open_archive(paths[0]) as ours, open_archive(paths[1]) as theirs:
        for key in tensors[1]:
            with suppress(UsageError):  # two large shapes, or no values
                assert diagnose(ours, theirs, key).failed == (), key


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(7)


@pytest.mark.spec("DIA-90")
@pytest.mark.parametrize("queries", [1, 5, 11])
def test_a_mistake_in_values_of_a_cross_attention_is_named(
    diagnosed: Diagnose, rng: np.random.Generator, queries: int
) -> None:
    shape, keys = (2, queries, 8), (2, 9, 8)
    reference = {
        "0/x.q_proj/output": rng.standard_normal(shape),
        "0/x.k_proj/output": rng.standard_normal(keys),
        "0/x.v_proj/output": rng.standard_normal(keys),
        "0/x/input.attention_mask": np.where(rng.random((2, 1, queries, 9)) < 0.2, -1e9, 0.0),
    }
    config = {"hidden_size": 8, "num_attention_heads": 2}
    for name in ("k_proj", "v_proj"):
        key = f"0/x.{name}/output"
        target = {**reference, key: 0.5 * reference[key]}
        result = diagnosed(reference, target, key=key, config=config)
        assert result.failed == ()
        assert result.explanations[0].kind == "factor"
        assert result.explanations[0].facts["factor"] == pytest.approx(0.5, rel=1e-6)


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A family of hypotheses that proposes nothing and fails, before all others."""

    def propose(context: PairContext) -> Iterator[Hypothesis]:
        yield from ()
        raise IndexError("list index out of range")

    monkeypatch.setattr(diagnosis, "FAMILIES", (Family("the moon", propose), *diagnosis.FAMILIES))


FAULT: Final = (
    "Hypotheses about the moon could not be tried: a fault of tensorcap, please report it "
    "(IndexError: list index out of range)."
)


@pytest.mark.spec("DIA-90")
@pytest.mark.usefixtures("failing")
def test_a_hypothesis_that_fails_is_named_and_loses_no_other(
    diagnosed: Diagnose, rng: np.random.Generator
) -> None:
    values = rng.standard_normal((2, 8, 16))
    result = diagnosed(values, 2 * values)
    assert result.failed == (FAULT,)
    assert result.explanations[0].kind == "factor"
    assert result.to_json()["failed"] == [FAULT]


@pytest.mark.spec("LCL-60")
@pytest.mark.usefixtures("failing")
def test_localize_keeps_its_suspects_and_warns_if_a_hypothesis_fails(
    tmp_path: Path, rng: np.random.Generator
) -> None:
    values = {f"0/m.{name}/output": rng.standard_normal((2, 8, 16)).astype(np.float32) for name in "abc"}
    paths = [
        write_archive(tmp_path / "ref.h5", values),
        write_archive(tmp_path / "tgt.h5", {**values, "0/m.b/output": 2 * values["0/m.b/output"]}),
    ]
    localization = localize(*paths)
    assert [suspect.module for suspect in localization.suspects] == ["m.b"]
    assert localization.suspects[0].cause == "factor"
    assert FAULT in localization.notes
    arguments = ["localize", *map(str, paths), "--reference-model", "none"]
    printed = CliRunner().invoke(tcap, arguments)
    assert " ".join(printed.output.split()).count(FAULT) == 1
    as_json = json.loads(CliRunner().invoke(tcap, [*arguments, "--json"]).stdout)
    assert FAULT in as_json["notes"]


def test_neighbours_are_of_the_same_parent_and_not_of_one_whose_name_goes_on(
    diagnosed: Diagnose, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[str] = []

    def propose(context: PairContext) -> Iterator[Hypothesis]:
        found.extend(record.key.site for record in context.find_neighbours())
        yield from ()

    monkeypatch.setattr(diagnosis, "FAMILIES", (Family("neighbours", propose),))
    sites = ("a.attn_norm", "a.attn.q", "a.attn.k", "a.attn.k.inner", "a.attn", "a.attn2.q")
    reference = {f"0/{site}/output": np.arange(8.0) + at for at, site in enumerate(sites)}
    diagnosed(reference, {**reference, "0/a.attn.q/output": np.ones(8)}, key="0/a.attn.q/output")
    assert found == ["a.attn.k", "a.attn.k.inner", "a.attn"]
