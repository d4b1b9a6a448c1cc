"""Ports that ran some rows of a batch, made logits of last tokens alone, or have a padded vocabulary.

Llama of transformers with random weights; a correct port is verified, and a mistake in it is found.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from torch import nn  # noqa: E402 - after the check that it is there

from tensorcap import Workload, verify  # noqa: E402
from tests.rewrites.llama import IDS, VOCABULARY, model  # noqa: E402

INPUTS = {"input_ids": IDS, "use_cache": False}


def padded(inner: Any) -> Any:
    """The model with zeros behind the rows of its table and its head."""
    for parent, name in ((inner.model, "embed_tokens"), (inner, "lm_head")):
        weight = getattr(parent, name).weight.detach()
        more = torch.zeros(128 - VOCABULARY, weight.shape[1])
        getattr(parent, name).weight = nn.Parameter(torch.cat([weight, more]))
    return inner


def plain(inner: Any) -> Any:
    return inner


RUNS: dict[str, tuple[Callable[[Any], Any], dict[str, Any]]] = {
    "whole": (plain, INPUTS),
    "row": (plain, {**INPUTS, "input_ids": IDS[1:]}),
    "last": (plain, {**INPUTS, "logits_to_keep": 1}),
    "padded": (padded, INPUTS),
    "padded-last": (padded, {**INPUTS, "logits_to_keep": 1}),
}
PAIRS = [
    ("whole", "row"),
    ("row", "whole"),
    ("whole", "last"),
    ("last", "whole"),
    ("whole", "padded"),
    ("padded", "whole"),
    ("whole", "padded-last"),
]


def workload(name: str, change: Callable[[Any], None] | None = None) -> Workload:
    port = model()
    if change is not None:
        change(port)
    adapt, inputs = RUNS[name]
    return Workload(adapt(port), inputs)


def roll_head(port: Any) -> None:
    port.lm_head.weight.data = port.lm_head.weight.data.roll(1, 1)


def change_activation(port: Any) -> None:
    port.model.layers[1].mlp.act_fn = nn.GELU()


@pytest.mark.sampled
@pytest.mark.spec("RPL-60", "INJ-70")
@pytest.mark.parametrize(("reference", "target"), PAIRS)
def test_what_both_runs_have_verifies_a_port(tmp_path: Path, reference: str, target: str) -> None:
    report = verify(workload(reference), workload(target), tmp_path / "report")
    assert [suspect.module for suspect in report.suspects] == []
    assert report.injected is not None
    assert report.exit_status == 0


@pytest.mark.slow
@pytest.mark.spec("RPL-60", "INJ-70")
@pytest.mark.parametrize(
    ("target", "change", "guilty"),
    [
        ("row", roll_head, "lm_head"),
        ("last", roll_head, "lm_head"),
        ("row", change_activation, "model.layers.1.mlp.act_fn"),
        ("last", change_activation, "model.layers.1.mlp.act_fn"),
        ("padded", change_activation, "model.layers.1.mlp.act_fn"),
    ],
)
def test_a_mistake_in_such_a_port_is_found_and_nobody_else(
    tmp_path: Path, target: str, change: Callable[[Any], None], guilty: str
) -> None:
    report = verify(workload("whole"), workload(target, change), tmp_path / "report")
    assert [suspect.module for suspect in report.suspects] == [guilty]
    assert report.exit_status == 1
