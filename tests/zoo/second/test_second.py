"""The second zoo says the truth, which plain runs of the models show: no judge is asked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from tests.zoo.architectures import ALL_ARCHITECTURES, ARCHITECTURES, make
from tests.zoo.catalogue import ALL_ENTRIES, ENTRIES
from tests.zoo.effect import (
    around,
    calls_of,
    changed_sites,
    clean_calls,
    compare_modules,
    difference,
    effect,
    is_cured,
    is_exercised,
)
from tests.zoo.entry import Correct, Entry, Mistake, build
from tests.zoo.fifth.catalogue import FIFTH_ENTRIES
from tests.zoo.fourth.catalogue import FOURTH_ENTRIES
from tests.zoo.port_distance import Double, in_float64
from tests.zoo.second.architectures import SECOND_ARCHITECTURES
from tests.zoo.second.catalogue import HALVES, SECOND_CORRECT, SECOND_MISTAKES
from tests.zoo.third.catalogue import THIRD_ENTRIES

REAL = 1e-3  # what a mistake changes at least, relative; roundings of float32 change 1e-6
ROUTED = 10  # times: of two experts that score alike, another may be chosen; others are 1 to 2 times as far
DOUBLE = 1e-9  # of float64, relative: some models have constants of eight digits; others agree to 1e-14


def names(entries: Sequence[Entry]) -> list[str]:
    return [entry.name for entry in entries]


def outputs(calls: Any) -> list[Any]:
    return [tensor for call in calls["@root"] for tensor in call.result]


def test_both_halves_have_mistakes_and_correct_ports_of_each_of_fifteen_models() -> None:
    models = {name.partition("_decode")[0].partition("_chunked")[0] for name in SECOND_ARCHITECTURES}
    assert len(models) == 15
    for entries in HALVES.values():
        mistakes = [entry for entry in entries.values() if isinstance(entry, Mistake)]
        rewrites = [e for e in entries.values() if isinstance(e, Correct) and not e.name.endswith("as_it_is")]
        assert len(mistakes) >= 50
        assert len(rewrites) >= 20
        for model in models:
            assert sum(mistake.name.startswith(model) for mistake in mistakes) >= 2, model
            assert any(port.name.startswith(model) for port in rewrites), model


def test_no_entry_and_no_architecture_has_a_name_of_the_first_zoo() -> None:
    assert ENTRIES.keys().isdisjoint(name for half in HALVES.values() for name in half)
    assert ARCHITECTURES.keys().isdisjoint(SECOND_ARCHITECTURES)
    others = len(ENTRIES) + len(THIRD_ENTRIES) + len(FOURTH_ENTRIES) + len(FIFTH_ENTRIES)
    assert len(SECOND_MISTAKES) + len(SECOND_CORRECT) == len(ALL_ENTRIES) - others


@pytest.mark.entries
@pytest.mark.parametrize("mistake", SECOND_MISTAKES, ids=names(SECOND_MISTAKES))
def test_a_mistake_is_real_and_in_the_guilty_module_alone(mistake: Mistake) -> None:
    dtype = "bfloat16" if mistake.kind == "precision" else "float32"
    changed = changed_sites(mistake, dtype)
    assert mistake.guilty in changed
    assert changed <= {mistake.guilty, *around(mistake.guilty)}
    if mistake.guilty != "@root":
        assert is_cured(mistake, dtype)
    if mistake.kind != "precision":
        assert effect(mistake, dtype) > REAL
    assert is_exercised(mistake, "bfloat16")
    architecture = ALL_ARCHITECTURES[mistake.architecture]
    wrong = outputs(calls_of(architecture.workload(mistake.change(make(mistake.architecture, dtype)))))
    assert difference(outputs(clean_calls(mistake.architecture, dtype)), wrong) > REAL


@pytest.mark.entries
@pytest.mark.parametrize("mistake", SECOND_MISTAKES, ids=names(SECOND_MISTAKES))
def test_a_mistake_is_in_no_other_module_in_bfloat16(mistake: Mistake) -> None:
    changed = changed_sites(mistake, "bfloat16")
    assert mistake.guilty in changed
    assert changed <= {mistake.guilty, *around(mistake.guilty)}
    if mistake.guilty != "@root":
        assert is_cured(mistake, "bfloat16")


@pytest.mark.entries
@pytest.mark.parametrize("port", SECOND_CORRECT, ids=names(SECOND_CORRECT))
def test_a_correct_port_gives_the_same_in_float64(port: Correct) -> None:
    architecture = ALL_ARCHITECTURES[port.architecture]
    with Double():
        right = calls_of(architecture.workload(in_float64(port.architecture)))
        ported = calls_of(architecture.workload(port.change(in_float64(port.architecture))))
    assert all(tensor.dtype == torch.float64 for tensor in outputs(right))
    assert difference(outputs(right), outputs(ported)) < DOUBLE


@pytest.mark.entries
@pytest.mark.parametrize("port", SECOND_CORRECT, ids=names(SECOND_CORRECT))
def test_a_correct_port_agrees_in_its_modules_too(port: Correct) -> None:
    compared = compare_modules(port)
    assert len(compared.largest) >= 0.5 * compared.modules
    for site, largest in compared.largest.items():
        assert largest < 1e-4, site


@pytest.mark.entries
@pytest.mark.parametrize("port", SECOND_CORRECT, ids=names(SECOND_CORRECT))
def test_a_correct_port_in_bfloat16_is_about_as_far_as_the_same_model_is(port: Correct) -> None:
    reference = outputs(clean_calls(port.architecture))
    twin, ported = (
        [tensor.float() for tensor in outputs(calls)]
        for calls in (
            clean_calls(port.architecture, "bfloat16"),
            calls_of(build(port, "bfloat16").target),
        )
    )
    assert difference(reference, ported) < ROUTED * difference(reference, twin)
