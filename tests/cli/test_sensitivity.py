"""`tcap sensitivity` of two models in a file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from tensorcap_cli.main import main

MODELS = """
import copy
import torch
from torch import nn
from tensorcap.workload import Workload

X = torch.randn(30, 16, generator=torch.Generator().manual_seed(1))

def net():
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(16, 16) for _ in range(6)))

def rounded(weight, steps):
    scale = weight.abs().amax() / steps
    return torch.round(weight / scale) * scale

def reference():
    return Workload(net(), (X,))

def target():
    port = net()
    with torch.no_grad():
        for place, layer in enumerate(port):
            layer.weight.copy_(rounded(layer.weight, 7 if place == 2 else 127))
    return Workload(port, (X,))

def broken(reference, target):
    raise RuntimeError("no tokenizer")
"""


def tcap(*arguments: str, status: int) -> Result:
    found = CliRunner().invoke(main, ["sensitivity", *arguments])
    assert found.exit_code == status, found.output
    return found


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "m.py").write_text(MODELS)
    return tmp_path


BOTH = ("m.py:reference", "m.py:target")


@pytest.mark.spec("SEN-5")
def test_the_layer_that_stands_out_is_first_and_named() -> None:
    lines = tcap(*BOTH, status=0).output.splitlines()
    assert lines[0].startswith("KL divergence of the output, mean, in nats: ")
    assert lines[1].split() == ["layer", "it", "alone", "it", "kept", "saves"]
    assert lines[2].split()[0] == "2"
    assert "2 stands out." in lines
    assert lines[-1] == "15 runs of models, of 6 layers"


@pytest.mark.spec("SEN-6", "SEN-7")
def test_a_goal_and_its_lists() -> None:
    found = json.loads(tcap(*BOTH, "--json", status=0).stdout)
    goal = f"kl={found['total'] / 5!r}"
    chosen = json.loads(tcap(*BOTH, "--goal", goal, "--json", status=0).stdout)
    assert (chosen["format"], chosen["keep"], chosen["is_reached"]) == ("tensorcap-sensitivity", ["2"], True)
    assert set(chosen["lists"]) == {"torchao", "onnxruntime", "tensorrt"}
    text = tcap(*BOTH, "--goal", goal, "--list", "torchao", status=0).output
    assert text == 'FqnToConfig({"2": None, "_default": CONFIG})\n'
    printed = tcap(*BOTH, "--goal", goal, status=0).output.splitlines()
    assert printed[-2] == "  2"
    assert printed[-3].startswith(f"The goal {goal} is reached with 1 layer kept (0 B more), at ")


@pytest.mark.spec("SEN-4")
@pytest.mark.parametrize(
    ("options", "message"),
    [
        pytest.param(
            ("--metric", "m.py:broken"), "raised RuntimeError: no tokenizer", id="a metric that fails"
        ),
        pytest.param(("--metric", "n.py:broken"), "there is no file 'n.py'", id="no such file"),
        pytest.param(("--goal", "psnr=1"), "expected kl, top1 or FILE.py:FUNCTION", id="another metric"),
        pytest.param(("--list", "torchao", "--json"), "expected no --json", id="two forms"),
    ],
)
def test_wrong_usage_is_one_line(options: tuple[str, ...], message: str) -> None:
    output = tcap(*BOTH, *options, status=2).output
    assert message in " ".join(output.split())
    assert "Traceback" not in output
