"""What MAX prints under a name, and torch saves under it, is one tensor; a log shows corners of tensors."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tensorcap.comparison import compare
from tensorcap_formats.dtypes import bits_of, dtype_of
from tensorcap_formats.foreign import write_max
from tests.comparison.conftest import MakeArchive

RNG = np.random.default_rng(3)
GATE, OUT = (RNG.normal(size=(1, 20, 16)).astype(np.float32) for _ in range(2))


def max_folder(folder: Path, tensors: Mapping[str, Any]) -> Path:
    """A folder as MAX's prints write it, without an axis for the batch."""
    folder.mkdir()
    for label, array in tensors.items():
        name = label.replace("/", "_")
        write_max(folder / f"{name}.max", label, dtype_of(array), array.shape, [bits_of(array)])
    return folder


def saved(folder: Path, tensors: Mapping[str, Any]) -> Path:
    """A folder of a file for each tensor, named by hand."""
    folder.mkdir()
    for name, array in tensors.items():
        np.save(folder / f"{name}.npy", array)
    return folder


@pytest.mark.spec("ALN-280")
@pytest.mark.parametrize(("scale", "status"), [(1.0, "identical"), (1.5, "diverged")])
def test_files_of_equal_names_are_compared_without_a_list(tmp_path: Path, scale: float, status: str) -> None:
    trusted = {"mlp_gate": GATE, "model.layers.0.mlp-output": OUT, "after_rope": OUT}
    tested = {
        "mlp_gate": GATE[0] * np.float32(scale),
        "model.layers.0.mlp-output": OUT[0],
        "model.layers.0-output": GATE[0],  # of a hook, of which nobody saved the other
        "after_rope": OUT[0],
    }
    found = compare(saved(tmp_path / "torch", trusted), max_folder(tmp_path / "max", tested))
    statuses = {pair.key: pair.status for pair in found.pairs}
    assert statuses.pop("0/probe:mlp_gate/value") == status
    assert statuses == {
        "0/layers.0.mlp/output": "identical",
        "0/probe:after_rope/value": "identical",
        "0/layers.0/output": "missing-in-reference",
    }
    assert found.exit_status == (status != "identical")


@pytest.mark.spec("ALN-280")
def test_two_names_of_one_print_are_left_as_they_are(tmp_path: Path) -> None:
    trusted = saved(tmp_path / "torch", {"model.norm-output": OUT, "norm-output": OUT})
    tested = max_folder(tmp_path / "max", {"model.norm-output": OUT[0], "model.head-output": GATE[0]})
    found = compare(trusted, tested)
    assert {p.key for p in found.pairs if p.status == "missing-in-target"} == {
        "model.norm-output",
        "norm-output",
    }
    assert found.exit_status == 1


def compact(label: str, array: Any) -> str:
    """A print of MAX of a tensor of (token, feature) with more than six of both."""

    def row(values: Any) -> str:
        texts = [f"{value:.4f}" for value in values]
        return f"[{', '.join([*texts[:3], '...', *texts[-3:]])}]"

    first, last = (",\n".join(row(values) for values in rows) for rows in (array[:3], array[-3:]))
    shape = ",".join(map(str, array.shape))
    return f"{label} = tensor([{first},\n ..., \n\n{last}], dtype=f32, shape=[{shape}])\n"


@pytest.mark.spec("ALN-281")
@pytest.mark.parametrize(
    ("change", "status"),
    [
        pytest.param(lambda a: a, "within-rounding", id="right"),
        pytest.param(lambda a: a * np.float32(1.02), "diverged", id="two percent too large"),
        pytest.param(lambda a: a[::-1].copy(), "diverged", id="tokens in another order"),
    ],
)
def test_the_corners_that_a_log_shows_are_compared(
    tmp_path: Path, make_archive: MakeArchive, change: Any, status: str
) -> None:
    run = {"modules": [{"path": p, "class": "m.Module"} for p in ("", "norm", "head")], "dtype": "float32"}
    reference = make_archive({"0/norm/output": OUT, "0/head/input.x": OUT, "0/head/output": GATE}, run=run)
    lines = [
        compact("model.norm-output", OUT[0]),
        compact("model.head-input_x", OUT[0]),
        compact("model.head-output", change(GATE[0])),
    ]
    (tmp_path / "max_tensors.log").write_text("".join(lines))
    found = compare(reference, tmp_path / "max_tensors.log")
    by_key = {pair.key: pair for pair in found.pairs}
    assert by_key["0/head/output"].status == status
    assert by_key["0/norm/output"].status == "within-rounding"
    assert by_key["0/head/output"].target is not None
    assert by_key["0/head/output"].target.shape == (1, 6, 6)
    assert found.exit_status == (status == "diverged")
