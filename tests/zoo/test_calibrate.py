"""The table of `specs/policy.md` that says where the limits of a replay come from."""

from __future__ import annotations

from pathlib import Path

import pytest

from tensorcap.comparison import Finding
from tensorcap.rerun import OwnError
from tests.zoo import calibrate
from tests.zoo.calibrate import LIMITS, Value, rows_of, table, values_of
from tests.zoo.catalogue import ENTRIES

SPECS = Path(__file__).parents[2] / "specs"


def cells(text: str, start: str) -> list[list[str]]:
    lines = text.partition(start)[2].partition("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


@pytest.mark.spec("RPL-6")
def test_the_specified_table_has_the_limits_and_right_modules_stay_below() -> None:
    rows = cells((SPECS / "policy.md").read_text(), "\n| statistic | green up to |")
    assert {row[0]: float(row[1]) for row in rows} == pytest.approx(dict(LIMITS))
    for name, limit, right, *_ in rows:
        assert right == "–" or float(right) < float(limit), name
    assert sum(int(row[4]) for row in rows) > 200


def test_rows_say_how_near_right_and_guilty_modules_come_to_a_limit() -> None:
    values = [
        Value("own_error_leaf", 1.5, "port", "x", is_guilty=False),
        Value("own_error_leaf", 1.8, "mistake", "y", is_guilty=False),
        Value("own_error_leaf", 1.0, "mistake", "z", is_guilty=True),
        Value("own_error_leaf", 9.0, "mistake", "z", is_guilty=True),
        Value("own_error_leaf", 3.0, "other", "z", is_guilty=True),
        Value("twin_ratio", 2.0, "other", "z", is_guilty=True),
        Value("own_error_leaf", 1.9, "unseen", "z", is_guilty=True),
    ]
    by_name = {row.statistic: row for row in rows_of(values)}
    a, b = by_name["own_error_leaf"], by_name["twin_ratio"]
    assert (a.right, a.where, a.caught, a.alone, a.guilty) == (1.8, "mistake: y", 2, 1, 3.0)
    assert (b.right, b.caught, b.alone, b.guilty) == (None, 1, 0, 2.0)
    assert table([a, b]).splitlines()[2:] == [
        "| own_error_leaf | 2 | 1.8 | 1.1 | 2 | 1 | 3 |",
        "| twin_ratio | 1.2 | – | – | 1 | 0 | 2 |",
    ]


def test_what_the_twin_excuses_does_not_count() -> None:
    findings = (
        Finding("own_error_leaf", 4.0, 2.5, "within-rounding", "4 roundings"),
        Finding("ulp_share", 0.1, 0.2, "suspect", "ulp"),
    )
    for ratio, expected in (
        (1.0, ["ulp_share, more than 1 ulp"]),
        (1.3, ["own_error_leaf", "ulp_share, more than 1 ulp"]),
    ):
        own = OwnError("k", "m", "result", True, 0.1, ratio, "suspect", findings, False)
        found = dict(values_of(own, is_wide=False))
        assert list(found) == expected
    assert found == pytest.approx({"own_error_leaf": 3.2, "ulp_share, more than 1 ulp": 0.0005})


@pytest.mark.slow
def test_entries_are_measured(tmp_path: Path) -> None:
    entries = [ENTRIES[name] for name in ("vit_norm_eps", "vit_eager")]
    values = calibrate.measure(entries, ["bfloat16"], tmp_path)
    assert {(v.entry, v.is_guilty) for v in values} == {("vit_eager", False)}  # the mistake is not exercised
    assert all(value.value <= LIMITS[value.statistic] for value in values)
