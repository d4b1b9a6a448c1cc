"""The ports of `tests/max/ports`, right and with mistakes, verified by the command on real MAX."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.max.ports.mistakes import MISTAKES, PORTS
from tests.max.ports.run import DTYPES, NAMES, Outcome, main, verify


@pytest.mark.parametrize("name", MISTAKES)
def test_a_port_with_a_mistake_is_a_program(name: str) -> None:
    compile(MISTAKES[name].source(), "port.py", "exec")


@pytest.mark.parametrize("port", PORTS)
def test_each_port_has_ten_mistakes_at_least_half_of_them_in_the_graph(port: str) -> None:
    graph = [mistake.is_in_weights for mistake in MISTAKES.values() if mistake.port == port]
    assert len(graph) == 10
    assert graph.count(False) >= 5


def test_an_unknown_entry_is_refused_with_the_names_that_there_are(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["--only", "no_such"]) == 2
    assert "no entry is named no_such; there are encoder, mixture, epsilon" in capsys.readouterr().err


def check(name: str, dtype: str, folder: Path) -> Outcome:
    """Verify a port: green if it is right, and with a mistake its module is first and the kind is right."""
    outcome = verify(name, dtype, folder)
    assert outcome.difference is not None, outcome.message
    if outcome.mistake is None:
        assert outcome.difference <= {"float32": 1e-4, "bfloat16": 5e-2}[dtype]
        assert outcome.is_green, outcome.row()
    else:
        assert outcome.difference > 0.02  # a right port in float32 differs by less than 1e-6
        assert outcome.is_guilty_first, outcome.row()
        assert outcome.is_kind_right, outcome.row()
        assert outcome.status == 1
    return outcome


@pytest.mark.entries
@pytest.mark.xdist_group("ports")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", NAMES)
def test_a_mistake_is_named_and_no_innocent_is_accused(name: str, dtype: str, tmp_path: Path) -> None:
    outcome = check(name, dtype, tmp_path)
    assert not outcome.innocents, outcome.row()
