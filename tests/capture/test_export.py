"""Level export: the nodes of a graph that torch.export makes, run node by node."""

from __future__ import annotations

import copy
import inspect
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.fx.proxy import TracerBase
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import tensorcap
from tensorcap.session import capture_workload
from tensorcap_formats.archive import Archive
from tensorcap_formats.errors import CaptureError, UsageError
from tests.support.transformers_models import llama

PLAIN = {"attn_implementation": "eager", "use_cache": False}
IDS = torch.tensor([[5, 6, 7, 8, 9, 10, 11, 12]])


def export(model: nn.Module, inputs: Any, path: Path, **options: Any) -> Archive:
    capture_workload(tensorcap.Workload(model, inputs), path, level="export", **options)
    return tensorcap.open_archive(path)


def ops(archive: Archive) -> dict[str, dict[str, Any]]:
    """The facts of every op, by step, site and call."""
    return {key.removesuffix("/op"): facts for key, facts in archive.values.items() if key.endswith("/op")}


def tensor(archive: Archive, key: str) -> torch.Tensor:
    """A record as torch has it, made without our own reader of torch dtypes."""
    record = archive.get(key)
    bits = np.array(archive.read(record))
    if record.dtype.name == "bfloat16":
        return torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(bits)


def points(archive: Archive) -> dict[str, dict[str, Any]]:
    return {entry["site"]: entry for entry in archive.run["points"] if "slots" not in entry}


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return scaled(self.linear(x))


def scaled(x: torch.Tensor) -> torch.Tensor:
    return x.transpose(0, 1).contiguous() * 3


class Twice(nn.Module):
    """Calls a module twice, under two names; has one that is never called and one without ops."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Inner()
        self.again = self.inner
        self.nothing = nn.Identity()
        self.unused = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor, *, mask: Any = None, parts: Any = None) -> dict[str, Any]:
        y = self.inner(x)
        y = self.nothing(self.again(self.inner(y)))
        return {"y": y, "pair": (y + parts["bias"], None)}


TWICE = {"x": torch.arange(16.0).reshape(4, 4), "mask": None, "parts": {"bias": torch.ones(4)}}


class EagerValues(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch has not annotated it
    """The floating values of every op of an eager run."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # as above
        self.seen: set[tuple[str, tuple[int, ...], bytes]] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in tree_leaves(result):
            if isinstance(value, torch.Tensor) and value.is_floating_point():
                self.seen.add(identity(value))
        return result


def identity(value: torch.Tensor) -> tuple[str, tuple[int, ...], bytes]:
    plain = value.detach().clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8)
    return str(value.dtype), tuple(value.shape), plain.numpy().tobytes()


def resolve(archive: Archive, model: nn.Module, reference: dict[str, Any]) -> torch.Tensor:
    """The tensor that a reference of CAP-12 leads to."""
    if "view" in reference:
        place, _, slot = reference["view"].rpartition("/")
        return resolve(archive, model, next(o for o in ops(archive)[place]["outputs"] if o["slot"] == slot))
    if "parameter" in reference:
        base = {**dict(model.named_parameters()), **dict(model.named_buffers())}[
            reference["parameter"]
        ].detach()
    else:
        base = tensor(archive, reference.get("record") or reference["view_of"])
    if "shape" not in reference:
        return base
    flat = base.contiguous().reshape(-1).view(getattr(torch, reference["dtype"]))
    return flat.as_strided(reference["shape"], reference["strides"], reference["offset"])


def computed_anew(archive: Archive, model: nn.Module, facts: dict[str, Any]) -> list[torch.Tensor]:
    """What torch's own op gives for what the archive says that it was given."""
    _, name, overload = facts["op"].split(".")
    arguments = {key: as_torch(key, value) for key, value in facts["arguments"].items()}
    for given in facts["inputs"]:
        key, _, number = given["name"].partition(".")
        value = resolve(archive, model, given)
        if number:
            items = arguments.setdefault(key, [])
            items.extend([None] * (int(number) - len(items)))
            items.append(value)
        else:
            arguments[key] = value
    function = getattr(getattr(torch.ops.aten, name), overload)
    result = function(**arguments)
    return [v for v in tree_leaves(result) if isinstance(v, torch.Tensor)]


def as_torch(key: str, value: Any) -> Any:
    if key in ("dtype", "layout", "memory_format") and isinstance(value, str):
        return getattr(torch, value)
    return value


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> tuple[nn.Module, Archive]:
    model = llama(**PLAIN)
    return model, export(model, {"input_ids": IDS}, tmp_path_factory.mktemp("export") / "ref.h5")


# The run


@pytest.mark.spec("CAP-25")
def test_what_the_model_is_given_and_returns_is_recorded_bit_for_bit(
    exported: tuple[nn.Module, Archive],
) -> None:
    model, archive = exported
    with torch.no_grad():
        logits = model(input_ids=IDS).logits
    assert torch.equal(tensor(archive, "0/@root/input.input_ids"), IDS)
    assert identity(tensor(archive, "0/@root/output.logits")) == identity(logits)
    assert archive.run["inputs"]["0/@root/input.input_ids"]["shape"] == [1, 8]
    roots = {record.key.slot for record in archive.records if record.key.site == "@root"}
    assert roots == {"input.input_ids", "output.logits"}


@pytest.mark.spec("CAP-25")
def test_every_floating_value_of_a_node_is_one_of_the_eager_run(exported: tuple[nn.Module, Archive]) -> None:
    model, archive = exported
    with torch.no_grad(), EagerValues() as eager:
        model(input_ids=IDS)
    floating = [r for r in archive.records if r.dtype.name == "float32"]
    assert len(floating) > 80
    assert all(identity(tensor(archive, r.key.text)) in eager.seen for r in floating)


@pytest.mark.spec("CAP-21")
def test_every_node_is_computed_anew_from_what_the_archive_says_of_it(
    exported: tuple[nn.Module, Archive],
) -> None:
    model, archive = exported
    nodes = {place: facts for place, facts in ops(archive).items() if facts["outputs"]}
    assert len(nodes) > 100
    for place, facts in nodes.items():
        with torch.no_grad():
            found = computed_anew(archive, model, facts)
        told = [resolve(archive, model, output) for output in facts["outputs"]]
        assert list(map(identity, found)) == list(map(identity, told)), place


@pytest.mark.spec("CAP-21")
def test_views_and_what_shares_memory_with_a_parameter_are_not_stored(
    exported: tuple[nn.Module, Archive],
) -> None:
    _, archive = exported
    facts = ops(archive)
    views = [
        f for f in facts.values() if f["op"].split(".")[1] in ("transpose", "view", "unsqueeze", "slice")
    ]
    assert len(views) > 10
    assert all("view_of" in output for f in views for output in f["outputs"])
    assert not any(record.key.slot.startswith("param") for record in archive.records)


# Names


@pytest.mark.spec("CAP-22")
@pytest.mark.parametrize(
    ("dtype", "length"),
    [
        pytest.param(torch.bfloat16, 8, id="bfloat16"),
        pytest.param(torch.float32, 13, id="longer"),
    ],
)
def test_names_are_those_of_another_precision_and_length(
    exported: tuple[nn.Module, Archive], path: Path, dtype: torch.dtype, length: int
) -> None:
    _, reference = exported
    ids = torch.arange(length).reshape(1, length)
    target = export(llama(**PLAIN).to(dtype), {"input_ids": ids}, path)
    assert list(ops(target)) == list(ops(reference))


@pytest.mark.spec("CAP-22")
def test_names_are_those_of_the_users_own_export(exported: tuple[nn.Module, Archive]) -> None:
    model, archive = exported
    program = torch.export.export(model, (), {"input_ids": IDS}, strict=False)
    own = [node.name for node in program.graph.nodes if node.op == "call_function"]
    assert [place.partition(":")[2] for place in ops(archive)] == own
    assert [facts["node"] for facts in ops(archive).values()] == own


# Where a node stands


@pytest.mark.spec("CAP-24")
def test_every_node_of_a_model_has_module_class_and_line(exported: tuple[nn.Module, Archive]) -> None:
    model, archive = exported
    for place, facts in ops(archive).items():
        path = facts["module"].removeprefix("@root")
        assert place.startswith(f"0/{facts['module']}:")
        assert facts["class"] == type(model.get_submodule(path)).__name__
        assert isinstance(facts["line"], int)
        assert facts["function"]
        assert f"{Path(torch.__file__).parent}" not in facts["file"]
    assert archive.run["export"] == {"strict": False, "grad": True, "frames": "all"}


@pytest.mark.spec("CAP-24")
def test_an_op_in_a_free_function_has_the_line_of_that_function(
    exported: tuple[nn.Module, Archive],
) -> None:
    from transformers.models.llama import modeling_llama

    _, archive = exported
    softmax = next(f for f in ops(archive).values() if f["op"].startswith("aten.softmax"))
    lines, first = inspect.getsourcelines(modeling_llama.eager_attention_forward)
    wanted = next(first + i for i, line in enumerate(lines) if "functional.softmax" in line)
    assert (softmax["function"], softmax["line"]) == ("eager_attention_forward", wanted)
    assert softmax["file"].endswith("modeling_llama.py")
    assert softmax["module"] == "model.layers.0.self_attn"


@pytest.mark.spec("CAP-24")
def test_without_the_place_in_torch_the_caller_is_told_and_said_to_be(
    monkeypatch: pytest.MonkeyPatch, path: Path
) -> None:
    theirs = TracerBase._filter_traceback_frames
    for cls in TracerBase.__subclasses__():
        monkeypatch.setattr(cls, "_filter_traceback_frames", theirs, raising=False)
    monkeypatch.delattr(TracerBase, "_filter_traceback_frames")
    archive = export(Inner(), (torch.ones(4, 4),), path)
    assert archive.run["export"]["frames"] == "of functions named forward"
    assert {facts["function"] for facts in ops(archive).values()} == {"forward"}
    assert {facts["file"].rpartition("/")[2] for facts in ops(archive).values()} == {"test_export.py"}


@pytest.mark.spec("CAP-24")
def test_a_node_outside_of_all_code_of_the_user_has_no_line(path: Path) -> None:
    archive = export(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), (torch.ones(2, 4),), path)
    found = ops(archive)["0/1:relu"]
    assert (found["class"], found["file"], found["line"], found["function"]) == ("ReLU", None, None, None)


@pytest.mark.spec("CAP-23")
def test_calls_of_a_module_are_counted_and_every_module_is_accounted_for(path: Path) -> None:
    model = Twice()
    archive = export(model, TWICE, path)
    linear = [
        (place, f["module_call"]) for place, f in ops(archive).items() if f["op"] == "aten.linear.default"
    ]
    assert linear == [
        ("0/inner.linear:linear", 0),
        ("0/inner.linear:linear_1", 1),
        ("0/inner.linear:linear_2", 2),
    ]
    weights = [f["inputs"][1] for f in ops(archive).values() if f["op"] == "aten.linear.default"]
    assert weights == [{"name": "weight", "parameter": "inner.linear.weight"}] * 3
    never = {"status": "never-called", "calls": 0, "reason": "no node of the exported graph lies in it"}
    assert points(archive) == {
        "@root": {"site": "@root", "status": "captured", "calls": 1},
        "inner": {"site": "inner", "status": "captured", "calls": 3},
        "inner.linear": {"site": "inner.linear", "status": "captured", "calls": 3},
        "nothing": {"site": "nothing", **never},
        "unused": {"site": "unused", **never},
    }


class Sliced(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
        self.shared = self.layers  # has torch name what is sliced by how it was got

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.layers[:2](x)
        return result


@pytest.mark.spec("CAP-21")
def test_a_node_of_a_module_without_a_name_lies_in_the_module_around_it(path: Path) -> None:
    archive = export(nn.Sequential(Sliced()), (torch.ones(2, 4),), path)
    assert list(ops(archive)) == ["0/0:linear", "0/0:relu"]


@pytest.mark.spec("CAP-25")
def test_keywords_none_and_fields_are_recorded_by_name(path: Path) -> None:
    model = Twice()
    archive = export(model, TWICE, path)
    with torch.no_grad():
        wanted = model(**TWICE)
    assert torch.equal(tensor(archive, "0/@root/input.parts.bias"), torch.ones(4))
    assert torch.equal(tensor(archive, "0/@root/output.y"), wanted["y"])
    assert torch.equal(tensor(archive, "0/@root/output.pair.0"), wanted["pair"][0])
    assert archive.values["0/@root/input.mask"] is None
    assert archive.values["0/@root/output.pair.1"] is None
    assert ops(archive)["0/inner.linear:linear"]["inputs"][0] == {
        "name": "input",
        "record": "0/@root/input.x",
    }


# What graphs hold beside plain ops


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> Any:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = self.linear(x)
        return torch.cond(x.sum() > 0, torch.sin, torch.cos, (y.float(),))


@pytest.mark.spec("CAP-21")
@pytest.mark.parametrize(
    ("sign", "node"),
    [pytest.param(1, "true_graph_0.sin", id="true"), pytest.param(-1, "false_graph_0.cos", id="false")],
)
def test_nodes_of_the_graphs_that_operators_run_are_recorded(path: Path, sign: int, node: str) -> None:
    model = Branches()
    x = torch.full((2, 4), float(sign))
    archive = export(model, (x,), path)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        projected = model.linear(x)
    inner = next(key for key, f in ops(archive).items() if f["op"] == "aten.linear.default")
    assert inner.startswith("0/linear:submod_")
    assert identity(tensor(archive, f"{inner}/output")) == identity(projected)
    branch = torch.sin if sign > 0 else torch.cos
    assert torch.equal(tensor(archive, f"0/@root:{node}/output"), branch(projected.float()))
    cond = next(f for f in ops(archive).values() if f["op"] == "cond")
    assert cond["arguments"] == {"1": "true_graph_0", "2": "false_graph_0"}
    assert sum("graph_0." in f["node"] for f in ops(archive).values()) == 1


@pytest.mark.spec("CAP-21")
def test_a_node_that_takes_one_of_several_results_refers_to_that_one(path: Path) -> None:
    class Best(nn.Module):
        def forward(self, x: torch.Tensor) -> Any:
            return x.topk(1).indices + 1

    archive = export(Best(), (torch.tensor([[3.0, 5.0]]),), path)
    taken = [f for f in ops(archive).values() if f["op"] == "getitem" and f["arguments"] == {"1": 1}]
    assert [f["inputs"] for f in taken] == [[{"name": "0", "record": "0/@root:topk/output.1"}]]
    assert tensor(archive, "0/@root:topk/output.1").tolist() == [[1]]


class Writes(nn.Module):
    count: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("count", torch.zeros(2, 4), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count[0] = x[0]
        y = self.norm(x) + torch.tensor([1.0, 2.0, 3.0, 4.0])
        y[0].mul_(2)
        total: torch.Tensor = y + self.count
        return total


@pytest.mark.spec("CAP-27")
@pytest.mark.parametrize(
    "is_functional", [pytest.param(False, id="as-it-is"), pytest.param(True, id="functional")]
)
def test_buffers_are_written_to_as_the_model_writes_to_them(
    path: Path,
    hooks: Callable[[nn.Module], int],
    monkeypatch: pytest.MonkeyPatch,
    is_functional: bool,
) -> None:
    if is_functional:  # as older releases export
        made = torch.export.export
        monkeypatch.setattr(torch.export, "export", lambda *a, **k: made(*a, **k).run_decompositions({}))
    model = Writes().train()
    eager = copy.deepcopy(model)
    theirs, forward = TracerBase._filter_traceback_frames, Writes.forward
    x = torch.randn(2, 4)
    archive = export(model, (x,), path)
    with torch.no_grad():
        wanted = eager(x)
    assert torch.equal(tensor(archive, "0/@root/output"), wanted)
    for (name, mine), (_, other) in zip(model.named_buffers(), eager.named_buffers(), strict=True):
        assert torch.equal(mine, other), name
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), eager.parameters(), strict=True))
    assert hooks(model) == 0
    assert (TracerBase._filter_traceback_frames, Writes.forward) == (theirs, forward)


@pytest.mark.spec("CAP-27")
@pytest.mark.parametrize("fails", [False, True])
def test_modules_that_share_a_list_still_share_it_after_an_export(path: Path, fails: bool) -> None:
    class Logs(nn.Module):
        def __init__(self, seen: list[str]) -> None:
            super().__init__()
            self.seen = seen

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * int(x.sum()) if fails and x.sum() > 0 else x * 2

    seen = ["before"]
    first, second = Logs(seen), Logs(seen)
    model = nn.Sequential(first, second)
    if fails:
        with pytest.raises(CaptureError, match="cannot export"):
            export(model, (torch.ones(2),), path)
    else:
        export(model, (torch.ones(2),), path)
    assert first.seen is seen
    assert second.seen is seen


@pytest.mark.spec("CAP-26")
def test_a_constant_and_what_was_written_to_are_recorded_where_they_are_read(path: Path) -> None:
    model = Writes().eval()
    x = torch.randn(2, 4)
    archive = export(model, (x,), path)
    constant = next(f for f in ops(archive).values() if f["op"] == "aten.lift_fresh_copy.default")
    assert resolve(archive, model, constant["inputs"][0]).tolist() == [1.0, 2.0, 3.0, 4.0]
    last = next(f for f in ops(archive).values() if f["op"] == "aten.add.Tensor" and len(f["inputs"]) == 2)
    final = [f for f in ops(archive).values() if f["op"] == "aten.add.Tensor"][-1]
    with torch.no_grad():
        before = model.norm(x) + torch.tensor([1.0, 2.0, 3.0, 4.0])
    doubled = torch.stack([before[0] * 2, before[1]])
    assert torch.equal(resolve(archive, model, last["outputs"][0]), before)
    assert torch.equal(resolve(archive, model, final["inputs"][0]), doubled)
    assert torch.equal(resolve(archive, model, final["inputs"][1]), torch.stack([x[0], torch.zeros(4)]))


# A part of the nodes


def test_nodes_of_some_modules_alone_are_recorded_with_what_they_are_given(path: Path) -> None:
    model = llama(**PLAIN)
    archive = export(model, {"input_ids": IDS}, path, ops_in="*.layers.1.mlp")
    assert {facts["module"] for facts in ops(archive).values()} == {
        f"model.layers.1.mlp{part}" for part in ("", ".act_fn", ".down_proj", ".gate_proj", ".up_proj")
    }
    facts = ops(archive)
    first = next(f for f in facts.values() if f["op"] == "aten.linear.default")
    place = f"0/model.layers.1.mlp.gate_proj:{first['node']}"
    assert first["inputs"][0]["record"] == f"{place}/input.input"
    with torch.no_grad():
        wanted = model.get_submodule("model.layers.1.mlp.gate_proj")(tensor(archive, f"{place}/input.input"))
    assert torch.equal(tensor(archive, f"{place}/output"), wanted)


def test_globs_and_limits_hold_for_nodes(path: Path) -> None:
    archive = export(Twice(), TWICE, path, only="0/*:linear*/output", sample=1)
    assert [record.key.text for record in archive.records] == [
        "0/@root/input.x",
        "0/@root/input.parts.bias",
        "0/inner.linear:linear/output",
        "0/inner.linear:linear_1/output",
        "0/inner.linear:linear_2/output",
    ]


def test_parameters_are_recorded_if_they_are_asked_for(path: Path) -> None:
    model = Inner()
    archive = export(model, (torch.ones(4, 4),), path, params=True)
    assert torch.equal(tensor(archive, "0/linear/param.weight"), model.linear.weight.detach())


def test_a_dry_run_lists_the_nodes() -> None:
    done = capture_workload(tensorcap.Workload(Inner(), (torch.ones(4, 4),)), None, level="export")
    assert [r.key.text for r in done.tally.records] == [
        "0/@root/input.x",
        "0/linear:linear/output",
        "0/@root:contiguous/output",
        "0/@root:mul/output",
        "0/@root/output",
    ]


def test_compiled_modules_are_exported_as_the_plain_code_that_they_are(path: Path) -> None:
    model = nn.Sequential(Inner(), Inner())
    model[1].compile(backend="eager")
    archive = export(model, (torch.ones(4, 4),), path)
    assert {entry["status"] for entry in points(archive).values()} == {"captured"}
    assert "0/1.linear:linear_1/output" in archive


# What cannot be done


class Branching(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 1 if x.sum() > 0 else x


@pytest.mark.spec("CAP-20")
def test_a_model_that_cannot_be_exported_is_refused_in_one_line_and_nothing_is_left(
    path: Path,
    capfd: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    recwarn: pytest.WarningsRecorder,
) -> None:
    theirs = TracerBase._filter_traceback_frames
    with pytest.raises(CaptureError) as caught:
        export(Branching(), (torch.ones(2),), path)
    line = inspect.getsourcelines(Branching.forward)[1] + 1
    assert f"Branching: torch.export cannot export it (test_export.py:{line}): " in str(caught.value)
    assert "Could not guard on data-dependent expression" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert caught.value.hint == "Take level op, which records any model as it runs."
    assert list(path.parent.iterdir()) == []
    assert capfd.readouterr() == ("", "")
    assert not recwarn.list
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert TracerBase._filter_traceback_frames is theirs


@pytest.mark.spec("CAP-20")
def test_a_cache_that_cannot_be_exported_is_told_how_to_do_without(path: Path) -> None:
    with pytest.raises(CaptureError, match="DynamicCache") as caught:
        export(llama(attn_implementation="eager", use_cache=True), {"input_ids": IDS}, path)
    assert caught.value.hint is not None
    assert "use_cache=False" in caught.value.hint


def generate(model: nn.Module, x: torch.Tensor) -> None:
    model(x)


@pytest.mark.spec("CAP-20")
@pytest.mark.parametrize(
    ("options", "run", "reason"),
    [
        pytest.param({}, generate, "runs one forward, found a workload that runs a function", id="run"),
        pytest.param({"grads": True}, None, "not the model's code, found grads", id="grads"),
        pytest.param({"ops_in": "*.liner"}, None, "no module matches '\\*.liner'", id="ops-in"),
    ],
)
def test_what_a_graph_cannot_give_is_refused(
    path: Path, options: dict[str, Any], run: Any, reason: str
) -> None:
    workload = tensorcap.Workload(Inner(), (torch.ones(4, 4),), run)
    with pytest.raises(UsageError, match=reason):
        capture_workload(workload, path, level="export", **options)
    assert list(path.parent.iterdir()) == []


@pytest.mark.spec("CAP-20")
def test_an_exported_program_is_no_module(path: Path) -> None:
    program = torch.export.export(Inner(), (torch.ones(4, 4),), strict=False)
    with pytest.raises(UsageError, match=r"ExportedProgram is no torch\.nn\.Module, expected one"):
        export(program, (torch.ones(4, 4),), path)  # type: ignore[arg-type]  # the misuse under test


@pytest.mark.spec("CAP-20")
@pytest.mark.parametrize(
    ("has_gradients", "site"),
    [pytest.param(True, "@root:submod_", id="on"), pytest.param(False, "@root:mul", id="off")],
)
def test_the_export_is_made_in_the_gradient_mode_of_the_caller(
    path: Path, has_gradients: bool, site: str
) -> None:
    class Frozen(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                return x * 2

    with torch.set_grad_enabled(has_gradients):
        archive = export(Frozen(), (torch.ones(2),), path)
    assert archive.run["export"]["grad"] is has_gradients
    assert next(key for key, f in ops(archive).items() if f["op"] == "aten.mul.Tensor").startswith(
        f"0/{site}"
    )


@pytest.mark.spec("CAP-20")
def test_a_block_is_no_workload(path: Path) -> None:
    with (
        pytest.raises(UsageError, match="level export is not for a block"),
        tensorcap.capture(Inner(), path, level="export"),
    ):
        pytest.fail("the block is not entered")
    assert list(path.parent.iterdir()) == []


def test_an_error_of_a_node_is_the_models_own_and_keeps_what_was_recorded(path: Path) -> None:
    model = nn.Sequential(nn.Embedding(4, 2), nn.ReLU())
    with pytest.raises(IndexError) as caught:
        export(model, (torch.tensor([9]),), path)
    assert caught.value.args == ("index out of range in self",)
    archive = tensorcap.open_archive(path)
    assert not archive.is_complete
    assert [record.key.text for record in archive.records] == ["0/@root/input.input"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "bert", "t5", "vit", "qwen3-moe", "mamba", "whisper"])
def test_other_architectures_are_exported_whole(name: str, path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    from tests.capture.test_architectures import CASES

    case = CASES[name]
    config = getattr(transformers, f"{case.model}Config")(**case.config)
    config.use_cache = False
    model = getattr(transformers, f"{case.model}Model")(config).eval()
    archive = export(model, case.inputs, path)
    with torch.no_grad():
        wanted = model(**case.inputs)
    for field, value in wanted.items():
        assert identity(tensor(archive, f"0/@root/output.{field}")) == identity(value)
    assert all(facts["file"] for facts in ops(archive).values())
    assert set(points(archive)) == {name or "@root" for name, _ in model.named_modules()}
    assert not any("lost" in r for f in ops(archive).values() for r in (*f["inputs"], *f["outputs"]))


@pytest.mark.spec("CAP-75")
@pytest.mark.parametrize("how", ["whole", "in place", "part"])
def test_a_compiled_model_is_said_not_to_have_run(tmp_path: Path, how: str) -> None:
    model: Any = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    if how == "whole":
        model = torch.compile(model, backend="eager")
    elif how == "in place":
        model.compile(backend="eager")
    else:
        model[0] = torch.compile(model[0], backend="eager")
    (note,) = export(model, (torch.ones(1, 4),), tmp_path / "a.h5").run["notes"]
    assert note.startswith("the model is compiled (torch.compile): level export ran a graph of the code")
    plain = export(nn.Linear(4, 4), (torch.ones(1, 4),), tmp_path / "b.h5")
    assert "notes" not in plain.run


@pytest.mark.spec("CAP-191")
@pytest.mark.parametrize(
    ("options", "message"),
    [
        pytest.param(
            {"level": "module", "decompositions": "coreai"},
            "decompositions 'coreai': of exported graphs, and the level is module",
            id="level",
        ),
        pytest.param(
            {"level": "export", "decompositions": "onyx"},
            "decompositions 'onyx': expected the name of a framework",
            id="name",
        ),
        pytest.param(
            {"level": "export", "decompositions": "torch"},
            "this framework compiles no exported graphs",
            id="framework",
        ),
    ],
)
def test_decompositions_are_of_exported_graphs_and_of_converters(
    options: dict[str, Any], message: str, path: Path
) -> None:
    workload = tensorcap.Workload(nn.Linear(4, 4), (torch.ones(1, 4),))
    with pytest.raises(UsageError, match=message):
        capture_workload(workload, path, **options)
    assert not path.exists()
