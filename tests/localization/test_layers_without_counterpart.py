"""Modules that a port has no counterpart of: recurrent layers written out, heads, what leaves are given."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations

from tensorcap.alignment import align
from tensorcap.localization import Localization, localize
from tensorcap.rerun.producers import Producers
from tensorcap.runs import PartialArchive
from tensorcap.session import capture_workload
from tensorcap.workload import Workload
from tensorcap_formats.open import open_archive

WIDTH, LENGTH = 8, 7
Run = Callable[[Any, Tensor], Tensor]


class Tagger(nn.Module):
    """A recurrent layer between two linears, whose result is handed on as it is."""

    def __init__(self, layer: nn.Module, width: int) -> None:
        super().__init__()
        self.first, self.reader = nn.Linear(WIDTH, WIDTH), layer
        self.last = nn.Linear(width, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        hidden, _ = self.reader(self.first(x))
        result: Tensor = self.last(hidden)
        return result


class Written(nn.Module):
    """A port of it, whose layer is a function of the rows; it has no module for it."""

    def __init__(self, reference: Tagger, run: Run) -> None:
        super().__init__()
        self.begin, self.end = reference.first, reference.last
        self.weights = [reference.reader]  # no module of its own
        self.run = run

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.end(self.run(self.weights[0], self.begin(x)))
        return result


def gru(own: Any, x: Tensor, *, is_other: bool = False, is_early: bool = False) -> Tensor:
    """Cho et al. 2014 as torch has it; update gate the other way round, or reset before the product."""
    h, rows = x.new_zeros(x.shape[0], WIDTH), []
    w, u, b, c = own.weight_ih_l0, own.weight_hh_l0, own.bias_ih_l0, own.bias_hh_l0
    for row in x.unbind(1):
        (r, z, n), (hr, hz, hn) = (functional.linear(*each).chunk(3, -1) for each in ((row, w, b), (h, u, c)))
        reset, update = torch.sigmoid(r + hr), torch.sigmoid(z + hz)
        if is_early:
            candidate = torch.tanh(n + functional.linear(reset * h, u[2 * WIDTH :], c[2 * WIDTH :]))
        else:
            candidate = torch.tanh(n + reset * hn)
        kept, taken = (1 - update, update) if is_other else (update, 1 - update)
        h = kept * h + taken * candidate
        rows.append(h)
    return torch.stack(rows, 1)


def lstm(own: Any, x: Tensor, *, forget: float = 0.0, order: str = "ifgo", is_turned: bool = True) -> Tensor:
    """Both directions: a bias of the forget gate, gates in another order, the second one not turned back."""
    sides = []
    for suffix, steps in (("", x), ("_reverse", x.flip(1))):
        names = ("weight_ih_l0", "weight_hh_l0", "bias_ih_l0", "bias_hh_l0")
        w, u, b, c = (getattr(own, name + suffix) for name in names)
        h, cell, rows = x.new_zeros(x.shape[0], WIDTH), x.new_zeros(x.shape[0], WIDTH), []
        for row in steps.unbind(1):
            gates = functional.linear(row, w, b) + functional.linear(h, u, c)
            part = dict(zip(order, gates.chunk(4, -1), strict=True))
            cell = torch.sigmoid(part["f"] + forget) * cell + torch.sigmoid(part["i"]) * torch.tanh(part["g"])
            h = torch.sigmoid(part["o"]) * torch.tanh(cell)
            rows.append(h)
        sides.append(torch.stack(rows, 1))
    return torch.cat((sides[0], sides[1].flip(1) if is_turned else sides[1]), -1)


def tagger(kind: str) -> Tagger:
    torch.manual_seed(3)
    is_gru = kind == "gru"
    layer = (
        nn.GRU(WIDTH, WIDTH, batch_first=True)
        if is_gru
        else nn.LSTM(WIDTH, WIDTH, batch_first=True, bidirectional=True)
    )
    return Tagger(layer, WIDTH if is_gru else 2 * WIDTH).eval()


def localized(folder: Path, reference: nn.Module, target: nn.Module, **inputs: Tensor) -> Localization:
    x = inputs or {"x": torch.randn(2, LENGTH, WIDTH, generator=torch.Generator().manual_seed(1))}
    capture_workload(Workload(reference, x), folder / "ref.h5")
    capture_workload(Workload(target.eval(), x), folder / "tgt.h5")
    return localize(folder / "ref.h5", folder / "tgt.h5", reference_model=Workload(reference, x))


MISTAKES: dict[str, tuple[str, Run, str, str]] = {
    "update": ("gru", lambda own, x: gru(own, x, is_other=True), "gate-complement", "update_gate"),
    "reset": ("gru", lambda own, x: gru(own, x, is_early=True), "operations-order", "reset_after"),
    "forget": ("lstm", lambda own, x: lstm(own, x, forget=1.0), "offset", "forget_part"),
    "back": (
        "lstm",
        lambda own, x: lstm(own, x, is_turned=False),
        "half-order",
        "from the last to the first",
    ),
    "gates": ("lstm", lambda own, x: lstm(own, x, order="iofg"), "parameter-order", "gates of all cells"),
}


@pytest.mark.spec("RPL-200", "DIA-380")
@pytest.mark.parametrize(
    "name",
    [
        "update",
        "reset",
        "gates",
        pytest.param("forget", marks=pytest.mark.entries),
        pytest.param("back", marks=pytest.mark.entries),
    ],
)
def test_a_recurrent_layer_that_is_written_out_is_accused_itself_and_its_step_is_named(
    tmp_path: Path, name: str
) -> None:
    layer, run, kind, words = MISTAKES[name]
    reference = tagger(layer)
    found = localized(tmp_path, reference, Written(reference, run))
    assert [suspect.module for suspect in found.suspects] == ["reader"]
    mistake = found.suspects[0].diagnosis
    assert mistake is not None
    assert mistake.kind == kind, mistake.text
    assert words in mistake.text


@pytest.mark.spec("RPL-200")
@pytest.mark.parametrize("layer", ["gru", "lstm"])
def test_a_recurrent_layer_that_is_written_out_right_accuses_nobody(tmp_path: Path, layer: str) -> None:
    reference = tagger(layer)
    runs: dict[str, Run] = {"gru": gru, "lstm": lstm}
    found = localized(tmp_path, reference, Written(reference, runs[layer]))
    assert not found.suspects


class Pooled(nn.Module):
    """A head within a body, whose result the body returns as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.head = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), Head()

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.head(self.norm(self.first(x)))
        return result


class Head(nn.Module):
    """A feed-forward beside a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x + self.down(functional.gelu(self.up(x)))
        return result


class WithHead(nn.Module):
    """A model that is such a body and a linear."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.last = Pooled(), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.last(self.body(x))
        return result


class FlatBody(nn.Module):
    """A port of the body with the head's work as its own; with a mistake the residual is left out."""

    def __init__(self, reference: Pooled, *, has_residual: bool) -> None:
        super().__init__()
        self.first, self.norm = reference.first, reference.norm
        self.up, self.down, self.has_residual = reference.head.up, reference.head.down, has_residual

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.first(x))
        y: Tensor = self.down(functional.gelu(self.up(x)))
        return x + y if self.has_residual else y


@pytest.mark.spec("RPL-200")
@pytest.mark.parametrize("has_residual", [False, True], ids=["wrong", "right"])
def test_a_module_whose_result_the_one_around_it_returns_is_accused_itself(
    tmp_path: Path, has_residual: bool
) -> None:
    torch.manual_seed(5)
    reference = WithHead().eval()
    target: Any = WithHead()
    target.load_state_dict(reference.state_dict())
    target.body = FlatBody(target.body, has_residual=has_residual)
    found = localized(tmp_path, reference, target)
    assert [suspect.module for suspect in found.suspects] == ([] if has_residual else ["body.head"])
    assert has_residual or found.suspects[0].cause == "term-missing"


class Shifted(nn.Module):
    """A layer that mixes each token with the one before it, which a module without parameters gives."""

    def __init__(self) -> None:
        super().__init__()
        self.shift, self.out = nn.ZeroPad2d((0, 0, 1, -1)), nn.Linear(WIDTH, WIDTH)
        self.share = nn.Parameter(torch.rand(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x + self.out(self.share * x + (1 - self.share) * self.shift(x))
        return result


class InlineShift(nn.Module):
    """A port of it; with a mistake the share is the other term's."""

    def __init__(self, own: Shifted, *, is_wrong: bool) -> None:
        super().__init__()
        share = own.share.detach()
        self.last, self.mix = own.out, nn.Parameter(1 - share if is_wrong else share.clone())

    def forward(self, y: Tensor) -> Tensor:
        beside = functional.pad(y, (0, 0, 1, -1))
        result: Tensor = y + self.last(self.mix * y + (1 - self.mix) * beside)
        return result


class Stack(nn.Module):
    """Layers, one after the other."""

    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.mark.spec("ALN-241")
def test_a_shift_that_a_port_does_inline_is_not_paired_with_what_it_shifts(tmp_path: Path) -> None:
    torch.manual_seed(4)
    layers = [Shifted() for _ in range(3)]
    target = Stack([InlineShift(one, is_wrong=at == 1) for at, one in enumerate(layers)])
    found = localized(tmp_path, Stack(list(layers)).eval(), target)
    assert [suspect.module for suspect in found.suspects] == ["layers.1"]


class Normed(nn.Module):
    """A convolution, its norm and an activation."""

    def __init__(self) -> None:
        super().__init__()
        self.mix, self.norm, self.act = nn.Conv1d(WIDTH, WIDTH, 1), nn.BatchNorm1d(WIDTH), nn.ReLU()
        self.out = nn.Conv1d(WIDTH, WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.out(self.act(self.norm(self.mix(x.transpose(1, 2)))))
        return result


class Folded(nn.Module):
    """A port with the norm in the weights of a linear; with a mistake it divides by the variance."""

    def __init__(self, own: Normed, *, is_wrong: bool) -> None:
        super().__init__()
        mean, variance = own.norm.running_mean, own.norm.running_var
        assert mean is not None
        assert variance is not None
        deviation = (variance + own.norm.eps).sqrt()
        scale = own.norm.weight / (deviation**2 if is_wrong else deviation)
        self.both = nn.Linear(WIDTH, WIDTH)
        self.both.weight = nn.Parameter((own.mix.weight[..., 0] * scale[:, None]).detach())
        bias = own.mix.bias if own.mix.bias is not None else torch.zeros(WIDTH)
        self.both.bias = nn.Parameter(((bias - mean) * scale + own.norm.bias).detach())
        self.last = nn.Linear(WIDTH, WIDTH)
        self.last.weight = nn.Parameter(own.out.weight[..., 0].detach().clone())
        self.last.bias = nn.Parameter(own.out.bias.detach().clone())  # type: ignore[union-attr]  # it has one

    def forward(self, y: Tensor) -> Tensor:
        result: Tensor = self.last(functional.relu(self.both(y)))
        return result.transpose(1, 2)


def folded(folder: Path, *, is_wrong: bool, is_narrow: bool = False) -> Localization:
    torch.manual_seed(6)
    reference = Normed()
    reference.norm.running_mean = torch.randn(WIDTH)
    reference.norm.running_var = torch.rand(WIDTH) + 0.2
    reference.norm.weight = nn.Parameter(torch.rand(WIDTH) + 0.5)
    target = Folded(reference.eval(), is_wrong=is_wrong)
    x = {"x": torch.randn(2, LENGTH, WIDTH, generator=torch.Generator().manual_seed(1))}
    given = {"y": x["x"].bfloat16() if is_narrow else x["x"]}
    capture_workload(Workload(reference, x), folder / "ref.h5")
    tested = target.bfloat16() if is_narrow else target
    capture_workload(Workload(tested.eval(), given), folder / "tgt.h5")
    return localize(folder / "ref.h5", folder / "tgt.h5", reference_model=Workload(reference, x))


@pytest.mark.spec("LCL-250")
def test_a_norm_that_is_folded_wrong_is_accused_and_not_the_module_around(tmp_path: Path) -> None:
    suspects = folded(tmp_path, is_wrong=True).suspects
    assert [(suspect.module, suspect.cause) for suspect in suspects] == [("norm", "statistics-differ")]


@pytest.mark.spec("RPL-201")
def test_an_activation_behind_a_folded_norm_is_not_judged_alone(tmp_path: Path) -> None:
    assert not folded(tmp_path, is_wrong=False, is_narrow=True).suspects


class Embedded(nn.Module):
    """Words times a scale, plus positions, and a linear."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.words, self.positions = nn.Embedding(12, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.out, self.scale = nn.Linear(WIDTH, WIDTH), scale

    def places(self, ids: Tensor) -> Tensor:
        result: Tensor = self.positions(torch.arange(ids.shape[1]))
        return result

    def forward(self, ids: Tensor) -> Tensor:
        result: Tensor = self.out(self.words(ids) * self.scale + self.places(ids))
        return result


class Both(nn.Module):
    """Two of them, the results of both added."""

    def __init__(self, encoder: nn.Module, decoder: nn.Module) -> None:
        super().__init__()
        self.encoder, self.decoder = encoder, decoder

    def forward(self, ids: Tensor) -> Tensor:
        result: Tensor = self.encoder(ids) + self.decoder(ids)
        return result


class Scaled(nn.Module):
    """A port of one, its scale in the table; with a mistake it takes positions in alternate channels."""

    def __init__(self, own: Embedded, *, is_wrong: bool) -> None:
        super().__init__()
        self.words, self.out = nn.Embedding(12, WIDTH), own.out
        self.words.weight = nn.Parameter(own.words.weight.detach() * own.scale)
        table = own.positions.weight.detach().clone()
        halves = torch.stack(table.chunk(2, -1), -1).flatten(-2)
        self.table = nn.Parameter(halves if is_wrong else table)

    def forward(self, ids: Tensor) -> Tensor:
        result: Tensor = self.out(self.words(ids) + self.table[: ids.shape[1]])
        return result


@pytest.mark.spec("RPL-202")
def test_a_scale_in_both_tables_is_no_mistake_beside_wrong_positions_of_one(tmp_path: Path) -> None:
    torch.manual_seed(7)
    reference: Any = Both(Embedded(8.0), Embedded(8.0)).eval()
    target = Both(Scaled(reference.encoder, is_wrong=True), Scaled(reference.decoder, is_wrong=False))
    ids = torch.randint(12, (2, LENGTH), generator=torch.Generator().manual_seed(1))
    found = localized(tmp_path, reference, target, ids=ids)
    assert [(one.module, one.cause) for one in found.suspects] == [("encoder.positions", "parameter-order")]


class SideBySide(nn.Module):
    """Two linears on norms of their own; a port may have one norm for both."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.one, self.other = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x + self.one(self.first(x)) + self.other(self.second(x))
        return result


class OneNorm(SideBySide):
    """The first norm for both."""

    def forward(self, x: Tensor) -> Tensor:
        normed = self.first(x)
        result: Tensor = x + self.one(normed) + self.other(normed)
        return result


@pytest.mark.spec("LCL-251")
def test_code_that_hands_on_another_result_is_accused_and_not_who_is_no_longer_called(tmp_path: Path) -> None:
    torch.manual_seed(8)
    reference: Any = Stack([SideBySide() for _ in range(2)]).eval()
    with torch.no_grad():
        for layer in reference.layers:
            layer.second.weight.uniform_(0.5, 1.5)
            layer.second.bias.uniform_(-0.5, 0.5)
    target = Stack([SideBySide(), OneNorm()])
    target.load_state_dict(reference.state_dict())
    found = localized(tmp_path, reference, target)
    assert [(one.module, one.cause) for one in found.suspects] == [("layers.1", "operand-exchanged")]


class Dropped(nn.Module):
    """A product and a dropout between two linears."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.inner, self.last = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.mix = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.last(self.mix(self.inner(self.first(x))))
        return result


class Product(nn.Module):
    """The product in a module of its own, halved if it is wrong; a port has no dropout."""

    def __init__(self, weights: nn.Linear, *, is_wrong: bool) -> None:
        super().__init__()
        self.weight, self.bias, self.factor = weights.weight, weights.bias, 0.5 if is_wrong else 1.0

    def forward(self, hidden: Tensor) -> Tensor:
        return functional.linear(hidden, self.weight, self.bias) * self.factor


class Undropped(nn.Module):
    """A port of it, in which the name of the dropout is that of the product."""

    def __init__(self, reference: Dropped, *, is_wrong: bool) -> None:
        super().__init__()
        self.first, self.last = reference.first, reference.last
        self.mix = Product(reference.inner, is_wrong=is_wrong)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.last(self.mix(self.first(x)))
        return result


@pytest.mark.spec("ALN-300")
@pytest.mark.parametrize("is_wrong", [True, False], ids=["wrong", "right"])
def test_a_dropout_is_not_given_what_the_product_before_it_is_given(tmp_path: Path, is_wrong: bool) -> None:
    torch.manual_seed(6)
    reference = Dropped().eval()
    found = localized(tmp_path, reference, Undropped(reference, is_wrong=is_wrong))
    assert [suspect.module for suspect in found.suspects] == (["inner"] if is_wrong else [])
    entries = align(tmp_path / "ref.h5", tmp_path / "tgt.h5").alignment.entries
    assert [entry.reference for entry in entries if "mix" in entry.reference[0]] == [("mix/output",)]


class Gained(nn.Module):
    """A linear, a factor for each channel, and a module that returns what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.inner, self.pass_on = (
            nn.Linear(WIDTH, WIDTH),
            nn.Linear(WIDTH, WIDTH),
            nn.Dropout(0.1),
        )
        self.last, self.gains = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.rand(WIDTH) + 0.3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        result: Tensor = self.last(hidden + self.pass_on(self.gains * self.inner(hidden)))
        return result


def narrow(folder: Path, reference: nn.Module, target: nn.Module) -> Localization:
    x = torch.randn(4, 64, WIDTH, generator=torch.Generator().manual_seed(1))
    capture_workload(Workload(reference.eval(), {"x": x}), folder / "ref.h5")
    capture_workload(Workload(target.bfloat16().eval(), {"x": x.bfloat16()}), folder / "tgt.h5")
    return localize(folder / "ref.h5", folder / "tgt.h5", reference_model=Workload(reference, {"x": x}))


@pytest.mark.spec("RPL-200", "RPL-201")
def test_what_a_dropout_returns_does_not_make_known_what_it_was_given(tmp_path: Path) -> None:
    capture_workload(Workload(Gained().eval(), {"x": torch.randn(2, LENGTH, WIDTH)}), tmp_path / "ref.h5")
    with open_archive(tmp_path / "ref.h5") as run:
        lacking = {"0/inner/output", "0/pass_on/input.input"}
        target = PartialArchive(run, [record for record in run.records if record.key.text not in lacking])
        assert Producers.of(run, target).spans == {"0/pass_on/output": "@root"}


class Cancelling(nn.Module):
    """Two linears, of which the second is given hardly more than its weight has no sum of."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.second(self.first(x).square())
        return result


@pytest.mark.spec("RPL-203")
@pytest.mark.parametrize("factor", [1.0, 3.0], ids=["right", "wrong"])
def test_a_weight_of_direction_and_length_is_rounded_twice(tmp_path: Path, factor: float) -> None:
    torch.manual_seed(4)
    reference = Cancelling()
    with torch.no_grad():
        reference.second.weight -= reference.second.weight.mean(1, keepdim=True)
        reference.second.bias.zero_()
        reference.first.weight.mul_(0.02)
        reference.first.bias.fill_(1.5)
    target = copy.deepcopy(reference)
    parametrizations.weight_norm(target.second)
    with torch.no_grad():
        target.second.get_parameter("parametrizations.weight.original0").mul_(factor)
    suspects = narrow(tmp_path, reference, target).suspects
    assert [suspect.module for suspect in suspects] == ([] if factor == 1 else ["second"])


class Packed(nn.Module):
    """A linear whose weight is kept as codes around 128 and steps, read with another zero if it is wrong."""

    steps: Tensor
    codes: Tensor
    offset: Tensor

    def __init__(self, linear: nn.Linear, *, zero: int) -> None:
        super().__init__()
        self.register_buffer("steps", linear.weight.detach().abs().amax(1, keepdim=True) / 127)
        self.register_buffer("codes", ((linear.weight.detach() / self.steps).round() + 128).to(torch.uint8))
        self.register_buffer("offset", linear.bias.detach().clone())
        self.zero = zero

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x, (self.codes.float() - self.zero) * self.steps, self.offset)


@pytest.mark.spec("ALN-300")
def test_a_layer_that_keeps_its_weights_as_buffers_is_given_what_the_linear_is_given(tmp_path: Path) -> None:
    torch.manual_seed(7)
    reference, target = Dropped().eval(), Dropped().eval()
    target.load_state_dict(reference.state_dict())
    for name in ("first", "inner", "last"):
        setattr(target, name, Packed(getattr(reference, name), zero=0))
    localized(tmp_path, reference, target.eval())
    found = align(tmp_path / "ref.h5", tmp_path / "tgt.h5").summary
    assert (found.reference.mapped, found.target.mapped) == (10, 10)


class Inner(nn.Module):
    """A module that hands on what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.down(torch.tanh(self.up(x)))
        return result


class Layer(nn.Module):
    """A layer that gives what its norm makes, or is given besides, to modules that only hand it on."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.own, self.other = nn.LayerNorm(WIDTH), Inner(), Inner()

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        result: Tensor = x + self.own(self.norm(x)) + self.other(memory)
        return result


class Reader(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.memory = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        memory = self.memory(x)
        for layer in self.layers:
            x = layer(x, memory)
        result: Tensor = self.head(x)
        return result


class FlatReader(nn.Module):
    """A port that has the leaves alone, all of them in one function."""

    def __init__(self, mistake: str) -> None:
        super().__init__()
        inner = Reader()
        self.mistake, self.memory, self.head = mistake, inner.memory, inner.head
        layers: Any = inner.layers
        self.norms = nn.ModuleList(layer.norm for layer in layers)
        self.own = nn.ModuleList(nn.ModuleList((layer.own.up, layer.own.down)) for layer in layers)
        self.other = nn.ModuleList(nn.ModuleList((layer.other.up, layer.other.down)) for layer in layers)

    def forward(self, x: Tensor) -> Tensor:
        memory = self.memory(x)
        parts: Any = zip(self.norms, self.own, self.other, strict=True)
        for at, (norm, own, other) in enumerate(parts):
            is_wrong = at == 1
            normed = norm(x)
            if is_wrong and self.mistake == "layer":
                normed = normed.sigmoid()
            second = x if is_wrong and self.mistake == "model" else memory
            if is_wrong and self.mistake == "element":
                second = memory.clone()
                second[0, 0, 0] += 3
            for (up, down), given in ((own, normed), (other, second)):
                x = x + down(torch.tanh(up(given)))
        result: Tensor = self.head(x)
        return result


@pytest.mark.spec("RPL-208")
@pytest.mark.parametrize(
    ("mistake", "guilty"),
    [
        pytest.param("layer", "layers.1", id="the layer gives it to its part"),
        pytest.param("model", "@root", id="the model gives one layer another memory than the others"),
        pytest.param("", None, id="right"),
    ],
)
def test_who_gave_an_argument_is_accused_and_not_who_hands_it_on(
    tmp_path: Path, mistake: str, guilty: str | None
) -> None:
    found = localized(tmp_path, Reader().eval(), FlatReader(mistake))
    assert [suspect.module for suspect in found.suspects[:1]] == ([guilty] if guilty else [])


@pytest.mark.spec("RPL-208", "LCL-4")
def test_who_hands_an_argument_on_is_not_accused_of_it_behind_who_gave_it(tmp_path: Path) -> None:
    x = torch.randn(64, LENGTH, WIDTH, generator=torch.Generator().manual_seed(1))
    localized(tmp_path, Reader().eval(), FlatReader("element"), x=x)
    found = localize(tmp_path / "ref.h5", tmp_path / "tgt.h5")
    key = "0/layers.1.other.up/input.input"
    assert [suspect.module for suspect in found.suspects if suspect.key == key] == ["@root"]
