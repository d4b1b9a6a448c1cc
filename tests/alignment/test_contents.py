"""Pairs behind a mistake, of modules that a port writes otherwise: folded, fused, nested or laid out so."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

import tensorcap
from tensorcap.alignment import align
from tensorcap.workload import Workload
from tests.localization.test_beginnings import located

Pairs = set[tuple[str, str]]


def drawn(model: nn.Module, seed: int) -> nn.Module:
    """The model with weights that leave its values of one size, and with statistics in its batch norms."""
    generator = torch.Generator().manual_seed(seed)
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            noise = torch.randn(parameter.shape, generator=generator)
            is_gain = parameter.ndim == 1 and name == "weight"
            parameter.data = (
                noise / (parameter[0].numel() ** 0.5) if parameter.ndim > 1 else noise * 0.2 + is_gain
            )
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean = 0.3 * torch.randn(module.num_features, generator=generator)
            module.running_var = 0.5 + torch.rand(module.num_features, generator=generator)
    return model.eval()


def pairs_of(reference: nn.Module, x: Tensor, target: nn.Module, y: Tensor, folder: Path) -> Pairs:
    """Which tensors of two runs are compared: one of each by its places."""
    for name, model, given in (("ref", reference, x), ("tgt", target, y)):
        (folder / f"{name}.h5").unlink(missing_ok=True)
        with torch.no_grad(), tensorcap.capture(model, folder / f"{name}.h5"):
            model(given)
    aligned = align(folder / "ref.h5", folder / "tgt.h5")
    return {
        (key.removeprefix("0/"), source.key.text.removeprefix("0/"))
        for key, sources in aligned.target.sources.items()
        for source in sources
    }


class Unit(nn.Module):
    """A convolution, its batch norm and an activation."""

    def __init__(self, before: int, after: int, size: int, stride: int) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(before, after, size, stride, size // 2, bias=False)
        self.norm = nn.BatchNorm2d(after)

    def forward(self, x: Any) -> Any:
        return self.norm(self.convolution(x))


class Block(nn.Module):
    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        stride = 1 if before == after else 2
        self.first, self.act, self.second = (
            Unit(before, after, 3, stride),
            nn.ReLU(),
            Unit(after, after, 3, 1),
        )
        self.shortcut = Unit(before, after, 1, stride) if stride > 1 else nn.Identity()

    def forward(self, x: Any) -> Any:
        return F.relu(self.second(self.act(self.first(x))) + self.shortcut(x))


class Network(nn.Module):
    """Convolutions in stages of blocks, channels first."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.pool = Unit(3, 8, 3, 1), nn.MaxPool2d(2)
        sizes = ((8, 8), (8, 8)), ((8, 16), (16, 16)), ((16, 24),)
        self.stages = nn.Sequential(*(nn.Sequential(*(Block(*s) for s in stage)) for stage in sizes))
        self.head = nn.Linear(24, 5)

    def forward(self, x: Any) -> Any:
        x = self.pool(F.relu(self.stem(x)))
        return self.head(self.stages(x).mean((2, 3)))


class Folded(nn.Module):
    """A convolution with its norm folded into it, channels last, the kernel too."""

    def __init__(self, unit: Unit, *, has_mean: bool = True, is_skewed: bool = False) -> None:
        super().__init__()
        norm, convolution = unit.norm, unit.convolution
        assert norm.running_var is not None
        assert norm.running_mean is not None
        gain = norm.weight / (norm.running_var + norm.eps) ** 0.5
        self.kernel = nn.Parameter(
            (convolution.weight * gain[:, None, None, None]).permute(2, 3, 1, 0).detach()
        )
        self.bias = nn.Parameter((norm.bias - norm.running_mean * gain * has_mean).detach())
        self.stride, self.is_skewed = convolution.stride, is_skewed

    def forward(self, x: Any) -> Any:
        pad = self.kernel.shape[0] // 2
        sides = (0, 2 * pad, 0, 2 * pad) if self.is_skewed else (pad,) * 4
        x = F.pad(x.permute(0, 3, 1, 2), sides)
        return F.conv2d(x, self.kernel.permute(3, 2, 0, 1), self.bias, self.stride).permute(0, 2, 3, 1)


class FlatBlock(nn.Module):
    def __init__(self, block: Any, **mistake: bool) -> None:
        super().__init__()
        has_shortcut = isinstance(block.shortcut, Unit)
        self.short = Folded(block.shortcut) if has_shortcut else None
        self.c1, self.c2 = Folded(block.first, **mistake), Folded(block.second)

    def forward(self, x: Any) -> Any:
        kept = x if self.short is None else self.short(x)
        return F.relu(self.c2(F.relu(self.c1(x))) + kept)


class Flat(nn.Module):
    """The network with all blocks in one list, channels last, norms folded; with a mistake, if wanted."""

    def __init__(self, model: Any, mistake: str = "") -> None:
        super().__init__()
        self.stem, self.pools_sum = Folded(model.stem, is_skewed=mistake == "stem"), mistake == "pool"
        blocks = [block for stage in model.stages for block in stage]
        self.h = nn.Sequential(
            *(FlatBlock(b, has_mean=not (mistake == "fold" and n == 3)) for n, b in enumerate(blocks))
        )
        self.weight, self.bias = nn.Parameter(model.head.weight.T.clone()), model.head.bias

    def forward(self, x: Any) -> Any:
        x = F.relu(self.stem(x)).permute(0, 3, 1, 2)
        x = F.avg_pool2d(x, 2) if self.pools_sum else F.max_pool2d(x, 2)
        return self.h(x.permute(0, 2, 3, 1)).mean((1, 2)) @ self.weight + self.bias


NETWORK = drawn(Network(), 0)
IMAGES = torch.randn(2, 3, 12, 12, generator=torch.Generator().manual_seed(1))


@pytest.mark.spec("ALN-341", "ALN-342", "ALN-343", "ALN-345", "ALN-346")
@pytest.mark.parametrize("mistake", ["", "stem", "pool", "fold"])
def test_folded_convolutions_are_paired_with_the_norms_whatever_a_mistake_does(
    mistake: str, tmp_path: Path
) -> None:
    port = Flat(NETWORK, mistake).eval()
    pairs = pairs_of(NETWORK, IMAGES, port, IMAGES.permute(0, 2, 3, 1).contiguous(), tmp_path)
    places = [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0)]
    units = {"first": "c1", "second": "c2"}
    for n, (i, j) in enumerate(places):
        for name, other in units.items():
            assert (f"stages.{i}.{j}.{name}.norm/output", f"h.{n}.{other}/output") in pairs
            assert (f"stages.{i}.{j}.{name}.norm/input.input", f"h.{n}.{other}/input.x") not in pairs
        assert (f"stages.{i}.{j}.act/output", f"h.{n}.c2/input.x") in pairs
    assert {
        ("stages.1.0.shortcut.norm/output", "h.2.short/output"),
        ("pool/output", "h/input.input"),
    } <= pairs
    blocks = {n: (f"stages.{i}.{j}", f"stages.{i}") for n, (i, j) in enumerate(places)}
    for n, names in blocks.items():  # a stage's result is its last block's
        assert {r.partition("/")[0] for r, t in pairs if t == f"h.{n}/output"} <= {*names}


@pytest.mark.spec("ALN-341")
def test_a_norm_without_the_running_mean_is_named_in_its_layer_alone(tmp_path: Path) -> None:
    wrong = Workload(Flat(NETWORK, "fold").eval(), {"x": IMAGES.permute(0, 2, 3, 1).contiguous()})
    localization = located("archives", tmp_path, Workload(NETWORK, {"x": IMAGES}), wrong)
    (suspect,) = localization.suspects
    assert suspect.module.startswith("stages.1.1.first")


class Heads(nn.Module):
    """Attention of two heads over projections that the subclasses make."""

    scale = 0.25

    def attend(self, *projected: Any) -> Any:
        q, k, v = (y.unflatten(-1, (2, 16)).transpose(1, 2) for y in projected)
        return F.scaled_dot_product_attention(q, k, v, scale=self.scale).transpose(1, 2).flatten(2)


class Attention(Heads):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.dense = nn.Linear(32, 96), nn.Linear(32, 32)

    def forward(self, x: Any) -> Any:
        return self.dense(self.attend(*self.qkv(x).chunk(3, -1)))


class OwnMatrices(Heads):
    """The same with four matrices of its own."""

    def __init__(self, other: Attention) -> None:
        super().__init__()
        weights, biases = other.qkv.weight.detach().chunk(3), other.qkv.bias.detach().chunk(3)
        self.w = nn.ParameterList(weight.clone() for weight in (*weights, other.dense.weight))
        self.b = nn.ParameterList(bias.clone() for bias in (*biases, other.dense.bias))

    def forward(self, x: Any) -> Any:
        q, k, v = (F.linear(x, self.w[n], self.b[n]) for n in range(3))
        return F.linear(self.attend(q, k, v), self.w[3], self.b[3])


class Projections(Heads):
    """The same with a linear layer for each."""

    def __init__(self, other: Attention) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(32, 32) for _ in range(4))
        weights, biases = other.qkv.weight.detach().chunk(3), other.qkv.bias.detach().chunk(3)
        for own, weight, bias in zip((self.q, self.k, self.v), weights, biases, strict=True):
            own.weight.data, own.bias.data = weight.clone(), bias.clone()
        self.o.weight.data, self.o.bias.data = other.dense.weight.detach(), other.dense.bias.detach()

    def forward(self, x: Any) -> Any:
        return self.o(self.attend(self.q(x), self.k(x), self.v(x)))


class Layer(nn.Module):
    """Norms, an attention and two linear layers; `takes` says which norm feeds the attention."""

    def __init__(self, attention: nn.Module, names: tuple[str, ...], takes: int = 0) -> None:
        super().__init__()
        self.names, self.takes = names, takes
        norms = nn.LayerNorm(32), nn.LayerNorm(32)
        for name, part in zip(names, (*norms, attention, nn.Linear(32, 64), nn.Linear(64, 32)), strict=True):
            self.add_module(name, part)

    def forward(self, x: Any) -> Any:
        first, second, attention, up, down = (getattr(self, name) for name in self.names)
        given, rest = (first, second) if self.takes == 0 else (second, first)
        return x + attention(given(x)) + down(F.gelu(up(rest(x))))


class Decoder(nn.Module):
    def __init__(self, name: str, layers: Iterable[nn.Module]) -> None:
        super().__init__()
        self.name = name
        self.add_module(name, nn.ModuleList(layers))

    def forward(self, x: Any) -> Any:
        for layer in getattr(self, self.name):
            x = layer(x)
        return x


OURS, THEIRS = ("norm", "other_norm", "attention", "up", "down"), ("n1", "n2", "attn", "fc1", "fc2")
DECODER: Any = drawn(Decoder("layers", (Layer(Attention(), OURS) for _ in range(3))), 2)
TOKENS = torch.randn(2, 7, 32, generator=torch.Generator().manual_seed(3))


def ported(kind: type[OwnMatrices | Projections], **mistake: Any) -> nn.Module:
    """The decoder in other modules of other names, its middle layer with a mistake."""
    layers = []
    for n, layer in enumerate(DECODER.layers):
        own: Any = Layer(kind(layer.attention), THEIRS, mistake.get("takes", 0) if n == 1 else 0)
        for name, other in zip(OURS, THEIRS, strict=True):
            if name != "attention":
                getattr(own, other).load_state_dict(getattr(layer, name).state_dict())
        own.attn.scale = mistake.get("scale", 0.25) if n == 1 else 0.25
        layers.append(own)
    return Decoder("h", layers).eval()


@pytest.mark.spec("ALN-342")
@pytest.mark.parametrize("scale", [0.25, 0.35])
def test_an_attention_with_matrices_of_its_own_is_the_attention_and_not_its_last_layer(
    scale: float, tmp_path: Path
) -> None:
    pairs = pairs_of(DECODER, TOKENS, ported(OwnMatrices, scale=scale), TOKENS, tmp_path)
    for n in range(3):
        partners = {r for r, t in pairs if t.startswith(f"h.{n}.attn/")}
        assert partners == {f"layers.{n}.attention/output", f"layers.{n}.attention/input.x"}


@pytest.mark.spec("ALN-31", "ALN-344")
def test_projections_that_are_given_another_norm_are_compared_with_what_they_should_be_given(
    tmp_path: Path,
) -> None:
    pairs = pairs_of(DECODER, TOKENS, ported(Projections, takes=1), TOKENS, tmp_path)
    given = {r for r, t in pairs if t.startswith("h.1.attn.") and t.endswith("input.input")}
    assert given >= {"layers.1.attention.qkv/input.input", "layers.1.attention.dense/input.input"}


class Scored(nn.Module):
    """Attention of one head whose scores a table is added to, and then what `late` is."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name, self.late = name, torch.zeros(7, 7)
        self.q, self.k, self.v = (nn.Linear(32, 32) for _ in range(3))

    def forward(self, x: Any, **table: Any) -> Any:
        scores = self.q(x) @ self.k(x).mT / 6.0 + table[self.name] + self.late
        return scores.softmax(-1) @ self.v(x)


class Tables(nn.Module):
    """Two such layers with one table: in the reference with a mask in it, in the port without."""

    def __init__(self, names: tuple[str, str], *, is_port: bool) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.zeros(7, 7))
        self.layers = nn.ModuleList(Scored(names[1]) for _ in range(2))
        self.names, self.is_port = names, is_port

    def forward(self, x: Any) -> Any:
        mask = torch.ones(7, 7).triu(1) * -4.0
        table = self.table * 1.0 if self.is_port else self.table + mask
        for layer in self.layers:
            layer.late = mask * self.is_port
            x = x + layer(x, **{self.names[1]: table})
        return x


@pytest.mark.spec("ALN-344")
@pytest.mark.parametrize("is_wrong", [False, True])
def test_tables_that_layers_which_agree_are_given_too_are_two_things(is_wrong: bool, tmp_path: Path) -> None:
    reference: Any = drawn(Tables(("", "bias"), is_port=False), 5)
    port: Any = Tables(("", "table"), is_port=True)
    port.load_state_dict(reference.state_dict())
    if is_wrong:
        port.layers[1].v.weight.data[:16] *= 0.5
    pairs = pairs_of(reference, TOKENS, port.eval(), TOKENS, tmp_path)
    assert ("layers.1/output", "layers.1/output") in pairs
    assert (
        not {("layers.0/input.bias", "layers.0/input.table"), ("layers.1/input.bias", "layers.1/input.table")}
        & pairs
    )


class Rotary(nn.Module):
    """Keys and queries whose product is made: their channels may lie in any order, the same in both."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x: Any) -> Any:
        return x + torch.tanh(self.turned(self.q(x)) @ self.turned(self.k(x)).mT / 8.0) @ x

    order = torch.arange(32)

    def turned(self, y: Any) -> Any:
        halves = y[..., self.order.argsort()]
        even, odd = halves[..., 0::2], halves[..., 1::2]
        angle = torch.arange(7.0)[:, None] * 0.3 ** torch.arange(16)
        return torch.cat([even * angle.cos() - odd * angle.sin(), odd * angle.cos() + even * angle.sin()], -1)


@pytest.mark.spec("ALN-130")
def test_a_layer_without_the_permutation_of_the_others_leaves_theirs_what_it_is(tmp_path: Path) -> None:
    reference: Any = drawn(Decoder("layers", (Rotary() for _ in range(2))), 6)
    port: Any = Decoder("h", (Rotary() for _ in range(2)))
    order = torch.cat([torch.arange(0, 32, 2), torch.arange(1, 32, 2)])
    for n, (layer, own) in enumerate(zip(reference.layers, port.h, strict=True)):
        own.order = order
        for name in ("q", "k"):
            wrong = n == 1 and name == "k"
            for part in ("weight", "bias"):
                values = getattr(getattr(layer, name), part).detach()
                getattr(getattr(own, name), part).data = values.clone() if wrong else values[order]
    for name, model in (("ref", reference), ("tgt", port)):
        with torch.no_grad(), tensorcap.capture(model, tmp_path / f"{name}.h5"):
            model(TOKENS)
    comparison = tensorcap.compare(tmp_path / "ref.h5", tmp_path / "tgt.h5")
    assert comparison.divergence is not None
    assert comparison.divergence.module == "layers.1.k"


class WordsAndPlaces(nn.Module):
    """Words that the head holds too, and places, as modules or as parameters of one."""

    def __init__(self, *, is_one: bool) -> None:
        super().__init__()
        self.is_one, self.head = is_one, nn.Linear(16, 40, bias=False)
        self.words, self.places = nn.Embedding(40, 16), nn.Embedding(12, 16)
        self.norm, self.embed = nn.LayerNorm(16), nn.Module()
        self.head.weight = self.words.weight

    def forward(self, ids: Any) -> Any:
        at = torch.arange(ids.shape[1])[None]
        x = self.embed(ids, at) if self.is_one else self.words(ids) + self.places(at)
        return self.head(self.norm(x))


class BothTables(nn.Module):
    def __init__(self, words: Any, places: Any) -> None:
        super().__init__()
        self.words, self.places = nn.Parameter(words), nn.Parameter(places)

    def forward(self, ids: Any, at: Any) -> Any:
        return self.words[ids] + self.places[at]


@pytest.mark.spec("ALN-360")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_module_of_both_tables_is_not_the_one_whose_other_table_lies_elsewhere(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    reference = drawn(WordsAndPlaces(is_one=False), 1)
    port: Any = drawn(WordsAndPlaces(is_one=True), 1)
    words, places = (table.weight.detach().clone() for table in (port.words, port.places))
    port.embed = BothTables(words, places)
    del port.words, port.places
    ids = torch.randint(0, 40, (1, 9), generator=torch.Generator().manual_seed(4))
    pairs = pairs_of(reference, ids, port.to(dtype), ids, tmp_path)
    assert ("norm/output", "norm/output") in pairs
    assert not [pair for pair in pairs if pair[0].startswith("places/") and pair[1].startswith("embed/")]


class Half(nn.Module):
    """What a recurrent cell makes of its input, or of its state: a product of its own, with a bias."""

    def __init__(self, name: str, width: int = 16) -> None:
        super().__init__()
        self.name, self.bias = name, nn.Parameter(torch.zeros(width))
        self.register_parameter(name, nn.Parameter(torch.zeros(width, width)))

    def forward(self, x: Any) -> Any:
        return x @ self.get_parameter(self.name).T + self.bias


class Halves(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.of_input, self.of_state, self.out = Half("weight_ih"), Half("weight_hh"), nn.Linear(16, 16)

    def forward(self, x: Any) -> Any:
        return self.out(torch.tanh(self.of_input(x) + self.of_state(x.flip(0))))


class Cell(nn.Module):
    """Both halves in one module, whose bias is the sum of theirs."""

    def __init__(self, halves: Any) -> None:
        super().__init__()
        self.weight_ih, self.weight_hh = halves.of_input.weight_ih, halves.of_state.weight_hh
        self.bias = nn.Parameter(halves.of_input.bias + halves.of_state.bias)

    def forward(self, x: Any) -> Any:
        return x @ self.weight_ih.T + x.flip(0) @ self.weight_hh.T + self.bias


class WithCell(nn.Module):
    def __init__(self, halves: Any) -> None:
        super().__init__()
        self.cell, self.end = Cell(halves), halves.out

    def forward(self, x: Any) -> Any:
        return self.end(torch.tanh(self.cell(x)))


@pytest.mark.spec("ALN-347")
def test_one_bias_that_is_the_sum_of_two_is_neither_of_them(tmp_path: Path) -> None:
    halves = drawn(Halves(), 3)
    x = torch.randn(4, 16, generator=torch.Generator().manual_seed(5))
    for name, model in (("ref", halves), ("tgt", WithCell(halves).eval())):
        with torch.no_grad(), tensorcap.capture(model, tmp_path / f"{name}.h5", params=True):
            model(x)
    found = tensorcap.compare(tmp_path / "ref.h5", tmp_path / "tgt.h5")
    statuses = {pair.key: pair.status for pair in found.pairs}
    assert statuses["0/of_input/param.weight_ih"] == statuses["0/of_state/param.weight_hh"] == "identical"
    assert statuses["0/of_input/param.bias"] == statuses["0/of_state/param.bias"] == "explained"
    assert found.exit_status == 0
