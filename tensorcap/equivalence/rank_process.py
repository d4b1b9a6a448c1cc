"""The program that runs on each rank of a target: `python -m tensorcap.equivalence.rank_process CALL`."""

from __future__ import annotations

import sys

from tensorcap.equivalence.models import call_as_rank

if __name__ == "__main__":
    call_as_rank(sys.argv[1])
