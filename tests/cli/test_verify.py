"""`tcap verify` at the command line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tensorcap_formats.open import open_archive
from tests.cli.conftest import ROOT, Tcap

MODELS = ROOT / "examples" / "models.py"
PORTS = f"""
import sys
sys.path.insert(0, {str(MODELS.parent)!r})
import models
import tensorcap

PORTS = {{"llama": tensorcap.Port(models.reference, models.port, dtypes=("float32",))}}
twin = tensorcap.Port(models.reference, models.reference)
"""


@pytest.mark.spec("VER-33", "VER-40")
def test_the_wrong_activation_is_named_with_what_it_is(tcap: Tcap, folder: Path) -> None:
    done = tcap("verify", f"{MODELS}:reference", f"{MODELS}:port", "-o", "report", status=1)
    lines = done.stdout.splitlines()
    accused = [line for line in lines if line.startswith(("1. ", "2. "))]
    assert len(accused) == 1
    assert accused[0] == "1. model.layers.2.mlp.act_fn (SiLUActivation) is wrong"
    details = lines[lines.index(accused[0]) + 1 :][:4]
    assert details[0].startswith("   error: own 0.081, ")
    assert details[1].startswith(
        "   by replay and injection: its own result is wrong for what the target gave it"
    )
    assert details[2].startswith("   explained: the target is gelu tanh of its input.input")
    assert details[3] == "   Another activation: gelu tanh where the reference has silu."
    assert any("only inherit an error" in line for line in lines)
    assert any(line.startswith("The execution order is the same: ") for line in lines)
    assert lines[:-1] == (folder / "report" / "summary.txt").read_text().splitlines()
    assert lines[-1] == (
        "Next, all that was tried on the values of model.layers.2.mlp.act_fn: tcap diagnose "
        "report/reference.h5 report/target.h5 0/model.layers.2.mlp.act_fn/output --all"
    )
    assert "injecting" in done.stderr.splitlines()


@pytest.mark.spec("VER-1", "VER-4", "VER-40")
def test_the_reference_in_bfloat16_is_no_suspect(tcap_json: Any, folder: Path) -> None:
    told = tcap_json("verify", f"{MODELS}:reference", "--dtype", "bfloat16", "-o", "report")
    assert (told["exit_status"], told["suspects"]) == (0, [])
    assert (told["reference"]["dtype"], told["target"]["dtype"]) == ("float32", "bfloat16")
    assert "Nothing is wrong that these runs show." in told["summary"]
    assert told == json.loads((folder / "report" / "verify.json").read_text())


@pytest.mark.spec("VER-1", "VER-4")
def test_a_port_is_found_by_its_name(tcap: Tcap, folder: Path) -> None:
    (folder / "ports.py").write_text(PORTS)
    assert "model.layers.2.mlp.act_fn" in tcap("verify", "ports.py:llama", "-o", "one", status=1).stdout
    assert "Nothing is wrong" in tcap("verify", "ports.py:twin", "-o", "two").stdout
    refused = tcap("verify", "ports.py:llama", "--dtype", "bfloat16", "-o", "three", status=2)
    assert "port: dtype: found bfloat16, expected float32" in refused.stderr
    refused = tcap("verify", "ports.py:llama", "--prompt", "a", "-o", "three", status=2)
    assert "--prompt is not for a Port" in refused.stderr


@pytest.mark.spec("VER-1", "VER-20")
def test_wrong_usage_is_refused_before_anything_runs(tcap: Tcap, folder: Path) -> None:
    missing = tcap("verify", f"{MODELS}:reference", "-o", "report", status=2)
    assert "expected TGT, or what to change" in missing.stderr
    (folder / "mine").mkdir()
    refused = tcap("verify", f"{MODELS}:reference", f"{MODELS}:port", "-o", "mine", "--force", status=2)
    assert "mine: exists and is no report" in refused.stderr
    assert "runs in" not in refused.stderr
    tcap("verify", "no.h5", "no2.h5", "-o", "report", status=3)
    assert [path.name for path in folder.iterdir()] == ["mine"]


@pytest.mark.spec("VER-5")
def test_a_target_generates_with_the_tokens_of_the_reference(tcap_json: Any, folder: Path) -> None:
    from transformers import LlamaConfig

    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4
    )
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(folder / "small")
    asked = ("--input-ids", "1,2,3", "--max-new-tokens", "3")
    told = tcap_json("verify", "small", "small", "--random-weights", "0", *asked, "-o", "one")
    assert (told["exit_status"], told["with_injection"]["is_green"]) == (0, True)
    assert {layer["key"][0] for layer in told["with_injection"]["layers"]} == {"0", "1", "2"}
    reference = folder / "one" / "reference.h5"
    # other weights would choose other tokens; those of the reference are what both are given
    told = tcap_json("verify", str(reference), "small", "--random-weights", "1", "-o", "two", status=1)
    assert "missing-in-target" not in told["without_injection"]["counts"]
    for name in ("one", "two"):
        with open_archive(folder / name / "target.h5") as archive:
            assert archive.run["workload"]["options"]["teacher_forced"] == str(reference)
    with open_archive(reference) as ours, open_archive(folder / "two" / "target.h5") as theirs:
        for step in range(3):
            key = f"{step}/model.embed_tokens/input.input"
            assert (ours.load(ours.get(key)) == theirs.load(theirs.get(key))).all()


BRANCHES = """
import torch
from torch import nn
from tensorcap import Workload

class Branches(nn.Module):
    def __init__(self, names):
        super().__init__()
        self.names = names
        torch.manual_seed(0)
        for name in sorted(names):
            setattr(self, name, nn.Linear(8, 8))

    def forward(self, x):
        made = {name: getattr(self, name)(x) for name in sorted(self.names)}
        one, other = (made[name] for name in self.names)
        return torch.tanh(one) + other

def reference():
    return Workload(Branches(["first", "second"]).eval(), (torch.linspace(-1, 1, 32).reshape(4, 8),))

def target():  # beta is first and called second; both are wrong, so that results do not say which is which
    made = Branches(["beta", "alpha"]).eval()
    ours = reference().model
    made.beta.load_state_dict(ours.first.state_dict())
    made.alpha.load_state_dict(ours.second.state_dict())
    with torch.no_grad():
        made.alpha.weight.mul_(torch.linspace(-1, 1, 64).reshape(8, 8))
        made.beta.bias.add_(0.01)
    return Workload(made, (torch.linspace(-1, 1, 32).reshape(4, 8),))
"""
RULES = """
[[rename]]
from = "beta"
to = "first"

[[rename]]
from = "alpha"
to = "second"
"""
MAP = """
[[pair]]
reference = "first"
target = "beta"

[[pair]]
reference = "second"
target = "alpha"
"""


@pytest.mark.spec("VER-2")
@pytest.mark.parametrize(
    ("option", "text"), [pytest.param("--rules", RULES, id="rules"), pytest.param("--map", MAP, id="map")]
)
def test_rules_and_maps_say_what_belongs_together(
    tcap_json: Any, folder: Path, option: str, text: str
) -> None:
    (folder / "m.py").write_text(BRANCHES)
    (folder / "known.toml").write_text(text)
    told = tcap_json(
        "verify", "m.py:reference", "m.py:target", option, "known.toml", "-o", "report", status=1
    )
    swapped = text.replace("first", "_").replace("second", "first").replace("_", "second")
    (folder / "crossed.toml").write_text(swapped)
    crossed = tcap_json(
        "verify", "m.py:reference", "m.py:target", option, "crossed.toml", "-o", "crossed", status=1
    )
    assert {one["own"] > 0.1 for one in crossed["suspects"]} == {True}  # each is the other
    assert {one["module"] for one in told["suspects"]} == {"first", "second"}
    owns = {one["module"]: one["own"] for one in told["suspects"]}
    assert owns["first"] < 0.1 < owns["second"]
    assert all(one["by"] == ["replay", "injection"] for one in told["suspects"])
    assert told["with_injection"]["counts"].get("missing-in-target", 0) == 0


@pytest.mark.spec("VER-4")
def test_a_device_is_the_targets(tcap: Tcap, tcap_json: Any, folder: Path) -> None:
    (folder / "m.py").write_text(BRANCHES)
    told = tcap_json("verify", "m.py:reference", "--device", "cpu", "-o", "one")
    assert (told["exit_status"], told["without_injection"]["counts"]) == (0, {"identical": 6})
    refused = tcap("verify", "m.py:reference", "m.py:target", "--device", "nowhere", "-o", "two", status=2)
    assert "nowhere" in refused.stderr
    (folder / "p.py").write_text(
        "import m, tensorcap\nhere = tensorcap.Port(m.reference, m.reference, devices=('cpu',))\n"
    )
    refused = tcap("verify", "p.py:here", "--device", "cuda", "-o", "three", status=2)
    assert "port: device: found cuda, expected cpu" in refused.stderr
    assert tcap_json("verify", "p.py:here", "--device", "cpu", "-o", "four")["exit_status"] == 0
    assert not (folder / "two").exists()


@pytest.mark.spec("VER-4")
def test_a_seed_of_zero_is_a_seed(tcap: Tcap, tcap_json: Any, folder: Path) -> None:
    (folder / "m.py").write_text(BRANCHES)
    told = tcap_json("verify", "m.py:reference", "--seed", "0", "-o", "one")
    assert told["exit_status"] == 0
    (folder / "p.py").write_text("import m, tensorcap\nhere = tensorcap.Port(m.reference, m.reference)\n")
    refused = tcap("verify", "p.py:here", "--max-new-tokens", "0", "-o", "two", status=2)
    assert "--max-new-tokens" in refused.stderr
