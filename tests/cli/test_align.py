"""`tcap align`: a mapping is printed, written, checked, and used by `tcap compare`."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result

from tensorcap.alignment import read_mapping
from tensorcap_cli.main import main
from tensorcap_formats.dtypes import Array
from tests.support.archives import write_archive


def _write(path: Path, tensors: dict[str, Array]) -> None:
    modules = [{"path": site, "class": "torch.nn.Linear"} for site in tensors]
    write_archive(path, tensors, run={"modules": modules})


def tcap(*arguments: str, status: int = 0) -> Result:
    found = CliRunner().invoke(main, list(arguments))
    assert found.exit_code == status, found.output
    return found


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A port of two layers with other names, one fused projection, and a result that only one side has."""
    monkeypatch.chdir(tmp_path)
    drawn = np.random.default_rng(3).standard_normal((2, 3, 8, 24)).astype(np.float32)
    ones: dict[str, Array] = {}
    others: dict[str, Array] = {}
    for i, (gate, up, down) in enumerate(drawn):
        ones |= {f"model.layers.{i}.gate_proj": gate, f"model.layers.{i}.up_proj": up}
        ones[f"model.layers.{i}.down_proj"] = down
        others[f"h.{i}.gate_up"] = np.concatenate([gate, up], axis=-1)
        others[f"h.{i}.down"] = down
    _write(tmp_path / "ref.h5", ones)
    _write(tmp_path / "tgt.h5", others)
    _write(tmp_path / "more.h5", {**ones, "model.odd": drawn[0, 0] ** 3})
    return tmp_path


@pytest.mark.usefixtures("folder")
def test_entries_are_folded_over_indices_and_told_by_evidence() -> None:
    lines = tcap("align", "ref.h5", "tgt.h5").output.splitlines()
    at = lines.index("BY VALUES")
    fused = "  model.layers.{i}.gate_proj + model.layers.{i}.up_proj = h.{i}.gate_up   i = 0-1"
    assert fused in lines[at:]
    assert lines[lines.index(fused) + 1] == "    split 1 2"
    assert "  model.layers.{i}.down_proj = h.{i}.down   i = 0-1" in lines[at:]
    assert "Both made 6 results in the same order." in lines
    assert "6 of 6 reference tensors are mapped, 0 are left over and explained, 0 are not explained" in lines
    assert lines[-2] == "Every reference tensor is mapped or explained."


def test_what_is_not_explained_is_marked_and_decides_the_exit_status(folder: Path) -> None:
    lines = tcap("align", "more.h5", "tgt.h5", "-o", "map.toml", status=1).output.splitlines()
    (line,) = [line for line in lines if line.startswith("? model.odd")]
    assert lines.index("LEFT OVER IN THE REFERENCE") < lines.index(line)
    assert "Not everything is mapped." in lines
    (left,) = read_mapping(folder / "map.toml").left_over
    assert (left.side, left.places, left.is_explained) == ("reference", ("model.odd",), False)
    assert "1 unmapped" in tcap("compare", "more.h5", "tgt.h5", "--map", "map.toml", status=1).output


def test_a_map_that_was_written_can_be_edited_checked_and_used(folder: Path) -> None:
    tcap("align", "ref.h5", "tgt.h5", "-o", "map.toml")
    assert "6 of 6 reference tensors compared: 6 identical" in tcap("compare", "ref.h5", "tgt.h5").output
    output = tcap("compare", "ref.h5", "tgt.h5", "--map", "map.toml").output
    assert "mapping    map.toml: 6 of 6 reference tensors (6 by values)" in output
    text = (folder / "map.toml").read_text()
    (folder / "map.toml").write_text(text.replace('i = "0-1"', 'i = "0"'))
    output = tcap("align", "ref.h5", "tgt.h5", "--map", "map.toml", "--by", "none", status=1).output
    assert "3 of 6 reference tensors are mapped" in output
    assert "? 0/model.layers.1.gate_proj/output: nothing is known of a counterpart" in output
    (folder / "map.toml").write_text(text.replace("split 1 2", "split 1 3"))
    error = tcap("align", "ref.h5", "tgt.h5", "--map", "map.toml", "--by", "none", status=2).output
    assert error.startswith("Error: map.toml:")
    assert "gives 3 tensors, the reference has 2" in error


def test_a_file_is_replaced_by_force_alone(folder: Path) -> None:
    (folder / "map.toml").write_text("mine")
    error = tcap("align", "ref.h5", "tgt.h5", "-o", "map.toml", status=2).output
    assert "-o map.toml: is there already; replace it with --force." in error
    assert (folder / "map.toml").read_text() == "mine"
    tcap("align", "ref.h5", "tgt.h5", "-o", "map.toml", "--force")
    assert len(read_mapping(folder / "map.toml").entries) == 2


@pytest.mark.spec("ALN-82")
@pytest.mark.usefixtures("folder")
def test_json_has_the_members_of_the_specification() -> None:
    found = json.loads(tcap("align", "more.h5", "tgt.h5", "--json", status=1).stdout)
    assert (found["format"], found["version"], found["exit_status"]) == ("tensorcap-alignment", 1, 1)
    assert (found["reference"]["records"], found["target"]["records"]) == (7, 4)
    fused = next(entry for entry in found["entries"] if entry["target"] == ["h.{i}.gate_up"])
    assert fused["reference"] == ["model.layers.{i}.gate_proj", "model.layers.{i}.up_proj"]
    assert (fused["variables"], fused["steps"]) == ({"i": ["0", "1"]}, ["split 1 2"])
    assert (fused["evidence"], fused["dims"]) == ("values", "")
    (left,) = found["left_over"]
    assert (left["side"], left["places"], left["is_explained"]) == ("reference", ["model.odd"], False)
    assert found["summary"]["reference"]["unexplained"] == ["0/model.odd/output"]
    assert found["tokens"] == []
    weights = found["weights"]  # of matching, in nats
    assert (weights["proof"], weights["pair_margin"], weights["size_differs"]) == (6.0, 1.0, -6.0)


@pytest.mark.usefixtures("folder")
def test_the_verdict_says_what_of_the_target_is_left_over() -> None:
    lines = tcap("align", "tgt.h5", "more.h5").output.splitlines()
    assert lines[-2] == "Every reference tensor is mapped or explained; 1 of the target is neither."


@pytest.mark.usefixtures("folder")
def test_names_alone_pair_nothing_here() -> None:
    assert tcap("align", "ref.h5", "tgt.h5", "--by", "names", status=1).output.endswith(
        "Nothing is mapped.\nNext, a map to edit: tcap align ref.h5 tgt.h5 -o map.toml\n"
    )


@pytest.mark.spec("ALN-83")
def test_a_map_that_is_begun_is_completed(folder: Path) -> None:
    text = '[[pair]]\nreference = "model.layers.1.down_proj"\ntarget = "h.0.down"\n'
    (folder / "mine.toml").write_text(text)  # a mistake of the user's stands all the same
    found = tcap("align", "ref.h5", "tgt.h5", "--map", "mine.toml", "-o", "map.toml")
    lines = found.output.splitlines()
    assert lines[lines.index("BY USER") + 1] == "  model.layers.1.down_proj = h.0.down"
    assert any(line.startswith("  model.layers.{i}.gate_proj + model.layers.{i}.up_proj") for line in lines)
    assert (
        len([entry for entry in read_mapping(folder / "map.toml").entries if entry.evidence == "user"]) == 1
    )
    output = tcap("align", "ref.h5", "tgt.h5", "--map", "mine.toml", "--by", "none", status=1).output
    assert "1 of 6 reference tensors is mapped" in output
    error = tcap("align", "ref.h5", "tgt.h5", "--by", "none", status=2).output
    assert "--by none computes nothing, expected --map." in error


def test_a_json_is_the_mapping_of_the_equivalence_method(folder: Path) -> None:
    found = tcap("align", "ref.h5", "tgt.h5", "-o", "component_mapping.json")
    content = json.loads((folder / "component_mapping.json").read_text())
    assert [["model.layers.{i}.down_proj"], ["h.{i}.down"]] in content["component_mapping"]
    assert content["variables"] == {"i": ["0", "1"]}
    assert "note: " in found.stderr
    output = tcap("compare", "ref.h5", "tgt.h5", "--map", "component_mapping.json").output
    assert "6 of 6 reference tensors compared: 6 identical" in output


def test_preflight_compares_parameters_through_a_mapping(folder: Path) -> None:
    drawn = np.random.default_rng(4).standard_normal((3, 8, 24)).astype(np.float32)
    for name, sites, last in (("r.h5", ("q", "k"), drawn[2]), ("t.h5", ("a", "b"), drawn[2] + 1)):
        outputs = dict(zip(sites, drawn, strict=False))
        write_archive(folder / name, {**outputs, f"0/{sites[1]}/param.weight": last})
    text = '[[pair]]\nreference = "k"\ntarget = "b"\n[[pair]]\nreference = "q"\ntarget = "a"\n'
    (folder / "map.toml").write_text(text)
    output = tcap("preflight", "r.h5", "t.h5", "--map", "map.toml", status=1).output
    assert "1 of 1 parameters is not the same numbers" in output
    assert "k/param.weight" in output
    assert (
        "parameters" in tcap("preflight", "r.h5", "t.h5", "--map", "none").output.partition("not checked")[2]
    )
