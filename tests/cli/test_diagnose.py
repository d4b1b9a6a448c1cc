"""`tcap diagnose`, as it prints."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

R = np.random.default_rng(0).standard_normal((1, 8, 64)).astype(np.float32)
Write = Callable[..., Path]


@pytest.fixture
def written(write: Write) -> Callable[[Any], None]:
    def run(target: Any) -> None:
        write("ref.h5", {"0/m/output": R}, run={"model": {"config": {"hidden_size": 64}}})
        write("tgt.h5", {"0/m/output": target})

    return run


@pytest.mark.spec("DIA-4", "DIA-51")
def test_an_explanation_is_printed_with_its_residual_and_hint(tcap: Any, written: Any) -> None:
    written(R / 8)
    assert tcap("diagnose", "ref.h5", "tgt.h5", "0/m/output").stdout == (
        "0/m/output: relative error 0.875, one rounding in float32 is 2.5e-08\n"
        "  the target is the reference times 0.125, which is 1/sqrt(hidden_size) (or 1/8)\n"
        "    [factor] leaves 0 of 0.875, 1 number fitted\n"
        "    The scale of embeddings by the root of the width is applied on one side only.\n"
        "What the module was given is not known: an error may come from there.\n"
        "Next: look at m in the port.\n"
    )


@pytest.mark.spec("DIA-51")
def test_what_was_tried_is_printed_where_nothing_explains_it(tcap: Any, written: Any) -> None:
    written(R + np.random.default_rng(1).standard_normal(R.shape).astype(np.float32) / 10)
    lines = tcap("diagnose", "ref.h5", "tgt.h5", "m/output", status=1).stdout.splitlines()
    assert lines[1].startswith("no hypothesis explains it, of ")
    assert lines[2].split() == ["tried", "left"]
    assert lines[8].endswith(" more; see them with --all")
    longer = tcap("diagnose", "ref.h5", "tgt.h5", "m/output", "--all", status=1).stdout
    assert "\nactivation-added " in longer


def test_identical_values_are_said_to_be(tcap: Any, written: Any) -> None:
    written(R)
    assert tcap("diagnose", "ref.h5", "tgt.h5", "m/output").stdout == (
        "0/m/output: the values are identical\nNext: nothing has to be done.\n"
    )


@pytest.mark.spec("DIA-50")
def test_json_holds_all_of_it(tcap_json: Any, written: Any) -> None:
    written(-R)
    found = tcap_json("diagnose", "ref.h5", "tgt.h5", "m/output")
    assert (found["format"], found["version"], found["status"]) == ("tensorcap-diagnosis", 1, "explained")
    (one,) = found["explanations"]
    assert (one["kind"], one["before"], one["after"], one["parameters"], one["elements"]) == (
        "sign",
        2,
        0,
        0,
        512,
    )
    assert found["tried"]["sign"] == 0
    assert found["exit_status"] == 0
    assert list(json.loads(json.dumps(found))) == [
        "format",
        "version",
        "key",
        "target_key",
        "status",
        "before",
        "rounding",
        "precision",
        "inherited",
        "explanations",
        "tried",
        "notes",
        "failed",
        "exit_status",
    ]


def test_two_keys_may_be_named(tcap: Any, write: Write) -> None:
    write("ref.h5", {"0/a/output": R})
    write("tgt.h5", {"0/b/output": 2 * R})
    output = tcap("diagnose", "ref.h5", "tgt.h5::b/output", "a/output").stdout
    assert output.startswith("0/a/output and 0/b/output: relative error 0.5")


@pytest.mark.spec("DIA-1", "DIA-2")
@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        pytest.param(["tgt.h5", "0/x/output"], 2, "Error: ref.h5: no tensor '0/x/output' among 1", id="key"),
        pytest.param(["no.h5", "0/m/output"], 3, "Error: no.h5: there is no such file", id="file"),
        pytest.param(
            ["tgt.h5", "m/output", "--compute-dtype", "int4"], 2, "Error: compute dtype 'int4' is", id="dtype"
        ),
    ],
)
def test_wrong_usage_and_what_cannot_be_read(
    tcap: Any, written: Any, arguments: list[str], status: int, message: str
) -> None:
    written(2 * R)
    assert message in tcap("diagnose", "ref.h5", *arguments, status=status).stderr


@pytest.mark.spec("DIA-2")
def test_records_without_values_are_refused(tcap: Any, write: Write) -> None:
    write("ref.h5", {"0/m/output": R})
    write("tgt.h5", {"0/m/output": R.astype(np.complex64)})
    assert (
        "is complex64, expected real values"
        in tcap("diagnose", "ref.h5", "tgt.h5", "m/output", status=2).stderr
    )
