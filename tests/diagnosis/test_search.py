"""How far a search goes, and which calls it does without."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tensorcap.adapters import Argument, CallMutation, Filled
from tensorcap.adapters.torch.call_inputs import CallInputs
from tensorcap.diagnosis import Search
from tensorcap.diagnosis.golden_section import minimize_over_logarithm
from tensorcap.diagnosis.repeated_call import RepeatedCall, repeat_call
from tensorcap.localization import Localization, localize, ranking
from tensorcap.reports.suspects import suspect_lines
from tensorcap.session import capture_workload
from tensorcap.workload import Workload

WORDS = np.array([1.0, -2.0, 3.0])


@pytest.mark.spec("DIA-530")
def test_causes_of_one_kind_take_half_of_what_is_left() -> None:
    search = Search(80)
    first = []
    for cause in search.affordable(range(6), 10):  # half of 80 is 4 times 10
        first.append(cause)
        search.left -= 10
    assert (first, search.tried, search.possible, search.left) == ([0, 1, 2, 3], 4, 6, 40)
    for _ in search.affordable("ab", 10):
        search.left -= 10
    assert (search.tried, search.possible, search.is_cut) == (6, 8, True)


@pytest.mark.spec("DIA-530")
def test_what_follows_the_cause_is_not_left_out() -> None:
    search = Search(math.inf)
    for cause in search.affordable(range(1000), 1 << 60):
        if cause == 2:
            break
    assert (search.tried, search.possible, search.is_cut) == (3, 3, False)


class Call:
    """Makes `(used + given) * rate`, and has much that it does not use."""

    def __init__(self) -> None:
        self.site, self.class_name = "mixer", "Mixer"
        self.tensors = {"used": (3,), **{f"unused.{n}": (3,) for n in range(64)}}
        self.arguments = {"given": Argument("float", (3,)), "state": Argument("float", (3,))}
        self.settings: dict[str, Any] = {}
        self.results: dict[str, Any] = {}
        self.operations: dict[str, Any] = {}
        self.operation_count, self.alike = 2, ()
        self.made: list[CallMutation] = []

    def settings_of(self, site: str) -> Mapping[str, Any]:
        return {}

    def read_tensor(self, name: str) -> Any:
        return WORDS

    def run(self, mutation: CallMutation) -> Any:
        self.made.append(mutation)
        parts = []
        for edit in (mutation.tensors.get("used"), mutation.arguments.get("given")):
            parts.append(np.full(3, edit.value) if isinstance(edit, Filled) else WORDS)
        return sum(parts) * mutation.settings.get("rate", 1.0)


def repeated(call: Call, search: Search) -> RepeatedCall:
    found = repeat_call(call, 2 * WORDS, 3 * WORDS, target_dtype="float32", search=search)
    assert found is not None
    return found


@pytest.mark.spec("DIA-531")
def test_what_has_no_effect_is_not_tried() -> None:
    call, search = Call(), Search()
    again = repeated(call, search)
    for name in call.tensors:
        for number in (0.0, 7.0, 11.0):
            values = again.run(CallMutation({name: Filled(number)}))
            assert (values is None) == (name != "used")
    filled = Filled(5.0)
    both = again.run(CallMutation({"unused.7": filled}, {}, {"given": filled}))
    np.testing.assert_array_equal(both, WORDS + 5.0)
    assert again.run(CallMutation({}, {}, {"state": filled})) is None
    rated = again.run(CallMutation({"unused.7": filled}, {"rate": 2.0}))
    np.testing.assert_array_equal(rated, 4 * WORDS)
    assert len(call.made) < 60  # of 199: each half of 65 tensors that has the one that is used is divided


@pytest.mark.spec("DIA-531")
def test_what_is_used_is_found_with_a_quarter_of_the_work() -> None:
    """Of 64 tensors each has an effect, which 127 calls would tell; there is work for 40."""
    call = Call()
    call.tensors = {f"used.{n}": (3,) for n in range(64)}
    call.arguments = {}
    call.run = lambda mutation: None if mutation.tensors else 2 * WORDS  # type: ignore[method-assign]
    work = 64 * 3 + 2 * 32768 + 1048576
    search = Search(40 * work)
    again = repeated(call, search)
    assert len(again.used_tensors) == 64
    assert search.left == 30 * work
    assert len(list(again.affordable(range(100)))) == 100  # of which none is made here


@pytest.mark.spec("DIA-530")
def test_work_is_counted_by_calls() -> None:
    call, search = Call(), Search(1e9)
    again = repeated(call, search)
    again.run(CallMutation(settings={"rate": 2.0}))
    elements = 65 * 3 + 2 * 3 + 2 * 32768 + 1048576  # tensors, arguments, operations, the call itself
    assert search.left == 1e9 - elements


def test_a_golden_section_knows_one_of_its_two_errors() -> None:
    asked = []

    def error(number: float) -> float:
        asked.append(number)
        return abs(math.log(number / 1.7))

    assert minimize_over_logarithm(error, 0.0, 2.0, 30) == pytest.approx(1.7, rel=1e-5)
    assert len(asked) == 32


@pytest.mark.spec("DIA-36")
def test_inputs_are_given_as_they_were_whatever_calls_write_into_them() -> None:
    """A cache of lists, a tensor, and a view that shares its memory."""
    whole = torch.arange(6.0)
    inputs = CallInputs((whole, whole[2:4]), {"cache": {"keys": [torch.ones(2)]}})
    whole.zero_()
    for _ in range(3):
        (tensor, view), kwargs = inputs.give()
        assert tensor.tolist() == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
        assert view.tolist() == [2.0, 3.0]
        assert [keys.tolist() for keys in kwargs["cache"]["keys"]] == [[1.0, 1.0]]
        view += 10.0
        kwargs["cache"]["keys"][0].fill_(9.0)
        kwargs["cache"]["keys"].append(tensor)
    assert inputs.kept[0][0].tolist() == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]


@pytest.mark.spec("DIA-36")
@pytest.mark.parametrize(
    "write",
    [
        pytest.param(lambda x: x.data.add_(1), id="beside-its-version"),
        pytest.param(lambda x: np.add(x.numpy(), 1, out=x.numpy()), id="through-numpy"),
        pytest.param(lambda x: x.t_(), id="other-axes"),
        pytest.param(lambda x: x.unsqueeze_(0).add_(1), id="one-more-axis"),
        pytest.param(lambda x: x.resize_(12).fill_(7), id="more-elements"),
        pytest.param(lambda x: setattr(x, "data", torch.zeros(4)), id="other-memory"),
    ],
)
def test_inputs_are_given_as_they_were_where_versions_do_not_tell(write: Callable[[Tensor], object]) -> None:
    inputs = CallInputs((torch.arange(6.0).reshape(2, 3).expand(1, 2, 3)[0],))
    for _ in range(3):
        (tensor,), _by_name = inputs.give()
        assert tensor.tolist() == [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]
        write(tensor)


class Mixer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(8, 8)
        self.gain = nn.Parameter(torch.linspace(0.5, 1.5, 8))

    def turn(self, x: Tensor) -> Tensor:
        return x * self.gain

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.out(self.turn(x).tanh())
        return made


class Port(Mixer):
    """With a mistake of no kind that is known."""

    def turn(self, x: Tensor) -> Tensor:
        turned = super().turn(x)
        return turned + (turned * 3.7).cos() * torch.roll(turned, 3, 0).sigmoid()


class Layered(nn.Module):
    def __init__(self, mixer: type[Mixer]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([mixer(), mixer()])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


class Repeated(nn.Module):
    def __init__(self, mixer: type[Mixer], calls: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.mixer, self.calls = mixer(), calls

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.calls):
            x = x + self.mixer(x)
        return x


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pair")
    for name, mixer in (("ref.h5", Mixer), ("tgt.h5", Port)):
        capture_workload(workload(Layered(mixer)), folder / name)
    return folder


def workload(model: nn.Module) -> Workload:
    x = np.random.default_rng(5).standard_normal((6, 8)).astype(np.float32)
    return Workload(model.eval(), {"x": torch.from_numpy(x)}, seed=0)


def localized(folder: Path, **options: Any) -> Localization:
    model = workload(Layered(Mixer))
    return localize(folder / "ref.h5", folder / "tgt.h5", reference_model=model, **options)


@pytest.mark.spec("LCL-530")
def test_a_search_that_ends_at_its_bound_says_how_far_it_went(
    pair: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = localized(pair).suspects
    assert [suspect.module for suspect in whole] == ["layers.0", "layers.1"]
    assert all(suspect.tried == suspect.possible > 100 for suspect in whole)
    assert not any("causes" in line for line in suspect_lines(1, whole[0]))

    monkeypatch.setattr(ranking, "MOST_WORK", 40 << 20)  # some forty calls, of both layers together
    first, second = localized(pair).suspects
    assert 5 < first.tried < 40
    assert second.tried < first.tried
    assert first.possible == whole[0].possible
    assert second.possible >= first.possible  # what it uses is not found out any more, by so little work
    assert first.to_json()["causes"] == {"tried": first.tried, "possible": first.possible}
    said = f"{first.tried} of {first.possible} possible causes were tried"
    assert any(said in line for line in suspect_lines(1, first))

    lifted = localized(pair, exhaustive=True).suspects
    assert [(one.tried, one.possible) for one in lifted] == [(one.tried, one.possible) for one in whole]


@pytest.mark.spec("LCL-531")
def test_the_same_tensor_in_a_further_call_is_not_searched_again(tmp_path: Path) -> None:
    found = []
    for calls in (1, 3):
        reference, target = (workload(Repeated(mixer, calls)) for mixer in (Mixer, Port))
        for name, side in (("ref.h5", reference), ("tgt.h5", target)):
            capture_workload(side, tmp_path / name)
        (suspect,) = localize(tmp_path / "ref.h5", tmp_path / "tgt.h5", reference_model=reference).suspects
        found.append((suspect.module, suspect.tried, suspect.possible))
    assert found[0] == found[1]
