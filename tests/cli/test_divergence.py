"""`tcap divergence` prints what only the device runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.conftest import Tcap

CODE = """
from nkilib.core.mlp.mlp import mlp

def get_rmsnorm_cls():
    return TorchNorm if cpu_mode() else KernelNorm

class MLP:
    def forward(self, x):
        if self.config.on_cpu:
            x = x.long()
        return mlp(x) if self.mlp_kernel_enabled else x * self.config.scale
"""


@pytest.mark.spec("NRN-50", "NRN-51", "NRN-52", "NRN-53")
def test_text_names_classes_ways_and_kernels(folder: Path, tcap: Tcap) -> None:
    (folder / "port.py").write_text(CODE)
    result = tcap("divergence", "port.py", status=1)
    lines = result.stdout.splitlines()
    assert "  port.py:5: rmsnorm: TorchNorm on a CPU, KernelNorm on the device" in lines
    assert "  port.py:9: MLP.forward: if self.config.on_cpu" in lines
    assert "    on a CPU: x = x.long()" in lines
    assert "    on the device: nothing" in lines
    assert "  port.py: mlp_kernel_enabled decides at 11 (MLP.forward)" in lines
    assert "  port.py:2: mlp of nkilib.core.mlp.mlp, used by MLP.forward" in lines
    content = json.loads(tcap("divergence", "port.py", "--json", status=1).stdout)
    assert content["format"] == "tensorcap-divergence"
    assert content["files"][0]["divergence_count"] == 1


@pytest.mark.spec("NRN-53", "NRN-54", "NRN-55")
def test_the_references_code_is_compared_if_it_is_given(folder: Path, tcap: Tcap) -> None:
    (folder / "port.py").write_text("class NeuronMLP:\n    def forward(self, x):\n        return x.tanh()\n")
    (folder / "reference.py").write_text(
        "class MLP:\n    def forward(self, x):\n        return x.float() * self.config.scale\n"
    )
    result = tcap("divergence", "port.py", "--reference-source", "reference.py", status=1)
    lines = result.stdout.splitlines()
    assert "  config.scale is read by the reference alone: reference.py:3" in lines
    assert "    operations of the port alone: tanh (port.py:3)" in lines
    assert "    the reference alone casts to float32 (reference.py:3)" in lines


def test_a_file_without_switches_is_green_and_one_without_syntax_is_named(folder: Path, tcap: Tcap) -> None:
    (folder / "port.py").write_text("x = 1\n")
    result = tcap("divergence", "port.py")
    assert result.stdout == "1 file: nothing depends on the device.\n"
    (folder / "port.py").write_text("def\n")
    result = tcap("divergence", "port.py", status=3)
    assert result.stderr.startswith("Error: port.py:1: is no Python that can be parsed")
