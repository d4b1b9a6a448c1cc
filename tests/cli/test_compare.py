"""`tcap compare` on real archives."""

from __future__ import annotations

import math
import re
import shutil
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tensorcap_formats.dtypes import Array

LAYERS = 6


def model(wrong_from: int = LAYERS, factor: float = 1.25) -> dict[str, Array]:
    """Inputs and outputs of a stack of layers; from one layer on the outputs are off by a factor."""
    tensors: dict[str, Array] = {"0/@root/input.ids": np.array([[1, 2, 3]])}
    value = np.full((2, 4), 2.0, np.float32)
    for i in range(LAYERS):
        tensors[f"0/layers.{i}/input.0"] = value
        tensors[f"0/layers.{i}.mlp/input.x"] = value
        value = np.full((2, 4), 2.0 + i, np.float32) * np.float32(factor if i >= wrong_from else 1)
        tensors[f"0/layers.{i}.mlp/output"] = value
        tensors[f"0/layers.{i}/output"] = value
    return tensors


@pytest.fixture
def pair(write: Callable[..., Path]) -> Callable[..., None]:
    """Write ref.h5 and tgt.h5."""

    def run(reference: Mapping[str, Array], target: Mapping[str, Array], **options: Any) -> None:
        modules = [{"path": "layers.2.mlp", "class": "zoo.MLP"}]
        known = {"model": {"class": "zoo.Stack"}, "dtype": "float32", "modules": modules}
        write("ref.h5", reference, run=known)
        write("tgt.h5", target, **options)

    return run


def test_identical_archives_are_green(tcap: Callable[..., Any], pair: Callable[..., None]) -> None:
    pair(model(), model())
    output = tcap("compare", "ref.h5", "tgt.h5").stdout
    assert "FIRST DIVERGENCE" not in output
    assert "25 of 25 reference tensors compared: 25 identical\nNo divergence.\n" in output


def test_the_first_diverging_module_is_named(tcap: Callable[..., Any], pair: Callable[..., None]) -> None:
    pair(model(), model(wrong_from=2))
    output = tcap("compare", "ref.h5", "tgt.h5", "--rtol", "0.01", status=1).stdout
    lines = output.splitlines()
    at = lines.index("FIRST DIVERGENCE  0/layers.2.mlp/output  (diverged)")
    assert lines[at + 1 : at + 8] == [
        "  module layers.2.mlp (MLP)",
        "  8 of 8 elements are outside rtol 0.01, atol 0",
        "  max abs 1 at [0, 0] (reference 4, target 5)",
        "  max rel 0.25 at [0, 0]",
        "  mean abs 1, relative Frobenius 0.25, cosine 1, PSNR 12.04 dB, 8 of 8 unequal",
        "  would pass with rtol 0.2501 alone, or with atol 1 alone",
        "  where the squared error lies: even over all axes",
    ]
    assert lines[0] == "reference  ref.h5: hdf5, 25 tensors, Stack float32"
    assert lines[-3:] == [
        "25 of 25 reference tensors compared: 11 identical, 14 diverged",
        "Not the same, first in layers.2.mlp.",
        "Next, which module is wrong: tcap localize ref.h5 tgt.h5",
    ]
    rows = [" ".join(line.split()) for line in lines if line.startswith("diverged")]
    where = "at [0, 0] of 0/layers.2.mlp/output"
    assert rows == [f"diverged 1 0.25 0.251 1 1 12 8 0/layers.{{2-5}}.mlp/output (+ 10) {where}"]
    output = tcap("compare", "ref.h5", "tgt.h5", "--rtol", "0.01", "--all", status=1).stdout
    rows = [" ".join(line.split()) for line in output.splitlines() if line.startswith("diverged")]
    assert len(rows) == 14
    assert rows[0] == "diverged 1 0.25 0.251 1 1 12 8 0/layers.2.mlp/output at [0, 0]"


def test_without_a_tolerance_the_policy_judges(tcap: Callable[..., Any], pair: Callable[..., None]) -> None:
    pair(model(), model(wrong_from=5))
    output = tcap("compare", "ref.h5", "tgt.h5", status=1).stdout
    assert "\npolicy     of specs/policy.md, errors in float32\n" in output
    assert "25 of 25 reference tensors compared: 23 identical, 2 diverged\n" in output


def test_why_tells_each_stage_and_test_of_a_pair_and_which_decided(
    tcap: Callable[..., Any], pair: Callable[..., None]
) -> None:
    pair(model(), model(wrong_from=5))
    key = "0/layers.5.mlp/output"
    output = tcap("compare", "ref.h5", "tgt.h5", "--why", key, status=1).stdout
    assert [" ".join(line.split()) for line in output.splitlines()] == [
        "0/layers.5.mlp/output: diverged, by policy",
        "",
        "STAGE TEST VALUE LIMIT RESULT",
        "pairing - - - unjudged paired with 0/layers.5.mlp/output",
        "values - - - - 8 of 8 differ",
        "policy row error 0.25 1e-5 diverged decides row error 0.25, float32 runs agree within 1e-05",
        "policy outlier 0.12 6.3 within-rounding "
        "one element is off by 0.12 of its row, where rows are off by 0.25",
        "policy attention gain 0.25 1e-5 diverged decides "
        "error 0 in, 0.25 out: 0.25 of its own, at most 1e-05",
        "Next, which module is wrong: tcap localize ref.h5 tgt.h5",
    ]


def test_why_says_that_the_tolerance_decided(
    tcap: Callable[..., Any], tcap_json: Callable[..., Any], pair: Callable[..., None]
) -> None:
    pair(model(), model(wrong_from=5))
    arguments = ("compare", "ref.h5", "tgt.h5", "--rtol", "0.5", "--why", "0/layers.5.mlp/output")
    found = tcap_json(*arguments)
    assert (found["key"], found["status"], found["decided_by"]) == (arguments[-1], "match", "tolerance")
    steps = [(step["stage"], step["test"], step["status"], step["is_decisive"]) for step in found["steps"]]
    assert steps == [
        ("pairing", None, "unjudged", False),
        ("values", None, None, False),
        ("tolerance", "tolerance", "match", True),
    ]
    assert (found["steps"][2]["value"], found["steps"][2]["limit"]) == (0, 0)
    message = tcap("compare", "ref.h5", "tgt.h5", "--why", "0/layers.9/output", status=2).output
    assert "no tensor '0/layers.9/output' among 25" in message


def test_map_none_pairs_equal_keys_alone(tcap: Callable[..., Any], write: Callable[..., Path]) -> None:
    rows = np.random.default_rng(0).standard_normal((4, 4, 64)).astype(np.float32)
    ours = {f"0/model.layers.{i}.mlp/output": rows[i] for i in range(3)}
    theirs = {f"0/blocks.{i}.mlp/output": rows[i] for i in range(3)}
    for name, tensors in (
        ("ref.h5", {**ours, "0/lm_head/output": rows[3]}),
        ("tgt.h5", {"0/lm_head/output": rows[3] + 1, **theirs}),
    ):
        modules = [{"path": key.split("/")[1], "class": "zoo.MLP"} for key in tensors]
        write(name, tensors, run={"modules": modules, "dtype": "float32"})
    output = tcap("compare", "ref.h5", "tgt.h5", "--map", "none", status=1).stdout
    counts = "1 of 4 reference tensors compared: 1 diverged, 3 missing-in-target, 3 missing-in-reference"
    assert counts in output
    assert "4 of 4 reference tensors compared" in tcap("compare", "ref.h5", "tgt.h5", status=1).stdout


def test_what_no_policy_judges_is_unjudged(tcap: Callable[..., Any], write: Callable[..., Path]) -> None:
    write("ref.h5", {"0/a/output": np.array([1.0, 2.0])}, stats_only=True)
    write("tgt.h5", {"0/a/output": np.array([2.0, 1.0])}, stats_only=True)
    output = tcap("compare", "ref.h5", "tgt.h5", status=1).stdout
    assert "0 of 1 reference tensors compared: 1 unjudged" in output
    assert "only statistics were kept: no values to judge by" in output


def test_different_inputs_are_said_before_any_module(
    tcap: Callable[..., Any], pair: Callable[..., None]
) -> None:
    pair(model(), {**model(), "0/@root/input.ids": np.array([[1, 2, 4]])})
    output = tcap("compare", "ref.h5", "tgt.h5", status=1).stdout
    assert "This is an input of the run: the two runs were fed different inputs." in output
    assert "module" not in output


def test_an_argument_is_blamed_on_its_caller(tcap: Callable[..., Any], pair: Callable[..., None]) -> None:
    target = model()
    target["0/layers.3.mlp/input.x"] = np.zeros((2, 4), np.float32)
    pair(model(), target)
    output = tcap("compare", "ref.h5", "tgt.h5", status=1).stdout
    assert "\n  module layers.3\n  The code of layers.3 made this argument of layers.3.mlp.\n" in output


def test_missing_and_misshapen_tensors_are_listed(
    tcap: Callable[..., Any], pair: Callable[..., None]
) -> None:
    target = {**model(), "0/extra/output": np.ones(1)}
    del target["0/layers.1.mlp/output"]
    target["0/layers.4/output"] = np.ones((4, 2), np.float32)
    point = {"site": "layers.1.mlp", "status": "not-capturable", "reason": "fused"}
    pair(model(), target, run={"points": [point]})
    output = tcap("compare", "ref.h5", "tgt.h5", "--rtol", "1", status=1).stdout
    rows = {line.split()[0]: line for line in output.splitlines() if "/output" in line}
    assert "  1 tensor, not-capturable: fused: 0/layers.1.mlp/output" in output.splitlines()
    assert rows["shape-mismatch"].endswith("[2, 4] in the reference, [4, 2] in the target")
    assert rows["missing-in-reference"].endswith("0/extra/output")
    assert "23 of 25 reference tensors compared: " in output


@pytest.mark.spec("CMP-56")
def test_nothing_compared_is_a_failure_and_a_way_is_shown(
    tcap: Callable[..., Any], pair: Callable[..., None]
) -> None:
    pair({"0/a/output": np.ones(1)}, {"0/b/output": np.ones(1)})
    output = tcap("compare", "ref.h5", "tgt.h5", status=1).stdout
    assert output.endswith(
        "0 of 1 reference tensors compared: 1 missing-in-target, 1 missing-in-reference\n"
        "Nothing was compared.\n"
        "Next, what belongs together though no names are equal, as a map to edit and to give to compare: "
        "tcap align ref.h5 tgt.h5 -o map.toml\n"
    )


def test_nothing_to_compare_with_has_no_way_to_pairs(
    tcap: Callable[..., Any], pair: Callable[..., None]
) -> None:
    pair({"0/a/output": np.ones(1)}, {"0/b/output": np.ones(1)})
    output = tcap("compare", "ref.h5", "tgt.h5", "--exclude", "*", status=1).stdout
    assert output.endswith("Nothing was compared.\nNext, what the target holds: tcap ls tgt.h5\n")


def test_an_incomplete_run_is_the_first_thing_said(
    tcap: Callable[..., Any], write: Callable[..., Path]
) -> None:
    write("ref.h5", model())
    error = {"type": "RuntimeError", "message": "boom", "last_point": "0/layers.5/output"}
    write("tgt.h5", model(), run={"error": error}, complete=False)
    output = tcap("compare", "ref.h5", "tgt.h5", status=1).stdout
    assert output.startswith("WARNING: The target is incomplete: its run ended early (RuntimeError: boom).\n")
    assert "No divergence" not in output


def test_excluded_tensors_stay_in_the_denominator(
    tcap: Callable[..., Any], pair: Callable[..., None]
) -> None:
    pair(model(), model(wrong_from=5))
    output = tcap("compare", "ref.h5", "tgt.h5", "--exclude", "layers.5*").stdout
    assert "21 of 25 reference tensors compared: 21 identical, 4 excluded" in output
    output = tcap("compare", "ref.h5", "tgt.h5", "--only", "layers.5.mlp", status=1).stdout
    assert "2 of 25 reference tensors compared: 1 identical, 1 diverged, 23 excluded" in output


def test_sorting_by_error_puts_the_worst_first(tcap: Callable[..., Any], pair: Callable[..., None]) -> None:
    errors = {"a": 0.1, "b": 0.4, "c": math.nan, "d": 0.2}
    reference = {f"0/{name}/output": np.ones(2) for name in errors}
    target = {f"0/{name}/output": np.ones(2) + error for name, error in errors.items()}
    pair(reference, target)
    output = tcap("compare", "ref.h5", "tgt.h5", "--sort", "error", status=1).stdout
    keys = [line.split()[7] for line in output.splitlines() if line.startswith(("diverged", "nonfinite"))]
    assert keys == ["0/c/output", "0/b/output", "0/d/output", "0/a/output"]


def test_long_lists_are_cut_and_say_so(tcap: Callable[..., Any], pair: Callable[..., None]) -> None:
    names = [f"{one}{two}" for one in "abcde" for two in "fghijklmno"]
    reference = {f"0/{name}/output": np.ones(2) * (at + 1) for at, name in enumerate(names)}
    target = {key: value + (1 if key == "0/eo/output" else 0.01) for key, value in reference.items()}
    pair(reference, target)
    output = tcap("compare", "ref.h5", "tgt.h5", "--atol", "0.1", status=1).stdout
    assert "… 30 more that are not identical; all with --all" in output
    assert sum(line.startswith(("match", "diverged")) for line in output.splitlines()) == 20
    assert "\ndiverged" in output  # the one that matters is not among those left out
    output = tcap("compare", "ref.h5", "tgt.h5", "--atol", "0.1", "--all", status=1).stdout
    assert sum(line.startswith(("match", "diverged")) for line in output.splitlines()) == 50


def test_values_that_differ_are_noted(tcap: Callable[..., Any], write: Callable[..., Path]) -> None:
    write("ref.h5", model(), values={"0/layers.0/input.causal": True})
    write("tgt.h5", model(), values={"0/layers.0/input.causal": False})
    output = tcap("compare", "ref.h5", "tgt.h5").stdout
    assert "  0/layers.0/input.causal: True in the reference, False in the target\n" in output


def test_one_record_against_another(tcap: Callable[..., Any], pair: Callable[..., None]) -> None:
    pair({"0/a/output": np.ones(2), "0/b/output": np.zeros(2)}, {"0/c/output": np.array([1.0, 1.5])})
    output = tcap("compare", "ref.h5::a", "tgt.h5::0/c/output", "--atol", "0.5").stdout
    assert "target     0/c/output: float64 [2]\n  0 of 2 elements are outside" in output
    assert "\n  max abs 0.5 at [1] (reference 1, target 1.5)\n  max rel 0.5 at [1]\n" in output
    assert tcap("compare", "ref.h5::a", "ref.h5").stdout.endswith(
        "1 identical\nNo divergence.\nNext: nothing has to be done.\n"
    )
    assert "do not go with" in tcap("compare", "ref.h5::a", "tgt.h5", "--only", "x", status=2).stderr
    assert "no tensor 'zz'" in tcap("compare", "ref.h5::zz", "tgt.h5", status=2).stderr


@pytest.mark.parametrize(
    ("target", "options", "verdict"),
    [
        pytest.param(np.full(2, 1.5), ["--rtol", "0"], "Not the same: a is diverged.", id="diverged"),
        pytest.param(np.array([1, math.nan]), [], "Not the same: a is nonfinite.", id="nonfinite"),
    ],
)
def test_the_verdict_on_two_named_records_fits(
    tcap: Callable[..., Any], folder: Path, target: Array, options: list[str], verdict: str
) -> None:
    np.savez(folder / "r.npz", a=np.ones(2))
    np.savez(folder / "t.npz", b=target)
    assert verdict in tcap("compare", "r.npz::a", "t.npz::b", *options, status=1).stdout


def test_what_could_not_be_captured_is_the_verdict(
    tcap: Callable[..., Any], write: Callable[..., Path]
) -> None:
    lost = {"site": "b", "status": "not-capturable", "calls": 1, "reason": "sparse"}
    write("ref.h5", {"0/a/output": np.ones(2)}, run={"points": [lost]})
    write("tgt.h5", {"0/a/output": np.ones(2)})
    found = tcap("compare", "ref.h5", "tgt.h5", status=1).stdout
    assert "All that both have is identical, but the target has no counterpart of 1 tensor." in found
    assert "1 tensor, not-capturable: in the reference: sparse: 0/b/output" in found


def test_a_number_that_differs_is_the_verdict(tcap: Callable[..., Any], write: Callable[..., Path]) -> None:
    for name, number in (("ref.h5", 4.0), ("tgt.h5", 4.01)):
        write(name, {"0/a/output": np.ones(2)}, values={"0/a/output.n": number})
    found = tcap("compare", "ref.h5", "tgt.h5", status=1).stdout
    assert "Not the same: a number that a module returned differs." in found
    found = tcap("compare", "ref.h5", "tgt.h5", "--atol", "0.1").stdout
    assert "  0/a/output.n: 4.0 in the reference, 4.01 in the target, within the tolerance" in found


def test_json_has_all_pairs_and_the_exit_status(
    tcap_json: Callable[..., Any], pair: Callable[..., None]
) -> None:
    pair(model(), model(wrong_from=2))
    found = tcap_json("compare", "ref.h5", "tgt.h5", status=1)
    assert (found["format"], found["version"], found["exit_status"]) == ("tensorcap-comparison", 1, 1)
    assert (found["compared"], found["records"], len(found["pairs"])) == (25, 25, 25)
    assert found["first_divergence"]["module"] == "layers.2.mlp"
    assert found["first_divergence"]["class"] == "zoo.MLP"


def test_foreign_files_are_compared_in_natural_order(tcap: Callable[..., Any], folder: Path) -> None:
    reference: dict[str, Any] = {f"layers.{i}": np.ones(4) for i in range(12)}
    target: dict[str, Any] = {f"layers.{i}": np.full(4, 1.0 if i < 2 else 1.01) for i in range(12)}
    np.savez(folder / "ref.npz", **reference)
    np.savez(folder / "tgt.npz", **target)
    output = tcap("compare", "ref.npz", "tgt.npz", status=1).stdout
    assert output.startswith("WARNING: The reference has no execution order: natural order")
    assert "FIRST DIVERGENCE  layers.2  (diverged)" in output


def test_an_unreadable_tensor_is_status_3(
    tcap: Callable[..., Any], folder: Path, write: Callable[..., Path]
) -> None:
    import h5py

    write("ref.h5", model())
    path = write("tgt.h5", model(wrong_from=0))
    with h5py.File(path, "r+") as file:
        del file["steps/0/layers.3/output"]
    output = tcap("compare", "ref.h5", "tgt.h5", "--rtol", "1", status=3).stdout
    assert "1 unreadable" in output


def test_a_pipe_gets_whole_keys_and_no_colors(
    pair: Callable[..., None], shell: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    key = "0/" + ".".join(["model"] * 60) + "/output"
    pair({key: np.ones(1)}, {key: np.zeros(1)})
    found = shell("COLUMNS=80 tcap compare ref.h5 tgt.h5 | cat")
    (row,) = [line for line in found.stdout.splitlines() if line.startswith("diverged")]
    assert key in row
    assert "\x1b" not in found.stdout
    assert found.stderr == ""
    assert found.returncode == 1


@pytest.mark.skipif(not shutil.which("script"), reason="needs script(1) to make a terminal")
def test_a_terminal_of_80_columns_is_not_overrun(
    pair: Callable[..., None], shell: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    key = "0/" + ".".join(["model"] * 12) + "/output"
    pair({key: np.ones(1)}, {key: np.zeros(1)})
    command = "stty cols 80; $(declare -f tcap); tcap compare ref.h5 tgt.h5 --atol 1"
    found = shell(f'script -qec "{command}" /dev/null')
    assert found.returncode == 0, found.stdout
    assert "\x1b[32mmatch" in found.stdout
    lines = re.sub(r"\x1b\[[0-9;]*m", "", found.stdout).splitlines()
    (row,) = [line for line in lines if line.startswith("match")]
    assert "…" in row
    assert len(row) <= 80
