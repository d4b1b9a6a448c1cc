"""Where archives alone see an error begin, and which differences lead to nothing."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import one_hot

from tensorcap.comparison import compare
from tensorcap.localization import localize
from tensorcap.localization.error_origins import ErrorOrigins
from tensorcap.localization.evidence import evidence_of_injection
from tensorcap.rerun import InjectedRun
from tensorcap.session import capture_workload
from tensorcap.workload import Workload
from tensorcap_formats.open import open_archive
from tests.support.archives import write_archive

IDS = torch.randint(0, 64, (3, 16), generator=torch.Generator().manual_seed(0))
X = torch.randn(4, 32, 32, generator=torch.Generator().manual_seed(1)).bfloat16().float()
DTYPES = [pytest.param(torch.float32, id="float32"), pytest.param(torch.bfloat16, id="bfloat16")]


def accused(folder: Path, reference: nn.Module, target: nn.Module, *arguments: Tensor) -> list[str]:
    """Whom the archives of two models accuse; floats are given in the target's dtype."""
    dtype = next(target.parameters()).dtype
    given = [one.to(dtype) if one.is_floating_point() else one for one in arguments]
    capture_workload(Workload(reference.eval(), arguments), folder / "ref.h5")
    capture_workload(Workload(target.eval(), tuple(given)), folder / "tgt.h5")
    return [suspect.module for suspect in localize(folder / "ref.h5", folder / "tgt.h5").suspects]


class Tagger(nn.Module):
    """A GRU between a norm and a head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(64, 32)
        self.norm = nn.LayerNorm(32)
        self.smoother = nn.GRU(32, 40, batch_first=True)
        self.tags = nn.Linear(40, 9)

    def forward(self, ids: Tensor) -> Tensor:
        tags: Tensor = self.tags(self.smooth(self.norm(self.words(ids))))
        return tags

    def smooth(self, x: Tensor) -> Tensor:
        smoothed: Tensor = self.smoother(x)[0]
        return smoothed


class WrittenOut(Tagger):
    """The same without the module, by the equations in torch's documentation of `GRU`."""

    def __init__(self, *, is_turned: bool) -> None:
        super().__init__()
        self.is_turned = is_turned

    def smooth(self, x: Tensor) -> Tensor:
        weights, rows = dict(self.smoother.named_parameters()), []
        into, onto = ((weights[f"weight_{side}_l0"].T, weights[f"bias_{side}_l0"]) for side in ("ih", "hh"))
        h = x.new_zeros(len(x), 40)
        for t in range(x.shape[1]):
            ours = (x[:, t] @ into[0] + into[1]).chunk(3, dim=-1)
            theirs = (h @ onto[0] + onto[1]).chunk(3, dim=-1)
            r, z = torch.sigmoid(ours[0] + theirs[0]), torch.sigmoid(ours[1] + theirs[1])
            n = torch.tanh(ours[2] + r * theirs[2])
            h = z * n + (1 - z) * h if self.is_turned else (1 - z) * n + z * h
            rows.append(h)
        return torch.stack(rows, dim=1)


@pytest.mark.spec("LCL-260")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("is_turned", [False, True])
def test_a_module_that_the_target_has_no_records_of_is_accused_of_what_comes_after_it(
    tmp_path: Path, dtype: torch.dtype, is_turned: bool
) -> None:
    suspects = accused(tmp_path, Tagger(), WrittenOut(is_turned=is_turned).to(dtype), IDS)
    assert suspects == (["@root"] if is_turned else [])


class Unnamed(WrittenOut):
    """The same of a port that has no such module at all."""

    def __init__(self, *, is_turned: bool) -> None:
        super().__init__(is_turned=is_turned)
        self.weights = [self.smoother]
        del self.smoother

    def smooth(self, x: Tensor) -> Tensor:
        (gru,) = self.weights
        self.__dict__["smoother"] = gru.to(x.dtype)
        return super().smooth(x)


@pytest.mark.spec("LCL-260")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("is_turned", [False, True])
def test_a_module_that_the_target_lacks_is_accused_of_what_comes_after_it(
    tmp_path: Path, dtype: torch.dtype, is_turned: bool
) -> None:
    suspects = accused(tmp_path, Tagger(), Unnamed(is_turned=is_turned).to(dtype), IDS)
    assert suspects == (["smoother"] if is_turned else [])


class Reduced(nn.Module):
    """Keys and values of what a reduction makes of the input; the port has its two layers inline."""

    def __init__(self, *, is_written_out: bool = False, is_normed: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.keys, self.values = nn.LayerNorm(32), nn.Linear(32, 32), nn.Linear(32, 32)
        self.reduction = nn.Sequential(nn.Linear(32, 32), nn.LayerNorm(32))
        self.parts, self.is_normed = [self.reduction], is_normed
        if is_written_out:
            del self.reduction

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        if hasattr(self, "reduction"):
            reduced = self.reduction(x)
        else:
            linear, norm = (list(part.parameters()) for part in self.parts[0].to(x.dtype))
            reduced = x @ linear[0].T + linear[1]
            if self.is_normed:
                reduced = nn.functional.layer_norm(reduced, (32,), norm[0], norm[1])
        keys, values = self.keys(reduced), self.values(reduced)
        made: Tensor = (x @ keys.mT).softmax(-1) @ values
        return made


@pytest.mark.spec("LCL-260")
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_lies_before_all_tensors_that_differ_first_is_accused(
    tmp_path: Path, dtype: torch.dtype
) -> None:
    target = Reduced(is_written_out=True, is_normed=False).to(dtype)
    assert accused(tmp_path, Reduced(), target, X)[0] in ("reduction", "reduction.1")


@pytest.mark.spec("LCL-262")
def test_a_module_that_the_target_lacks_is_accused_by_injection(tmp_path: Path) -> None:
    target = Unnamed(is_turned=True)
    accused(tmp_path, Tagger(), target, IDS)
    workload = Workload(target.eval(), (IDS,))
    by_injection = localize(tmp_path / "ref.h5", tmp_path / "tgt.h5", target_model=workload)
    assert by_injection.by == "injection"
    assert [suspect.module for suspect in by_injection.suspects] == ["smoother"]


class Table(nn.Module):
    """Words, normalised."""

    def __init__(self, eps: float) -> None:
        super().__init__()
        self.word, self.norm = nn.Embedding(64, 32), nn.LayerNorm(32, eps=eps)
        with torch.no_grad():
            self.word.weight.mul_(0.01)

    def forward(self, ids: Tensor) -> Tensor:
        made: Tensor = self.norm(self.word(ids))
        return made


class Stack(nn.Module):
    """Two layers, one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.ModuleList([Layer(), Layer()])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layer:
            x = layer(x)
        return x


class WithStack(nn.Module):
    """A table and a stack."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.stack = Table(1e-12), Stack()

    def forward(self, ids: Tensor) -> Tensor:
        made: Tensor = self.stack(self.table(ids))
        return made


class WithoutStack(nn.Module):
    """The same layers, called by the model itself, behind a table of another eps."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.blocks = Table(1e-5), nn.ModuleList([Layer(), Layer()])

    def forward(self, ids: Tensor) -> Tensor:
        x: Tensor = self.table(ids)
        for block in self.blocks:
            x = block(x)
        return x


@pytest.mark.spec("LCL-270")
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_module_around_what_the_port_calls_itself_does_not_answer_for_what_it_hands_on(
    tmp_path: Path, dtype: torch.dtype
) -> None:
    target = WithoutStack().to(dtype).eval()
    accused(tmp_path, WithStack(), target, IDS)
    found = localize(tmp_path / "ref.h5", tmp_path / "tgt.h5", target_model=Workload(target, (IDS,)))
    assert [suspect.module for suspect in found.suspects] == ["table.norm"]


@pytest.mark.spec("LCL-262")
def test_by_injection_who_makes_the_first_tensor_that_differs_is_accused_and_not_who_hands_it_on(
    tmp_path: Path,
) -> None:
    """A port without the two modules, of whose own errors the injected run says nothing."""
    given, mixed, made = (np.random.default_rng(i).normal(size=(8, 16)).astype("f4") for i in range(3))
    tensors = {
        "0/@root/input.x": given,
        "0/core/input.x": given,
        "0/core/output": mixed,
        "0/merge/input.x": mixed,
        "0/merge.dense/input.input": mixed,
        "0/merge.dense/output": made,
        "0/merge/output": made,
        "0/@root/output": made,
    }
    lacks = [key for key in tensors if key.startswith(("0/core", "0/merge/"))]
    other = {key: tensor for key, tensor in tensors.items() if key not in lacks}
    other["0/merge.dense/input.input"] = mixed[:, ::-1].copy()
    other["0/merge.dense/output"] = other["0/@root/output"] = made[:, ::-1].copy()
    paths = write_archive(tmp_path / "ref.h5", tensors), write_archive(tmp_path / "tgt.h5", other)
    with open_archive(paths[0]) as reference, open_archive(paths[1]) as target:
        free = compare(reference, target, mapping="none")
        run = InjectedRun(paths[1], reference, target, free, (), ())
        found = evidence_of_injection(run, free)
    assert [one.module for one in found.evidence] == ["core"]
    assert found.evidence[0].reason == "@root hands this on, which is made in core."


class Layer(nn.Module):
    """A feed-forward with a scale of each channel behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.act, self.down = nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)
        self.scale = nn.Parameter(torch.randn(32))

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = x + self.scale * self.down(self.act(self.up(x)))
        return made


def layers(*, is_folded: bool) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(Layer(), Layer(), Layer())
    for layer in model.children() if is_folded else ():
        assert isinstance(layer, Layer)
        layer.down.weight.data *= layer.scale.data[:, None]
        layer.down.bias.data *= layer.scale.data
        layer.scale.data.fill_(1)
    return model


@pytest.mark.spec("LCL-261")
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_scale_that_is_folded_into_the_weights_before_it_accuses_nobody(
    tmp_path: Path, dtype: torch.dtype
) -> None:
    assert accused(tmp_path, layers(is_folded=False), layers(is_folded=True).to(dtype), X) == []


@pytest.mark.spec("LCL-261")
@pytest.mark.parametrize("dtype", DTYPES)
def test_beside_folded_scales_the_module_that_is_wrong_is_accused(tmp_path: Path, dtype: torch.dtype) -> None:
    target = layers(is_folded=True)
    target.get_parameter("1.up.weight").data[:, :2] = 0
    assert accused(tmp_path, layers(is_folded=False), target.to(dtype), X)[0] == "1.up"


class Adding(nn.Module):
    """What a feed-forward makes of its argument, and another argument."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        made: Tensor = self.down(torch.relu(self.up(x))) + residual
        return made


class Around(nn.Module):
    """Hands on its input, or the norm of it, as what is added."""

    def __init__(self, *, is_normed: bool) -> None:
        super().__init__()
        self.norm, self.body, self.is_normed = nn.LayerNorm(32), Adding(), is_normed

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm(x)
        made: Tensor = self.body(normed, normed if self.is_normed else x)
        return made


@pytest.mark.spec("LCL-261")
@pytest.mark.parametrize("dtype", DTYPES)
def test_an_argument_that_is_used_late_leads_to_something(tmp_path: Path, dtype: torch.dtype) -> None:
    def make(is_normed: bool) -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(Around(is_normed=False), Around(is_normed=is_normed))

    assert accused(tmp_path, make(False), make(True).to(dtype), 3 * X + 1)[0] == "1"


class Router(nn.Module):
    """Scores of experts by a layer of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(32, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.layer(x)
        return scores


class Experts(nn.Module):
    """Experts of chosen tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 32, 32) / 6)

    def forward(self, x: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        return torch.einsum("tk,tkij,tj->ti", top_k_weights, self.weight[top_k_index], x)


class Mixture(nn.Module):
    """Two experts of eight, as DBRX has them: the router gives scores, and the experts are given choices."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.router, self.experts = Router(), Experts()

    def forward(self, x: Tensor) -> Tensor:
        weights, index = self.router(x).softmax(-1).topk(2)
        made: Tensor = self.experts(x, index, weights / weights.sum(-1, keepdim=True))
        return made


class Dense(Mixture):
    """The same with all experts computed, and what is not chosen weighted with nothing."""

    def __init__(self, *, is_whole: bool) -> None:
        super().__init__()
        self.is_whole = is_whole

    def forward(self, x: Tensor) -> Tensor:
        weights, index = self.router(x).softmax(-1).topk(2)
        weights = weights if self.is_whole else weights / weights.sum(-1, keepdim=True)
        shares = (one_hot(index, 8).to(x.dtype) * weights[..., None]).sum(-2)
        return torch.einsum("te,eij,tj->ti", shares, self.experts.weight, x)


@pytest.mark.spec("POL-260")
def test_tokens_at_near_ties_of_choices_that_are_handed_on_accuse_nobody(tmp_path: Path) -> None:
    tokens = torch.randn(4000, 32, generator=torch.Generator().manual_seed(2)).bfloat16().float()
    assert accused(tmp_path, Mixture(), Dense(is_whole=False).bfloat16(), tokens) == []
    (result,) = [
        pair
        for pair in compare(tmp_path / "ref.h5", tmp_path / "tgt.h5").pairs
        if pair.key == "0/@root/output"
    ]
    assert result.is_green
    target = Dense(is_whole=False).bfloat16()
    with torch.no_grad():
        ours, theirs = Mixture()(tokens), target(tokens.bfloat16()).float()
    rows = (theirs - ours).norm(dim=-1) / ours.norm(dim=-1)
    assert rows.median() < 0.01
    assert rows.max() > 0.5  # a token that chose otherwise


@pytest.mark.spec("LCL-260")
def test_experts_with_wrong_shares_are_accused(tmp_path: Path) -> None:
    tokens = torch.randn(400, 32, generator=torch.Generator().manual_seed(2)).bfloat16().float()
    suspects = accused(tmp_path, Mixture(), Dense(is_whole=True).bfloat16(), tokens)
    assert suspects[:1] in (["experts"], ["@root"])


class Mixer(nn.Module):
    """A product of three parts of what a linear makes, one of them a token late; it is small."""

    def __init__(self, *, is_exchanged: bool) -> None:
        super().__init__()
        self.into, self.out, self.is_exchanged = nn.Linear(32, 96), nn.Linear(32, 32), is_exchanged

    def forward(self, x: Tensor) -> Tensor:
        first, last, value = self.into(x).chunk(3, dim=-1)
        if self.is_exchanged:
            first, last = last, first
        result: Tensor = self.out(last * torch.roll(first * value, 1, dims=1) * 0.03)
        return result


class Mixing(nn.Module):
    """A norm and a mixer."""

    def __init__(self, *, is_exchanged: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.mix, self.end = nn.LayerNorm(32), Mixer(is_exchanged=is_exchanged), nn.Linear(32, 9)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.end(self.mix(self.norm(x)))
        return result


@pytest.mark.spec("LCL-260")
@pytest.mark.parametrize("is_exchanged", [False, True])
def test_a_small_product_that_is_wrong_does_not_hide_behind_a_large_input(
    tmp_path: Path, is_exchanged: bool
) -> None:
    target = Mixing(is_exchanged=is_exchanged).bfloat16()
    assert accused(tmp_path, Mixing(is_exchanged=False), target, X) == (["mix"] if is_exchanged else [])


class Feed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.down(self.up(x).relu())
        return made


class Residual(nn.Module):
    def __init__(self, factor: float) -> None:
        super().__init__()
        self.norm, self.feed, self.factor = nn.LayerNorm(32), Feed(), factor

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = x + self.feed(self.norm(x)) * self.factor
        return made


class Residuals(nn.Module):
    """Three layers; the second one may scale what it adds."""

    def __init__(self, factor: float = 1.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(*(Residual(factor if number == 1 else 1.0) for number in range(3)))

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.layers(x)
        return made


@pytest.mark.spec("LCL-260")
@pytest.mark.parametrize("has_model", [False, True], ids=["archives", "replay"])
@pytest.mark.parametrize(
    ("only", "module"),
    [
        pytest.param(["*/layers.*.feed/output"], "@root", id="a part"),
        pytest.param(["*/layers.*.feed/output", "*/layers/output"], "layers", id="a part and all around"),
        pytest.param(["*/output"], "layers.1", id="all"),
        pytest.param(["*/layers.?/output"], "layers.1", id="layers"),
    ],
)
def test_of_results_alone_the_code_since_the_last_known_one_is_accused(
    tmp_path: Path, only: list[str], module: str, has_model: bool
) -> None:
    sides = [Workload(Residuals(factor).eval(), (X,)) for factor in (1.0, 0.5)]
    for name, side in zip(("ref", "tgt"), sides, strict=True):
        capture_workload(side, tmp_path / f"{name}.h5", only=only)
    found = localize(
        tmp_path / "ref.h5", tmp_path / "tgt.h5", reference_model=sides[0] if has_model else None
    )
    if has_model:  # called again with another factor of that layer, it makes what the target has
        module = "layers.1"
    assert [suspect.module for suspect in found.suspects] == [module]


@pytest.mark.spec("LCL-260")
def test_a_model_without_recorded_results_is_still_around_its_modules(tmp_path: Path) -> None:
    sides = [Workload(Residuals(factor).eval(), (X,)) for factor in (1.0, 0.5)]
    capture_workload(sides[0], tmp_path / "ref.h5", only=["layers.*.feed"])
    capture_workload(sides[1], tmp_path / "tgt.h5", only=["*/layers.*.feed/output"])
    found = localize(tmp_path / "ref.h5", tmp_path / "tgt.h5")
    assert [suspect.module for suspect in found.suspects] == ["@root"]


class Weighing(nn.Module):
    """Weighs tokens by their distance; rates are made here, or of an argument that only a port has."""

    def __init__(self, *, is_activated: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.is_activated = is_activated
        self.into, self.norm, self.out = nn.Linear(32, 32), nn.LayerNorm(32), nn.Linear(32, 32)

    def forward(self, x: Tensor, fade: Tensor | None = None) -> Tensor:
        rates = torch.linspace(2, 3, 32, dtype=x.dtype) if fade is None else fade.sqrt()
        distances = torch.arange(x.shape[1], dtype=x.dtype)
        weights = torch.softmax(-(distances[:, None] - distances).abs() * rates[:1], -1)
        values = 3 * self.into(x)
        made: Tensor = self.out(self.norm(weights @ (values.tanh() if self.is_activated else values)))
        return made


class Weighed(nn.Module):
    def __init__(self, *, is_port: bool = False, is_activated: bool = True) -> None:
        super().__init__()
        self.mix = Weighing(is_activated=is_activated)
        self.is_port = is_port

    def forward(self, x: Tensor) -> Tensor:
        fade = torch.linspace(2, 3, 32, dtype=x.dtype).square() if self.is_port else None
        made: Tensor = x + self.mix(x, fade)
        return made


@pytest.mark.spec("LCL-11")
@pytest.mark.parametrize("is_activated", [True, False], ids=["right", "wrong"])
def test_what_an_argument_that_nobody_knows_leaves_unjudged_is_judged_by_the_free_runs(
    tmp_path: Path, is_activated: bool
) -> None:
    port = Weighed(is_port=True, is_activated=is_activated).eval().bfloat16()
    target = Workload(port, (X.bfloat16(),), seed=0)
    capture_workload(Workload(Weighed().eval(), (X,)), tmp_path / "ref.h5")
    capture_workload(target, tmp_path / "tgt.h5")
    found = localize(tmp_path / "ref.h5", tmp_path / "tgt.h5", target_model=target)
    assert [suspect.module for suspect in found.suspects] == ([] if is_activated else ["mix"])


class Scaled(nn.Module):
    """A norm, a product with numbers near 3 in the code, and a layer."""

    def __init__(self, off_by: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.out = nn.LayerNorm(32), nn.Linear(32, 32)
        self.factors = 3 * (1 + off_by * torch.randn(X.shape).sign())

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.out((self.norm(x).float() * self.factors).to(x.dtype))
        return made


@pytest.mark.spec("LCL-260")
@pytest.mark.parametrize(("off_by", "expected"), [(0.0, []), (0.018, ["@root"])])
def test_an_error_five_times_what_is_before_it_accuses(
    tmp_path: Path, off_by: float, expected: list[str]
) -> None:
    """Of 0.018, where two roundings of bfloat16 and the error of the norm are 0.0038 together."""
    assert accused(tmp_path, Scaled(0.0), Scaled(off_by).bfloat16(), X) == expected


@pytest.mark.spec("LCL-260")
@pytest.mark.parametrize(("is_equal", "expected"), [(True, "block"), (False, "@root")])
def test_what_a_call_was_given_is_right_if_its_other_results_are(
    tmp_path: Path, is_equal: bool, expected: str
) -> None:
    """A port without the layer before, of whose modulation one of two results has a counterpart."""
    tensors = {
        key: np.random.default_rng(seed).normal(size=(8, 16)).astype("f4")
        for key, seed in {
            "0/@root/input.x": 0,
            "0/time/input.x": 0,
            "0/time/output": 1,
            "0/block/input.x": 0,
            "0/block/input.time": 1,
            "0/block.mod/input.time": 1,
            "0/block.mod/output.0": 2,
            "0/block.mod/output.1": 3,
            "0/block/output": 4,
            "0/@root/output": 4,
        }.items()
    }
    lacks = ["0/time/output", "0/block/input.time", "0/block.mod/input.time", "0/block.mod/output.1"]
    other = {key: tensor for key, tensor in tensors.items() if key not in lacks}
    other["0/block/output"] = other["0/@root/output"] = tensors["0/block/output"][:, ::-1].copy()
    if not is_equal:
        other["0/block.mod/output.0"] = tensors["0/block.mod/output.0"][:, ::-1].copy()
    paths = write_archive(tmp_path / "ref.h5", tensors), write_archive(tmp_path / "tgt.h5", other)
    with open_archive(paths[0]) as reference, open_archive(paths[1]) as target:
        pairs = compare(reference, target, mapping="none").pairs
        (made,) = [pair for pair in pairs if pair.key == "0/block/output"]
        assert ErrorOrigins(reference, target, pairs).module_of(made, pairs) == expected


_FIRST = "0/first/output", "0/second/input.x"
_BIAS = "0/second/input.bias", "0/second/output.1"


@pytest.mark.spec("LCL-260")
@pytest.mark.parametrize(
    ("lacks", "expected"),
    [
        pytest.param((), "0/second/input.x", id="known-argument"),
        pytest.param((*_FIRST, "0/second/input.bias"), "0/first/input.x", id="handed-on"),
        pytest.param((*_FIRST, *_BIAS), "0/first/input.x", id="whole-numbers"),
    ],
)
def test_what_a_call_hands_on_or_chooses_proves_nothing_of_what_else_it_was_given(
    tmp_path: Path, lacks: tuple[str, ...], expected: str
) -> None:
    """A block that returns the positions' bias that it is given, or whole numbers, beside its result."""
    x, bias, one, other = (np.random.default_rng(seed).normal(size=(8, 16)).astype("f4") for seed in range(4))
    chosen = np.arange(32).reshape(8, 4)
    tensors = {
        "0/@root/input.x": x,
        "0/@root/input.bias": bias,
        "0/first/input.x": x,
        "0/first/output": one,
        "0/second/input.x": one,
        "0/second/input.bias": bias,
        "0/second/output.0": other,
        "0/second/output.1": bias,
        "0/second/output.2": chosen,
        "0/@root/output": other,
    }
    for key in set(_BIAS).intersection(lacks):
        del tensors[key]
    wrong = ("0/first/output", "0/second/input.x", "0/second/output.0", "0/@root/output")
    target = {key: tensor * 1.1 if key in wrong else tensor for key, tensor in tensors.items()}
    target = {key: tensor for key, tensor in target.items() if key not in lacks}
    paths = write_archive(tmp_path / "ref.h5", tensors), write_archive(tmp_path / "tgt.h5", target)
    with open_archive(paths[0]) as reference, open_archive(paths[1]) as tested:
        pairs = compare(reference, tested, mapping="none").pairs
        (made,) = [pair for pair in pairs if pair.key == "0/second/output.0"]
        assert expected in ErrorOrigins(reference, tested, pairs).gap(made).operands
