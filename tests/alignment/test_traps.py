"""Right-looking but wrong pairs are not accepted silently, wrong-looking but right ones are found."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.alignment.ports.scoring import archive_of, broken_rules
from tests.alignment.ports.traps import TRAPS


@pytest.mark.spec("ALN-34", "ALN-38", "ALN-304")
@pytest.mark.parametrize("name", TRAPS)
def test_what_looks_right_and_what_is_right_are_kept_apart(name: str, tmp_path: Path) -> None:
    trap = TRAPS[name]
    reference, target = (
        archive_of(tmp_path / file, side) for file, side in (("r.h5", trap.reference), ("t.h5", trap.target))
    )
    assert broken_rules(trap, reference, target) == {}
