"""A layout that a whole port has otherwise under equal names: rotary pairs, fused heads, channels last.

The models are written here, twice: each port computes in its own layout what the other one computes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import Tensor, nn  # noqa: E402 - after the check that it is there
from torch.nn import functional as F  # noqa: E402, N812 - as everybody calls it

import tensorcap  # noqa: E402
from tensorcap.comparison import Comparison  # noqa: E402

HEADS, HEAD, LAYERS = 2, 8, 3
SIZE = HEADS * HEAD


def angles(length: int) -> Tensor:
    """Angles of rotation (position, pair)."""
    values: Tensor = torch.arange(length)[:, None] * 100.0 ** -(torch.arange(HEAD // 2) / (HEAD // 2))
    return values


class Attention(nn.Module):
    """Rotates elements `i` and `i + HEAD / 2` of a head, or `2 i` and `2 i + 1` if `interleaved`."""

    def __init__(self, interleaved: bool = False) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(SIZE, SIZE) for _ in range(4))
        self.interleaved = interleaved

    def turn(self, x: Tensor) -> Tensor:
        angle = angles(x.shape[-2])
        axis = -1 if self.interleaved else -2
        sizes = (*x.shape[:-1], HEAD // 2, 2) if self.interleaved else (*x.shape[:-1], 2, HEAD // 2)
        one, two = x.reshape(sizes).unbind(axis)
        turned = one * angle.cos() - two * angle.sin(), two * angle.cos() + one * angle.sin()
        out: Tensor = torch.stack(turned, axis).flatten(-2)
        return out

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (HEADS, HEAD)).transpose(1, 2) for f in (self.q, self.k, self.v))
        mixed = F.scaled_dot_product_attention(self.turn(q), self.turn(k), v, is_causal=True)
        out: Tensor = self.o(mixed.transpose(1, 2).flatten(2))
        return out


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(SIZE), Attention()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.attention(self.norm(x))
        return out


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(50, SIZE), nn.Linear(SIZE, 50)
        self.layers = nn.ModuleList(Block() for _ in range(LAYERS))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        out: Tensor = self.head(x)
        return out


def interleave(linear: nn.Linear) -> None:
    """Put the rows `i` and `i + HEAD / 2` of each head beside each other."""
    for values in (linear.weight, linear.bias):
        pairs = values.detach().reshape(HEADS, 2, HEAD // 2, *values.shape[1:]).transpose(1, 2)
        values.data = pairs.reshape(values.shape).clone()


def decoder() -> Decoder:
    torch.manual_seed(0)
    return Decoder().eval()


def interleaved(weights: tuple[int, ...] = (0, 1, 2), code: tuple[int, ...] = (0, 1, 2)) -> Decoder:
    """The decoder with interleaved rotation, and weights for it, in some layers."""
    port: Any = decoder()
    for i in weights:
        interleave(port.layers[i].attention.q)
        interleave(port.layers[i].attention.k)
    for i in code:
        port.layers[i].attention.interleaved = True
    return port  # type: ignore[no-any-return] # layers are not typed


def compared(
    tmp_path: Path, reference: nn.Module, target: nn.Module, inputs: Tensor, **options: Any
) -> Comparison:
    tmp_path.mkdir(exist_ok=True)
    for name, model in (("r.h5", reference), ("t.h5", target)):
        with tensorcap.capture(model, tmp_path / name, **options), torch.no_grad():
            model(inputs)
    return tensorcap.compare(tmp_path / "r.h5", tmp_path / "t.h5")


IDS = torch.arange(14).reshape(2, 7) * 3 % 50
MOVED = {f"0/layers.{i}.attention.{name}/output" for i in range(LAYERS) for name in "qk"}


def bad(comparison: Comparison) -> list[str]:
    return [pair.key for pair in comparison.pairs if pair.is_required and not pair.is_green]


@pytest.mark.spec("ALN-43")
def test_interleaved_rotation_in_all_layers_is_compared_in_halves(tmp_path: Path) -> None:
    comparison = compared(tmp_path, decoder(), interleaved(), IDS)
    assert comparison.exit_status == 0
    steps = {pair.key: pair.origin.steps for pair in comparison.pairs if pair.origin}
    assert steps == dict.fromkeys(MOVED, (f"rope_halves {HEAD}",))
    assert {pair.status for pair in comparison.pairs if pair.key in MOVED} <= {"identical", "within-rounding"}
    assert comparison.mapping is not None
    assert list(comparison.mapping.tokens) == [
        f"layers.0.attention.q/output and 5 more places: compared after rope_halves {HEAD}, the target's "
        "layout in all layers"
    ]


@pytest.mark.spec("ALN-43")
def test_weights_follow_the_layout_of_their_results(tmp_path: Path) -> None:
    comparison = compared(tmp_path, decoder(), interleaved(), IDS, params=True)
    assert comparison.exit_status == 0
    steps = {pair.key: pair.origin.steps for pair in comparison.pairs if pair.origin}
    assert steps["0/layers.1.attention.k/param.weight"] == (f"rope_halves {HEAD} axis=0",)


@pytest.mark.spec("ALN-43")
@pytest.mark.parametrize(
    ("weights", "code", "first"),
    [
        pytest.param((0, 1, 2), (), "0/layers.0.attention.q/output", id="weights-alone"),
        pytest.param((), (0, 1, 2), "0/layers.0.attention.o/input.input", id="code-alone"),
        pytest.param((0, 1, 2), (0, 2), "0/layers.1.attention.o/input.input", id="code-of-one-layer-missing"),
        pytest.param((0, 2), (0, 1, 2), "0/layers.1.attention.q/output", id="weights-of-one-layer-missing"),
    ],
)
def test_a_layout_that_is_not_kept_is_an_error(
    tmp_path: Path, weights: tuple[int, ...], code: tuple[int, ...], first: str
) -> None:
    comparison = compared(tmp_path, decoder(), interleaved(weights, code), IDS)
    assert comparison.exit_status == 1
    assert comparison.divergence is not None
    assert comparison.divergence.pair.key == first


@pytest.mark.spec("ALN-43")
def test_a_layer_that_differs_from_the_others_is_red(tmp_path: Path) -> None:
    comparison = compared(tmp_path, decoder(), interleaved((0, 2), (0, 2)), IDS)
    assert bad(comparison) == ["0/layers.1.attention.q/output", "0/layers.1.attention.k/output"]
    assert comparison.exit_status == 1


@pytest.mark.spec("ALN-43")
def test_results_of_the_model_in_another_order_are_an_error(tmp_path: Path) -> None:
    port = decoder()
    with torch.no_grad():
        for values in (port.head.weight, port.head.bias):
            rows = values.reshape(5, 10, *values.shape[1:]).transpose(0, 1)
            values.copy_(rows.reshape(values.shape).clone())
    comparison = compared(tmp_path, decoder(), port, IDS)
    assert bad(comparison) == ["0/head/output", "0/@root/output"]


class Fused(nn.Module):
    """Query, key and value of one matrix: part by part, or head by head."""

    def __init__(self, by_head: bool) -> None:
        super().__init__()
        self.qkv, self.o, self.by_head = nn.Linear(SIZE, 3 * SIZE), nn.Linear(SIZE, SIZE), by_head

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(x).unflatten(-1, (HEADS, 3, HEAD) if self.by_head else (3, HEADS, HEAD))
        q, k, v = (t.transpose(1, 2) for t in parts.unbind(-2 if self.by_head else -3))
        out: Tensor = self.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return out


def fused(by_head: bool) -> nn.Sequential:
    torch.manual_seed(1)
    model = nn.Sequential(*(Fused(by_head) for _ in range(2)))
    layers: Any = model if by_head else ()
    for layer in layers:
        for values in (layer.qkv.weight, layer.qkv.bias):
            rows = values.detach().reshape(3, HEADS, HEAD, *values.shape[1:]).transpose(0, 1)
            values.data = rows.reshape(values.shape).clone()
    return model.eval()


@pytest.mark.spec("ALN-43")
def test_fused_projections_may_lie_head_by_head(tmp_path: Path) -> None:
    x = torch.randn(2, 5, SIZE, generator=torch.Generator().manual_seed(2))
    comparison = compared(tmp_path, fused(False), fused(True), x)
    assert comparison.exit_status == 0
    assert {pair.key for pair in comparison.pairs if pair.origin} == {"0/0.qkv/output", "0/1.qkv/output"}
    wrong: Any = fused(True)
    wrong[1].by_head = False
    assert compared(tmp_path / "wrong", fused(False), wrong, x).exit_status == 1


class Stem(nn.Module):
    """Convolutions of square maps with as many channels; with channels last it computes on [b, h, w, c]."""

    def __init__(self, channels_last: bool) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.stages = nn.ModuleList(Stage(channels_last) for _ in range(3))
        self.head, self.channels_last = nn.Linear(8, 10), channels_last

    def forward(self, x: Tensor) -> Tensor:
        x = x.permute(0, 2, 3, 1) if self.channels_last else x
        for stage in self.stages:
            x = stage(x)
        out: Tensor = self.head(x.mean((1, 2) if self.channels_last else (2, 3)))
        return out


class Stage(nn.Module):
    def __init__(self, channels_last: bool) -> None:
        super().__init__()
        self.conv, self.act, self.channels_last = nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(), channels_last

    def forward(self, x: Tensor) -> Tensor:
        last = self.channels_last
        x = self.conv(x.permute(0, 3, 1, 2)).permute(0, 2, 3, 1) if last else self.conv(x)
        out: Tensor = self.act(x)
        return out


@pytest.mark.spec("ALN-43")
def test_channels_last_of_equal_sizes_is_found(tmp_path: Path) -> None:
    x = torch.randn(2, 8, 8, 8, generator=torch.Generator().manual_seed(4))
    comparison = compared(tmp_path, Stem(False).eval(), Stem(True).eval(), x)
    assert comparison.exit_status == 0
    moved = {pair.key for pair in comparison.pairs if pair.origin}
    assert {"0/stages.0/output", "0/stages.1/input.x", "0/stages.2.act/input.input"} <= moved
    assert "0/stages.0.conv/output" not in moved


class Maps(nn.Module):
    """Stages from maps to maps, with channels last within, and at the border: in, out, both or neither."""

    def __init__(self, within: bool = False, *, takes: bool = False, returns: bool = False) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.stages = nn.ModuleList(Stage(within) for _ in range(3))
        self.enters, self.leaves = within and not takes, within and not returns

    def forward(self, x: Tensor) -> Tensor:
        x = x.permute(0, 2, 3, 1) if self.enters else x
        for stage in self.stages:
            x = stage(x)
        return x.permute(0, 3, 1, 2) if self.leaves else x


@pytest.mark.spec("ALN-43")
@pytest.mark.parametrize("size", [(8, 8), (6, 5)], ids=["square", "oblong"])
@pytest.mark.parametrize("takes", [True, False], ids=["takes", "does-not-take"])
def test_a_port_that_takes_and_returns_channels_last_is_right(
    tmp_path: Path, takes: bool, size: tuple[int, int]
) -> None:
    x = torch.randn(2, 8, *size, generator=torch.Generator().manual_seed(4))
    given = x.permute(0, 2, 3, 1).contiguous() if takes else x
    port = Maps(within=True, takes=takes, returns=True).eval()
    for name, model, inputs in (("r.h5", Maps().eval(), x), ("t.h5", port, given)):
        with tensorcap.capture(model, tmp_path / name), torch.no_grad():
            model(inputs)
    comparison = tensorcap.compare(tmp_path / "r.h5", tmp_path / "t.h5")
    if takes:
        assert bad(comparison) == []
        assert {
            pair.origin.steps for pair in comparison.pairs if pair.key == "0/@root/output" and pair.origin
        } == {('rearrange "a b c d -> a d b c"',)}
    else:
        assert "0/@root/output" in bad(comparison)


class RenamedMaps(nn.Module):
    """Two convolutions under names of one's own, which take and return channels first or last."""

    def __init__(self, names: tuple[str, str], takes_last: bool = False, returns_last: bool = False) -> None:
        super().__init__()
        torch.manual_seed(5)
        for name, (few, many) in zip(names, ((3, 8), (8, 4)), strict=True):
            self.add_module(name, Map(few, many, takes_last or returns_last))
        self.takes_last, self.returns_last = takes_last, returns_last

    def forward(self, x: Tensor) -> Tensor:
        x = x.permute(0, 2, 3, 1) if self.returns_last and not self.takes_last else x
        for module in self.children():
            x = module(x)
        return x if self.returns_last or not self.takes_last else x.permute(0, 3, 1, 2)


class Map(nn.Module):
    def __init__(self, few: int, many: int, last: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(many, few, 3, 3))
        self.last = last

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = F.conv2d(x.permute(0, 3, 1, 2) if self.last else x, self.weight, padding=1)
        return y.permute(0, 2, 3, 1) if self.last else y


@pytest.mark.spec("ALN-43")
@pytest.mark.parametrize("takes_last", [True, False], ids=["all-through", "at-its-end-alone"])
def test_a_model_returns_channels_last_if_it_is_given_them_so(tmp_path: Path, takes_last: bool) -> None:
    x = torch.randn(2, 3, 6, 6, generator=torch.Generator().manual_seed(6))
    given = x.permute(0, 2, 3, 1).contiguous() if takes_last else x
    port = RenamedMaps(("enter", "leave"), takes_last, returns_last=True)
    for name, model, inputs in (("r.h5", RenamedMaps(("first", "second")), x), ("t.h5", port, given)):
        with tensorcap.capture(model.eval(), tmp_path / name), torch.no_grad():
            model(inputs)
    comparison = tensorcap.compare(tmp_path / "r.h5", tmp_path / "t.h5")
    assert bad(comparison) == ([] if takes_last else ["0/@root/output"])
