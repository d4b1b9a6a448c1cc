"""Ports to JAX held against their PyTorch twin: without a map, with planted mistakes, and injected."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner, Result
from flax import nnx
from jax import numpy as jnp

import tensorcap
from tensorcap.session import capture_workload
from tensorcap_cli.main import main
from tests.jax import ports


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("reference") / "ref.h5"
    capture_workload(ports.reference(), path, params=True)
    return path


def target(path: Path, workload: tensorcap.Workload) -> Path:
    capture_workload(workload, path / "tgt.h5", params=True)
    return path / "tgt.h5"


def tcap(*arguments: Any) -> Result:
    return CliRunner().invoke(main, [*map(str, arguments)])


def compared(reference: Path, path: Path) -> dict[str, dict[str, Any]]:
    result = tcap("compare", reference, path, "--json")
    assert result.exit_code == 0, result.output
    return {pair["key"]: pair for pair in json.loads(result.output)["pairs"]}


@pytest.mark.spec("JAX-20")
@pytest.mark.parametrize("make", [ports.nnx_port, ports.linen_port], ids=["nnx", "linen"])
def test_a_port_with_names_of_its_own_is_paired_and_right(
    make: Callable[[], tensorcap.Workload], reference: Path, tmp_path: Path
) -> None:
    pairs = compared(reference, target(tmp_path, make()))
    for partner in ports.PARTNERS.values():
        assert pairs[f"0/{partner}/output"]["status"] in ("identical", "match", "within-rounding"), partner
        assert pairs[f"0/{partner}/param.weight"]["status"] == "identical", partner


@pytest.mark.spec("JAX-8", "JAX-20")
def test_values_that_a_function_names_are_results_of_modules(reference: Path, tmp_path: Path) -> None:
    pairs = compared(reference, target(tmp_path, ports.function_port()))
    for i in range(2):
        for key in (
            f"0/encoder.layer.{i}.attention/output.0",
            f"0/encoder.layer.{i}.intermediate.dense/output",
            f"0/encoder.layer.{i}/output",
        ):
            assert pairs[key]["status"] == "within-rounding", key
    assert pairs["0/encoder.layer.1.output.dense/param.weight"]["status"] == "identical"


MISTAKES: dict[str, tuple[dict[str, Any], str, str]] = {
    "gelu": (
        {"approximate": [1]},
        "encoder.layer.1.intermediate.intermediate_act_fn",
        "GELU by tanh on one side and by erf on the other",
    ),
    "eps": ({"epsilon": {0: 1e-2}}, "encoder.layer.0.attention.output.LayerNorm", "eps 0.01"),
    "mask": ({"unmasked": [1]}, "encoder.layer.1.attention.self", "tokens of the target see padded ones"),
    "kernel": (
        {"transposed": [0]},
        "encoder.layer.0.attention.output.dense",
        "multiplies by the transposed weight",
    ),
}


@pytest.mark.spec("JAX-20")
@pytest.mark.parametrize("name", MISTAKES)
def test_a_planted_mistake_is_named_from_archives_alone(name: str, reference: Path, tmp_path: Path) -> None:
    mistakes, guilty, text = MISTAKES[name]
    result = tcap("localize", reference, target(tmp_path, ports.nnx_port(**mistakes)))
    assert result.exit_code == 1, result.output
    assert next(line for line in result.output.splitlines() if line.startswith("1. ")).split()[1] == guilty
    assert text in result.output


class ConvNet(nnx.Module):
    """Channels last, as JAX has them."""

    def __init__(self, weights: dict[str, Any]) -> None:
        self.first = nnx.Conv(3, 8, (3, 3), rngs=nnx.Rngs(0))
        self.second = nnx.Conv(8, 5, (1, 3), rngs=nnx.Rngs(0))
        for name in ("first", "second"):
            conv = getattr(self, name)
            conv.kernel[...] = jnp.asarray(weights[f"{name}.weight"].transpose(2, 3, 1, 0))
            conv.bias[...] = jnp.asarray(weights[f"{name}.bias"])

    def __call__(self, x: Any) -> Any:
        x = self.second(nnx.relu(self.first(x.transpose(0, 2, 3, 1))))
        return x.transpose(0, 3, 1, 2)


class TorchConvNet(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Conv2d(3, 8, 3, padding="same")
        self.second = torch.nn.Conv2d(8, 5, (1, 3), padding="same")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        second: torch.Tensor = self.second(torch.relu(self.first(x)))
        return second


@pytest.mark.spec("JAX-20")
def test_convolutions_with_channels_last_are_compared_after_a_permutation(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = TorchConvNet().eval()
    x = np.random.default_rng(0).standard_normal((2, 3, 6, 7)).astype(np.float32)
    capture_workload(tensorcap.Workload(model, {"x": torch.from_numpy(x)}), tmp_path / "ref.h5", params=True)
    port = ConvNet({name: value.numpy() for name, value in model.state_dict().items()})
    pairs = compared(tmp_path / "ref.h5", target(tmp_path, tensorcap.Workload(port, {"x": x})))
    for name in ("first", "second"):
        assert pairs[f"0/{name}/param.weight"]["status"] == "identical"
        assert pairs[f"0/{name}/output"]["status"] in ("identical", "match", "within-rounding")


PORT = """
from tests.jax import ports


def target():
    return ports.nnx_port(approximate=[1])


def function():
    return ports.function_port()
"""


@pytest.mark.spec("JAX-1", "JAX-7")
def test_the_command_captures_a_function_of_a_file_on_the_inputs_of_an_archive(
    reference: Path, tmp_path: Path
) -> None:
    (tmp_path / "port.py").write_text(PORT)
    path = tmp_path / "tgt.h5"
    result = tcap(
        "capture", "jax", f"{tmp_path / 'port.py'}:target", "--like", reference, "--params", "-o", path
    )
    assert result.exit_code == 0, result.output
    with tensorcap.open_archive(path) as archive, tensorcap.open_archive(reference) as before:
        key = "0/@root/input.attention_mask"
        np.testing.assert_array_equal(archive.read(archive.get(key)), before.read(before.get(key)))
        assert archive.info.workload.path.endswith("port.py:target")
    for option in ("--dtype=bfloat16", "--num-hidden-layers=1"):
        refused = tcap("capture", "jax", f"{tmp_path / 'port.py'}:target", option, "-o", tmp_path / "no.h5")
        assert refused.exit_code == 2, refused.output
        assert not (tmp_path / "no.h5").exists()


@pytest.mark.spec("JAX-21")
def test_archived_values_go_on_in_compiled_code(reference: Path, tmp_path: Path) -> None:
    free, injected = target(tmp_path, ports.nnx_port(approximate=[1])), tmp_path / "injected.h5"
    tensorcap.inject(reference, ports.nnx_port(approximate=[1]), injected, outputs="layers.1.down")
    with (
        tensorcap.open_archive(reference) as before,
        tensorcap.open_archive(free) as own,
        tensorcap.open_archive(injected) as archive,
    ):
        natural, expected = "0/layers.1.down/output", "0/encoder.layer.1.output.dense/output"
        np.testing.assert_array_equal(archive.read(archive.get(natural)), own.read(own.get(natural)))
        assert archive.run["injected"]["slots"][0]["status"] == "injected"
        # behind the mistake: what is made of the archived value is the reference's
        after = archive.read(archive.get("0/@root/output"))
        reference_after = before.read(before.get("0/@root/output.last_hidden_state"))
        assert np.abs(after - reference_after).max() < 1e-5
        assert np.abs(own.read(own.get("0/@root/output")) - reference_after).max() > 1e-4
        assert expected in {record.key.text for record in before.records}


@pytest.mark.spec("JAX-21")
def test_a_live_bisection_finds_the_layer(reference: Path, tmp_path: Path) -> None:
    (tmp_path / "port.py").write_text(PORT)
    result = tcap("bisect", reference, "--target-model", f"{tmp_path / 'port.py'}:target", "--json")
    assert result.exit_code == 1, result.output
    assert "encoder.layer.1.intermediate" in result.output
