"""Runs of real models with a reference's tensors: what shows, and that nothing else does."""

from __future__ import annotations

import re
import types
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn

import tensorcap
from tensorcap.alignment import Alignment, Entry, ReversedArchive, align
from tensorcap.comparison import Comparison, Pair, compare
from tensorcap.rerun import inject, reverse
from tensorcap.session import Capture, capture_workload
from tensorcap.workload import Workload
from tensorcap_formats.archive import Archive
from tensorcap_formats.errors import TensorNotFoundError
from tensorcap_formats.open import open_archive
from tests.alignment.ports.capturing import is_close
from tests.zoo.deep_models import make, tokens

PORTS = ("llama", "gpt2", "qwen3_moe", "t5")


class Sides(NamedTuple):
    """A reference, its archive, its port, and their inputs."""

    model: nn.Module
    inputs: dict[str, Any]
    archive: Path
    port: nn.Module
    others: dict[str, Any]


@pytest.fixture(scope="module", params=PORTS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Sides:
    port = import_module(f"tests.alignment.ports.{request.param}").PORT
    model, inputs = port.reference()
    other, others = port.target(model.state_dict(), inputs)
    path = tmp_path_factory.mktemp(request.param) / "ref.h5"
    with torch.no_grad(), tensorcap.capture(model, path):
        model(**inputs)
    return Sides(model, inputs, path, other.eval(), others)


def logits(model: nn.Module, inputs: dict[str, Any]) -> torch.Tensor:
    with torch.no_grad():
        found = model(**inputs)
    return found if isinstance(found, torch.Tensor) else found[0]


@pytest.mark.spec("INJ-7")
def test_a_reference_into_itself_changes_nothing(pair: Sides, tmp_path: Path) -> None:
    before = logits(pair.model, pair.inputs)
    cap = inject(pair.archive, Workload(pair.model, pair.inputs), tmp_path / "own.h5")
    assert {slot.status for slot in done(cap)} == {"injected"}
    comparison = tensorcap.compare(pair.archive, tmp_path / "own.h5")
    assert set(comparison.counts) == {"identical"}
    assert torch.equal(logits(pair.model, pair.inputs), before)


@pytest.mark.spec("INJ-12")
def test_a_port_with_other_names_gets_the_references_tensors(pair: Sides, tmp_path: Path) -> None:
    before = logits(pair.port, pair.others)
    cap = inject(pair.archive, Workload(pair.port, pair.others), tmp_path / "own.h5")
    injected = [slot for slot in done(cap) if slot.status == "injected"]
    assert len(injected) >= 10
    with open_archive(tmp_path / "own.h5") as out:
        assert out.run["injected"]["mapping"] == "computed"
    comparison = tensorcap.compare(pair.archive, tmp_path / "own.h5")
    assert not comparison.counts.keys() & {"suspect", "diverged", "nonfinite"}
    assert torch.equal(logits(pair.port, pair.others), before)


def done(cap: Capture) -> Any:
    assert cap.substitution is not None
    return cap.substitution.slots


def aligned_and_reversed(
    reference: Archive, target: Archive, mapping: Alignment | None = None
) -> ReversedArchive:
    found = reverse(align(reference, target, mapping=mapping))
    assert isinstance(found, ReversedArchive)
    return found


def is_part_of_a_sum(key: str) -> bool:
    """Whether it is a block's result or its residual, which add up to one tensor of the reference."""
    return re.fullmatch(r"0/layers\.\d/output\.[01]", key) is not None


@pytest.mark.spec("INJ-10")
def test_a_port_is_given_the_tensors_that_it_would_have_had(pair: Sides, tmp_path: Path) -> None:
    with torch.no_grad(), tensorcap.capture(pair.port, tmp_path / "tgt.h5"):
        pair.port(**pair.others)
    with open_archive(pair.archive) as reference, open_archive(tmp_path / "tgt.h5") as target:
        back = aligned_and_reversed(reference, target)
        assert len(back) >= 20
        for record in back.records:
            own = target.get(record.key)
            assert record.shape == own.shape
            if not is_part_of_a_sum(record.key.text):
                assert is_close(target.load(own), back.load(record)), record.key.text


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_what_comes_after_a_graft_is_the_references_to_the_bit(name: str, tmp_path: Path) -> None:
    model, inputs = import_module(f"tests.alignment.ports.{name}").reference()
    block = next(n for n in ("model.layers", "transformer.h") if n in dict(model.named_modules()))
    with torch.no_grad(), tensorcap.capture(model, tmp_path / "ref.h5"):
        model(**inputs)
    expected = logits(model, inputs)
    with torch.no_grad():
        dict(model.named_modules())[f"{block}.0"].mlp.register_forward_hook(lambda m, a, out: out * 2)
    assert not torch.equal(logits(model, inputs), expected)
    inject(tmp_path / "ref.h5", Workload(model, inputs), tmp_path / "own.h5", outputs=f"{block}.1")
    comparison = tensorcap.compare(tmp_path / "ref.h5", tmp_path / "own.h5")
    status = {pair.key: pair.status for pair in comparison.pairs}
    order = list(status)
    at = max(i for i, key in enumerate(order) if key.startswith(f"0/{block}.1/output"))
    after = {key: status[key] for key in order[at + 1 :] if not key.startswith("0/model.rotary")}
    assert set(after.values()) == {"identical"}
    assert f"0/{block}.2.mlp/output" in after
    assert status[f"0/{block}.0.mlp/output"] == status[order[at]] == "diverged"


class Twins(NamedTuple):
    reference: Path
    twin: Any
    inputs: dict[str, Any]


@pytest.fixture
def twins(tmp_path: Path) -> Twins:
    """The archive of a float32 Llama, and its bfloat16 twin."""
    inputs = {"input_ids": tokens(), "use_cache": False}
    model = make("llama", std=0.06, layers=4)
    with torch.no_grad(), tensorcap.capture(model, tmp_path / "ref.h5"):
        model(**inputs)
    return Twins(tmp_path / "ref.h5", make("llama", std=0.06, layers=4, dtype="bfloat16"), inputs)


def accused(twins: Twins, path: Path) -> dict[str, Pair]:
    """Pairs that are not green, by key, after all arguments were injected."""
    inject(twins.reference, Workload(twins.twin, twins.inputs), path)
    return {pair.key: pair for pair in compared(twins, path).pairs if not pair.is_green}


def compared(twins: Twins, path: Path) -> Comparison:
    return tensorcap.compare(twins.reference, path)


@pytest.mark.spec("POL-80", "POL-82")
def test_a_correct_twin_has_no_suspect(twins: Twins, tmp_path: Path) -> None:
    assert accused(twins, tmp_path / "own.h5") == {}
    comparison = compared(twins, tmp_path / "own.h5")
    tests = {pair.key: {f.test for f in pair.findings} for pair in comparison.pairs}
    assert tests["0/model.layers.2.mlp.up_proj/output"] == {"own_error_leaf", "outlier_element"}
    assert tests["0/model.layers.2.mlp/output"] == {"own_error_composite", "outlier_element"}
    assert tests["0/model.layers.2.mlp.act_fn/output"] == {"own_error_leaf", "outlier_element"}
    assert tests["0/model.embed_tokens/output"] == {
        "own_error_leaf",
        "outlier_element",
    }  # its token ids were replaced
    assert comparison.warnings[0].startswith("The target is an injected run: ")
    assert str(twins.reference) in comparison.warnings[0]


@pytest.mark.spec("POL-81")
def test_an_attention_scale_shows_between_the_modules_and_in_no_result(twins: Twins, tmp_path: Path) -> None:
    twins.twin.model.layers[2].self_attn.scaling *= 2
    found = accused(twins, tmp_path / "own.h5")
    assert set(found) == {"0/model.layers.2.self_attn.o_proj/input.input"}
    (only,) = found.values()
    assert {f.test for f in only.findings if f.status == "diverged"} >= {
        "own_error_composite",
        "attention_gain",
    }
    divergence = compared(twins, tmp_path / "own.h5").divergence
    assert divergence is not None
    assert divergence.module == "model.layers.2.self_attn"


def test_a_missing_activation_makes_its_mlp_the_only_suspect(twins: Twins, tmp_path: Path) -> None:
    twins.twin.model.layers[2].mlp.act_fn = nn.Identity()
    found = accused(twins, tmp_path / "own.h5")
    assert set(found) == {
        "0/model.layers.2.mlp.act_fn/output",
        "0/model.layers.2.mlp.down_proj/input.input",  # the code of the mlp made it of that
    }


def test_a_norm_that_adds_in_low_precision_shows_and_no_other_does(twins: Twins, tmp_path: Path) -> None:
    def forward(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
        total = torch.zeros_like(hidden_states[..., :1])
        for i in range(hidden_states.shape[-1]):
            total = total + hidden_states[..., i : i + 1].pow(2)
        variance = (total / hidden_states.shape[-1]).float()
        scaled = hidden_states.float() * torch.rsqrt(variance + self.variance_epsilon)
        return self.weight * scaled.to(hidden_states.dtype)  # type: ignore[no-any-return] # a tensor

    norm = twins.twin.model.layers[1].input_layernorm
    norm.forward = types.MethodType(forward, norm)
    found = accused(twins, tmp_path / "own.h5")
    assert set(found) == {"0/model.layers.1.input_layernorm/output"}
    (only,) = found.values()
    assert [f.test for f in only.findings if f.status != "within-rounding"] == ["own_error_leaf"]


def test_each_step_of_a_generation_is_injected_and_its_cache_is_the_models_own(tmp_path: Path) -> None:
    model = make("llama", std=0.06, layers=2)

    def generate(model: Any, ids: torch.Tensor) -> None:
        model.generate(ids, max_new_tokens=3, do_sample=False, pad_token_id=0)

    workload = Workload(model, (tokens(8),), generate)
    capture_workload(workload, tmp_path / "ref.h5")
    cap = inject(tmp_path / "ref.h5", workload, tmp_path / "own.h5", inputs="*.mlp*")
    assert {(s.status, s.count) for s in done(cap)} == {("injected", 3)}
    assert set(tensorcap.compare(tmp_path / "ref.h5", tmp_path / "own.h5").counts) == {"identical"}
    cap = inject(tmp_path / "ref.h5", workload, tmp_path / "all.h5")
    left = {slot.slot for slot in done(cap) if slot.status == "left"}
    assert left
    assert all(re.fullmatch(r"input\.\w+\.layers\.[01]\.(keys|values)", slot) for slot in left)
    assert set(tensorcap.compare(tmp_path / "ref.h5", tmp_path / "all.h5").counts) == {"identical"}


class Port(nn.Module):
    """As `Plain`, with its two layers in one, its tokens behind padding, and no batch axis."""

    def __init__(self, plain: Plain) -> None:
        super().__init__()
        self.both = nn.Linear(3, 8, bias=False)
        self.both.weight.data = torch.cat([plain.q.weight, plain.k.weight, torch.zeros(2, 3)])
        self.end = plain.end

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.end(self.both(x)[..., :6])
        return made


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(3, 4, bias=False), nn.Linear(3, 2, bias=False)
        self.end = nn.Linear(6, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.end(torch.cat([self.q(x), self.k(x)], -1))
        return made


class Renamed(nn.Module):
    """As `Plain`, its last layer under another name."""

    def __init__(self, plain: Plain) -> None:
        super().__init__()
        self.q, self.k, self.last = plain.q, plain.k, plain.end

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.last(torch.cat([self.q(x), self.k(x)], -1))
        return made


ALIGNMENT = Alignment(
    (
        Entry(("q/input.input",), ("both/input.input",), steps=("unsqueeze 0",)),
        Entry(("q", "k"), ("both",), steps=("unsqueeze 0", "slice -1 0:6", "split -1 4,2")),
        Entry(("end/input.input",), ("end/input.input",), steps=("unsqueeze 0",)),
    )
)


@pytest.mark.spec("INJ-10")
def test_steps_are_undone_and_padding_keeps_the_targets_values(tmp_path: Path) -> None:
    torch.manual_seed(0)
    plain = Plain()
    port = Port(plain)
    port.both.weight.data[6:] = 1.0
    x, other = torch.randn(1, 5, 3), torch.randn(5, 3)
    with torch.no_grad(), tensorcap.capture(plain, tmp_path / "ref.h5"):
        plain(x)
    cap = inject(
        tmp_path / "ref.h5",
        Workload(port, (other,)),
        tmp_path / "own.h5",
        inputs="*",
        outputs="both",
        mapping=ALIGNMENT,
    )
    assert {(s.site, s.slot, s.status) for s in done(cap)} == {
        ("both", "input.input", "injected"),
        ("both", "output", "injected"),
        ("end", "input.input", "injected"),
    }
    with torch.no_grad(), tensorcap.capture(port, tmp_path / "tgt.h5"):
        port(other)
    with open_archive(tmp_path / "ref.h5") as reference, open_archive(tmp_path / "tgt.h5") as target:
        back = aligned_and_reversed(reference, target, ALIGNMENT)
        made = back.load(back.get("0/both/output"))
        with torch.no_grad():
            wanted = torch.cat([plain.q(x)[0], plain.k(x)[0], other.sum(-1, keepdim=True).expand(5, 2)], -1)
        assert np.allclose(made, wanted.numpy(), atol=1e-6)
    with open_archive(tmp_path / "own.h5") as own:
        with torch.no_grad():
            assert np.allclose(own.load(own.get("0/end/input.input")), wanted[:, :6].numpy(), atol=1e-6)
            expected = plain.end(wanted[:, :6])
        assert np.allclose(own.load(own.get("0/@root/output")), expected.numpy(), atol=1e-6)


@pytest.mark.spec("INJ-10")
def test_equal_keys_that_a_mapping_says_nothing_of_are_injected_too(tmp_path: Path) -> None:
    torch.manual_seed(0)
    plain = Plain()
    other = Renamed(plain)
    x = torch.randn(1, 5, 3)
    with torch.no_grad(), tensorcap.capture(plain, tmp_path / "ref.h5"):
        plain(x)
    mapping = Alignment((Entry(("end",), ("last",)),))
    cap = inject(tmp_path / "ref.h5", Workload(other, (x * 2,)), tmp_path / "own.h5", mapping=mapping)
    assert {(s.site, s.slot) for s in done(cap)} == {(name, "input.input") for name in ("q", "k", "last")}
    with open_archive(tmp_path / "own.h5") as own, torch.no_grad():
        assert np.array_equal(own.load(own.get("0/q/output")), plain.q(x).numpy())


@pytest.mark.spec("INJ-23", "POL-81")
def test_the_mapping_of_an_injection_shows_a_mistake_between_modules_of_a_port(
    tmp_path: Path,
) -> None:
    port = import_module("tests.alignment.ports.llama").PORT
    model, inputs = port.reference()
    other, others = port.target(model.state_dict(), inputs)
    for name, made, given in (("ref", model, inputs), ("tgt", other, others)):
        with torch.no_grad(), tensorcap.capture(made, tmp_path / f"{name}.h5"):
            made(**given)
    with open_archive(tmp_path / "ref.h5") as reference, open_archive(tmp_path / "tgt.h5") as target:
        alignment = align(reference, target).alignment
    core = dict(other.named_modules())["layers.1.attn.core"]
    core.register_forward_pre_hook(lambda module, args: (args[0] * 2, *args[1:]))
    inject(tmp_path / "ref.h5", Workload(other, others), tmp_path / "own.h5", mapping=alignment)
    comparison = tensorcap.compare(tmp_path / "ref.h5", tmp_path / "own.h5")
    wrong = {pair.key for pair in comparison.pairs if pair.status in ("suspect", "diverged")}
    assert wrong == {"0/model.layers.1.self_attn.o_proj/input.input"}
    assert comparison.divergence is not None
    assert comparison.divergence.module == "model.layers.1.self_attn"
    inject(
        tmp_path / "ref.h5",
        Workload(other, others),
        tmp_path / "own.h5",
        mapping=alignment,
        only="layers.0*",
    )
    assert tensorcap.compare(tmp_path / "ref.h5", tmp_path / "own.h5").compared > 5


class Apart(nn.Module):
    """Hands its residual on apart from its result."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.fc(x), x


class Together(Apart):
    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override] # the port's other way
        made: torch.Tensor = self.fc(x) + x
        return made


class Adding(nn.Module):
    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = self.block(x)
        return made if isinstance(made, torch.Tensor) else made[0] + made[1]


@pytest.mark.spec("INJ-11")
def test_a_sum_goes_into_its_first_tensor_and_irreversible_steps_give_none(
    tmp_path: Path,
) -> None:
    torch.manual_seed(0)
    reference, port = Adding(Together()), Adding(Apart())
    x = torch.randn(1, 2)
    for name, made in (("ref", reference), ("tgt", port)):
        with torch.no_grad(), tensorcap.capture(made, tmp_path / f"{name}.h5"):
            made(x)
    places = ("block/output.0", "block/output.1")
    alignment = Alignment((Entry(("block",), places, steps=("sum",)),))
    workload = Workload(port, (torch.zeros(1, 2),))
    inject(tmp_path / "ref.h5", workload, tmp_path / "own.h5", outputs="block", mapping=alignment)
    with open_archive(tmp_path / "own.h5") as own, torch.no_grad():
        assert own.load(own.get("0/@root/output")).tolist() == reference(x).tolist()
    groups = Entry(("block", "block.fc"), (*places, "block.fc", "@root"), steps=("sum of=2",))
    with open_archive(tmp_path / "ref.h5") as trusted, open_archive(tmp_path / "tgt.h5") as tested:
        back = aligned_and_reversed(
            trusted, tested, Alignment((groups, Entry(("block.fc/input.input",), ("block.fc/input.input",))))
        )
    plain = ["0/@root/input.x", "0/block/input.x", "0/block.fc/input.input"]  # and those of equal keys
    assert [record.key.text for record in back.records] == plain
    lost = "step 'sum of=2': cannot be undone: what each tensor added is lost"
    assert set(back.left_out.values()) == {lost}
    assert len(back.left_out) == 4


@pytest.mark.spec("INJ-10")
def test_matched_tokens_are_put_in_the_places_of_the_same_tokens(tmp_path: Path) -> None:
    from tensorcap.alignment.tokens import TokenRule

    class Embedding(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.e, self.act = nn.Embedding(9, 2), nn.Identity()

        def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
            made: torch.Tensor = self.act(self.e(input_ids))
            return made

    torch.manual_seed(0)
    model, other = Embedding(), Embedding()
    ids, mask = torch.tensor([[5, 6, 7]]), torch.ones(1, 3, dtype=torch.long)
    padded, masked = torch.tensor([[0, 0, 5, 6, 7]]), torch.tensor([[0, 0, 1, 1, 1]])
    for name, made, given in (("ref", model, (ids, mask)), ("tgt", other, (padded, masked))):
        with torch.no_grad(), tensorcap.capture(made, tmp_path / f"{name}.h5"):
            made(input_ids=given[0], attention_mask=given[1])
    alignment = Alignment((Entry(("act",), ("act",)),), tokens=TokenRule("valid_tokens"))
    with open_archive(tmp_path / "ref.h5") as reference, open_archive(tmp_path / "tgt.h5") as target:
        back = aligned_and_reversed(reference, target, alignment)
        found = back.load(back.get("0/act/input.input"))
    with torch.no_grad():
        expected = torch.cat([other.e(padded[:, :2]), model.e(ids)], 1)
    assert found.tolist() == expected.tolist()


@pytest.mark.spec("INJ-20")
def test_the_archive_says_what_was_injected_where_and_of_what(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    with torch.no_grad(), tensorcap.capture(model, tmp_path / "ref.h5"):
        model(torch.ones(1, 2))
    inject(
        tmp_path / "ref.h5",
        Workload(model, (torch.zeros(1, 2),)),
        tmp_path / "own.h5",
        steps="0-",
        inputs="0",
    )
    with open_archive(tmp_path / "own.h5") as own, open_archive(tmp_path / "ref.h5") as reference:
        assert own.run["injected"] == {
            "source": str(tmp_path / "ref.h5"),
            "root": reference.root,
            "mapping": "",
            "inputs": ["0"],
            "outputs": [],
            "steps": "0-",
            "slots": [
                {
                    "site": "0",
                    "slot": "input.input",
                    "status": "injected",
                    "injected": 1,
                    "archived": 1,
                    "calls": {"0": "0"},
                }
            ],
        }
        assert own.load(own.get("0/0/input.input")).tolist() == [[0.0, 0.0]]
        assert (
            own.read(own.get("0/0/output")).tolist() == reference.read(reference.get("0/0/output")).tolist()
        )


def test_a_glob_that_fits_nothing_is_refused_before_the_run(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    with torch.no_grad(), tensorcap.capture(model, tmp_path / "ref.h5"):
        model(torch.ones(1, 2))
    with pytest.raises(TensorNotFoundError, match="no tensor 'mlp'"):
        inject(tmp_path / "ref.h5", Workload(model, (torch.ones(1, 2),)), tmp_path / "own.h5", inputs="mlp")


def test_what_was_injected_of_another_archive_than_the_reference_is_reported(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    for name, x in (("one", torch.ones(1, 2)), ("two", torch.zeros(1, 2))):
        with torch.no_grad(), tensorcap.capture(model, tmp_path / f"{name}.h5"):
            model(x)
    inject(tmp_path / "one.h5", Workload(model, (torch.ones(1, 2),)), tmp_path / "own.h5")
    found = tensorcap.compare(tmp_path / "two.h5", tmp_path / "own.h5").warnings
    assert any("is not of this reference" in warning for warning in found)


class State:
    """What a model writes to."""

    def __init__(self) -> None:
        self.total = torch.zeros(3, 4)


class Adder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, state: State) -> torch.Tensor:
        state.total = state.total + self.fc(x)
        return state.total


class Adders(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Adder(), Adder()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state = State()
        self.first(x, state)
        made: torch.Tensor = self.second(x, state)
        return made


@pytest.mark.spec("POL-81")
def test_what_an_object_holds_is_nobodys_own(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = Adders(), torch.randn(3, 4)
    with torch.no_grad(), tensorcap.capture(model, tmp_path / "ref.h5"):
        model(x)
    with torch.no_grad():
        model.first.fc.weight.mul_(2)
    inject(tmp_path / "ref.h5", Workload(model, (x,)), tmp_path / "own.h5")
    comparison = compare(tmp_path / "ref.h5", tmp_path / "own.h5")
    tests = {pair.key: {finding.test for finding in pair.findings} for pair in comparison.pairs}
    held = "0/second/input.state.total"
    assert "own_error_composite" not in tests[held]
    assert "own_error_leaf" in tests["0/first.fc/output"]
    assert "own_error_composite" not in tests["0/second/output"]  # which is made of it


class Counter(nn.Module):
    """Writes to the state that it is given, in the way of its name."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way

    def forward(self, x: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        if self.way == "version":
            state.add_(x.sum())
        elif self.way == "data":
            state.data.add_(x.sum())
        elif self.way == "numpy":
            np.add(state.numpy(), x.numpy().sum(), out=state.numpy())
        elif self.way == "axes":
            state.add_(x.sum()).t_()
        elif self.way == "one more axis":
            state.unsqueeze_(0)
        return x + 1


class Counted(nn.Module):
    def __init__(self, way: str) -> None:
        super().__init__()
        self.counter = Counter(way)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state = torch.zeros(2, 3)
        made: torch.Tensor = self.counter(x, state) * (1 + state.sum()) + state.shape[0]
        return made


@pytest.mark.spec("INJ-80")
@pytest.mark.parametrize("way", ["nothing", "version", "data", "numpy", "axes", "one more axis"])
def test_what_a_call_makes_of_its_copy_becomes_of_its_callers_tensor(way: str, tmp_path: Path) -> None:
    totals = {"nothing": 0, "one more axis": 0}
    rows = {"axes": 3, "one more axis": 1}
    workload = Workload(Counted(way), (torch.ones(4),))
    capture_workload(workload, tmp_path / "ref.h5")
    inject(tmp_path / "ref.h5", workload, tmp_path / "own.h5", inputs="counter", mapping="none")
    with open_archive(tmp_path / "own.h5") as archive:
        values = archive.read(archive.get("0/@root/output"))
    assert values.tolist() == [2 * (1 + totals.get(way, 6 * 4)) + rows.get(way, 2)] * 4


@pytest.mark.spec("INJ-5")
def test_a_mask_that_cannot_be_read_as_the_models_own_stops_no_injection_of_others(tmp_path: Path) -> None:
    class Masked(nn.Module):
        def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            return x * mask

    class Model(nn.Module):
        def __init__(self, mask: torch.Tensor) -> None:
            super().__init__()
            self.inner, self.mask = Masked(), mask

        def forward(self, x: torch.Tensor) -> Any:
            return self.inner(x, self.mask)

    x = torch.ones(2)
    reference = Workload(Model(torch.tensor([0.5, 1.0])), (3 * x,))
    target = Workload(Model(torch.tensor([True, True])), (x,))
    for name, workload in (("ref", reference), ("tgt", target)):
        capture_workload(workload, tmp_path / f"{name}.h5")
    cap = inject(
        tmp_path / "ref.h5",
        target,
        tmp_path / "out.h5",
        target=tmp_path / "tgt.h5",
        mapping="none",
        leaves_misfits=True,
    )
    assert cap.substitution is not None
    assert {slot.slot: slot.describe()["status"] for slot in cap.substitution.slots} == {
        "input.x": "injected",
        "input.mask": "left",
    }
    with open_archive(tmp_path / "out.h5") as archive:
        assert archive.load(archive.get("0/inner/output")).tolist() == [3.0, 3.0]
