"""Captures the port and its mistakes on the ranks of a launcher, each into an archive of its own name."""

from __future__ import annotations

import sys

import port
from torch import distributed

from tensorcap.adapters import adapter_named
from tensorcap.session import capture_workload

if __name__ == "__main__":
    adapter = adapter_named("neuron")
    adapter.seed(0)
    for name in sys.argv[1:]:
        capture_workload(adapter.prepare(getattr(port, name)()), f"{name}.h5", params=True)
    distributed.destroy_process_group()
