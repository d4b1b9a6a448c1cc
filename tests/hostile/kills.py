"""Kill every command that writes before each of its steps, in each container.

python -m tests.hostile.kills [NAME]...    a part of the cases, as 'convert to .h5'; --help lists them
"""

from __future__ import annotations

import sys
import tempfile
import traceback
from importlib.util import find_spec
from pathlib import Path

from tests.hostile.kill_cases import ALL_CASES, check_kills


def main(names: list[str]) -> int:
    """Print the kills of each case; exit status 1 if anything was lost, or stays, 2 of no such case."""
    if unknown := [name for name in names if name not in ALL_CASES]:
        print(f"Cases: {', '.join(ALL_CASES)}")
        return 0 if unknown[0] in ("-h", "--help") else 2
    total = failed = 0
    for name in names or ALL_CASES:
        case = ALL_CASES[name]
        absent = [package for package in case.packages if find_spec(package) is None]
        if absent:
            print(f"{name}: left out, as {absent[0]} is not installed", flush=True)
            continue
        with tempfile.TemporaryDirectory(prefix="kills-") as folder:
            try:
                count = check_kills(name, case, Path(folder), "--writes")
                print(f"{name}: {count} kills", flush=True)
                total += count
            except Exception:
                print(f"{name}: failed\n{traceback.format_exc()}", flush=True)
                failed += 1
    print(f"{total} kills, {failed} cases failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
