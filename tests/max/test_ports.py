"""The ports of `tests/max/ports`, right and with mistakes, verified by the command on real MAX."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.max.ports.mistakes import MISTAKES, PORTS
from tests.max.ports.run import DTYPES, NAMES, main, verify

RUN_IN_CI = (
    *PORTS,
    "weight_of_layer_0",
    "transposed_matrix",
)  # mistakes in weights: no graph more to compile


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


def check(name: str, dtype: str, folder: Path) -> None:
    outcome = verify(name, dtype, folder)
    assert outcome.difference is not None, outcome.message
    if outcome.mistake is None:
        assert outcome.difference <= {"float32": 1e-4, "bfloat16": 5e-2}[dtype]
        assert outcome.is_green, outcome.row()
    else:
        assert outcome.difference > {"float32": 1e-3, "bfloat16": 5e-3}[dtype]
        assert outcome.is_guilty_first, outcome.row()
        assert outcome.is_kind_right, outcome.row()
        assert not outcome.innocents, outcome.row()
        assert outcome.status == 1


@pytest.mark.slow
@pytest.mark.xdist_group("ports")
@pytest.mark.parametrize("name", RUN_IN_CI)
def test_a_right_port_is_green_and_a_mistake_is_named(name: str, tmp_path: Path) -> None:
    check(name, "float32", tmp_path)


@pytest.mark.entries
@pytest.mark.xdist_group("ports")
@pytest.mark.parametrize(
    ("name", "dtype"),
    [(name, dtype) for dtype in DTYPES for name in NAMES if dtype != "float32" or name not in RUN_IN_CI],
)
def test_every_port_is_judged_rightly(name: str, dtype: str, tmp_path: Path) -> None:
    check(name, dtype, tmp_path)
