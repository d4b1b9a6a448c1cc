from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import tensorcap
from tensorcap import probe
from tensorcap_formats.errors import UsageError
from tests.support.models import Calls

COMPILED = "inside a compiled graph (torch.compile); --eager runs it as plain code"


class Half(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return probe("half", x / 2) + 1


def read(path: Path) -> dict[str, Any]:
    """Every tensor and every value of a probe, by key."""
    archive = tensorcap.open_archive(path)
    tensors = {r.key.text: archive.read(r).tolist() for r in archive.records}
    found = {**tensors, **archive.values}
    return {key: value for key, value in found.items() if "/probe:" in key}


def point(path: Path, site: str) -> list[dict[str, Any]]:
    return [entry for entry in tensorcap.open_archive(path).run["points"] if entry["site"] == site]


@pytest.mark.spec("CAP-40")
def test_a_probe_is_recorded_by_its_name_with_the_module_that_passed_it(path: Path) -> None:
    model = nn.Sequential(Half(), nn.Sequential(Half()))
    with tensorcap.capture(model, path) as cap:
        for _ in range(2):
            assert model(torch.tensor([4.0])).tolist() == [2.5]
    expected = {"value": [2.0], "@1/value": [1.5]}
    assert read(path) == {
        key: value
        for step in (0, 1)
        for key, value in (
            (f"{step}/probe:half/value", expected["value"]),
            (f"{step}/probe:half/module", "0"),
            (f"{step}/probe:half@1/value", expected["@1/value"]),
            (f"{step}/probe:half@1/module", "1.0"),
        )
    }
    assert cap.summary is not None
    assert cap.summary.probes == ("probe:half",)
    assert point(path, "probe:half") == [
        {"site": "probe:half", "status": "captured", "calls": 4, "kind": "probe"}
    ]


@pytest.mark.spec("CAP-40")
def test_a_probe_takes_any_structure_and_any_name(path: Path) -> None:
    def run(x: torch.Tensor) -> torch.Tensor:
        probe("a/b c", {"first": x, "rest": (x + 1, 3, None)})
        x.zero_()
        return x

    model = Calls(run)
    with tensorcap.capture(model, path):
        model(torch.ones(1))
    assert read(path) == {
        "0/probe:a%2Fb%20c/value.first": [1],
        "0/probe:a%2Fb%20c/value.rest.0": [2],
        "0/probe:a%2Fb%20c/value.rest.1": 3,
        "0/probe:a%2Fb%20c/value.rest.2": None,
        "0/probe:a%2Fb%20c/module": "@root",
    }


@pytest.mark.spec("CAP-41")
@pytest.mark.parametrize("is_captured", [False, True])
def test_a_probe_gives_back_the_very_value(is_captured: bool) -> None:
    values = [torch.ones(2), {"a": 1}, None, object()]

    def run(x: torch.Tensor) -> torch.Tensor:
        for value in values:
            assert probe("value", value) is value
        return x

    model = Calls(run)
    if is_captured:
        with tensorcap.capture(model, None):
            model(torch.ones(1))
    else:
        model(torch.ones(1))


@pytest.mark.spec("CAP-41")
@pytest.mark.parametrize("name", ["", None, 3, b"x"])
def test_a_name_that_is_no_text_is_refused_whether_or_not_there_is_a_capture(name: Any) -> None:
    with pytest.raises(UsageError, match="expected a text that is not empty"):
        probe(name, 1)


@pytest.mark.spec("CAP-41")
def test_a_value_that_cannot_be_read_does_not_break_the_run(path: Path) -> None:
    class Hostile(dict[str, int]):
        def items(self) -> Any:
            raise RuntimeError("hands off")

    model = Calls(lambda x: (probe("hostile", Hostile()), probe("sparse", x.to_sparse()), x)[-1])
    with tensorcap.capture(model, path) as cap:
        assert model(torch.ones(1)).tolist() == [1]
    assert cap.summary is not None
    assert cap.summary.not_capturable == {
        "probe:hostile": "RuntimeError: hands off",
        "probe:sparse": "layout sparse_coo",
    }


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({"only": "probe:half"}, {"0/probe:half/value", "0/probe:half/module"}),
        ({"only": "0/probe:*/value"}, {"0/probe:half/value"}),
        ({"exclude": "probe:*"}, set()),
        ({"steps": [range(1, 2)]}, {"1/probe:half/value", "1/probe:half/module"}),
    ],
)
def test_globs_and_limits_choose_among_probes(path: Path, options: dict[str, Any], kept: set[str]) -> None:
    model = Half()
    with tensorcap.capture(model, path, **options):
        model(torch.ones(1))
        if "steps" in options:
            model(torch.ones(1))
    assert read(path).keys() == kept


@pytest.mark.spec("CAP-42")
def test_of_several_captures_the_one_whose_model_is_called_takes_the_probe(tmp_path: Path) -> None:
    one, two = Half(), nn.Sequential(Half())
    with (
        tensorcap.capture(one, tmp_path / "1.h5") as first,
        tensorcap.capture(two, tmp_path / "2.h5") as second,
    ):
        one(torch.tensor([2.0]))
        two(torch.tensor([6.0]))
        probe("outside", torch.ones(1))
    assert read(tmp_path / "1.h5") == {"0/probe:half/value": [1], "0/probe:half/module": "@root"}
    assert read(tmp_path / "2.h5") == {"0/probe:half/value": [3], "0/probe:half/module": "0"}
    for cap in (first, second):
        assert cap.summary is not None
        assert cap.summary.not_capturable == {
            "probe:outside": "outside of a call of a model, while several captures were under way"
        }


@pytest.mark.spec("CAP-42")
def test_the_only_capture_takes_a_probe_outside_of_a_call(path: Path) -> None:
    model = Half()
    with tensorcap.capture(model, path):
        probe("before", torch.zeros(1))
        model(torch.ones(1))
        model(torch.ones(1))
        probe("after", torch.ones(1))
    probe("too late", torch.ones(1))
    found = read(path)
    assert found["0/probe:before/value"] == [0]
    assert found["1/probe:after/value"] == [1]
    assert not any("late" in key for key in found)


@pytest.mark.spec("CAP-42")
def test_threads_keep_their_steps_apart(path: Path) -> None:
    barrier = threading.Barrier(2, timeout=200)

    def run(x: torch.Tensor) -> torch.Tensor:
        barrier.wait()
        return probe("x", probe("x", x) + 1)

    model = Calls(run)
    with tensorcap.capture(model, path):
        threads = [threading.Thread(target=model, args=(torch.full((1,), v),)) for v in (10.0, 20.0)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    found = read(path)
    steps = [(found[f"{step}/probe:x/value"], found[f"{step}/probe:x@1/value"]) for step in (0, 1)]
    assert sorted(steps) == [([10], [11]), ([20], [21])]


@pytest.mark.spec("CAP-43")
@pytest.mark.parametrize("use_reentrant", [True, False])
def test_a_backward_pass_that_computes_anew_is_not_counted_twice(path: Path, use_reentrant: bool) -> None:
    model = Calls(
        lambda x: checkpoint(lambda y: probe("square", y * y).sin(), x, use_reentrant=use_reentrant)
    )
    x = torch.ones(1, requires_grad=True)
    with tensorcap.capture(model, path):
        model(x).sum().backward()
    assert read(path).keys() == {"0/probe:square/value", "0/probe:square/module"}
    [entry] = point(path, "probe:square")
    assert entry["calls"] == 1
    assert entry["reason"] == "not recorded: calls of a backward pass to compute anew, 1"


@pytest.mark.spec("CAP-43")
def test_a_compiled_graph_is_whole_without_a_capture_and_within_one(path: Path) -> None:
    model = Half()
    compiled: Any = torch.compile(model, backend="eager", fullgraph=True)
    x = torch.tensor([4.0])
    assert compiled(x).tolist() == [3]
    with tensorcap.capture(model, path) as cap:
        assert compiled(x).tolist() == [3]
        model(x)
    assert compiled(x).tolist() == [3]
    assert cap.summary is not None
    assert cap.summary.not_capturable["probe:half/value"] == COMPILED
    assert read(path) == {"0/probe:half/value": [2], "0/probe:half/module": "@root"}


@pytest.mark.spec("CAP-43")
@pytest.mark.filterwarnings("ignore:`torch.jit.trace:DeprecationWarning")
def test_a_trace_and_a_function_transform_run_as_they_would_and_are_told(path: Path) -> None:
    model = Half()
    x = torch.tensor([4.0])
    with tensorcap.capture(model, path) as cap:
        model(x)
        traced: Any = torch.jit.trace(lambda y: probe("traced", y + 1), (x,))  # type: ignore[no-untyped-call] # torch has no types there
        assert torch.func.grad(lambda y: probe("grad", y * y).sum())(x).tolist() == [8]
        assert torch.vmap(lambda y: probe("vmap", y + 1))(x).tolist() == [5]
    assert traced(x).tolist() == [5]
    assert cap.summary is not None
    assert cap.summary.not_capturable == {
        "probe:traced/value": "under torch.jit.trace",  # which then checks it by a call that is seen
        "probe:grad": "inside a function transform (vmap, grad, …)",
        "probe:vmap": "inside a function transform (vmap, grad, …)",
    }


class Reference(nn.Module):
    """Attention scores in a module of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = Calls(lambda q, k: probe("scores", q @ k.T))

    def forward(self, q: torch.Tensor, k: torch.Tensor) -> Any:
        return self.attention(q, k).softmax(-1)


class Port(nn.Module):
    """The same in the root module, twice as large if it is wrong."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, q: torch.Tensor, k: torch.Tensor) -> Any:
        scores = torch.einsum("id,jd->ij", q, k)
        probe("scores", scores * self.factor)
        return scores.softmax(-1)


@pytest.mark.spec("CAP-40")
@pytest.mark.parametrize(("factor", "is_green"), [(1.0, True), (2.0, False)])
def test_probes_of_one_name_are_compared_wherever_they_stand(
    tmp_path: Path, factor: float, is_green: bool
) -> None:
    q, k = torch.randn(8, 16), torch.randn(8, 16)
    for name, model in (("ref.h5", Reference()), ("tgt.h5", Port(factor))):
        with tensorcap.capture(model, tmp_path / name, inputs=False):
            model(q, k)
    result = tensorcap.compare(tmp_path / "ref.h5", tmp_path / "tgt.h5")
    pairs = {pair.key: pair for pair in result.pairs}
    # the port has no such module, and its results agree; the probe alone may be wrong
    assert [pairs[f"0/{place}/output"].status for place in ("attention", "@root")] == [
        "explained",
        "identical",
    ]
    pair = pairs["0/probe:scores/value"]
    assert pair.target is not None
    assert pair.target.key.text == "0/probe:scores/value"
    assert pair.status == ("identical" if is_green else "diverged")
    assert result.exit_status == (0 if is_green else 1)
    assert [difference.key for difference in result.value_differences if "probe" in difference.key] == []
    places = [tensorcap.open_archive(tmp_path / name).values for name in ("ref.h5", "tgt.h5")]
    assert [values["0/probe:scores/module"] for values in places] == ["attention", "@root"]
