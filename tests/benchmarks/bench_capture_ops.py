"""Measure what looking at every op costs: CPU time as a multiple of that of the eager forward.

Beside capture to disk stand a dispatch mode that does nothing, one that clones what every op returns, and
torch's own DebugMode, which keeps no values unless it is asked to. Ways take turns, and the least time of
each counts, as the machine may have other work.

Usage: python tests/benchmarks/bench_capture_ops.py [--json] [--rounds N] [--folder FOLDER]
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch.utils import _python_dispatch
from torch.utils._debug_mode import DebugMode
from transformers import LlamaConfig, LlamaForCausalLM

import tensorcap

Mode: Any = _python_dispatch.TorchDispatchMode  # has no types


class Watching(Mode):  # type: ignore[misc] # see there
    """Counts ops, and clones what they return if it is to."""

    def __init__(self, *, clones: bool) -> None:
        super().__init__()
        self.clones = clones
        self.count = 0
        self.kept: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.count += 1
        if self.clones:
            results = result if isinstance(result, (tuple, list)) else (result,)
            self.kept += [r.detach().clone() for r in results if isinstance(r, torch.Tensor)]
        return result


def model(hidden: int, layers: int) -> Any:
    config = LlamaConfig(
        vocab_size=1000,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 128,
        use_cache=False,
    )
    torch.manual_seed(0)
    return LlamaForCausalLM(config).train(False)


def measure(folder: Path, hidden: int, layers: int, tokens: int, rounds: int) -> dict[str, float]:
    """Milliseconds of CPU of each way, and the count of ops."""
    llama = model(hidden, layers)
    ids = torch.arange(tokens).reshape(1, tokens)
    path = folder / "a.h5"

    def capture(**options: Any) -> AbstractContextManager[Any]:
        return tensorcap.capture(llama, path, **options)

    ways: dict[str, Callable[[], AbstractContextManager[Any]]] = {
        "eager": nullcontext,
        "dispatch mode": lambda: Watching(clones=False),
        "dispatch mode + clone": lambda: Watching(clones=True),
        "DebugMode": lambda: DebugMode(record_nn_module=True),
        "DebugMode, stacks": lambda: DebugMode(record_nn_module=True, record_stack_trace=True),
        "DebugMode, stacks, outputs": lambda: DebugMode(
            record_nn_module=True, record_stack_trace=True, record_output=True, store_original_args=False
        ),
        "capture of modules": capture,
        "capture of ops": lambda: capture(level="op"),
        "capture of ops, statistics only": lambda: capture(level="op", stats_only=True),
        "capture of the ops of one MLP": lambda: capture(
            level="op", ops_in="model.layers.0.mlp", only=["model.layers.0.mlp*"], inputs=False
        ),
    }
    least = dict.fromkeys(ways, float("inf"))
    watching = Watching(clones=False)
    with torch.no_grad(), watching:
        llama(input_ids=ids)
    for turn in range(rounds + 1):
        for name, way in ways.items():
            started = time.process_time()
            with torch.no_grad(), way():
                llama(input_ids=ids)
            if turn:  # the first one warms up
                least[name] = min(least[name], (time.process_time() - started) * 1e3)
            path.unlink(missing_ok=True)
    return {"ops": watching.count, **least}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--folder", type=Path, default=None)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    sizes = {
        "hidden 256, 4 layers, 64 tokens": (256, 4, 64),
        "hidden 1024, 2 layers, 256 tokens": (1024, 2, 256),
    }
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        rows = {name: measure(Path(folder), *size, arguments.rounds) for name, size in sizes.items()}
    if arguments.json:
        print(json.dumps(rows, indent=1))
        return
    for name, row in rows.items():
        count = row.pop("ops")
        eager = row["eager"]
        print(f"{name}: {count} ops; CPU time")
        for way, found in row.items():
            each = (found - eager) / count * 1e3
            print(f"  {way:<32}{found:8.1f} ms  {found / eager:5.2f} x eager  {each:7.1f} µs an op")


if __name__ == "__main__":
    main()
