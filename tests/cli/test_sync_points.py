"""`tcap sync-points` in the terminal, in JSON, and what compare says of it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from tensorcap_formats.dtypes import Array, bits_of, dtype_of
from tensorcap_formats.keys import Key
from tensorcap_formats.writing import Writer

if TYPE_CHECKING:
    from click.testing import Result

Run = Callable[..., "Result"]
X = np.random.default_rng(0).standard_normal((8, 32)).astype(np.float32)
NODES = ("exp", "mul", "tanh")


def write(path: Path, values: dict[str, Array], *, is_program: bool, **run: Any) -> str:
    """A run of y = tanh(mul(exp(x))), as a graph, or as a program whose operations are 7 to 9."""
    rows = [
        {"node": node, "module": "m", "output": 0, "op": f"core.{node}", "op_id": 7 + i, "op_ids": [7 + i]}
        | {"op_output": 0, "file": "/src/net.py", "line": 20 + i}
        for i, node in enumerate(NODES)
    ]
    kind = {"operation_map": rows} if is_program else {"scope": {"level": "export"}}
    modules = [{"path": "", "class": "my.Net"}, {"path": "m", "class": "my.Inner"}]
    dtypes = {"dtype": "float32", "compute_dtype": "float32"}
    writer = Writer(path, run={"modules": modules, **dtypes, **kind, **run})
    before = "0/@root/input.x"
    writer.add(Key.parse(before), bits_of(X), dtype_of(X), X.shape)
    for i, node in enumerate(NODES):
        text = f"0/m:{node}/output"
        array = np.asarray(values[node], np.float32)
        writer.add(Key.parse(text), bits_of(array), dtype_of(array), array.shape)
        if not is_program:
            fact = {"op": f"aten.{node}.default", "order": 2 * i + 1, "module": "m", "module_call": 0}
            fact |= {"class": "Inner", "file": "/ref/net.py", "line": 5 + i, "function": "forward"}
            fact |= {"inputs": [{"name": "self", "record": before}], "arguments": {}}
            writer.add_value(f"0/m:{node}/op", fact | {"outputs": [{"slot": "output", "record": text}]})
        before = text
    last = np.asarray(values["tanh"], np.float32)
    writer.add(Key.parse("0/@root/output"), bits_of(last), dtype_of(last), last.shape)
    writer.close()
    return str(path)


def values(factor: float = 2.0) -> dict[str, Array]:
    exp = np.exp(X.astype(np.float64))
    return {"exp": exp, "mul": factor * exp, "tanh": np.tanh(factor * exp)}


@pytest.fixture
def runs(tmp_path: Path) -> tuple[str, str]:
    """A reference, and a program that multiplies by 2.002."""
    settings = {"framework": {"name": "core", "settings": {"function": "main"}}}
    return (
        write(tmp_path / "ref.h5", values(), is_program=False),
        write(tmp_path / "tgt.h5", values(2.002), is_program=True, **settings),
    )


@pytest.mark.spec("SYN-40")
def test_failure_sources_come_first_with_their_line(runs: tuple[str, str], tcap: Run) -> None:
    lines = tcap("sync-points", *runs, status=1).stdout.splitlines()
    assert lines[0] == "FAILURE SOURCES  they fail, and all that they are computed from agrees"
    assert lines[1] == "  core.mul #8 = mul  in m"
    assert lines[2].startswith("    at /src/net.py:21: ")
    assert "  of the target alone: framework core, function main" in lines
    assert "bands      green from 60 dB, red below 40 dB of PSNR (32-bit floats)" in lines
    rows = [line.split()[:3] for line in lines if line.startswith("● ")]
    assert rows == [["●", "green", "pass"], ["●", "green", "FAIL"], ["●", "green", "fail"]]
    assert lines[-2] == "3 of 3 mapped compared: 1 pass, 2 fail"


@pytest.mark.spec("SYN-40")
def test_metric_order_and_bands_are_as_asked_for(runs: tuple[str, str], tcap: Run) -> None:
    options = ("--sort", "similarity", "--metric", "mean-relative", "--bands", "90/70")
    done = tcap("sync-points", *runs, *options, status=1)
    lines = done.stdout.splitlines()
    assert "bands      green from 90 dB, red below 70 dB of PSNR (given)" in lines
    assert "           of this metric: green up to 3.2e-06, red above 0.00056" in lines
    rows = [line.split() for line in lines if line.startswith("● ")]
    assert (rows[0][1], rows[0][4], rows[0][7]) == ("red", "core.mul", "mul")
    assert rows[-1][:4] == ["●", "green", "pass", "identical"]


@pytest.mark.spec("SYN-41")
def test_json_has_all_points(runs: tuple[str, str], tcap: Run) -> None:
    document = json.loads(tcap("sync-points", *runs, "--json", status=1).stdout)
    assert (document["format"], document["version"]) == ("tensorcap-sync-points", 1)
    assert (document["mapped"], document["compared"], document["exit_status"]) == (3, 3, 1)
    assert document["counts"] == {"pass": 1, "fail": 2}
    assert document["failure_sources"] == ["core.mul #8 = mul"]
    assert document["settings"]["function"] == [None, "main"]
    assert document["modules"] == [{"module": "m", "compared": 3, "failed": 2, "red": 0}]
    first, second = document["points"][:2]
    assert (first["metrics"]["psnr"], first["verdict"], first["band"]) == ("inf", "identical", "green")
    assert (second["operation"], second["operation_id"], second["node"]) == ("core.mul", 8, "mul")
    assert (second["file"], second["line"], second["key"]) == ("/src/net.py", 21, "0/m:mul/output")
    assert second["metrics"]["mean-relative"] == pytest.approx(1e-3, rel=1e-3)


@pytest.mark.spec("SYN-40")
def test_compare_says_how_many_points_there_are_and_what_lists_them(runs: tuple[str, str], tcap: Run) -> None:
    done = tcap("compare", *runs, status=1)
    assert (
        f"note: sync points: 3 of 3 mapped compared: 1 pass, 2 fail; tcap sync-points {runs[0]} {runs[1]} "
        "lists them."
    ) in done.stdout.splitlines()


@pytest.mark.spec("SYN-42")
def test_two_runs_of_no_program_are_refused(runs: tuple[str, str], tcap: Run) -> None:
    done = tcap("sync-points", runs[0], runs[0], status=2)
    assert "expected one of a compiled program" in done.stderr
    assert "Hint: Capture the target with its adapter" in done.stderr
    assert "expected GREEN/RED in dB" in tcap("sync-points", *runs, "--bands", "5", status=2).stderr


@pytest.mark.spec("SYN-40")
def test_the_folder_of_a_verification_has_them(runs: tuple[str, str], tcap: Run, tmp_path: Path) -> None:
    report = tmp_path / "report"
    tcap("verify", *runs, "-o", str(report), status=1)
    lines = (report / "sync-points.txt").read_text().splitlines()
    assert lines[1] == "  core.mul #8 = mul  in m"
    assert lines[-1] == "3 of 3 mapped compared: 1 pass, 2 fail"
    document = json.loads((report / "sync-points.json").read_text())
    assert (document["format"], len(document["points"])) == ("tensorcap-sync-points", 3)
