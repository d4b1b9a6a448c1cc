"""`component_mapping.json`: read as a mapping, and written from one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tensorcap.alignment import (
    Alignment,
    Entry,
    LeftOver,
    component_mapping,
    read_mapping,
    write_component_mapping,
)
from tensorcap.alignment.tokens import TokenRule
from tensorcap_formats.errors import ReadError, TensorcapError, UsageError, WriteError

_EXAMPLE: dict[str, Any] = {
    "mapping_size": 3,
    "component_mapping": [
        [["model.norm"], ["norm"]],
        [["model.layers.{i}.q", "model.layers.{i}.k"], ["layers.{i}.qk"]],
        [["model.layers.{j}.experts.{e}"], ["layers.{j}.moe.{e}"]],
    ],
    "variables": {"i": ["0", "1"], "j": ["1"], "e": ["0", "3"]},
    "reasoning": {
        "HF": {"model.norm": "the last norm", "model.rotary": "one for all layers"},
        "vLLM": {"layers.{i}.qk": "fused", "layers.{i}.kv_mgr": "its own cache"},
    },
}


def _write(folder: Path, content: object) -> Path:
    path = folder / "map.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


@pytest.mark.spec("ALN-63")
def test_entries_variables_and_reasons_are_read(tmp_path: Path) -> None:
    found = read_mapping(_write(tmp_path, _EXAMPLE))
    assert [e.reference for e in found.entries] == [
        ("model.norm",),
        ("model.layers.{i}.q", "model.layers.{i}.k"),
        ("model.layers.{j}.experts.{e}",),
    ]
    assert list(found.entries[2].expanded()) == [
        (("model.layers.1.experts.0",), ("layers.1.moe.0",)),
        (("model.layers.1.experts.3",), ("layers.1.moe.3",)),
    ]
    assert found.entries[0].reason == "the last norm"
    assert found.entries[1].reason == "target layers.{i}.qk: fused"
    assert found.left_over == (
        LeftOver("reference", ("model.rotary",), "one for all layers"),
        LeftOver("target", ("layers.0.kv_mgr", "layers.1.kv_mgr"), "its own cache"),
    )


@pytest.mark.spec("ALN-63")
@pytest.mark.parametrize(
    ("first", "second", "is_turned"),
    [
        pytest.param("ref", "port", False, id="ref-port"),
        pytest.param("port", "ref", True, id="port-ref"),
        pytest.param("HF", "vLLM", False, id="HF-vLLM"),
        pytest.param("vLLM", "HF", True, id="vLLM-HF"),
        pytest.param("a", "b", False, id="any-two"),
    ],
)
def test_sides_may_have_any_two_names(tmp_path: Path, first: str, second: str, is_turned: bool) -> None:
    path = _write(tmp_path, {"component_mapping": [{first: ["x"], second: ["y"]}]})
    (entry,) = read_mapping(path).entries
    assert (entry.reference, entry.target) == ((("y",), ("x",)) if is_turned else (("x",), ("y",)))


def test_reasons_of_pairs_of_lists_are_of_the_side_that_they_name(tmp_path: Path) -> None:
    for names, side in (("port", "target"), ("ref", "reference")):
        path = _write(tmp_path, {"component_mapping": [[["x"], ["y"]]], "reasoning": {names: {"z": "why"}}})
        assert read_mapping(path).left_over == (LeftOver(side, ("z",), "why"),)  # type: ignore[arg-type]  # a literal


@pytest.mark.spec("ALN-63")
def test_toml_is_told_from_json_by_content(tmp_path: Path) -> None:
    path = tmp_path / "map.json"
    path.write_text('[[pair]]\nreference = "x"\ntarget = "y"\n')
    assert read_mapping(path).entries[0].reference == ("x",)


@pytest.mark.spec("ALN-63")
@pytest.mark.parametrize(
    ("change", "message"),
    [
        pytest.param({"mapping_size": 4}, "mapping_size: found 4, expected 3", id="cut"),
        pytest.param(
            {"variables": {"i": ["0"], "j": ["1"]}}, "entry 3: variable 'e' has no values", id="no-values"
        ),
        pytest.param(
            {"mapping_size": 1, "component_mapping": [["a", "b", "c"]]}, "entry 1: found", id="three-sides"
        ),
        pytest.param(
            {"mapping_size": 1, "component_mapping": [[[], ["b"]]]}, "entry 1: found [], expected", id="empty"
        ),
        pytest.param({"component_mapping": {}}, "component_mapping: found {}, expected a list", id="no-list"),
        pytest.param({"variables": {"i": ["0", "0"]}}, "variable 'i': found", id="twice"),
        pytest.param({"reasoning": {"HF": {"x": 1}, "v": {}}}, "'x': found 1, expected a text", id="reason"),
        pytest.param({"reasoning": {"a": {}, "b": {}, "c": {}}}, "reasoning: found", id="three-reasons"),
        pytest.param({"tensorcap": {"4": {}}}, "expected numbers of entries, 1 to 3", id="extra"),
        pytest.param({"tensorcap": {"2": {"steps": ["flyp 0"]}}}, "entry 2: ", id="step"),
        pytest.param({"componnt": 1}, "has 'componnt', expected mapping_size", id="unknown"),
    ],
)
def test_what_is_wrong_is_one_line_with_the_place(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    path = _write(tmp_path, {**_EXAMPLE, **change})
    with pytest.raises(UsageError) as caught:
        read_mapping(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "text",
    [
        pytest.param("{", id="cut"),
        pytest.param('{"a": 1, "a": 2}', id="twin"),
        pytest.param('{"a":' * 100_000, id="deep"),
    ],
)
def test_damaged_files_are_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(TensorcapError, match=r"map\.json"):
        read_mapping(_write(tmp_path, text))
    with pytest.raises(ReadError, match="cannot be read"):
        read_mapping(tmp_path / "none.json")


@pytest.mark.spec("ALN-64")
def test_all_that_the_format_has_comes_back(tmp_path: Path) -> None:
    found = read_mapping(_write(tmp_path, _EXAMPLE))
    made = component_mapping(found, reference="HF", target="vLLM")
    assert made.content == _EXAMPLE
    assert made.remarks == ()


@pytest.mark.spec("ALN-64")
def test_what_the_format_lacks_is_kept_apart_and_told(tmp_path: Path) -> None:
    entries = (
        Entry(("q.{i}", "k.{i}"), ("qk.{i}",), {"i": ("0", "1")}, ("split -1 4,2",), "values", "by hand"),
        Entry(("h.{i}",), ("g.{i}",), {"i": ("0", "1", "2")}),
        Entry(("h.{i+1}",), ("out.{i}",), {"i": ("0", "1")}),
        Entry(("w",), ("rank*/w/output",), dims="b (h[tp])"),
    )
    path = tmp_path / "out.json"
    told = write_component_mapping(Alignment(entries), path, reference="a", target="b")
    assert [text.split()[0] for text in told] == ["steps", "an", "ranks"]
    content = json.loads(path.read_text())
    assert content["mapping_size"] == 5
    assert content["variables"] == {"i": ["0", "1"], "i_2": ["0", "1", "2"]}
    assert content["component_mapping"][1:4] == [
        [["h.{i_2}"], ["g.{i_2}"]],
        [["h.1"], ["out.0"]],
        [["h.2"], ["out.1"]],
    ]
    back = read_mapping(path).entries
    assert (back[0].steps, back[0].evidence, back[0].reason) == (("split -1 4,2",), "values", "by hand")
    assert (back[4].target, back[4].dims) == (("rank*/w/output",), "b (h[tp])")
    with pytest.raises(WriteError, match="is there already"):
        write_component_mapping(Alignment(entries), path)


@pytest.mark.spec("ALN-64")
def test_equal_names_of_sides_and_rules_for_tokens_are_refused() -> None:
    whole = Alignment((Entry(("a",), ("b",)),))
    with pytest.raises(UsageError, match="both sides are named 'x'"):
        component_mapping(whole, reference="x", target="x")
    with pytest.raises(UsageError, match="no place for"):
        component_mapping(Alignment(whole.entries, (), TokenRule("match_tokens", "", {}, {})))
