"""`tcap capture torch --coreai`: an archive, and the folder that Apple's debugger reads, of one run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner

pytest.importorskip("coreai_torch")

from coreai_torch.debugging.torch_utils import load_intermediates

import tensorcap
from tensorcap.session import capture_workload
from tensorcap_cli.main import main
from tensorcap_formats.open import open_archive
from tests.coreai.conversion import exported
from tests.coreai.models import make, make_inputs
from tests.coreai.ports import BlockWithTanh, recast

pytestmark = pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")  # of torch's own programs

SOURCE = """
import torch

import tensorcap


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = torch.nn.LayerNorm(8)
        self.up = torch.nn.Linear(8, 6)

    def forward(self, x):
        h = self.norm(x)
        return torch.topk(self.up(h), 2, -1)


def reference():
    torch.manual_seed(0)
    return tensorcap.Workload(Net().eval(), {"x": torch.randn(2, 8)})
"""


@pytest.fixture
def tcap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "net.py").write_text(SOURCE)

    def run(*arguments: str, status: int = 0) -> Any:
        result = CliRunner().invoke(main, list(arguments), prog_name="tcap", catch_exceptions=False)
        assert result.exit_code == status, result.output
        return result

    return run


@pytest.mark.slow
@pytest.mark.spec("CAP-222", "AIM-42")
def test_one_run_is_an_archive_and_a_folder(tcap: Callable[..., Any], tmp_path: Path) -> None:
    result = tcap("capture", "torch", "net.py:reference", "--coreai", "-o", "ref.h5")
    assert "ref.aimodelintermediates: 15 values of the graph, " in result.stderr
    loaded = load_intermediates(tmp_path / "ref.aimodelintermediates")
    with open_archive("ref.h5") as run:
        assert run.info.scope is not None
        scope = run.info.scope
        assert (scope.level, scope.decompositions, scope.params) == ("export", "coreai", True)
        facts = run.values["0/norm:native_layer_norm/op"]
        assert (facts["module"], SOURCE.splitlines()[facts["line"] - 1].strip()) == (
            "norm",
            "h = self.norm(x)",
        )
        for name, slot in (("native_layer_norm", "output.0"), ("native_layer_norm.2", "output.2")):
            own = run.read(run.get(f"0/norm:native_layer_norm/{slot}"))
            assert own.tolist() == loaded.intermediates[name].tolist()
        weight = run.read(run.get("0/up/param.weight"))
    normed = loaded.intermediates["native_layer_norm"].double().numpy()
    up = normed @ weight.astype("f8").T + loaded.intermediates["up_bias"].double().numpy()
    best = np.sort(up, -1)[:, :-3:-1]
    np.testing.assert_allclose(loaded.intermediates["topk"].numpy(), best, rtol=0, atol=1e-5)
    assert {value.dtype for value in loaded.outputs.values()} == {torch.float32, torch.int64}
    again = tcap("capture", "torch", "--like", "ref.h5", "-o", "again.h5")
    assert "aimodelintermediates" not in again.stderr
    with open_archive("ref.h5") as run, open_archive("again.h5") as repeated:
        assert repeated.info.scope == run.info.scope
        assert [r.digest for r in repeated.records] == [r.digest for r in run.records]
    ops = tcap("capture", "torch", "--like", "ref.h5", "--level", "op", "-o", "ops.h5")
    assert "ops.h5: " in ops.stderr


@pytest.mark.spec("CAP-222")
@pytest.mark.parametrize(
    ("options", "message"),
    [
        pytest.param(["--level", "op"], "--coreai is of exported graphs, expected no --level op", id="level"),
        pytest.param(["--stats-only"], "expected no --stats-only", id="statistics"),
        pytest.param(["--slice", "[:1]"], "expected no --slice", id="slice"),
    ],
)
def test_what_leaves_the_folder_without_values_is_refused(
    tcap: Callable[..., Any], tmp_path: Path, options: list[str], message: str
) -> None:
    assert (
        message
        in tcap(
            *("capture", "torch", "net.py:reference", "--coreai", "-o", "ref.h5"), *options, status=2
        ).stderr
    )
    assert [path.name for path in tmp_path.iterdir()] == ["net.py"]


@pytest.mark.spec("CAP-222")
def test_a_folder_that_is_there_is_an_error_before_the_run(tcap: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "ref.aimodelintermediates").mkdir()
    error = tcap("capture", "torch", "net.py:reference", "--coreai", "-o", "ref.h5", status=1).stderr
    assert error.startswith("Error: ref.aimodelintermediates: is there already, expected a new folder\n")
    assert not (tmp_path / "ref.h5").exists()


@pytest.mark.slow
@pytest.mark.spec("AIM-42", "AIM-47", "CMP-54")
def test_both_forms_of_a_reference_are_compared_with_a_target(tmp_path: Path) -> None:
    inputs = make_inputs("mlp")
    folder, path = tmp_path / "ref.aimodelintermediates", tmp_path / "ref.h5"
    tensorcap.save_intermediates(exported(make("mlp"), inputs), inputs, folder, archive=path)
    ports = {"right": make("mlp"), "wrong": recast(make("mlp"), "blocks.0", BlockWithTanh)}
    for name, port in ports.items():
        workload = tensorcap.Workload(
            tensorcap.CoreAIModel(port), {key: value.numpy() for key, value in inputs.items()}
        )
        capture_workload(workload, tmp_path / f"{name}.h5")
    for reference in (folder, path):
        right = tensorcap.compare(reference, tmp_path / "right.h5")
        assert right.exit_status == 0
        compared = {pair.key for pair in right.pairs if pair.is_compared}
        assert "0/head:permute_6/output" in compared  # a view of a weight, which the archive does not store
        assert len(compared) == 20
        wrong = tensorcap.compare(reference, tmp_path / "wrong.h5")
        assert wrong.exit_status == 1
        worse = [pair.key for pair in wrong.pairs if pair.status in ("suspect", "diverged")]
        assert worse[0] == "0/blocks.0:gelu/output"
