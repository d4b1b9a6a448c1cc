"""What the server of the page gives back before it serves."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from tensorcap.viewer.memory import release_memory


def resident_code(library: str) -> int:
    """KiB of a library's code that this process has in memory, as the kernel counts them."""
    total, is_code = 0, False
    for line in Path("/proc/self/smaps").read_text(encoding="utf-8").splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            is_code = library in line and " r-xp " in line
        elif is_code and line.startswith("Rss:"):
            total += int(line.split()[1])
    return total


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_code_of_the_compiler_is_given_back_and_still_runs() -> None:
    llvm = pytest.importorskip("llvmlite.binding")
    llvm.initialize_native_target()
    before = llvm.Target.from_default_triple().create_target_machine().triple
    taken = resident_code("libllvmlite")
    assert taken > 1000
    release_memory()
    assert resident_code("libllvmlite") < taken / 10
    assert llvm.Target.from_default_triple().create_target_machine().triple == before
    assert str(llvm.parse_assembly("define i32 @one() { ret i32 1 }").get_function("one").name) == "one"
