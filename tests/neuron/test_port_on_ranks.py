"""A port of parallel layers on one rank and on several, in real processes, against its reference.

The port is our own, `lookalike/port.py`; each mistake of it is in one module that its function names.
"""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import pytest
from click.testing import CliRunner

import tensorcap
from tensorcap.adapters import adapter_named
from tensorcap.adapters.neuron import leave_ranks
from tensorcap.localization import bisect_live
from tensorcap.rerun import replay
from tensorcap_cli.main import main

ROOT = Path(__file__).parents[2]
PORT = Path(__file__).parent / "lookalike" / "port.py"
ASSERTION = """
import os
import port
from torch import distributed
from tensorcap.adapters import adapter_named
from tensorcap.adapters.neuron import leave_ranks
from tensorcap.testing import assert_matches

adapter_named("neuron").seed(0)
for name in ("port", "wrong_shard"):
    try:
        assert_matches("../ref.h5", getattr(port, name), exclude=["*/param.*"])
        text = f"{name} matches"
    except AssertionError as error:
        text = f"{name}: " + next(l for l in str(error).splitlines() if "part" in l).strip().partition(":")[0]
    print(f"rank {os.environ['RANK']}: {text}\\n", end="", flush=True)
leave_ranks()
"""
TIMEOUT_SECONDS = 600  # ten times and more of what four processes need here

# the module, what its finding says of ranks, and the kind that its diagnosis names
MISTAKES = {
    "wrong_shard": (
        "model.layers.1.self_attn.q_proj",
        ", which is the reference's part of rank 0",
        "rank-parts",
    ),
    "unreduced": (
        "model.layers.1.mlp.down_proj",
        "as terms of a sum would that was not taken",
        "reduce-missing",
    ),
    "missing_reduce": ("model.layers.1.mlp.down_proj", "", "bias-on-ranks"),
    "doubled_reduce": ("model.layers.1.self_attn.o_proj", "", "reduced-again"),
    "halves": ("model.layers.1.mlp.gate_proj", "", "fused-cut"),
    "kv_order": (
        "model.layers.0.self_attn.k_proj",
        "rank 1 holds another tensor than rank 0, where concat",
        "repeats-order",
    ),
    "epsilon": ("model.layers.0.input_layernorm", "", "norm-eps"),
    "padding": ("model.layers.1.self_attn", "", "attention-mask"),
    "bias_on_every_rank": ("model.layers.1.self_attn.o_proj", "", "bias-on-ranks"),
}


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run Python on some arguments, alone."""
    paths = os.pathsep.join(map(str, (*(ROOT / part for part in (".", "formats", "cli")), PORT.parent)))
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env={**environment, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_SECONDS,
    )


def capture(folder: Path, framework: str, function: str, *options: str) -> str:
    """Run `tcap capture`; return what it prints."""
    done = run(
        folder, "-m", "tensorcap_cli", "capture", framework, f"{PORT}:{function}", "--params", *options
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def launch(folder: Path, ranks: int, *functions: str) -> None:
    """Run functions of the port on the ranks of a launcher, each into archives of its name."""
    launcher = ("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}")
    done = run(folder, *launcher, str(PORT.with_name("mistakes.py")), *functions)
    assert done.returncode == 0, done.stdout + done.stderr


def refusal(*options: str) -> tuple[int, str]:
    """The exit status and the error of `tcap capture neuron --tp 2`, which starts no process."""
    arguments = ["capture", "neuron", "port.py:port", "--tp", "2", *options]
    result = CliRunner().invoke(main, arguments, prog_name="tcap")
    return result.exit_code, result.output.splitlines()[-1]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The reference, on prompts of one length and of two."""
    folder = tmp_path_factory.mktemp("port")
    capture(folder, "torch", "reference", "-o", "ref.h5")
    capture(folder, "torch", "padded_reference", "-o", "padded_ref.h5")
    return folder


@pytest.fixture(scope="module")
def port() -> Iterator[Any]:
    """The look-alike port and its reference, in this process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(PORT.parent))
        yield importlib.import_module(PORT.stem)
    leave_ranks()
    for name in [*sys.modules]:
        if name.partition(".")[0] in (PORT.stem, "neuronx_distributed", "neuronx_distributed_inference"):
            del sys.modules[name]


@pytest.fixture(scope="module")
def mistakes(folder: Path) -> Path:
    """The right port on prompts of two lengths, and all mistakes, on four ranks."""
    low = ("port:bfloat16", "rounded_terms:bfloat16")
    launch(folder, 4, "padded", "fused", *low, *MISTAKES)
    return folder


@pytest.mark.slow
@pytest.mark.spec("NRN-150", "NRN-153")
@pytest.mark.parametrize("ranks", [1, 2, 4])  # of 2 heads of keys
def test_a_right_port_is_the_reference_within_rounding(folder: Path, ranks: int) -> None:
    name = f"right{ranks}"
    printed = capture(folder, "neuron", "port", "--tp", str(ranks), "-o", f"{name}.h5")
    assert (f"140 tensors of {ranks} ranks" in printed) == (ranks > 1)
    assert sorted(path.name for path in folder.glob(f"{name}.*")) == [
        f"{name}.h5",
        *(f"{name}.rank{rank}.h5" for rank in range(ranks) if ranks > 1),
    ]
    comparison = tensorcap.compare(folder / "ref.h5", folder / f"{name}.h5")
    assert comparison.exit_status == 0
    compared = [pair for pair in comparison.pairs if pair.difference is not None]
    assert max(pair.difference.relative_frobenius or 0.0 for pair in compared if pair.difference) < 1e-5
    sites = {pair.key.split("/")[1] for pair in compared}
    for layer in (0, 1):
        parts = ("q_proj", "k_proj", "v_proj", "o_proj")
        assert {f"model.layers.{layer}.self_attn.{part}" for part in parts} <= sites
        assert {f"model.layers.{layer}.mlp.{part}_proj" for part in ("gate", "up", "down")} <= sites
    assert {"model.embed_tokens", "model.norm", "lm_head"} <= sites
    assert tensorcap.localize(folder / "ref.h5", folder / f"{name}.h5").suspects == ()
    with tensorcap.open_archive(folder / f"{name}.h5") as archive:
        slots = [r.key.slot for r in archive.records if r.key.site == "layers.1.self_attn"]
        assert [slot for slot in slots if slot.startswith("output")] == [
            "output.hidden_states",
            "output.present_key_value.0",
            "output.present_key_value.1",
            "output.cos_cache",
            "output.sin_cache",
        ]
        never = {point.site for point in archive.info.points if point.status == "never-called"}
        assert "layers.1.self_attn.rotary_emb" in never
        assert archive.get("0/layers.0/output.0").shape == (2, 32, 64)  # padded to the graph's length
        assert archive.get("0/lm_head/output").shape == (2, 1, 256)


@pytest.mark.slow
@pytest.mark.spec("NRN-152")
def test_rules_of_heads_and_of_fused_projections_are_known_by_class(mistakes: Path) -> None:
    with tensorcap.open_archive(mistakes / "padded.rank2.h5") as archive:
        assert archive.info.ranks is not None
        known = {key: (e.rule, e.known) for e in archive.info.ranks.tensors for key in e.keys}
    repeated = "2 heads of keys repeated to 4"
    attention = "0/layers.1.self_attn"
    assert known[f"{attention}.qkv_proj.k_proj/output"] == (
        "concat -1 copies=2",
        f"ColumnParallelLinear, gather_output false, {repeated}",
    )
    assert known[f"{attention}.qkv_proj.q_proj/output"][0] == "concat -1"
    assert known[f"{attention}/output.present_key_value.1"] == (
        "concat 1 copies=2",
        f"heads of its GroupQueryAttention_QKV, {repeated}",
    )
    assert known["0/layers.1.mlp.gate_up_proj/output"][0] == "concat -1 parts=2"
    assert known[f"{attention}.rank_util/param.rank"] == ("concat 0", "SPMDRank: the number of the rank")
    with tensorcap.open_archive(mistakes / "padded.rank*.h5") as archive:
        assert archive.info.ranks is not None
        assert not archive.info.ranks.problems
        assert archive.get(f"{attention}/output.present_key_value.0").shape == (2, 2, 32, 16)


@pytest.mark.slow
def test_a_right_port_accuses_nobody_on_prompts_of_unlike_lengths(mistakes: Path) -> None:
    result = tensorcap.localize(mistakes / "padded_ref.h5", mistakes / "padded.rank*.h5")
    assert (result.exit_status, result.suspects) == (0, ())


@pytest.mark.slow
@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_on_ranks_is_named_first(mistakes: Path, name: str) -> None:
    module, text, _ = MISTAKES[name]
    reference = mistakes / ("padded_ref.h5" if name == "padding" else "ref.h5")
    target = mistakes / f"{name}.rank*.h5"
    comparison = tensorcap.compare(reference, target)
    assert comparison.exit_status == 1
    assert comparison.divergence is not None
    assert comparison.divergence.module == module
    suspects = tensorcap.localize(reference, target).suspects
    assert suspects[0].module == module
    assert text in suspects[0].reason


@pytest.mark.slow
@pytest.mark.spec("DIA-300", "DIA-301")
@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_on_ranks_is_named_by_kind(mistakes: Path, port: Any, name: str) -> None:
    is_padded = name == "padding"
    reference = mistakes / ("padded_ref.h5" if is_padded else "ref.h5")
    made = port.padded_reference() if is_padded else port.reference()
    result = tensorcap.localize(reference, mistakes / f"{name}.rank*.h5", reference_model=made)
    first = result.suspects[0]
    assert first.module == MISTAKES[name][0]
    assert first.diagnosis is not None
    assert first.diagnosis.kind == MISTAKES[name][2]
    if name in ("unreduced", "missing_reduce"):  # what follows has one rank's terms, and is no suspect
        assert {"model.norm", "lm_head"}.isdisjoint(suspect.module for suspect in result.suspects)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_a_right_port_in_bfloat16_rounds_as_the_model_itself(
    folder: Path, request: pytest.FixtureRequest, port: Any, ranks: int
) -> None:
    target = folder / "port.bfloat16.h5"
    if ranks == 4:
        target = request.getfixturevalue("mistakes") / "port.bfloat16.rank*.h5"
    elif ranks == 2:
        (folder / "two").mkdir()
        launch(folder / "two", 2, "port:bfloat16")
        target = folder / "two" / "port.bfloat16.rank*.h5"
    else:
        launch(folder, 1, "port:bfloat16")
    comparison = tensorcap.compare(folder / "ref.h5", target)
    assert comparison.exit_status == 0
    assert not [item for item in tensorcap.preflight(folder / "ref.h5", target).items if item.explains]
    result = replay(folder / "ref.h5", target, reference_model=port.reference())
    assert result.exit_status == 0
    ratios = sorted(result.leaf_ratios.values())
    assert len(ratios) == 25  # embedding, tables of rotations, 5 norms, 14 projections, 2 activations, head
    assert ratios[-1] <= 1.2
    assert 0.9 <= median(ratios) <= 1.1


@pytest.mark.slow
@pytest.mark.spec("RPL-180")
def test_terms_that_ranks_round_and_add_up_in_bfloat16_accuse_nobody(mistakes: Path, port: Any) -> None:
    target = mistakes / "rounded_terms.bfloat16.rank*.h5"
    assert tensorcap.compare(mistakes / "ref.h5", target).exit_status == 0
    result = replay(mistakes / "ref.h5", target, reference_model=port.reference())
    assert result.exit_status == 0
    assert max(result.leaf_ratios.values()) > 1.5  # four roundings of terms, and two of their sums


@pytest.mark.slow
@pytest.mark.spec("NRN-152")
def test_a_fused_projection_of_repeated_heads_is_put_together(mistakes: Path) -> None:
    target = mistakes / "fused.rank*.h5"
    with tensorcap.open_archive(target) as archive:
        assert archive.info.ranks is not None
        assert not archive.info.ranks.problems
        assert archive.get("0/layers.1.self_attn.qkv_proj.Wqkv/output").shape == (2, 32, 128)
    comparison = tensorcap.compare(mistakes / "ref.h5", target)
    assert comparison.exit_status == 0
    keys = {pair.key for pair in comparison.pairs if pair.is_compared}
    assert {f"0/model.layers.1.self_attn.{name}_proj/output" for name in "qkv"} <= keys


@pytest.mark.slow
@pytest.mark.spec("NRN-181", "INJ-100", "BIS-40")
def test_a_port_is_injected_verified_and_bisected(folder: Path, port: Any) -> None:
    adapter = adapter_named("neuron")
    found = bisect_live(folder / "ref.h5", adapter.prepare(port.epsilon()))
    assert (found.module, found.blame, found.exit_status) == ("model.layers.0.input_layernorm", "module", 1)
    target = adapter.prepare(port.port(), dtype="bfloat16", input_dtype="bfloat16")
    verification = tensorcap.verify(port.reference(), target, folder / "report")
    assert verification.exit_status == 0
    with tensorcap.open_archive(folder / "report" / "with_injection" / "target.h5") as archive:
        assert archive.info.injected is not None
        sites = {slot.site for slot in archive.info.injected.slots if slot.status == "injected"}
        assert {"layers.1.mlp.down_proj", "layers.0.self_attn.o_proj.o_proj", "norm", "lm_head"} <= sites
    tensorcap.inject(folder / "ref.h5", adapter.prepare(port.epsilon()), folder / "own.h5")
    pairs = tensorcap.compare(folder / "ref.h5", folder / "own.h5").pairs
    assert [p.key for p in pairs if p.status in ("suspect", "diverged")] == [
        "0/model.layers.0.input_layernorm/output",
        "0/model.layers.0.self_attn/input.hidden_states",  # the same tensor, before it was replaced
    ]


@pytest.mark.slow
def test_an_assertion_on_ranks_is_about_what_all_of_them_hold(folder: Path) -> None:
    script = folder / "check.py"
    script.write_text(ASSERTION)
    (folder / "asserted").mkdir()
    arguments = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script))
    done = run(folder / "asserted", *arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted(done.stdout.splitlines()) == [
        "rank 0: port matches",
        "rank 0: wrong_shard: all of it in rank 1's part",
        "rank 1: port matches",
        "rank 1: wrong_shard: all of it in rank 1's part",
    ]
    assert not list((folder / "asserted").iterdir())


@pytest.mark.slow
@pytest.mark.spec("NRN-180")
def test_the_group_of_a_port_is_left_again(tmp_path: Path) -> None:
    code = (
        "import os, port\nbefore = dict(os.environ)\n"
        "from torch import distributed\nfrom tensorcap.adapters import adapter_named\n"
        "from tensorcap.adapters.neuron import leave_ranks\n"
        "adapter_named('neuron').seed(0)\nassert distributed.is_initialized()\n"
        "assert (os.environ['RANK'], os.environ['NXD_CPU_MODE']) == ('0', '1')\n"
        "leave_ranks()\nassert not distributed.is_initialized()\nassert dict(os.environ) == before\n"
        "distributed.init_process_group('gloo', store=distributed.HashStore(), rank=0, world_size=1)\n"
        "adapter_named('neuron').seed(0)\nleave_ranks()\nassert distributed.is_initialized()\n"
        "distributed.destroy_process_group()\n"
    )
    done = run(tmp_path, "-c", code)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.spec("NRN-154")
def test_a_process_that_dies_ends_the_others_and_leaves_its_log(tmp_path: Path) -> None:
    arguments = ("-m", "tensorcap_cli", "capture", "neuron", f"{PORT}:dies", "--tp", "2", "-o", "tgt.h5")
    done = run(tmp_path, *arguments)
    assert done.returncode == 1
    assert done.stderr.splitlines()[1:] == [
        "Error: rank 1 of 2 ended with status 1: FileNotFoundError: weights/tp1_sharded.safetensors",
        "Hint: The other ranks were ended; its log is tgt.rank1.log.",
    ]
    assert [path.name for path in tmp_path.glob("*.log")] == ["tgt.rank1.log"]
    assert not (tmp_path / "tgt.h5").exists()
    assert "Traceback" in (tmp_path / "tgt.rank1.log").read_text()


@pytest.mark.spec("NRN-153")
@pytest.mark.parametrize(
    ("options", "text"),
    [
        (("--dry-run",), "--tp: each rank writes an archive, expected -o ARCHIVE and no --dry-run."),
        (("-o", "a.h5", "--print"), "--tp: several processes print at once, expected no --print."),
    ],
)
def test_options_that_are_not_for_several_ranks_are_refused(options: tuple[str, ...], text: str) -> None:
    assert refusal(*options) == (2, f"Error: {text}")


@pytest.mark.spec("NRN-153")
def test_another_count_of_ranks_than_the_launchers_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("RANK", "0")
    expected = (2, "Error: --tp 2: a launcher started 4 ranks, expected as many.")
    assert refusal("-o", "a.h5") == expected
