"""Captures the port and its mistakes on the ranks of a launcher, each into an archive of its own name.

Behind the name of one may stand the precision that it is run in: `port:bfloat16`.
"""

from __future__ import annotations

import sys

import port

from tensorcap.adapters import adapter_named
from tensorcap.adapters.neuron import leave_ranks
from tensorcap.session import capture_workload

if __name__ == "__main__":
    adapter = adapter_named("neuron")
    adapter.seed(0)
    for argument in sys.argv[1:]:
        name, _, dtype = argument.partition(":")
        workload = adapter.prepare(getattr(port, name)(), dtype=dtype or None, input_dtype=dtype or None)
        capture_workload(workload, f"{name}{dtype and '.'}{dtype}.h5", params=True)
    leave_ranks()
