"""Capture on a CUDA device: hold it against plain copies bit for bit, and measure what it costs.

For a machine with a GPU; needs torch alone. Every line says what was held against what, or a ratio within
this run; the exit status is 1 where something that must hold does not.

Usage: python tests/benchmarks/capture_cuda.py [--json] [--folder FOLDER]
       [--layers N] [--width N] [--tokens N]
"""

from __future__ import annotations

import argparse
import functools
import inspect
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

import tensorcap
from tensorcap.adapters.torch.staging_buffer import BOUND_BYTES, StagingBuffer

MIB = 1 << 20
ROUNDS, FORWARDS = 5, 4
GRAPH = "inside a CUDA graph under capture"


class Block(nn.Module):
    """A decoder layer, whose sums are written in place: what a hook saw is overwritten at once."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = width // 64
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.act, self.down = nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.first(x)).unflatten(-1, (3, self.heads, 64)).permute(2, 0, 3, 1, 4)
        attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x.add_(self.out(attended.transpose(1, 2).flatten(2)))
        return x.add_(self.down(self.act(self.up(self.second(x)))))


class Stack(nn.Module):
    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.clone()
        for block in self.blocks:
            x = block(x)
        return x


@contextmanager
def copied(model: nn.Module, kept: dict[str, torch.Tensor]) -> Iterator[None]:
    """Keep what every module is given and returns, by key, as a clone on the device."""
    hooks = []
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList):
            continue
        argument = next(iter(inspect.signature(module.forward).parameters))
        site = name or "@root"

        def before(_: Any, args: Any, key: str = f"0/{site}/input.{argument}") -> None:
            kept[key] = args[0].clone(memory_format=torch.contiguous_format)

        def after(_: Any, __: Any, output: Any, key: str = f"0/{site}/output") -> None:
            kept[key] = output.clone(memory_format=torch.contiguous_format)

        hooks += [module.register_forward_pre_hook(before), module.register_forward_hook(after)]
    yield
    for hook in hooks:
        hook.remove()


def differing(path: Path, kept: dict[str, torch.Tensor]) -> list[str]:
    """The keys whose records are not the bits of the copies, or are on one side alone."""
    with tensorcap.open_archive(path) as archive:
        found = {record.key.text: record for record in archive.records}
        wrong = sorted(found.keys() ^ kept.keys())
        for key in found.keys() & kept.keys():
            expected = kept[key].cpu().reshape(-1).view(torch.uint8).numpy().tobytes()
            if archive.read(found[key]).tobytes() != expected:
                wrong.append(key)
    return wrong


def new_stream() -> torch.cuda.Stream:
    return torch.cuda.Stream()  # type: ignore[no-untyped-call]  # torch has no types there


def check_bits(model: nn.Module, x: torch.Tensor, folder: Path) -> dict[str, list[str]]:
    """Under whatever a user may have switched on, with a ring that is far too small as well."""
    small = functools.partial(StagingBuffer, bound_bytes=2 * x.nbytes)
    situations: dict[str, Callable[[], AbstractContextManager[Any]]] = {
        "the default stream": nullcontext,
        "a stream of the user": lambda: torch.cuda.stream(new_stream()),
        "inference mode": torch.inference_mode,
        "autocast": lambda: torch.autocast("cuda", torch.bfloat16),
        "a small ring": lambda: patch("tensorcap.adapters.torch.adapter.StagingBuffer", small),
    }
    found = {}
    for number, (name, situation) in enumerate(situations.items()):
        path = folder / f"{number}.h5"
        kept: dict[str, torch.Tensor] = {}
        torch.cuda.synchronize()
        with torch.no_grad(), situation():
            alone = model(x)
            with copied(model, kept), tensorcap.capture(model, path):
                output = model(x)
            torch.cuda.synchronize()
            wrong = [] if torch.equal(output, alone) else ["the model's output"]
        found[name] = wrong + differing(path, kept)
        path.unlink()
    return found


def check_waits(model: nn.Module, x: torch.Tensor, folder: Path) -> dict[str, float]:
    """Seconds that a forward under capture takes to return while the device is kept busy."""
    cycles = int(2e9)
    found = {}
    for name, staged in (("staged", StagingBuffer), ("copied in hooks", in_hooks())):
        with (
            torch.no_grad(),
            patch("tensorcap.adapters.torch.adapter.StagingBuffer", staged),
            tensorcap.capture(model, folder / "a.h5", only="*.down", inputs=False),
        ):
            model(x)  # makes the ring
            torch.cuda.synchronize()
            begin = time.perf_counter()
            torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]  # torch has no types there
            model(x)
            found[name] = time.perf_counter() - begin
            torch.cuda.synchronize()
            found.setdefault("device busy", time.perf_counter() - begin)
    return found


def check_graph(model: nn.Module, x: torch.Tensor, folder: Path) -> list[str]:
    """A CUDA graph that is captured within the block, while tensors of ours are on their way."""
    wrong = []
    with torch.no_grad():
        alone = model(x)
        with tensorcap.capture(model, folder / "a.h5", inputs=False) as cap:
            warm = new_stream()
            warm.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(warm):
                model(x)
            torch.cuda.current_stream().wait_stream(warm)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                output = model(x)
            graph.replay()
            model(x)
        torch.cuda.synchronize()
    if not torch.equal(output, alone):
        wrong.append("the graph's output")
    reasons = {} if cap.summary is None else cap.summary.not_capturable
    if not any(GRAPH in reason for reason in reasons.values()):
        wrong.append("the graph's calls are not told")
    with tensorcap.open_archive(folder / "a.h5") as archive:
        last = archive.read(archive.get("2/@root/output")).tobytes()
        if last != alone.cpu().reshape(-1).view(torch.uint8).numpy().tobytes():
            wrong.append("the record after the graph")
    return wrong


def in_hooks() -> Any:
    """What is done without staging: `.cpu()` in every hook."""
    return functools.partial(StagingBuffer, host_copy_of=lambda device: None)


def measure(model: nn.Module, x: torch.Tensor, folder: Path, **options: Any) -> dict[str, float]:
    """Median seconds of a few forwards, plain and captured, and the device memory at their peak."""

    def plain() -> None:
        for _ in range(FORWARDS):
            model(x)
        torch.cuda.synchronize()

    def captured() -> None:
        with tensorcap.capture(model, folder / "a.h5", inputs=False, **options):
            plain()

    found = {}
    for name, action, staged in (
        ("plain", plain, StagingBuffer),
        ("staged", captured, StagingBuffer),
        ("in hooks", captured, in_hooks()),
    ):
        with torch.no_grad(), patch("tensorcap.adapters.torch.adapter.StagingBuffer", staged):
            action()
            torch.cuda.reset_peak_memory_stats()
            rounds = []
            for _ in range(ROUNDS):
                begin = time.perf_counter()
                action()
                rounds.append(time.perf_counter() - begin)
        found[name] = statistics.median(rounds)
        found[f"{name} MiB"] = torch.cuda.max_memory_allocated() / MIB
    return found


def compare_with_cpu(layers: int, width: int, folder: Path) -> dict[str, Any]:
    """What compare says of a float32 run on CUDA, held against the same on the CPU."""
    torch.manual_seed(1)
    model, x = Stack(layers, width).eval(), torch.randn(1, 64, width)
    for device in ("cpu", "cuda"):
        model.to(device)
        with torch.no_grad(), tensorcap.capture(model, folder / f"{device}.h5"):
            model(x.to(device))
    compared = tensorcap.compare(folder / "cpu.h5", folder / "cuda.h5")
    return {"counts": dict(compared.counts), "is_green": compared.is_green}


def run(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    torch.manual_seed(0)
    model = Stack(arguments.layers, arguments.width).eval().to("cuda", torch.float32)
    x = torch.randn(1, arguments.tokens, arguments.width, device="cuda")
    found: dict[str, Any] = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
    found["bits"] = check_bits(model, x, folder)
    found["graph"] = check_graph(model, x, folder)
    found["waits"] = check_waits(model, x, folder)
    found["cpu"] = compare_with_cpu(min(arguments.layers, 4), 256, folder)
    for name, options in (
        ("all outputs", {}),
        ("one site a layer", {"include": "blocks.*.out"}),
        ("statistics only", {"stats_only": True}),
    ):
        found[name] = measure(model, x, folder, **options)
    return found


def failures(found: dict[str, Any]) -> list[str]:
    """What must hold and does not."""
    wrong = [f"bits, {name}: {keys[:3]}" for name, keys in found["bits"].items() if keys]
    wrong += [f"graph: {what}" for what in found["graph"]]
    if found["waits"]["staged"] > 0.5 * found["waits"]["device busy"]:
        wrong.append("a hook waited for the device")
    if not found["cpu"]["is_green"]:
        wrong.append(f"CPU against CUDA: {found['cpu']['counts']}")
    for name in ("all outputs", "one site a layer", "statistics only"):
        row = found[name]
        if row["staged MiB"] - row["plain MiB"] > BOUND_BYTES / MIB + 1:
            wrong.append(f"{name}: more than the bound on the device")
    return wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--folder", type=Path, default=None)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--tokens", type=int, default=1024)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("skipped: torch finds no CUDA device here")
        return
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        found = run(arguments, Path(folder))
    wrong = failures(found)
    if arguments.json:
        print(json.dumps({**found, "failures": wrong}, indent=1))
        sys.exit(bool(wrong))
    print(f"{found['device']}, torch {found['torch']}")
    for name, keys in found["bits"].items():
        print(f"  bits, {name}: {'equal' if not keys else f'{len(keys)} DIFFER'}")
    print(f"  graph within the block: {', '.join(found['graph']) or 'whole, and told'}")
    waits = {name: round(seconds, 3) for name, seconds in found["waits"].items()}
    print(f"  a forward returns after {waits} seconds")
    print(f"  CPU against CUDA: {found['cpu']['counts']}")
    for name in ("all outputs", "one site a layer", "statistics only"):
        row = found[name]
        staged, hooks = row["staged"] / row["plain"], row["in hooks"] / row["plain"]
        more = row["staged MiB"] - row["plain MiB"]
        print(
            f"  {name}: {staged:.2f} x the plain run, {hooks:.2f} x without staging; + {more:.0f} MiB there"
        )
    print(f"  pinned: {BOUND_BYTES // MIB} MiB, whatever the size")
    print("all holds" if not wrong else "FAILS: " + "; ".join(wrong))
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
