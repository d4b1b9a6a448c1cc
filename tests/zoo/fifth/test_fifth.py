"""The fifth zoo says the truth, which plain runs of the models and of the ports show: no judge is asked."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, get_args

import pytest

from tests.zoo import run as running
from tests.zoo.architectures import ARCHITECTURES, make
from tests.zoo.catalogue import ALL_ENTRIES, ENTRIES
from tests.zoo.effect import difference, is_exercised, ported_effect
from tests.zoo.entry import Correct, Entry, Kind, build
from tests.zoo.fifth.architectures import FIFTH_ARCHITECTURES
from tests.zoo.fifth.catalogue import FIFTH_CORRECT, FIFTH_ENTRIES, FIFTH_MISTAKES
from tests.zoo.fourth.architectures import FOURTH_ARCHITECTURES
from tests.zoo.fourth.catalogue import FOURTH_ENTRIES
from tests.zoo.port_distance import apart, distance, outputs
from tests.zoo.second.architectures import SECOND_ARCHITECTURES
from tests.zoo.second.catalogue import HALVES
from tests.zoo.third.architectures import THIRD_ARCHITECTURES
from tests.zoo.third.catalogue import THIRD_ENTRIES

REAL = 1e-3  # what a mistake changes at least, relative; correct ports are within 2.0e-6 of the reference
SUBTLE = {"mobilevit_larger_epsilon": 1e-4, "parakeet_angles_rounded": 1e-4}  # by their nature smaller
CLOSE = 3e-6  # of float32, relative: the reference itself is up to 1.5e-6 from what float64 gives
DOUBLE = 1e-12  # of float64, relative: the ports agree to 3e-15
ROUTED = 3  # times: of two experts that score alike, another may be chosen; others are 1 to 2 times as far
PORTS = list(dict.fromkeys((mistake.architecture, mistake.port) for mistake in FIFTH_MISTAKES))
PORT_NAMES = [f"{architecture}-{port.__name__}" for architecture, port in PORTS]


def names(entries: Sequence[Entry]) -> list[str]:
    return [entry.name for entry in entries]


def model_of(architecture: str) -> str:
    return architecture.removesuffix("_stream")


def test_mistakes_and_correct_ports_of_twelve_models_are_registered() -> None:
    mistakes = Counter(model_of(mistake.architecture) for mistake in FIFTH_MISTAKES)
    correct = Counter(model_of(port.architecture) for port in FIFTH_CORRECT)
    assert len(mistakes) == 12
    assert mistakes.keys() == correct.keys()
    assert min(mistakes.values()) >= 5
    assert min(correct.values()) >= 2
    assert (len(FIFTH_MISTAKES), len(FIFTH_CORRECT), len(FIFTH_ENTRIES)) == (85, 35, 120)
    assert {entry.architecture for entry in FIFTH_MISTAKES} == set(FIFTH_ARCHITECTURES)
    assert FIFTH_ENTRIES.items() <= ALL_ENTRIES.items()


def test_no_name_and_no_model_is_one_of_another_zoo() -> None:
    others = {*ENTRIES, *HALVES["dev"], *HALVES["held-out"], *THIRD_ENTRIES, *FOURTH_ENTRIES}
    assert others.isdisjoint(FIFTH_ENTRIES)
    taken = {**ARCHITECTURES, **SECOND_ARCHITECTURES, **THIRD_ARCHITECTURES, **FOURTH_ARCHITECTURES}
    assert taken.keys().isdisjoint(FIFTH_ARCHITECTURES)
    assert {a.model for a in taken.values()}.isdisjoint(a.model for a in FIFTH_ARCHITECTURES.values())


def test_the_fifth_zoo_is_run_as_a_whole(capsys: pytest.CaptureFixture[str]) -> None:
    assert running.main(["--zoo", "fifth", "--only", "unheard_*"]) == 2
    with pytest.raises(SystemExit):
        running.main(["--zoo", "fifth", "--half", "dev"])
    assert "measured by halves" in capsys.readouterr().err


def test_each_mistake_has_a_kind_of_the_zoos_and_words_of_its_own() -> None:
    for mistake in FIFTH_MISTAKES:
        assert {mistake.kind, *mistake.also_kinds} <= set(get_args(Kind)), mistake.name
        assert mistake.in_words
        assert mistake.words
        assert all(word == word.lower() for word in mistake.words), mistake.name


def test_one_entry_of_each_sort_says_the_truth() -> None:
    """The others are run by `make test-entries`."""
    mistake = next(m for m in FIFTH_MISTAKES if m.name == "mmdit_scale_before_shift")
    assert ported_effect(mistake, "float32") > REAL
    port = next(c for c in FIFTH_CORRECT if c.name == "mmdit_rewritten")
    assert distance(port.architecture, port.change, double=False) < CLOSE


@pytest.mark.entries
def test_guilty_modules_are_modules_of_the_reference() -> None:
    for architecture in FIFTH_ARCHITECTURES:
        sites = {"@root", *(name for name, _ in make(architecture).named_modules())}
        for mistake in FIFTH_MISTAKES:
            if mistake.architecture == architecture:
                assert {mistake.guilty, *mistake.also} <= sites, mistake.name


@pytest.mark.entries
@pytest.mark.parametrize("mistake", FIFTH_MISTAKES, ids=names(FIFTH_MISTAKES))
def test_a_mistake_changes_what_comes_out_by_a_finite_amount(mistake: Any) -> None:
    assert SUBTLE.get(mistake.name, REAL) < ported_effect(mistake, "float32") < 10


@pytest.mark.entries
@pytest.mark.parametrize(("architecture", "port"), PORTS, ids=PORT_NAMES)
def test_without_its_mistake_a_port_gives_the_same_in_float64(architecture: str, port: Any) -> None:
    assert distance(architecture, port, double=True) < DOUBLE


@pytest.mark.entries
@pytest.mark.parametrize("port", FIFTH_CORRECT, ids=names(FIFTH_CORRECT))
def test_a_correct_port_gives_the_same_in_float64(port: Correct) -> None:
    assert distance(port.architecture, port.change, double=True) < DOUBLE


@pytest.mark.entries
@pytest.mark.parametrize("port", FIFTH_CORRECT, ids=names(FIFTH_CORRECT))
def test_a_correct_port_is_within_roundings_in_float32(port: Correct) -> None:
    assert distance(port.architecture, port.change, double=False) < CLOSE


@pytest.mark.entries
@pytest.mark.parametrize("port", FIFTH_CORRECT, ids=names(FIFTH_CORRECT))
def test_a_correct_port_in_bfloat16_is_about_as_far_as_the_same_model_is(port: Correct) -> None:
    reference = outputs(port.architecture, make(port.architecture))
    twin = outputs(port.architecture, make(port.architecture, "bfloat16"))
    ported = outputs(port.architecture, build(port, "bfloat16").target.model)
    assert apart(reference, ported) < ROUTED * difference(reference, twin)


@pytest.mark.entries
def test_mistakes_that_bfloat16_does_not_show_are_known() -> None:
    hidden = {m.name for m in FIFTH_MISTAKES if not is_exercised(m, "bfloat16")}
    assert hidden == {"mobilevit_larger_epsilon", "minimax_stream_state_rounded"}
