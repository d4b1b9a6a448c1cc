"""What one side alone has for a known reason is explained by a computed mapping, and nothing else is."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tensorcap.alignment import align
from tensorcap_formats.dtypes import Array
from tests.support.archives import new_archive


def drawn(*shape: int) -> Array:
    rng = np.random.default_rng(int(np.prod(shape)) + len(shape))
    return rng.standard_normal(shape).astype(np.float32)


IDS = np.array([[5, 9, 2, 7]])
HIDDEN, LOGITS, POOLED = drawn(1, 4, 8), drawn(1, 4, 11), drawn(1, 9)


def unexplained(tmp_path: Path, ours: Mapping[str, Array], theirs: Mapping[str, Array], **runs: Any) -> Any:
    """Keys of the reference that the mapping leaves without a reason, and the reasons of all left over."""
    reference = new_archive(tmp_path / "r.h5", ours, run=runs.get("reference", {}))
    target = new_archive(tmp_path / "t.h5", theirs, run=runs.get("target", {}))
    found = align(reference, target)
    assert found.exit_status == int(bool(found.summary.reference.unexplained))
    return found.summary.reference.unexplained, {left.reason for left in found.alignment.left_over}


@pytest.mark.spec("ALN-305")
@pytest.mark.parametrize(
    ("left_out", "error", "keys"),
    [
        pytest.param(["bert.pooler.weight"], 0.0, (), id="left-out"),
        pytest.param([], 0.0, ("0/@root/output.1",), id="forgotten"),
        pytest.param(["other.weight"], 0.0, ("0/@root/output.1",), id="another-weight"),
        pytest.param(["pooler.weight"], 1.0, ("0/pooler/output", "0/@root/output.1"), id="a-mistake-beside"),
    ],
)
def test_a_head_whose_weights_the_target_leaves_out_is_explained(
    tmp_path: Path, left_out: list[str], error: float, keys: tuple[str, ...]
) -> None:
    ours = {
        "0/net/output": HIDDEN,
        "0/pooler/output": POOLED,
        "0/@root/output.0": LOGITS,
        "0/@root/output.1": POOLED,
    }
    theirs = {"0/body/output": HIDDEN, "0/@root/output.0": LOGITS + error * drawn(1, 4, 11)[::, ::-1]}
    modules = [{"path": "net", "class": "my.Net"}, {"path": "pooler", "class": "my.Linear"}]
    modules[1]["parameters"] = {"weight": {"shape": [9, 8]}}  # type: ignore[assignment]  # JSON
    runs = {
        "reference": {"modules": modules},
        "target": {"modules": [{"path": "body", "class": "my.Net"}], "model": {"left_out_weights": left_out}},
    }
    found, reasons = unexplained(tmp_path, ours, theirs, **runs)
    assert found == keys
    said = "the target's code leaves out the weights of pooler, and its other results agree"
    assert (said in reasons) == (keys == ())


@pytest.mark.spec("ALN-305")
def test_a_head_that_returns_several_results_is_explained_by_any_of_them(tmp_path: Path) -> None:
    ours = {
        "0/net/output": HIDDEN,
        "0/pooler/output.0": drawn(1, 10),
        "0/pooler/output.1": POOLED,
        "0/@root/output.0": LOGITS,
        "0/@root/output.1": POOLED,
    }
    theirs = {"0/body/output": HIDDEN, "0/@root/output.0": LOGITS}
    modules = [{"path": "net", "class": "my.Net"}, {"path": "pooler", "class": "my.Linear"}]
    modules[1]["parameters"] = {"weight": {"shape": [9, 8]}}  # type: ignore[assignment]  # JSON
    target = {
        "modules": [{"path": "body", "class": "my.Net"}],
        "model": {"left_out_weights": ["pooler.weight"]},
    }
    found, reasons = unexplained(tmp_path, ours, theirs, reference={"modules": modules}, target=target)
    assert found == ()
    assert "the target's code leaves out the weights of pooler, and its other results agree" in reasons


@pytest.mark.spec("ALN-306")
@pytest.mark.parametrize(
    ("mask", "keys"),
    [
        pytest.param([[1, 1, 1, 1]], (), id="the-same-tokens"),
        pytest.param([[0, 1, 1, 1]], ("0/@root/input.attention_mask",), id="fewer-tokens"),
    ],
)
def test_a_mask_is_explained_if_both_sides_have_the_same_tokens(
    tmp_path: Path, mask: list[list[int]], keys: tuple[str, ...]
) -> None:
    ours = {
        "0/@root/input.input_ids": IDS,
        "0/@root/input.attention_mask": np.array(mask),
        "0/net/output": HIDDEN,
        "0/@root/output": LOGITS,
    }
    theirs = {
        "0/@root/input.input_ids": IDS[0],
        "0/body/output": HIDDEN[0],
        "0/@root/output": LOGITS[:, -1],
    }
    found, reasons = unexplained(tmp_path, ours, theirs)
    assert found == keys
    assert ("it says which tokens there are, and both sides have the same 4" in reasons) == (keys == ())
