"""Measure capture against the budgets of the design: CPU time beside that of cloning the same outputs.

The outputs are those of a real Llama, collected once; each is then the output of a module that does nothing
else, so that matrix products do not drown what is measured.

Usage: python tests/benchmarks/bench_capture.py [--json] [--folder FOLDER]
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from bench_archive import cpu_in_fresh_memory  # type: ignore[import-not-found]  # beside this script
from transformers import LlamaConfig, LlamaForCausalLM

import tensorcap

SECONDS_A_TENSOR = 1e-4


def model(layers: int) -> torch.nn.Module:
    config = LlamaConfig(
        vocab_size=1024,
        hidden_size=1024,
        intermediate_size=2048,
        num_hidden_layers=layers,
        num_attention_heads=16,
        num_key_value_heads=4,
    )
    torch.manual_seed(0)
    llama: torch.nn.Module = LlamaForCausalLM(config)
    return llama.train(False)


class Given(torch.nn.Module):
    """Returns what another module computed."""

    def __init__(self, value: torch.Tensor) -> None:
        super().__init__()
        self.value = value

    def forward(self) -> torch.Tensor:
        return self.value


class Replayed(torch.nn.Module):
    """Gives the outputs of all modules of a Llama again, in their order."""

    def __init__(self, layers: int, tokens: int) -> None:
        super().__init__()
        values: list[torch.Tensor] = []
        llama = model(layers)
        for module in llama.modules():
            module.register_forward_hook(lambda m, i, o: values.append(o[0] if isinstance(o, tuple) else o))
        with torch.no_grad():
            llama(input_ids=torch.arange(tokens).reshape(1, tokens) % 1024, use_cache=False)
        tensors = [value for value in values if isinstance(value, torch.Tensor)]
        self.given = [Given(value) for value in tensors]
        self.steps = torch.nn.ModuleList(self.given)

    def forward(self) -> None:
        for step in self.given:
            step()


class Repeated(torch.nn.Module):
    """Gives many small tensors, no two of them equal, as so many sites are called again and again."""

    def __init__(self, sites: int, calls: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.given = [Given(torch.empty(0)) for _ in range(sites)]
        self.steps = torch.nn.ModuleList(self.given)
        self.values = list(torch.randn(sites * calls, 256))  # 1 KiB each

    def forward(self) -> None:
        for i, value in enumerate(self.values):
            step = self.given[i % len(self.given)]
            step.value = value
            step()


def measure(folder: Path, replayed: Replayed | Repeated) -> dict[str, float | int]:
    """CPU seconds of giving the outputs, of cloning and keeping them, and of capturing them."""
    first = Given(torch.ones(1))
    with tensorcap.capture(first, folder / "first.h5"):  # what only the first capture of a process costs
        first()

    def cloned() -> None:
        kept.clear()
        hooks = [s.register_forward_hook(lambda m, i, o: kept.append(o.clone())) for s in replayed.given]
        replayed()
        for hook in hooks:
            hook.remove()

    def captured(*, stats_only: bool) -> Callable[[], None]:
        def run() -> None:
            with tensorcap.capture(replayed, folder / "a.h5", stats_only=stats_only):
                replayed()

        return run

    kept: list[torch.Tensor] = []
    cloned()
    found: dict[str, float | int] = {
        "tensors": len(kept),
        "mebibytes": sum(tensor.nbytes for tensor in kept) >> 20,
    }
    kept.clear()
    for name, action in (
        ("forward", replayed),
        ("cloned", cloned),
        ("outputs", captured(stats_only=False)),
        ("statistics", captured(stats_only=True)),
    ):
        rounds = []
        for _ in range(5):
            rounds.append(cpu_in_fresh_memory(action))
            (folder / "a.h5").unlink(missing_ok=True)
        found[name] = statistics.median(rounds)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--folder", type=Path, default=None)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        rows = {
            "6 layers, 1024 tokens": measure(Path(folder), Replayed(6, 1024)),
            "24 layers, 16 tokens": measure(Path(folder), Replayed(24, 16)),
            "200 sites called 50 times": measure(Path(folder), Repeated(200, 50)),
        }
    for row in rows.values():
        clone = row["cloned"] - row["forward"]
        each = SECONDS_A_TENSOR * row["tensors"]
        for name, factor in (("outputs", 2.0), ("statistics", 1.2)):
            row[f"{name}_cost"] = row[name] - row["forward"]
            row[f"{name}_budget"] = factor * clone + each
    if arguments.json:
        print(json.dumps(rows, indent=1))
        return
    for name, row in rows.items():
        print(f"{name}: {row['tensors']} outputs, {row['mebibytes']} MiB; CPU seconds")
        print(f"  cloned and kept: + {row['cloned'] - row['forward']:.3f}")
        for part in ("outputs", "statistics"):
            cost, budget = row[f"{part}_cost"], row[f"{part}_budget"]
            verdict = "holds" if cost <= budget else "FAILS"
            print(f"  capture of {part}: + {cost:.3f}, budget + {budget:.3f} ({verdict})")


if __name__ == "__main__":
    main()
