"""Places within modules in `tcap ls`, `tcap show` and `tcap compare`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

X = np.arange(24, dtype=np.float32).reshape(4, 6)
SOURCE = "0/mlp/input.x"
MUL = "0/mlp:aten.mul.Tensor"
VIEW = "0/mlp:aten.t.default"
RUN = {
    "model": {"class": "my.Net"},
    "modules": [{"path": "", "class": "my.Net"}, {"path": "mlp", "class": "my.Mlp"}],
}


def fact(op: str, **entries: Any) -> dict[str, Any]:
    return {
        "op": op,
        "order": 1,
        "module": "mlp",
        "module_call": 0,
        "class": "Mlp",
        "file": "/lib/modeling_my.py",
        "line": 189,
        "function": "forward",
        "inputs": [],
        "arguments": {},
        "outputs": [],
        **entries,
    }


def facts(**arguments: Any) -> dict[str, Any]:
    """`mul` of a transposed input, which is not stored."""
    seen = {"view_of": SOURCE, "shape": [6, 4], "strides": [1, 6], "offset": 0, "dtype": "float32"}
    return {
        f"{VIEW}/op": fact(
            "aten.t.default",
            inputs=[{"name": "self", "record": SOURCE}],
            outputs=[{"slot": "output", **seen}],
        ),
        f"{MUL}/op": fact(
            "aten.mul.Tensor",
            order=3,
            inputs=[{"name": "self", "view": f"{VIEW}/output"}, {"name": "w", "parameter": "mlp.weight"}],
            arguments=arguments,
            outputs=[{"slot": "output", "record": f"{MUL}/output"}],
        ),
    }


@pytest.fixture
def archive(write: Callable[..., Path]) -> None:
    tensors = {SOURCE: X, f"{MUL}/output": 2 * X.T, "0/probe:gate/value": X, "1/mlp/input.x": X}
    values = {**facts(other=2), "0/probe:gate/module": "mlp"}
    write("a.h5", tensors, run={**RUN, "phases": ["prefill", "decode"]}, values=values)


@pytest.mark.usefixtures("archive")
def test_ls_tells_the_line_of_an_op_and_what_the_steps_are(tcap: Callable[..., Any]) -> None:
    lines = tcap("ls", "a.h5").stdout.splitlines()
    assert lines[0] == "a.h5: hdf5, 4 tensors, 384 B, 2 steps (1 prefill, 1 decode), Net, complete"
    assert lines[1].endswith("  inf  code")
    (line,) = [line for line in lines if line.startswith(f"{MUL}/output ")]
    assert line.endswith("  modeling_my.py:189 in forward")


@pytest.mark.usefixtures("archive")
def test_globs_choose_ops_probes_and_what_is_within_a_module(tcap: Callable[..., Any]) -> None:
    def keys(*globs: str) -> list[str]:
        lines = tcap("ls", "a.h5", *globs).stdout.splitlines()[3:]
        return [line.split()[0] for line in lines]

    assert keys("mlp:*") == keys("*:aten.mul.*") == [f"{MUL}/output"]
    assert keys("probe:*") == ["0/probe:gate/value"]


@pytest.mark.usefixtures("archive")
def test_show_says_of_an_op_what_goes_in_and_where_it_stands(tcap: Callable[..., Any]) -> None:
    lines = tcap("show", "a.h5", f"{MUL}/output").stdout.splitlines()
    assert lines[2:7] == [
        "  aten.mul.Tensor in mlp (Mlp)",
        "  at /lib/modeling_my.py:189 in forward",
        f"  from self: {VIEW}/output",
        "  from w: parameter mlp.weight",
        "  with other=2",
    ]
    assert "  gate in mlp" in tcap("show", "a.h5", "0/probe:gate/value").stdout.splitlines()


@pytest.mark.usefixtures("archive")
@pytest.mark.parametrize("key", [f"{VIEW}/output", f"{MUL}/input.self"])
def test_a_view_that_is_not_stored_is_shown_with_its_values(
    tcap: Callable[..., Any], folder: Path, key: str
) -> None:
    lines = tcap("show", "a.h5", key, "--slice", "[0, :]").stdout.splitlines()
    assert lines[0] == key
    assert lines[1].startswith("  float32 [6, 4], 96 B")
    assert lines[-1].split() == ["[", "0,", "6,", "12,", "18]"]
    tcap("show", "a.h5", key, "--npy", "t.npy")
    assert np.array_equal(np.load(folder / "t.npy"), X.T)


@pytest.mark.usefixtures("archive")
def test_a_view_says_what_it_is_a_view_of(tcap: Callable[..., Any], tcap_json: Callable[..., Any]) -> None:
    lines = tcap("show", "a.h5", f"{VIEW}/output").stdout.splitlines()
    assert f"  a view: [6, 4] of {SOURCE}, strides [1, 6], offset 0" in lines
    assert f"  into {MUL}" in lines
    found = tcap_json("show", "a.h5", f"{VIEW}/output")
    assert (found["shape"], found["statistics"]["maximum"]) == ([6, 4], 23)
    assert (found["op"]["op"], found["op"]["line"]) == ("aten.t.default", 189)


@pytest.mark.usefixtures("archive")
@pytest.mark.parametrize(
    ("wrong", "meant"),
    [("0/mlp:aten.mul.Tensr/output", f"{MUL}/output"), ("0/mlp:aten.t.defalt/output", f"{VIEW}/output")],
)
def test_near_names_of_ops_and_of_views_are_shown(tcap: Callable[..., Any], wrong: str, meant: str) -> None:
    assert f"Did you mean '{meant}'" in tcap("show", "a.h5", wrong, status=2).stderr


def test_the_first_divergence_names_op_line_and_the_argument_that_differs(
    write: Callable[..., Path], tcap: Callable[..., Any]
) -> None:
    for name, factor in (("ref.h5", 2.0), ("tgt.h5", 3.0)):
        tensors = {SOURCE: X + 1, f"{MUL}/output": factor * (X.T + 1)}
        write(name, tensors, run={**RUN, "dtype": "float32"}, values=facts(other=factor))
    lines = tcap("compare", "ref.h5", "tgt.h5", status=1).stdout.splitlines()
    at = lines.index(f"FIRST DIVERGENCE  {MUL}/output  (diverged)")
    assert lines[at + 1 : at + 4] == [
        "  module mlp (Mlp)",
        "  aten.mul.Tensor at modeling_my.py:189 in forward",
        "  its argument other is 2.0 in the reference, 3.0 in the target",
    ]


def test_a_guilty_module_shows_the_first_variable_of_its_code_that_is_wrong(
    write: Callable[..., Path], tcap: Callable[..., Any], folder: Path
) -> None:
    key = "0/mlp:Mlp.forward/scores"
    for name, factor in (("ref.h5", 1.0), ("tgt.h5", 1.05)):
        tensors = {SOURCE: X, key: X * np.float32(factor), "0/mlp/output": X * np.float32(factor)}
        write(name, tensors, run={**RUN, "dtype": "bfloat16"})
    (folder / "limits.toml").write_text('[[threshold]]\nmatch = "0/mlp/output"\nrtol = 1e-3\n')
    text = tcap("compare", "ref.h5", "tgt.h5", "--thresholds", "limits.toml", status=1).stdout
    lines = text.splitlines()
    at = lines.index("FIRST DIVERGENCE  0/mlp/output  (diverged)")
    assert lines[at + 2] == (
        f"  within it first {key} (suspect): row error 0.05, at most 0.032 expected at depth 0 in bfloat16"
    )


@pytest.mark.spec("RES-32")
def test_places_on_one_side_only_are_reported_by_class_and_have_no_rows(
    write: Callable[..., Path], tcap: Callable[..., Any]
) -> None:
    modules = [{"path": f"layers.{i}", "class": "my.Block"} for i in range(30)]
    for name, op in (("ref.h5", "bmm"), ("tgt.h5", "fused")):
        tensors: dict[str, Any] = {}
        values: dict[str, Any] = {}
        for i in range(30):
            place = f"0/layers.{i}:aten.{op}.default"
            tensors |= {f"{place}/output": X - i, f"0/layers.{i}/input.x": X + i + 0.5}
            values[f"{place}/op"] = fact(f"aten.{op}.default", module=f"layers.{i}")
        write(name, tensors, run={"modules": modules}, values=values)
    text = tcap("compare", "ref.h5", "tgt.h5", status=1).stdout
    at = text.splitlines().index("MISSING  30 tensors of the reference, without a counterpart")
    assert text.splitlines()[at + 1] == "  30 tensors of places within modules: see below, by class"
    at = text.splitlines().index("PLACES WITHIN MODULES ON ONE SIDE ONLY")
    assert text.splitlines()[at + 1 : at + 5] == [
        "  Block (30 modules, the first layers.0)",
        "    only in the reference: 30 aten.bmm.default",
        "    only in the target: 30 aten.fused.default",
        "  What computes the same in other ops is compared without them: --exclude '*:*'",
    ]
    assert "WORST" not in text
    assert text.count("aten.fused") == 1
    assert tcap("compare", "ref.h5", "tgt.h5", "--all", status=1).stdout.count("aten.fused") == 30
    assert tcap("compare", "ref.h5", "tgt.h5", "--exclude", "*:*").exit_code == 0


@pytest.mark.spec("RES-32")
def test_many_tensors_missing_for_one_reason_are_one_line(
    write: Callable[..., Path], tcap: Callable[..., Any]
) -> None:
    write("ref.h5", {f"{step}/m.{i}/output": X for step in (0, 1) for i in range(5)})
    write("tgt.h5", {f"0/m.{i}/output": X for i in range(5)}, run={"scope": {"steps": "0"}})
    lines = tcap("compare", "ref.h5", "tgt.h5", status=1).stdout.splitlines()
    (line,) = [line for line in lines if "took steps 0" in line and line.startswith("  5 tensors")]
    assert line == (
        "  5 tensors, missing-in-target: the target's capture took steps 0: "
        "1/m.0/output, 1/m.1/output, 1/m.2/output, and 2 more"
    )
