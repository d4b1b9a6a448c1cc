"""Measure `localize` and `verify` on pairs of about 4,000 records, and beside another version in one run.

A Llama of 17 small layers against a twin with another activation in one of them, the same under names of its
own, and a twin in bfloat16. CPU times are of the calls alone, without imports and captures of the archives.
With `--against`, a folder that holds another version of tensorcap, each is measured by both versions in turn,
and may take a quarter longer than there. Version 0.1 (a6f39bb) is one that can be.

Usage: python tests/benchmarks/bench_localize.py [--json] [--against FOLDER]
"""

from __future__ import annotations

import argparse
import functools
import gc
import importlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

import tensorcap

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


@dataclass(frozen=True)
class Version:
    """What is measured of a version.

    Attributes:
        capture: Of a workload, into a file.
        localize: Of two archives.
        reference_model: What that calls the reference's workload.
        target_model: Likewise the target's.
        verify: Of two workloads, into a folder.
    """

    capture: Callable[..., object]
    localize: Callable[..., object]
    reference_model: str
    target_model: str
    verify: Callable[..., object]


def imported() -> Version:
    """The version that is imported: version 0.1 has other modules, and other names of arguments."""
    if hasattr(tensorcap, "localize"):
        session = importlib.import_module("tensorcap.session")
        verbs = session.capture_workload, tensorcap.localize, "reference_model", "target_model"
        return Version(*verbs, tensorcap.verify)
    capturing, localizing, verifying = (
        importlib.import_module(f"tensorcap.{name}") for name in ("capturing", "localizing", "verifying")
    )
    return Version(capturing.capture_workload, localizing.localize, "workload", "into", verifying.verify)


def measure(folder: Path) -> dict[str, float]:
    """CPU seconds by what was done."""
    torch.set_num_threads(1)
    version = imported()
    seconds = {}
    reference = folder / "reference.h5"
    version.capture(workload(llama()), reference)
    for name, make in TARGETS.items():
        target = folder / "target.h5"
        version.capture(make(), target)
        localize = functools.partial(version.localize, reference, target)
        calls: dict[str, Callable[[], object]] = {
            "localize, archives": localize,
            "localize, replay": lambda of=localize: of(  # type: ignore[misc]  # bound at once
                **{version.reference_model: workload(llama())}
            ),
            "localize, injection": lambda of=localize, m=make: of(  # type: ignore[misc]
                **{version.target_model: m()}
            ),
            "verify": lambda m=make: version.verify(  # type: ignore[misc]
                workload(llama()), m(), folder / "report", force=True
            ),
        }
        for what, call in calls.items():
            seconds[f"{what}: {name}"] = cpu_seconds(call)
        target.unlink()
    return seconds


def cpu_seconds(call: Callable[[], object]) -> float:
    """The time that a call spends in the code of this process, without the system's.

    Garbage is collected before: when the next whole collection falls due depends on what was measured before.
    """
    gc.collect()
    start = os.times().user
    call()
    return os.times().user - start


def measure_version(root: Path) -> dict[str, float]:
    """Measure by the code of a version, in a process of its own."""
    paths = os.pathsep.join(str(root / part) for part in (".", "formats", "cli"))
    done = subprocess.run(
        [sys.executable, __file__, "--measure"],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},  # others wait in user time
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
    turns: dict[Path, list[dict[str, float]]] = {}
    versions = [ROOT, *([options.against] if options.against else [])]
    for _ in range(REPEATS):
        for root in versions:
            turns.setdefault(root, []).append(measure_version(root))
    ours, *others = (
        {what: min(turn[what] for turn in turns[root]) for what in turns[root][0]} for root in versions
    )
    theirs: dict[str, float] = others[0] if others else {}
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
