"""What a capture needs beside the model's own memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MIB = 1 << 20

SCRIPT = """
import json, sys
import torch
import tensorcap

class Nothing(torch.nn.Module):
    def forward(self, x):
        return None

def peak():
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith("VmHWM"))

torch.set_num_threads(1)
model = Nothing()
with tensorcap.capture(model, sys.argv[1]):
    model(torch.ones(100, 100).t())
tensors = {}  # all are kept, so that each peak is above the one before
found = {}
for name, make in (
    ("contiguous", lambda: torch.ones(4096, 4096)),
    ("ids", lambda: torch.ones(64 << 20, dtype=torch.uint8)),
    ("bfloat16", lambda: torch.ones(4096, 8192, dtype=torch.bfloat16)),
    ("transposed", lambda: torch.ones(4096, 4096).t()),
):
    tensors[name] = make()
    before = peak()
    with tensorcap.capture(model, sys.argv[1]):
        model(tensors[name])
    found[name] = peak() - before
print(json.dumps(found))
"""


@pytest.mark.skipif(not Path("/proc/self/status").is_file(), reason="only Linux tells a process its peak")
def test_a_tensor_of_64_mib_is_captured_without_a_copy_unless_it_is_strided(tmp_path: Path) -> None:
    search = os.pathsep.join(str(ROOT / part) for part in (".", "formats"))
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path / "ref.h5")],
        env={**os.environ, "PYTHONPATH": search},
        capture_output=True,
        text=True,
        check=True,
    )
    grown = json.loads(done.stdout)
    assert grown["contiguous"] < 8 * MIB
    assert grown["ids"] < 8 * MIB
    assert grown["bfloat16"] < 8 * MIB
    assert 48 * MIB < grown["transposed"] < 72 * MIB
