"""`tcap inject` at the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from tensorcap_cli.main import main
from tensorcap_formats.open import open_archive

CODE = """
import torch
from torch import nn
from tensorcap import Workload


class Old(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.fc, self.act = nn.Linear(4, 4), nn.ReLU()

    def forward(self, x):
        return self.act(self.fc(x))


class New(nn.Module):
    def __init__(self, size=4):
        super().__init__()
        old = Old()
        self.dense, self.relu = old.fc, old.act

    def forward(self, x):
        return self.relu(self.dense(x))


X = torch.arange(12.0).reshape(3, 4)


def old():
    return Workload(Old().eval(), (X,))


def short():
    return Workload(Old().eval(), (X[:2],))


def new():
    return Workload(New().eval(), (X,))
"""
MAP = """
[[pair]]
reference = "fc"
target = "dense"
"""


def tcap(*arguments: object) -> Result:
    return CliRunner().invoke(main, list(map(str, arguments)))


@pytest.fixture
def code(tmp_path: Path) -> Path:
    path = tmp_path / "models.py"
    path.write_text(CODE)
    assert tcap("capture", "torch", f"{path}:old", "-o", tmp_path / "ref.h5").exit_code == 0
    return path


@pytest.mark.spec("INJ-22")
def test_a_run_is_injected_and_compared(code: Path, tmp_path: Path) -> None:
    done = tcap("inject", tmp_path / "ref.h5", "--target-model", f"{code}:old", "-o", tmp_path / "own.h5")
    assert (done.exit_code, done.stdout) == (0, "")
    assert "injected: 2 tensors in 2 slots of 2 modules\n" in done.stderr
    told = tcap("compare", tmp_path / "ref.h5", tmp_path / "own.h5")
    assert told.exit_code == 0
    assert "is an injected run: 2 inputs of 2 modules were replaced by those of " in told.stdout


def test_without_a_workload_the_references_own_run_is_repeated(code: Path, tmp_path: Path) -> None:
    done = tcap("inject", tmp_path / "ref.h5", "--dtype", "bfloat16", "-o", tmp_path / "own.h5", "--json")
    assert done.exit_code == 0
    found = json.loads(done.stdout)
    assert [slot["casts"] for slot in found["injected"]["slots"]] == [{"float32 to bfloat16": 1}] * 2
    assert "cast: 2 float32 to bfloat16" in done.stderr


@pytest.mark.spec("INJ-22")
def test_a_dry_run_lists_what_would_be_replaced_and_writes_nothing(code: Path, tmp_path: Path) -> None:
    done = tcap(
        "inject", tmp_path / "ref.h5", "--target-model", f"{code}:old", "--inject-outputs", "fc", "--dry-run"
    )
    assert done.exit_code == 0
    assert [line.split() for line in done.stdout.splitlines()] == [
        ["site", "slot", "status", "times", "how"],
        ["fc", "output", "injected", "1"],
    ]
    assert sorted(path.name for path in tmp_path.glob("*.h5")) == ["ref.h5"]


@pytest.mark.spec("INJ-12", "INJ-22")
def test_a_map_brings_other_names_together(code: Path, tmp_path: Path) -> None:
    (tmp_path / "map.toml").write_text(MAP)
    given = "inject", tmp_path / "ref.h5", "--target-model", f"{code}:new", "-o", tmp_path / "own.h5"
    done = tcap(*given, "--map", tmp_path / "map.toml")
    assert done.exit_code == 0
    assert f"1 tensor in 1 slot of 1 module, by a mapping ({tmp_path / 'map.toml'})" in done.stderr
    refused = tcap(*given, "--map", "none")
    assert refused.exit_code == 2
    assert "none of its 2 sites is a module of the model: fc, act" in refused.stderr


@pytest.mark.spec("INJ-22")
def test_what_does_not_fit_ends_with_2_and_what_is_not_asked_for_rightly_too(
    code: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other.py"
    other.write_text(f"{CODE}\n\ndef fewer():\n    return Workload(Old(), (-X[:2],))\n")
    done = tcap("inject", tmp_path / "ref.h5", "--target-model", f"{other}:fewer", "-o", tmp_path / "own.h5")
    assert done.exit_code == 2
    assert "0/fc/input.input: does not fit: [3, 4] in the archive, [2, 4] in the model" in done.stderr
    assert tcap("inject", tmp_path / "ref.h5", "--target-model", f"{code}:old").exit_code == 2


@pytest.mark.spec("INJ-70")
def test_a_target_that_is_fed_some_rows_is_given_those_of_the_reference(code: Path, tmp_path: Path) -> None:
    done = tcap("inject", tmp_path / "ref.h5", "--target-model", f"{code}:short", "-o", tmp_path / "own.h5")
    assert done.exit_code == 0
    with open_archive(tmp_path / "own.h5") as run, open_archive(tmp_path / "ref.h5") as ref:
        own, whole = (each.load(each.get("0/act/output")) for each in (run, ref))
    assert (own == whole[:2]).all()


@pytest.mark.spec("INJ-22")
def test_what_was_met_and_not_replaced_ends_with_1(code: Path, tmp_path: Path) -> None:
    two = tmp_path / "two.py"
    two.write_text(f"{CODE}\n\ndef twice():\n    return Workload(Old(), (X,), lambda m, x: (m(x), m(x)))\n")
    done = tcap("inject", tmp_path / "ref.h5", "--target-model", f"{two}:twice", "-o", tmp_path / "own.h5")
    assert done.exit_code == 1
    assert "not in the archive: fc/input.input, act/input.input" in done.stderr


MASKED = """
import torch
from torch import nn
from tensorcap import Workload


class Mix(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        return self.second(self.first(x).tanh())


class Blend(Mix):
    factor = 1.0

    def forward(self, x, mask):
        return super().forward(x) * self.factor + mask


class Trusted(nn.Module):
    def __init__(self):
        super().__init__()
        self.mix, self.head = Mix(), nn.Linear(8, 8)

    def forward(self, x):
        return self.head(self.mix(x))


class Port(nn.Module):
    def __init__(self):
        super().__init__()
        self.blend, self.head = Blend(), nn.Linear(8, 8)

    def forward(self, x):
        return self.head(self.blend(x, torch.zeros(6, 1)))


def weights():
    torch.manual_seed(0)
    return Trusted().state_dict()


X = torch.linspace(-1, 1, 48).reshape(6, 8).cos()


def trusted():
    model = Trusted().eval()
    model.load_state_dict(weights())
    return Workload(model, (X,))


def port(factor=1.0):
    model = Port().eval()
    model.load_state_dict({name.replace("mix", "blend"): weight for name, weight in weights().items()})
    model.blend.factor = factor
    return Workload(model, (X,))


def wrong():
    return port(1.5)
"""


@pytest.mark.spec("INJ-22", "INJ-110")
def test_an_argument_that_the_mapping_explains_is_no_failure_and_one_that_it_does_not_is(
    tmp_path: Path,
) -> None:
    code, reference, own = tmp_path / "masked.py", tmp_path / "ref.h5", tmp_path / "own.h5"
    code.write_text(MASKED)
    assert tcap("capture", "torch", f"{code}:trusted", "-o", reference).exit_code == 0
    right = tcap("inject", reference, "--target-model", f"{code}:port", "-o", own)
    assert "without a counterpart, which is explained: blend/input.mask" in right.stderr
    assert "not in the archive" not in right.stderr
    assert (right.exit_code, tcap("compare", reference, own).exit_code) == (0, 0)
    with open_archive(own) as run:
        (slot,) = (s for s in run.run["injected"]["slots"] if s["slot"] == "input.mask")
    assert slot == {
        "site": "blend",
        "slot": "input.mask",
        "status": "explained",
        "injected": 0,
        "archived": 0,
        "explained": ["0/blend/input.mask"],
        "reason": "no counterpart was found at mix, and what comes of it agrees",
    }
    wrong = tcap("inject", reference, "--target-model", f"{code}:wrong", "-o", tmp_path / "wrong.h5")
    assert "not in the archive: blend/input.mask" in wrong.stderr
    assert (wrong.exit_code, tcap("compare", reference, tmp_path / "wrong.h5").exit_code) == (1, 1)
