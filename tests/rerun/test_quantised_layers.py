"""Quantised layers in the layouts that checkpoints have: right ones are green, and mistakes are named."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import tensorcap
from tensorcap import preflight
from tensorcap.comparison import Comparison, compare, weight_judge
from tensorcap.comparison.preflight import item_text
from tensorcap.comparison.weight_rounding import Rounding, WeightNumbers, measure_rounding
from tensorcap.localization import localize
from tensorcap.reports.pair_examination import examine
from tensorcap.session import capture_workload
from tensorcap.workload import Workload
from tensorcap_formats.open import open_archive, opened_both
from tests.rerun.quantised_layers import AWQ, Awq, Bytes, Gptq, Nf4, Nibbles, pack, unpack

pytestmark = pytest.mark.slow
X = torch.randn(4, 24, 64, generator=torch.Generator().manual_seed(2))
Make = Callable[[nn.Linear], nn.Module]


def model() -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        layers = nn.Linear(64, 128), nn.SiLU(), nn.Linear(128, 128), nn.LayerNorm(128), nn.Linear(128, 32)
        net = nn.Sequential(*layers)
        with torch.no_grad():
            rows: Any = net[2].weight
            rows *= torch.exp(torch.randn(128, 1) / 2)  # of unlike size
        return net.eval()


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("reference") / "reference.h5"
    capture_workload(Workload(model(), (X,)), path, params=True)
    return path


def port(make: Make, wrong: Callable[[Any], None] | None = None) -> Any:
    net = copy.deepcopy(model())
    for place in (0, 2, 4):
        net[place] = make(net[place])
    if wrong is not None:
        wrong(net[2])
    return net


def captured(folder: Path, net: nn.Module) -> Path:
    path = folder / "target.h5"
    capture_workload(Workload(net, (X,)), path, params=True)
    return path


def texts(result: Comparison, test: str) -> dict[str, str]:
    return {pair.key: f.text for pair in result.pairs for f in pair.findings if f.test == test}


def scales_rolled(layer: Any) -> None:
    layer.weight_scale.copy_(torch.roll(layer.weight_scale, 1, 0))


FORMS = [
    pytest.param(lambda layer: Gptq(layer, 32), "uint4", "32 values", id="gptq"),
    pytest.param(lambda layer: Gptq(layer, 16, 0), "uint4", "16 values", id="gptq-2"),
    pytest.param(Awq, "uint4", "32 values", id="awq"),
    pytest.param(Bytes, "int8", "each row", id="int8"),
    pytest.param(lambda layer: Bytes(layer, "uint8", 32), "uint8", "32 values", id="uint8"),
    pytest.param(lambda layer: Bytes(layer, "float8_e4m3fn"), "float8_e4m3fn", "each row", id="float8"),
    pytest.param(lambda layer: Nibbles(layer, way="low first, signed"), "int4", "32 values", id="int4"),
    pytest.param(lambda layer: Nibbles(layer, way="high first, offset"), "uint4", "32 values", id="uint4"),
    pytest.param(Nf4, "nf4", "64 values", id="nf4"),
]


@pytest.mark.spec("CAP-290", "CAP-330", "POL-280", "POL-281")
@pytest.mark.parametrize(("make", "number", "scope"), FORMS)
def test_rightly_quantised_layers_are_as_their_rounding_predicts(
    tmp_path: Path, reference: Path, make: Make, number: str, scope: str
) -> None:
    target = captured(tmp_path, port(make))
    result = compare(reference, target)
    assert (result.exit_status, set(result.counts)) <= (
        0,
        {"identical", "within-rounding", "missing-in-reference"},
    )
    said = f"the reference's, rounded to {number} with a scale for {scope}"
    wide = {"64 values": {"each row"}}.get(scope, set())  # of the first layer
    weights = texts(result, "weight_rounding")
    assert len(weights) == 3
    assert all(
        text in {said, *(f"the reference's, rounded to {number} with a scale for {w}" for w in wide)}
        for text in weights.values()
    )
    layers = texts(result, "quantisation")
    assert set(layers) == {"0/0/output", "0/2/output", "0/4/output"}
    workload = Workload(model(), (X,))
    found = localize(reference, target, reference_model=workload)
    assert (found.suspects, found.exit_status) == ((), 0)


class InBfloat16(Bytes):
    """A layer of a model in bfloat16, which its scales are rounded to after they were used."""

    def __init__(self, layer: nn.Linear) -> None:
        with torch.no_grad():
            layer.weight.copy_(layer.weight.bfloat16().float())
        super().__init__(layer)
        self.weight_scale = self.get_buffer("weight_scale").bfloat16()
        self.bias = nn.Parameter(self.bias.bfloat16())

    def forward(self, x: Tensor) -> Tensor:
        values: Any = self.weight
        scales: Any = self.weight_scale
        return nn.functional.linear(x, (values.float() * scales.float()).to(x.dtype), self.bias)


@pytest.mark.spec("POL-280", "POL-281")
@pytest.mark.parametrize(("wrong", "status"), [(None, 0), (scales_rolled, 1)])
def test_scales_that_bfloat16_rounds_are_right(
    tmp_path: Path, reference: Path, wrong: Callable[[Any], None] | None, status: int
) -> None:
    net = port(InBfloat16, wrong)
    net[3] = net[3].bfloat16()
    path = tmp_path / "target.h5"
    capture_workload(Workload(net, (X.bfloat16(),)), path, params=True)
    assert compare(reference, path).exit_status == status
    suspects = localize(reference, path, reference_model=Workload(model(), (X,))).suspects
    assert [suspect.module for suspect in suspects] == (["2"] if wrong else [])


@pytest.mark.spec("PRE-90")
def test_preflight_tells_right_weights_as_rounded(tmp_path: Path, reference: Path) -> None:
    items = preflight(reference, captured(tmp_path, port(Gptq))).items
    texts = [item_text(item) for item in items if item.kind == "parameters"]
    assert len(texts) == 1
    assert "3 parameters rounded to uint4 with a scale for 32 values" in texts[0]


@pytest.mark.spec("PRE-90")
def test_a_weight_is_measured_once_for_its_verdict_and_the_preflight(
    tmp_path: Path, reference: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = []

    def count(trusted: Any, weight: WeightNumbers, inputs: Any) -> Rounding:
        measured.append(weight.values.shape)
        return measure_rounding(trusted, weight, inputs)

    with opened_both(reference, captured(tmp_path, port(Gptq))) as (ours, theirs):
        alone = preflight(ours, theirs)
        monkeypatch.setattr(weight_judge, "measure_rounding", count)
        assert examine(compare(ours, theirs), ours, theirs).preflight == alone
    assert measured == [(128, 64), (128, 128), (32, 128)]


@pytest.mark.spec("CAP-330")
@pytest.mark.parametrize(("make", "number", "scope"), FORMS)
def test_what_is_recorded_is_what_the_layer_multiplies_by(
    tmp_path: Path, make: Make, number: str, scope: str
) -> None:
    net = port(make)
    with open_archive(captured(tmp_path, net)) as archive:
        weight = archive.load(archive.get("0/2/param.weight"))
        made = net[2](torch.eye(128)) - net[2].bias
        assert np.allclose(weight, made.detach().numpy().T, rtol=1e-5, atol=1e-6)
        assert archive.info.modules["2"].settings["numbers"] == {"weight": number}


def zero_point_off(layer: Any) -> None:
    layer.weight_zero_point += 1


def scales_of_columns(layer: Any) -> None:
    scales = layer.weight_scale
    layer.forward = lambda x: nn.functional.linear(x, layer.weight.float() * scales.T, layer.bias)
    layer.weight_scale = scales.T.contiguous()


def scales_transposed(layer: Any) -> None:
    layer.weight_scale.copy_(layer.weight_scale.T.reshape(layer.weight_scale.shape))


def larger_scales(layer: Any) -> None:
    layer.weight_scale *= 1.5


def exchanged_nibbles(layer: Any) -> None:
    layer.weight.copy_(layer.weight << 4 | layer.weight >> 4)


def clipped_channel(layer: Any) -> None:
    """A channel twenty times as large, whose numbers are cut off since scales were made without it."""
    wanted = 20 * model()[2].weight.detach()[:, 9] / layer.weight_scale[:, 0]
    layer.weight[:, 9] = wanted.round().clamp(-128, 127).to(torch.int8)


def unsigned_as_signed(layer: Any) -> None:
    layer.weight = (layer.weight.to(torch.int16) + 128).to(torch.uint8).view(torch.int8)


def plain_order(layer: Any) -> None:
    """Outputs of AWQ are packed one after the other."""
    columns = unpack(layer.qweight, axis=2)
    layer.qweight.copy_(pack(columns[..., np.argsort(AWQ).tolist()].numpy(), axis=2))


def zero_points_stored_as_they_are(layer: Any) -> None:
    """Zero points of a version of GPTQ that does not store one less, with a reader that adds it."""
    layer.qzeros.copy_(pack(unpack(layer.qzeros, axis=2).numpy() + 1, axis=2))


MISTAKES = [
    pytest.param(Awq, plain_order, "each eight rows are in the order", id="AWQ's order"),
    pytest.param(Gptq, zero_points_stored_as_they_are, "its zero point is 1 off", id="GPTQ's zero points"),
    pytest.param(
        lambda layer: Bytes(layer, "uint8", 32), zero_point_off, "its zero point is 1 off", id="zero point"
    ),
    pytest.param(Bytes, scales_rolled, "its scales are those of 1 row", id="scales of the next row"),
    pytest.param(Bytes, scales_of_columns, "its scales are those of the other axis", id="axis of scales"),
    pytest.param(
        lambda layer: Bytes(layer, "int8", 32),
        scales_transposed,
        "scales of rows and groups are exchanged",
        id="groups",
    ),
    pytest.param(Bytes, larger_scales, "all its scales are 1.5 times", id="factor"),
    pytest.param(Nibbles, exchanged_nibbles, "each two columns are exchanged", id="nibbles"),
    pytest.param(Bytes, unsigned_as_signed, "the sign bit of its numbers", id="sign"),
]


@pytest.mark.spec("POL-280", "POL-282")
@pytest.mark.parametrize(("make", "wrong", "name"), MISTAKES)
def test_a_wrong_weight_is_red_and_named(
    tmp_path: Path, reference: Path, make: Make, wrong: Callable[[Any], None], name: str
) -> None:
    target = captured(tmp_path, port(make, wrong))
    result = compare(reference, target)
    assert result.exit_status == 1
    assert name in texts(result, "weight_rounding")["0/2/param.weight"]
    assert result.divergence is not None
    assert result.divergence.module == "2"
    suspects = localize(reference, target).suspects
    assert [suspect.module for suspect in suspects] == ["2"]


@pytest.mark.spec("POL-280", "POL-282")
def test_a_channel_that_is_cut_off_is_named(tmp_path: Path) -> None:
    large = model()
    with torch.no_grad():
        large[2].weight[:, 9] *= 20
    path = tmp_path / "reference.h5"
    capture_workload(Workload(large, (X,)), path, params=True)
    result = compare(path, captured(tmp_path, port(Bytes, clipped_channel)))
    assert result.exit_status == 1
    text = texts(result, "weight_rounding")["0/2/param.weight"]
    assert "beyond the largest number cut off, in column 9: " in text


def group_of_another_size(layer: Any) -> None:
    def forward(x: Tensor) -> Tensor:
        scales = layer.weight_scale.repeat_interleave(64, 1)[:, :128]
        return nn.functional.linear(x, layer.weight.float() * scales, layer.bias)

    layer.forward = forward


def no_bias(layer: Any) -> None:
    layer.forward = lambda x: type(layer).forward(layer, x) - layer.bias


@pytest.mark.spec("POL-281", "POL-283")
@pytest.mark.parametrize(
    ("make", "wrong", "name"),
    [
        pytest.param(
            lambda layer: Bytes(layer, "int8", 32),
            group_of_another_size,
            "scales of groups of 64, where they are of 32",
            id="size of groups",
        ),
        pytest.param(Bytes, no_bias, "no bias is added", id="bias"),
    ],
)
def test_a_layer_that_does_not_compute_with_its_weight_is_red_and_named(
    tmp_path: Path, reference: Path, make: Make, wrong: Callable[[Any], None], name: str
) -> None:
    target = captured(tmp_path, port(make, wrong))
    result = compare(reference, target)
    assert result.exit_status == 1
    assert name in texts(result, "quantisation")["0/2/output"]
    assert "2" not in {
        key.split("/")[1] for key, text in texts(result, "weight_rounding").items() if "not the" in text
    }
    assert [suspect.module for suspect in localize(reference, target).suspects] == ["2"]


@pytest.mark.spec("POL-280")
def test_numbers_whose_errors_make_up_for_each_other_are_green(tmp_path: Path) -> None:
    """GPTQ takes other numbers than the nearest, so that products with like inputs are off by less."""
    generator = torch.Generator().manual_seed(4)
    mixed = torch.randn(400, 12, generator=generator) @ torch.randn(12, 128, generator=generator)
    x = mixed + torch.randn(400, 128, generator=generator) / 2
    torch.manual_seed(1)
    linear = nn.Linear(128, 64)
    layer = nn.Sequential(linear)
    paths = tmp_path / "reference.h5", tmp_path / "target.h5"
    for path, net in zip(paths, (layer, nn.Sequential(Gptq(linear, 32, inputs=x))), strict=True):
        capture_workload(Workload(net, (x,)), path, params=True)
    result = compare(*paths)
    text = texts(result, "weight_rounding")["0/0/param.weight"]
    assert "not each to the nearest" in text
    assert result.exit_status == 0


class Static(nn.Module):
    """A model that torch.ao quantises statically."""

    def __init__(self) -> None:
        super().__init__()
        from torch.ao.quantization import DeQuantStub, QuantStub

        torch.manual_seed(3)
        self.quant, self.dequant = QuantStub(), DeQuantStub()
        self.up, self.act, self.down = nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 32)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.dequant(self.down(self.act(self.up(self.quant(x)))))
        return result


def statically_quantised(wrong: Callable[[Any], None] | None = None) -> nn.Module:
    quantization: Any = torch.ao.quantization
    net = Static().eval()
    if wrong is not None:
        wrong(net)
    port: Any = net
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        port.qconfig = quantization.get_default_qconfig("x86")
        quantization.prepare(port, inplace=True)
        port(X)
        quantization.convert(port, inplace=True)
    return net


def wrong_row(net: Any) -> None:
    with torch.no_grad():
        net.down.weight[:16] *= 1.1


@pytest.mark.spec("CAP-331", "POL-281")
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
@pytest.mark.parametrize(("wrong", "status", "suspects"), [(None, 0, []), (wrong_row, 1, ["down"])])
def test_a_model_that_is_quantised_statically_is_recorded_in_floats(
    tmp_path: Path, wrong: Callable[[Any], None] | None, status: int, suspects: list[str]
) -> None:
    paths = tmp_path / "reference.h5", tmp_path / "target.h5"
    capture_workload(Workload(Static().eval(), (X,)), paths[0], params=True)
    port = statically_quantised(wrong)
    capture_workload(Workload(port, (X,)), paths[1], params=True)
    with open_archive(paths[1]) as archive:
        made: Any = port
        up = made.up(made.quant(X)).dequantize()
        assert np.array_equal(archive.load(archive.get("0/up/output")), up.numpy())
    result = compare(*paths)
    assert result.exit_status == status
    assert [suspect.module for suspect in localize(*paths).suspects] == suspects


@pytest.mark.spec("POL-281")
@pytest.mark.parametrize(
    "make",
    [
        pytest.param(Bytes, id="int8"),
        pytest.param(lambda layer: Nibbles(layer, 16), id="int4-16"),
        pytest.param(lambda layer: Nibbles(layer, 128), id="int4-128"),
        pytest.param(lambda layer: Bytes(layer, "float8_e4m3fn"), id="float8"),
    ],
)
def test_own_errors_are_those_that_independent_rounding_makes(tmp_path: Path, make: Make) -> None:
    """Each number is off by a uniform error of its step, whose squares add up over inputs."""
    torch.manual_seed(0)
    layer = nn.Linear(256, 128)
    x = torch.randn(64, 256)
    net = make(layer)
    own = (net(x) - layer(x)).double().norm()
    weight, shape = layer.weight.detach().double(), layer.weight.shape
    if isinstance(net, Nibbles):
        step = net.get_buffer("weight_scale").double().repeat_interleave(net.group, 1)
    elif net.get_buffer("weight").dtype == torch.int8:
        step = net.get_buffer("weight_scale").double().expand(shape)
    else:  # three bits behind the leading one, and 2 ** -9 below 2 ** -6
        scale = net.get_buffer("weight_scale").double()
        exponent = torch.floor(torch.log2((weight / scale).abs())).clamp(min=-6)
        step = torch.exp2(exponent - 3) * scale
    predicted = (x.double().square() @ (step.square() / 12).T).sum().sqrt()
    assert 0.8 < own / predicted < 1.25


class Block(nn.Module):
    """A norm and a gated pair of layers, beside a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.act = nn.LayerNorm(64), nn.SiLU()
        self.up, self.down = nn.Linear(64, 128), nn.Linear(128, 64)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x + self.down(self.act(self.up(self.norm(x))))
        return result


def blocks() -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(Block(), Block(), Block()).eval()


def smoothed(wrong: Callable[[Any], None] | None = None) -> Any:
    """AWQ as it is: columns of a weight are multiplied before it is rounded, and the norm is divided."""
    port = blocks()
    for block in port:
        scales = torch.exp(torch.randn(64, generator=torch.Generator().manual_seed(3)) / 2)
        with torch.no_grad():
            block.norm.weight /= scales
            block.norm.bias /= scales
            block.up.weight *= scales
        block.up, block.down = Awq(block.up), Awq(block.down)
    if wrong is not None:
        with torch.no_grad():
            wrong(port[1])
    return port


def norm_not_divided(block: Any) -> None:
    block.norm.weight.copy_(blocks()[1].norm.weight)


def norm_adds_more(block: Any) -> None:
    block.norm.register_forward_hook(lambda _, given, made: made + 0.2)


def norm_of_another_epsilon(block: Any) -> None:
    block.norm.eps = 0.2


def larger_scale_of_awq(block: Any) -> None:
    block.up.scales *= 1.4


@pytest.mark.spec("POL-284")
@pytest.mark.parametrize(
    ("wrong", "guilty"),
    [
        pytest.param(None, set(), id="right"),
        pytest.param(norm_not_divided, {"1.norm", "1.up"}, id="the norm is not divided"),
        pytest.param(norm_adds_more, {"1.norm"}, id="the norm is divided, and adds 0.2"),
        pytest.param(norm_of_another_epsilon, {"1.norm"}, id="the norm is divided, of another epsilon"),
        pytest.param(larger_scale_of_awq, {"1.norm", "1.up"}, id="larger scales"),
    ],
)
def test_columns_that_were_scaled_before_rounding_accuse_nobody(
    tmp_path: Path, wrong: Callable[[Any], None] | None, guilty: set[str]
) -> None:
    paths = tmp_path / "reference.h5", tmp_path / "target.h5"
    workload = Workload(blocks(), (X,))
    capture_workload(workload, paths[0], params=True)
    capture_workload(Workload(smoothed(wrong), (X,)), paths[1], params=True)
    result = compare(*paths)
    assert result.exit_status == int(bool(guilty))
    assert (
        set(result.counts) <= {"identical", "within-rounding", "explained", "missing-in-reference"} or guilty
    )
    for found in (localize(*paths), localize(*paths, reference_model=workload)):
        assert {suspect.module for suspect in found.suspects} <= guilty
        assert bool(found.suspects) == bool(guilty)


class Gated(nn.Module):
    """A norm that two layers share, beside a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(64)
        self.gate, self.up, self.down = nn.Linear(64, 96), nn.Linear(64, 96), nn.Linear(96, 64)

    def forward(self, x: Tensor) -> Tensor:
        given = self.norm(x)
        result: Tensor = x + self.down(nn.functional.silu(self.gate(given)) * self.up(given))
        return result


class Numbers(nn.Module):
    """int8 with a step for each row, under names of its own."""

    is_transposed = False

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        step = layer.weight.detach().abs().amax(1) / 127
        numbers = (layer.weight.detach() / step[:, None]).round().to(torch.int8)
        self.register_buffer("w", numbers.T.contiguous() if self.is_transposed else numbers)
        self.s, self.b = nn.Parameter(step), layer.bias

    def forward(self, x: Tensor) -> Tensor:
        numbers = self.get_buffer("w").to(x.dtype)
        return (x @ (numbers if self.is_transposed else numbers.T)) * self.s + self.b


class Across(Numbers):
    is_transposed = True


class Squared(Numbers):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + x.square().mean(-1, keepdim=True)


@pytest.mark.spec("CAP-330")
@pytest.mark.parametrize(("make", "is_read"), [(Numbers, True), (Across, True), (Squared, False)])
def test_bytes_of_any_name_are_a_weight_if_the_module_computes_with_it(
    tmp_path: Path, make: Callable[[nn.Linear], nn.Module], is_read: bool
) -> None:
    layer = nn.Linear(64, 32)
    with open_archive(captured(tmp_path, nn.Sequential(make(layer)))) as run:
        records = {record.key.slot: record for record in run.records}
        assert ("param.weight" in records) == is_read
        if is_read:
            step = np.abs(layer.weight.detach().numpy()).max(axis=1, keepdims=True) / 127
            off = np.abs(run.load(records["param.weight"]) - layer.weight.detach().numpy())
            assert (off <= 0.501 * step).all()


@pytest.mark.spec("POL-690")
@pytest.mark.parametrize(
    ("kept", "left_out"),
    [
        pytest.param((), None, id="int8, right"),
        pytest.param((), "up", id="int8"),
        pytest.param(("up",), "up", id="one in floats"),
        pytest.param(("gate", "up", "down"), "up", id="floats"),
    ],
)
def test_a_layer_that_lacks_the_factors_of_a_shared_input_is_guilty_alone(
    tmp_path: Path, kept: tuple[str, ...], left_out: str | None
) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = nn.Sequential(Gated(), Gated()).eval()
    port: Any = copy.deepcopy(net)
    for number, block in enumerate(port):
        factors = torch.linspace(0.9, 1.1, 64)
        with torch.no_grad():
            block.norm.weight /= factors
            for name in ("gate", "up"):
                if (number, name) != (1, left_out):
                    block.get_submodule(name).weight *= factors
        for name in ("gate", "up", "down"):
            if name not in kept:
                setattr(block, name, Numbers(getattr(block, name)))
    paths = tmp_path / "reference.h5", tmp_path / "target.h5"
    workload = Workload(net, (X,))
    capture_workload(workload, paths[0], params=True)
    capture_workload(Workload(port, (X,)), paths[1], params=True)
    found = localize(*paths, reference_model=workload)
    assert compare(*paths).exit_status == found.exit_status == int(left_out is not None)
    assert [suspect.module for suspect in found.suspects] == ([] if left_out is None else ["1.up"])
    if left_out is not None:
        assert found.suspects[0].cause == "weight-columns"


class Noisy(Gptq):
    """A layer that draws random numbers in training."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(super().forward(x), 0.1, training=True)


@pytest.mark.spec("CAP-330")
def test_asking_a_layer_draws_no_random_numbers_of_the_run(tmp_path: Path) -> None:
    net = nn.Sequential(Noisy(nn.Linear(64, 32)))
    torch.manual_seed(5)
    alone = net(X)
    torch.manual_seed(5)
    with tensorcap.capture(net, tmp_path / "run.h5", params=True):
        captured_result = net(X)
    assert torch.equal(alone, captured_result)
