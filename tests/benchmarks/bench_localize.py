"""Measure `localize` and `verify` on pairs of about 4,000 records, and beside another version in one run.

A Llama of 17 small layers against a twin with another activation in one of them, the same under names of its
own, and a twin in bfloat16. CPU times are of the calls alone, without imports and captures of the archives.
With `--against`, a folder that holds another version of tensorcap, each is measured by both versions in turn,
and may take a quarter longer than there.

Usage: python tests/benchmarks/bench_localize.py [--json] [--against FOLDER]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

import tensorcap
from tensorcap.session import capture_workload

ROOT = Path(__file__).parents[2]
LAYERS = 17  # 17 x 237 records
REPEATS = 2
ALLOWED = 1.25


class Block(nn.Module):
    """A layer under other names."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.ln1, self.attention = layer.input_layernorm, layer.self_attn
        self.ln2, self.ff = layer.post_attention_layernorm, layer.mlp

    def forward(self, x: Tensor, positions: Any, mask: Tensor) -> Tensor:
        x = x + self.attention(self.ln1(x), position_embeddings=positions, attention_mask=mask)[0]
        output: Tensor = x + self.ff(self.ln2(x))
        return output


class Port(nn.Module):
    """A Llama under other names."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.wte, self.rope = model.model.embed_tokens, model.model.rotary_emb
        self.blocks = nn.ModuleList(map(Block, model.model.layers))
        self.final, self.head = model.model.norm, model.lm_head

    def forward(self, ids: Tensor) -> Tensor:
        x = self.wte(ids)
        count = ids.shape[1]
        mask = torch.full((count, count), torch.finfo(x.dtype).min).triu(1)[None, None]
        positions = self.rope(x, torch.arange(count)[None])
        for block in self.blocks:
            x = block(x, positions, mask)
        logits: Tensor = self.head(self.final(x))
        return logits


def llama() -> Any:
    torch.manual_seed(0)
    make_config: Any = transformers.LlamaConfig
    config = make_config(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_hidden_layers=LAYERS,
        initializer_range=0.06,
        attn_implementation="eager",
    )
    model: Any = transformers.LlamaForCausalLM(config)
    return model.eval()


def with_mistake() -> Any:
    model = llama()
    model.model.layers[LAYERS // 2].mlp.act_fn = nn.GELU()
    return model


def workload(model: Any, argument: str = "input_ids") -> tensorcap.Workload:
    return tensorcap.Workload(model, {argument: torch.arange(96)[None] * 7 % 256})


TARGETS: dict[str, Callable[[], tensorcap.Workload]] = {
    "a mistake": lambda: workload(with_mistake()),
    "a mistake, other names": lambda: workload(Port(with_mistake()).eval(), "ids"),
    "bfloat16": lambda: workload(llama().to(torch.bfloat16)),
}


def measure(folder: Path) -> dict[str, float]:
    """CPU seconds by what was done, the least of some runs."""
    torch.set_num_threads(1)
    seconds = {}
    reference = folder / "reference.h5"
    capture_workload(workload(llama()), reference)
    for name, make in TARGETS.items():
        target = folder / "target.h5"
        capture_workload(make(), target)
        calls: dict[str, Callable[[], object]] = {
            "localize, archives": lambda t=target: tensorcap.localize(reference, t),  # type: ignore[misc]  # bound at once
            "localize, replay": lambda t=target: tensorcap.localize(  # type: ignore[misc]
                reference, t, reference_model=workload(llama())
            ),
            "localize, injection": lambda t=target, m=make: tensorcap.localize(  # type: ignore[misc]
                reference, t, target_model=m()
            ),
            "verify": lambda m=make: tensorcap.verify(  # type: ignore[misc]
                workload(llama()), m(), folder / "report", force=True
            ),
        }
        for what, call in calls.items():
            seconds[f"{what}: {name}"] = min(cpu_seconds(call) for _ in range(REPEATS))
        target.unlink()
    return seconds


def cpu_seconds(call: Callable[[], object]) -> float:
    start = time.process_time()
    call()
    return time.process_time() - start


def measure_version(root: Path) -> dict[str, float]:
    """Measure by the code of a version, in a process of its own."""
    paths = os.pathsep.join(str(root / part) for part in (".", "formats", "cli"))
    done = subprocess.run(
        [sys.executable, __file__, "--measure"],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": paths},
    )
    seconds: dict[str, float] = json.loads(done.stdout)
    return seconds


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--against", type=Path, metavar="FOLDER", help="a checkout of another version")
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        with tempfile.TemporaryDirectory() as folder:
            print(json.dumps(measure(Path(folder))))
        return 0
    ours = measure_version(ROOT)
    theirs = measure_version(options.against) if options.against else {}
    ratios = {what: ours[what] / seconds for what, seconds in theirs.items()}
    if options.json:
        print(json.dumps({"seconds": ours, "against": theirs, "ratios": ratios}, indent=1))
    else:
        for what, seconds in ours.items():
            line = f"{what:<45} {seconds:7.2f} s"
            if what in ratios:
                verdict = "within" if ratios[what] <= ALLOWED else "ABOVE"
                line += f"  {ratios[what]:5.2f} x of the other version, {verdict} {ALLOWED} x"
            print(line)
    return int(any(ratio > ALLOWED for ratio in ratios.values()))


if __name__ == "__main__":
    sys.exit(main())
