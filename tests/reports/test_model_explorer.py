"""Graphs for Model Explorer: nodes and edges, errors laid over them, what belongs together on two panes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tensorcap.reports.model_explorer import export_model_explorer
from tensorcap_formats.errors import UsageError, WriteError
from tests.support.archives import write_archive

X = np.random.default_rng(1).standard_normal((4, 8)).astype(np.float32)


def gated_block(name: str = "block", wrong: bool = False) -> dict[str, Any]:
    """norm -> gate, up -> (their product, in the block's code) -> down -> (the sum with x, in its code)."""
    norm, gate, up = X / 2, X * 3, X * 5
    product = gate * up * (2 if wrong else 1)
    down = product + 1
    return {
        "0/@root/input.x": X,
        f"0/{name}/input.x": X,
        f"0/{name}.norm/input.x": X,
        f"0/{name}.norm/output": norm,
        f"0/{name}.gate/input.x": norm,
        f"0/{name}.gate/output": gate,
        f"0/{name}.up/input.x": norm,
        f"0/{name}.up/output": up,
        f"0/{name}.down/input.x": product,
        f"0/{name}.down/output": down,
        f"0/{name}/output": X + down,
        "0/@root/output": X + down,
    }


def read(folder: Path, name: str) -> Any:
    text = (folder / name).read_text(encoding="utf-8")
    return json.loads(text, parse_constant=lambda constant: pytest.fail(f"{constant} is no JSON"))


@pytest.mark.spec("RPT-98")
def test_results_of_modules_have_the_flow_that_contents_and_calls_show(tmp_path: Path) -> None:
    archive = write_archive(
        tmp_path / "ref.h5", gated_block(), run={"modules": [{"path": "block", "class": "my.Block"}]}
    )
    files = export_model_explorer(archive, tmp_path / "graphs")
    assert (files.files, files.command) == (
        ("reference.json",),
        ("model-explorer", str(tmp_path / "graphs" / "reference.json")),
    )
    (graph,) = read(tmp_path / "graphs", "reference.json")["graphs"]
    edges = {n["id"]: {edge["sourceNodeId"] for edge in n["incomingEdges"]} for n in graph["nodes"]}
    assert edges == {
        "0/block.norm": set(),  # its argument is the model's own
        "0/block.gate": {"0/block.norm"},
        "0/block.up": {"0/block.norm"},
        "0/block.down": {"0/block.gate", "0/block.up"},  # which the code of the block multiplied
        "0/block": {"0/block.down"},  # and added to its argument; the model passes it on, and is no node
    }
    spaces = {n["id"]: (n["label"], n["namespace"]) for n in graph["nodes"]}
    assert spaces["0/block.up"] == ("up", "block")
    assert spaces["0/block"] == ("block", "block")
    block = next(n for n in graph["nodes"] if n["id"] == "0/block")
    assert {"key": "class", "value": "my.Block"} in block["attrs"]
    assert block["outputsMetadata"][0]["attrs"][1] == {"key": "tensor_shape", "value": "float32 4x8"}
    with pytest.raises(WriteError, match="not empty"):
        export_model_explorer(archive, tmp_path / "graphs")


@pytest.mark.spec("RPT-99")
def test_two_runs_have_errors_on_both_graphs_and_entries_that_belong_together(tmp_path: Path) -> None:
    ours = write_archive(tmp_path / "ref.h5", gated_block())
    wrong = gated_block("layer", wrong=True)
    wrong["0/layer.up/output"] = np.full_like(X, np.nan)
    theirs = write_archive(tmp_path / "tgt.h5", wrong)
    map_file = tmp_path / "map.toml"
    map_file.write_text(
        "".join(
            f'[[pair]]\nreference = "block{part}"\ntarget = "layer{part}"\n'
            for part in ("", ".norm", ".gate", ".up", ".down")
        )
    )
    files = export_model_explorer(ours, tmp_path / "graphs", target=theirs, mapping=map_file)
    assert files.nodes == {"reference.json": 5, "target.json": 5}
    sync = read(tmp_path / "graphs", "sync_navigation.json")
    assert sync["disableMappingFallback"] is True
    assert {"leftNodeIds": ["0/block.up"], "rightNodeIds": ["0/layer.up"]} in sync["mappingEntries"]
    assert len(sync["mappingEntries"]) == files.paired == 5
    errors = read(tmp_path / "graphs", "relative_error.json")
    assert set(errors) == {"reference", "target"}
    green, down = (errors["target"]["results"][f"0/layer.{name}"] for name in ("gate", "down"))
    assert (green["value"], green["bgColor"]) == (0.0, "#a5d6a7")
    product = 15 * X.astype(np.float64) ** 2  # of which the wrong one has twice
    expected = np.linalg.norm(product) / np.linalg.norm(product + 1)
    assert down["value"] == pytest.approx(expected, rel=1e-5)
    assert down["bgColor"] == "#ef9a9a"
    statuses = read(tmp_path / "graphs", "status.json")["reference"]["results"]
    assert statuses["0/block.up"]["value"] == "nonfinite"
    assert statuses["0/block.norm"]["value"] == "identical"


@pytest.mark.spec("RPT-98")
def test_a_file_without_modules_and_ops_is_refused(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", x=X)
    with pytest.raises(UsageError, match="has no ops and no results of modules"):
        export_model_explorer(tmp_path / "a.npz", tmp_path / "graphs")
    assert not (tmp_path / "graphs").exists()


@pytest.mark.spec("RPT-98")
def test_ops_are_nodes_within_their_modules(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    import tensorcap

    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.GELU()).eval()
    with tensorcap.capture(model, tmp_path / "ops.h5", level="op"):
        model(torch.ones(2, 4))
    export_model_explorer(tmp_path / "ops.h5", tmp_path / "graphs")
    (graph,) = read(tmp_path / "graphs", "reference.json")["graphs"]
    nodes = {node["id"]: node for node in graph["nodes"]}
    gelu = next(node for name, node in nodes.items() if "gelu" in name)
    assert gelu["namespace"] == "1"
    (source,) = [edge["sourceNodeId"] for edge in gelu["incomingEdges"]]
    assert nodes[source]["label"] == "aten.addmm.default"
    assert {"key": "class", "value": "GELU"} in gelu["attrs"]
