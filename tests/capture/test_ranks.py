"""Models on several ranks, in real processes: captured unchanged, merged, and compared with one process."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import tensorcap
from tensorcap.comparison import Comparison
from tensorcap.recording import Placement
from tensorcap.session.process_rank import ProcessRank, process_rank
from tensorcap_formats.errors import UnfinishedArchiveError

ROOT = Path(__file__).parents[2]
TIMEOUT_SECONDS = 600  # ten times and more of what two processes need here

# A decoder of plain torch, the same on one rank and on many
MODEL = """
import os, sys
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(32, 32, bias=False) for _ in range(4))
    def forward(self, x):
        b, s, _ = x.shape
        q, k, v = (p(x).view(b, s, -1, 8).transpose(1, 2) for p in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(y.transpose(1, 2).reshape(b, s, -1))

class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(32, 64), nn.Linear(32, 64), nn.Linear(64, 32)
        self.act = nn.SiLU()
    def forward(self, x):
        return self.down(self.act(self.gate(x)) * self.up(x))

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.attn, self.norm2, self.mlp = nn.LayerNorm(32), Attention(), nn.LayerNorm(32), MLP()
    def forward(self, x):
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(50, 32), nn.Linear(32, 50, bias=False)
        self.layers = nn.ModuleList(Block() for _ in range(2))
    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)

torch.manual_seed(0)
net = Net().eval()
ids = torch.randint(0, 50, (2, 6), generator=torch.Generator().manual_seed(1))
torch.set_grad_enabled(False)
"""

PARALLEL = """
def parallelize(net):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    plan = {"head": ColwiseParallel(output_layouts=Replicate())}
    for i in range(2):
        for name in ("attn.q", "attn.k", "attn.v", "mlp.gate", "mlp.up"):
            plan[f"layers.{i}.{name}"] = ColwiseParallel()
        plan[f"layers.{i}.attn.o"] = plan[f"layers.{i}.mlp.down"] = RowwiseParallel()
    return parallelize_module(net, mesh, plan), mesh
"""

SCRIPT = (
    MODEL
    + PARALLEL
    + """
if int(os.environ.get("WORLD_SIZE", "1")) > 1:
    dist.init_process_group("gloo")
    parallelize(net)
print(f"sum {float(net(ids).sum()):.3f}")
if dist.is_initialized():
    dist.destroy_process_group()
"""
)

MISTAKES = (
    MODEL
    + PARALLEL
    + """
import copy
import tensorcap
from torch.distributed.tensor import DTensor, Replicate, Shard

dist.init_process_group("gloo")
rank, original = dist.get_rank(), net

def wrong_shard(net, mesh):  # each rank has rank 0's keys
    weight = net.layers[1].attn.k.weight
    weight.to_local().copy_(weight.full_tensor()[:16])

def one_rank(net, mesh):  # rank 1's weights are scaled
    if rank == 1:
        net.layers[1].mlp.gate.weight.to_local().mul_(1.5)

def norm(net, mesh):  # what is replicated is another on rank 1
    if rank == 1:
        net.layers[1].norm2.weight.mul_(1.01)

def missing_reduce(net, mesh):  # terms of a sum are handed on as the sum
    def keep(module, args, output):
        return DTensor.from_local(partial.pop(), mesh, [Replicate()], run_check=False).to_local()
    down, partial = net.layers[1].mlp.down, []
    inner = dict(down._forward_hooks)
    down._forward_hooks.clear()
    down.register_forward_hook(lambda m, a, output: partial.append(output.to_local()))
    for hook in inner.values():
        down.register_forward_hook(hook)
    down.register_forward_hook(keep)

def placement(net, mesh):  # the part is of the last axis, and is said to be of the first
    def say(module, args, output):
        return DTensor.from_local(output, mesh, [Shard(0)], run_check=False).to_local()
    net.layers[1].mlp.up.register_forward_hook(say)

for plant in (wrong_shard, one_rank, norm, missing_reduce, placement):
    net, mesh = parallelize(copy.deepcopy(original))
    plant(net, mesh)
    with tensorcap.capture(net, f"{plant.__name__}.h5"):
        net(ids)
dist.destroy_process_group()
"""
)

# Layers of a port's own, which no framework knows: column and row parallel, fewer heads of keys than ranks, a
# fused gate and up projection, a row parallel layer whose parent adds, a padded vocabulary
OWN_LAYERS = """
import os
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

SIZE, RANK = (int(os.environ.get(name, default)) for name, default in (("WORLD_SIZE", "1"), ("RANK", "0")))
HEADS, KV_HEADS, DIM, VOCABULARY = 4, 2, 8, 50

def weights(*shape):
    return torch.randn(*shape, generator=GENERATOR) / shape[-1] ** 0.5

class Column(nn.Module):
    def __init__(self, weight, parts=1, copies=1):
        super().__init__()
        held = [p.chunk(SIZE // copies)[RANK // copies] for p in weight.chunk(parts)]
        self.weight = nn.Parameter(torch.cat(held))
    def forward(self, x):
        return F.linear(x, self.weight)

class Row(nn.Module):
    def __init__(self, weight, reduces=True):
        super().__init__()
        self.weight, self.reduces = nn.Parameter(weight.chunk(SIZE, 1)[RANK].clone()), reduces
    def forward(self, x):
        y = F.linear(x, self.weight)
        return reduce(y) if self.reduces else y

def reduce(y):
    if SIZE > 1:
        dist.all_reduce(y := y.clone())
    return y

class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        copies = max(1, SIZE // KV_HEADS)
        self.q_proj = Column(weights(32, 32))
        self.k_proj = Column(weights(16, 32), copies=copies)
        self.v_proj = Column(weights(16, 32), copies=copies)
        self.o_proj = Row(weights(32, 32))
    def forward(self, x):
        parts = (self.q_proj, self.k_proj, self.v_proj)
        q, k, v = (p(x).unflatten(-1, (-1, DIM)).transpose(1, 2) for p in parts)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o_proj(y.transpose(1, 2).flatten(-2))

class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate_up_proj = Column(weights(128, 32), parts=2)
        self.down_proj = Row(weights(32, 64), reduces=False)
    def forward(self, x):
        gate, up = self.gate_up_proj(x).chunk(2, -1)
        return reduce(self.down_proj(F.silu(gate) * up))

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.attn, self.mlp = nn.Embedding(VOCABULARY, 32), Attention(), MLP()
        padding = -VOCABULARY % SIZE
        self.head = Column(torch.cat([weights(VOCABULARY, 32), torch.zeros(padding, 32)]))
    def forward(self, ids):
        x = self.embed(ids)
        x = x + self.attn(x)
        return self.head(x + self.mlp(x))

GENERATOR = torch.Generator().manual_seed(0)
torch.manual_seed(0)
if SIZE > 1:
    dist.init_process_group("gloo")
with torch.no_grad():
    Net()(torch.arange(10).reshape(2, 5))
"""


def environment() -> dict[str, str]:
    paths = os.pathsep.join(str(ROOT / part) for part in (".", "formats", "cli"))
    return {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}


def run(folder: Path, *arguments: str) -> str:
    """Run Python on some arguments; return what it prints."""
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=TIMEOUT_SECONDS,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def launch(folder: Path, ranks: int, *arguments: str) -> str:
    """Run a program on several ranks."""
    launcher = ("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}")
    return run(folder, *launcher, *arguments)


CAPTURE = ("-m", "tensorcap_cli", "capture", "script")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The DTensor script captured on one rank, and on two, unchanged."""
    folder = tmp_path_factory.mktemp("ranks")
    (folder / "model.py").write_text(SCRIPT)
    single = run(folder, *CAPTURE, "-o", "ref.h5", "--params", "--", "model.py")
    parallel = launch(folder, 2, *CAPTURE, "-o", "tgt.h5", "--params", "--", "model.py")
    assert len(set(re.findall(r"sum (-?\d+\.\d+)", single + parallel))) == 1
    return folder


@pytest.fixture(scope="module")
def mistakes(folder: Path) -> Mapping[str, Comparison]:
    """Mistakes on two ranks, each captured by the API and compared with the single process."""
    (folder / "mistakes.py").write_text(MISTAKES)
    launch(folder, 2, "mistakes.py")
    names = ("wrong_shard", "one_rank", "norm", "missing_reduce", "placement")
    return {name: tensorcap.compare(folder / "ref.h5", folder / f"{name}.rank*.h5") for name in names}


def first(comparison: Comparison) -> tuple[str, str, list[str]]:
    """The module of the first divergence, the key, and the texts of its findings and its reason."""
    assert comparison.divergence is not None
    pair = comparison.divergence.pair
    return comparison.divergence.module, pair.key, [*(f.text for f in pair.findings), pair.reason]


@pytest.mark.slow
@pytest.mark.spec("RNK-1", "RNK-2", "RNK-3")
def test_each_rank_writes_its_own_archive(folder: Path) -> None:
    assert not (folder / "tgt.h5").exists()
    for rank in range(2):
        with tensorcap.open_archive(folder / f"tgt.rank{rank}.h5") as archive:
            ranks = archive.info.ranks
            assert ranks is not None
            assert (ranks.rank, ranks.count) == (rank, 2)
            record = archive.get("0/layers.0.mlp.up/output")
            assert (record.key.rank, record.shape) == (0, (2, 6, 32))
            entry = next(e for e in ranks.tensors if record.key.text in e.keys)
            assert (entry.rule, entry.known, entry.shape) == ("concat 2", "DTensor", (2, 6, 64))
            assert entry.mesh == {"sizes": {"tp": 2}, "ranks": [0, 1]}
            assert all(point.status == "captured" for point in archive.info.points if point.calls)


@pytest.mark.slow
@pytest.mark.parametrize("is_merged", [False, True])
def test_a_dtensor_model_is_the_single_process_within_rounding(folder: Path, is_merged: bool) -> None:
    target: Path = folder / "tgt.rank*.h5"
    if is_merged:
        result = tensorcap.merge([target], folder / "all.h5")
        assert (result.exit_status, result.ranks) == (0, 2)
        target = result.path
    comparison = tensorcap.compare(folder / "ref.h5", target)
    assert comparison.exit_status == 0
    assert comparison.compared == comparison.records > 80
    errors = [p.difference.relative_frobenius or 0.0 for p in comparison.pairs if p.difference]
    assert max(errors) < 1e-6  # of 24 bits: 16 roundings at most
    assert {p.status for p in comparison.pairs if "/param." in p.key} == {"identical"}


@pytest.mark.slow
def test_localize_accuses_nobody_of_a_right_run_on_ranks(folder: Path) -> None:
    assert tensorcap.localize(folder / "ref.h5", folder / "tgt.rank*.h5").suspects == ()


@pytest.mark.slow
@pytest.mark.spec("RNK-32")
@pytest.mark.parametrize(
    ("name", "module", "part"),
    [
        (
            "wrong_shard",
            "layers.1.attn.k",
            "all of it in rank 1's part: indices 16 to 31 of axis 2, which is the reference's part of rank 0",
        ),
        ("one_rank", "layers.1.mlp.gate", "all of it in rank 1's part: indices 32 to 63 of axis 2"),
    ],
)
def test_a_mistake_on_one_rank_is_named_with_the_rank(
    mistakes: Mapping[str, Comparison], folder: Path, name: str, module: str, part: str
) -> None:
    named, key, texts = first(mistakes[name])
    assert (named, key) == (module, f"0/{module}/output")
    assert part in texts
    suspects = tensorcap.localize(folder / "ref.h5", folder / f"{name}.rank*.h5").suspects
    assert [suspect.module for suspect in suspects] == [module]
    assert part in suspects[0].reason


@pytest.mark.slow
@pytest.mark.spec("RNK-30")
@pytest.mark.parametrize(
    ("name", "module"), [("norm", "layers.1.norm2"), ("missing_reduce", "layers.1.mlp.down")]
)
def test_what_ranks_hold_unlike_is_named_where_it_begins(
    mistakes: Mapping[str, Comparison], folder: Path, name: str, module: str
) -> None:
    named, key, texts = first(mistakes[name])
    assert (named, key) == (module, f"0/{module}/output")
    assert texts[0].startswith("rank 1 holds another tensor than rank 0, where replicated")
    assert ("as terms of a sum would" in texts[0]) == (name == "missing_reduce")
    suspects = tensorcap.localize(folder / "ref.h5", folder / f"{name}.rank*.h5").suspects
    assert [suspect.module for suspect in suspects] == [module]


@pytest.mark.slow
@pytest.mark.spec("RNK-33")
@pytest.mark.parametrize(
    ("name", "module"), [("norm", "layers.1.norm2"), ("missing_reduce", "layers.1.mlp.down")]
)
def test_a_replay_accuses_no_module_that_ranks_gave_unlike_arguments(
    mistakes: Mapping[str, Comparison], folder: Path, name: str, module: str
) -> None:
    assert mistakes[name].exit_status == 1
    scope: dict[str, Any] = {"__name__": "model"}
    exec(compile(MODEL, "model.py", "exec"), scope)
    workload = tensorcap.Workload(scope["net"], {"ids": scope["ids"]})
    target = folder / f"{name}.rank*.h5"
    suspects = tensorcap.localize(folder / "ref.h5", target, reference_model=workload).suspects
    assert [suspect.module for suspect in suspects] == [module]
    torch.set_grad_enabled(True)


@pytest.mark.slow
@pytest.mark.spec("RNK-31")
def test_a_wrong_placement_is_named(mistakes: Mapping[str, Comparison]) -> None:
    pair = next(p for p in mistakes["placement"].pairs if p.key == "0/layers.1.mlp.up/output")
    assert pair.status == "shape-mismatch"
    assert (
        "concat 0 (DTensor) gives [4, 6, 32], the reference has [2, 6, 64], as concat 2 would give"
        in pair.reason
    )
    assert mistakes["placement"].exit_status == 1


@pytest.mark.slow
@pytest.mark.spec("RNK-21", "RNK-22", "RNK-23")
def test_layers_of_its_own_on_four_ranks_are_put_together(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN_LAYERS)
    run(tmp_path, *CAPTURE, "-o", "ref.h5", "--params", "--", "own.py")
    launch(tmp_path, 4, *CAPTURE, "-o", "tgt.h5", "--params", "--", "own.py")
    result = tensorcap.merge([tmp_path / "tgt.rank*.h5"], tmp_path / "all.h5", reference=tmp_path / "ref.h5")
    assert result.problems == ()
    with tensorcap.open_archive(result.path) as archive:
        assert archive.info.ranks is not None
        rules = {key: entry.rule for entry in archive.info.ranks.tensors for key in entry.keys}
    expected = {
        "attn.k_proj": "concat 2 copies=2",
        "mlp.gate_up_proj": "concat 2 parts=2",
        "head": "concat 2 cut=50",
        "attn.o_proj": "replicated",
    }
    assert {key: rules[f"0/{key}/output"] for key in expected} == expected
    assert rules["0/mlp.down_proj/output"] == "sum"
    assert rules["0/attn.k_proj/param.weight"] == "concat 0 copies=2"
    comparison = tensorcap.compare(tmp_path / "ref.h5", result.path, exclude=["*gate_up_proj/param*"])
    assert comparison.exit_status == 0
    errors = [p.difference.relative_frobenius or 0.0 for p in comparison.pairs if p.difference]
    assert max(errors) < 1e-6


# Without further processes --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"RANK": "1", "WORLD_SIZE": "2"}, ProcessRank(1, 2)),
        ({"RANK": "0", "WORLD_SIZE": "1"}, None),
        ({"RANK": "0"}, None),
        ({"RANK": "x", "WORLD_SIZE": "2"}, None),
        ({"RANK": "2", "WORLD_SIZE": "2"}, None),
    ],
)
@pytest.mark.spec("RNK-1")
def test_the_rank_is_the_launchers(
    monkeypatch: pytest.MonkeyPatch, values: dict[str, str], expected: ProcessRank | None
) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    assert process_rank() == expected


@pytest.mark.spec("RNK-1")
def test_a_capture_under_a_launcher_writes_beside_the_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    net = nn.Linear(2, 2)
    for rank in "01":
        monkeypatch.setenv("RANK", rank)
        with tensorcap.capture(net, tmp_path / "a.h5") as capture:
            net(torch.ones(1, 2))
        assert capture.path == tmp_path / f"a.rank{rank}.h5"
    with tensorcap.open_archive(tmp_path / "a.rank*.h5") as archive:
        assert [r.key.text for r in archive.records] == ["0/@root/input.input", "0/@root/output"]


@pytest.mark.spec("RNK-3")
def test_an_adapter_says_what_a_layers_tensors_are_parts_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    first = nn.Linear(2, 3)
    net = nn.Sequential(first, nn.ReLU())
    placements = {
        "output": Placement("concat -1", "ColumnParallelLinear, gather_output false"),
        "param.weight": Placement("concat 0", "ColumnParallelLinear", shape=(6, 2)),
    }
    for rank in range(2):
        monkeypatch.setenv("RANK", str(rank))
        nn.init.constant_(first.weight, rank + 1.0)
        with tensorcap.capture(net, tmp_path / "a.h5", params=True) as capture:
            for slot, placement in placements.items():
                capture._recorder.place_slot("0", slot, placement)
            for _ in range(2):
                net(torch.ones(1, 2))
    with tensorcap.open_archive(tmp_path / "a.rank*.h5") as archive:
        assert archive.get("1/0/output").shape == (1, 6)
        assert archive.get("1/1/output").shape == (1, 6)  # as its argument, which is the same tensor
        assert archive.info.ranks is not None
        known = {key: entry.known for entry in archive.info.ranks.tensors for key in entry.keys}
        assert known["0/0/output"] == "ColumnParallelLinear, gather_output false"


def test_a_rank_that_dies_leaves_what_can_be_recovered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    net = nn.Linear(2, 2)
    capture = tensorcap.capture(net, tmp_path / "a.h5")
    capture.__enter__()
    net(torch.ones(1, 2))
    with pytest.raises(UnfinishedArchiveError):
        tensorcap.open_archive(tmp_path / "a.rank1.h5")
    capture.__exit__(None, None, None)


@pytest.fixture
def mesh(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A mesh of this process alone."""
    from torch import distributed
    from torch.distributed.device_mesh import init_device_mesh

    store = getattr(distributed, "HashStore")()  # noqa: B009 # torch does not export it by name
    distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,), mesh_dim_names=("tp",))
    distributed.destroy_process_group()


@pytest.mark.slow
@pytest.mark.spec("RNK-2")
def test_dtensors_and_what_they_give_are_recorded_with_their_placement(tmp_path: Path, mesh: Any) -> None:
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

    class Parts(nn.Module):
        def forward(self, x: torch.Tensor) -> Any:
            part = DTensor.from_local(x, mesh, [Shard(1)])
            term = DTensor.from_local(x + 1, mesh, [Partial()])
            return {"part": part, "local": part.to_local(), "term": term.to_local(), "own": x * 2}

    net, x = Parts(), torch.randn(2, 3, requires_grad=True)
    before = DTensor.to_local
    with tensorcap.capture(net, tmp_path / "a.h5"):
        given = net(x)
    assert DTensor.to_local is before
    assert isinstance(given["part"], DTensor)
    with tensorcap.open_archive(tmp_path / "a.h5") as archive:
        for name in ("part", "local"):
            assert np.array_equal(archive.load(archive.get(f"0/@root/output.{name}")), x.detach().numpy())
        assert archive.info.ranks is None  # of one process there is nothing to put together
    assert Replicate() not in given["part"].placements


@pytest.mark.slow
def test_placements_have_rules_or_none(mesh: Any) -> None:
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

    from tensorcap.adapters.torch.dtensors import placement_of

    local = torch.zeros(2, 3)
    for placement, rule in ((Shard(1), "concat 1"), (Replicate(), "replicated"), (Partial("avg"), "avg")):
        found = placement_of(DTensor.from_local(local, mesh, [placement]))
        assert found is not None
        assert (found.rule, found.mesh, found.ranks, found.shape) == (rule, (("tp", 1),), (0,), (2, 3))
    assert placement_of(DTensor.from_local(local, mesh, [Partial("product")])) is None
