"""The capturing half needs torch, numpy and the standard library alone."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import tensorcap

ROOT = Path(__file__).parents[2]

SCRIPT = """
import sys

class Refuse:
    REFUSED = {
        "cattrs", "click", "einops", "h5py", "hdf5plugin", "llvmlite", "ml_dtypes", "numba", "rich",
        "safetensors", "tokenizers", "tomlkit", "transformers", "xxhash", "zarr",
    }

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in self.REFUSED:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Refuse())
import torch
import tensorcap

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU()).bfloat16()
for path in sys.argv[1:]:
    for scale in (1, 2):  # the second time there is an archive to be replaced
        with torch.no_grad(), tensorcap.capture(model, path) as cap:
            model(torch.full((1, 4), float(scale), dtype=torch.bfloat16))
    print(cap.summary.tensors, sorted(Refuse.REFUSED & set(sys.modules)))
"""


def test_a_capture_needs_no_other_package(tmp_path: Path) -> None:
    paths = [tmp_path / f"ref.{suffix}" for suffix in ("h5", "safetensors")]
    search = os.pathsep.join(str(ROOT / part) for part in (".", "formats"))
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, *map(str, paths)],
        env={**os.environ, "PYTHONPATH": search},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "6 []\n6 []\n", "")
    for path in paths:
        with tensorcap.open_archive(path) as archive:
            assert archive.algorithm == "blake2b_128"
            assert archive.is_complete
            assert archive.load(archive.get("0/0/input.input")).tolist() == [[2, 2, 2, 2]]
            assert archive.get("0/1/output").dtype.name == "bfloat16"


def test_no_module_outside_the_adapters_imports_torch() -> None:
    search = os.pathsep.join(str(ROOT / part) for part in (".", "formats"))
    code = "import sys, tensorcap; print([m for m in ('torch', 'h5py', 'click') if m in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": search},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "[]\n"
