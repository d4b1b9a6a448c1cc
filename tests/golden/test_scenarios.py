"""The golden results leave nothing out."""

from __future__ import annotations

import pytest

pytest.importorskip("transformers")

from tests.alignment import conftest
from tests.alignment.ports import traps
from tests.golden.scenarios import ALL_ENTRIES, FEW_ENTRIES, PORTS, TRAPS, WITH_MAPPING
from tests.zoo.catalogue import ENTRIES
from tests.zoo.entry import Correct


def test_all_entries_of_the_zoo_are_in_it_with_their_mappings() -> None:
    assert {name for names in ALL_ENTRIES.values() for name in names} == set(ENTRIES)
    assert all(ENTRIES[name].architecture == key for key, names in ALL_ENTRIES.items() for name in names)
    assert all(set(names) <= set(ALL_ENTRIES[key]) for key, names in FEW_ENTRIES.items())
    mapped = {name for name, e in ENTRIES.items() if isinstance(e, Correct) and e.mapping is not None}
    assert mapped == set(WITH_MAPPING)


def test_all_ports_and_traps_are_in_it() -> None:
    assert set(PORTS) == set(conftest.PORTS)
    assert set(TRAPS) == set(traps.TRAPS)
