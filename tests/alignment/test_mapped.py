"""A target under the reference's keys: what a mapping makes of its records, and what is refused."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from tensorcap.alignment import (
    Alignment,
    Entry,
    LeftOver,
    MappedArchive,
    map_text,
    parse_values,
    read_mapping,
    resolve,
    values_text,
)
from tensorcap_formats.dtypes import Array
from tensorcap_formats.errors import ReadError, UsageError
from tensorcap_formats.open import open_archive
from tests.support.archives import new_archive

_RNG = np.random.default_rng(0)


def _drawn(*shape: int) -> Array:
    return _RNG.standard_normal(shape).astype(np.float32)


def _mapped(
    tmp_path: Path, alignment: Alignment, one: Mapping[str, Array], other: Mapping[str, Array]
) -> MappedArchive:
    reference, target = new_archive(tmp_path / "ref.h5", one), new_archive(tmp_path / "tgt.h5", other)
    return MappedArchive(reference, target, resolve(alignment, reference, target).links)


@pytest.mark.spec("ALN-1", "ALN-5")
def test_a_fused_tensor_is_taken_apart_under_the_references_keys(tmp_path: Path) -> None:
    q, k, v = _drawn(2, 3, 8), _drawn(2, 3, 4), _drawn(2, 3, 4)
    entry = Entry(("l.{i}.q", "l.{i}.k", "l.{i}.v"), ("h.{i+1}.qkv",), {"i": ("0", "1")}, ("split -1 8,4,4",))
    one = {f"0/l.{i}.{n}/output": a for i in (0, 1) for n, a in (("q", q), ("k", k), ("v", v))}
    fused = np.concatenate([q, k, v], -1)
    found = _mapped(tmp_path, Alignment((entry,)), one, {f"0/h.{i}.qkv/output": fused for i in (1, 2)})
    assert [r.key.text for r in found.records] == [
        f"0/l.{i}.{n}/output" for i in (0, 1) for n in ("q", "k", "v")
    ]
    assert np.array_equal(found.read(found.get("0/l.1.k/output")), k)
    assert np.array_equal(found.read_range(found.get("0/l.0.v/output"), 5, 9), v.reshape(-1)[5:9])
    assert [s.key.text for s in found.sources["0/l.1.v/output"]] == ["0/h.2.qkv/output"]


@pytest.mark.spec("ALN-1")
def test_shards_of_ranks_are_joined(tmp_path: Path) -> None:
    q = _drawn(3, 8)
    other = {"0/q/output": q[:, :4], "rank1/0/q/output": q[:, 4:]}
    entry = Entry(("q_proj",), ("rank*/q",), steps=("concat -1",))
    found = _mapped(tmp_path, Alignment((entry,)), {"0/q_proj/output": q}, other)
    assert np.array_equal(found.read(found.get("0/q_proj/output")), q)


def test_modules_and_points_of_the_target_have_the_references_names(tmp_path: Path) -> None:
    reference = new_archive(tmp_path / "ref.h5", {"0/a/output": _drawn(2)})
    modules = [{"path": p, "class": p.upper() or "Root"} for p in ("", "b", "c")]
    points = [{"site": "b", "status": "captured"}, {"site": "c", "status": "never-called"}]
    run = {"modules": modules, "points": points}
    target = new_archive(tmp_path / "tgt.h5", {"0/b/output": _drawn(2)}, run=run)
    links = resolve(Alignment((Entry(("a",), ("b",)),)), reference, target).links
    info = MappedArchive(reference, target, links).info
    classes = {site: module.class_name for site, module in info.modules.items()}
    assert classes == {"@root": "Root", "a": "B", "c": "C"}
    assert [(point.site, point.status) for point in info.points] == [("a", "captured"), ("c", "never-called")]


def test_a_record_that_is_only_renamed_keeps_its_digest(tmp_path: Path) -> None:
    x = _drawn(4)
    found = _mapped(tmp_path, Alignment((Entry(("a",), ("b",)),)), {"0/a/output": x}, {"0/b/output": x})
    with open_archive(tmp_path / "ref.h5") as reference:
        assert found.get("0/a/output").digest == reference.get("0/a/output").digest
    assert found.is_direct


@pytest.mark.spec("ALN-5")
def test_a_record_under_a_key_that_means_another_is_moved_away(tmp_path: Path) -> None:
    x, y = _drawn(4), _drawn(4)
    one = {"0/l.0/output": x, "0/l.1/output": y}
    other = {"0/l.1/output": x, "0/l.2/output": y, "0/l.0/output": _drawn(4)}  # one layer further on
    entry = Entry(("l.{i}",), ("l.{i+1}",), {"i": ("0", "1")})
    found = _mapped(tmp_path, Alignment((entry,)), one, other)
    assert {r.key.text for r in found.records} == {"0/l.0/output", "0/l.1/output", "0/unmapped:l.0/output"}
    assert np.array_equal(found.read(found.get("0/l.0/output")), x)


@pytest.mark.spec("ALN-3")
def test_arguments_pair_by_name_then_by_shape_and_results_by_being_the_main_one(tmp_path: Path) -> None:
    x, mask, y = _drawn(2, 3), _drawn(2, 2), _drawn(2, 3)
    one = {"0/a/input.hidden_states": x, "0/a/input.mask": mask, "0/a/output.0": y, "0/a/output.1": mask}
    other = {"0/b/input.x": x, "0/b/input.mask": mask, "0/b/output": y}
    found = _mapped(tmp_path, Alignment((Entry(("a",), ("b",)),)), one, other)
    by_key = {text: link[0].key.text for text, link in found.sources.items()}
    assert by_key == {
        "0/a/input.mask": "0/b/input.mask",
        "0/a/input.hidden_states": "0/b/input.x",
        "0/a/output.0": "0/b/output",
    }


@pytest.mark.spec("ALN-3")
def test_two_arguments_of_one_shape_are_not_guessed_at(tmp_path: Path) -> None:
    one = {"0/a/input.u": _drawn(2), "0/a/input.v": _drawn(2), "0/a/output": _drawn(2)}
    other = {"0/b/input.x": _drawn(2), "0/b/input.y": _drawn(2), "0/b/output": _drawn(2)}
    found = _mapped(tmp_path, Alignment((Entry(("a",), ("b",)),)), one, other)
    assert list(found.links) == ["0/a/output"]


@pytest.mark.spec("ALN-4")
@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ([Entry(("x",), ("b",))], "x = b: fits no record of the reference"),
        ([Entry(("a",), ("x",))], "a = x: fits no record of the target"),
        (
            [Entry(("a",), ("b",), where="m.toml:3"), Entry(("a/output",), ("c",), where="m.toml:7")],
            "m.toml:7: a/output = c: 0/a/output is mapped already, at m.toml:3",
        ),
        ([Entry(("a", "d"), ("b",))], r"a \+ d = b: gives 1 tensor, the reference has 2"),
        (
            [Entry(("a", "d"), ("b",), steps=("split 0 3",))],
            "0/b/output: step 'split 0 3': axis 0 has 2 elements, expected a multiple of 3",
        ),
        ([Entry(("a",), ("late",))], "both sides have records there, but none with the same step and call"),
    ],
)
def test_an_entry_that_does_not_fit_is_refused(tmp_path: Path, entries: list[Entry], message: str) -> None:
    one = {"0/a/output": _drawn(2, 2), "0/d/output": _drawn(2, 2)}
    other = {"0/b/output": _drawn(2, 2), "0/c/output": _drawn(2, 2), "1/late/output": _drawn(2, 2)}
    with pytest.raises(UsageError, match=message):
        _mapped(tmp_path, Alignment(tuple(entries)), one, other)


@pytest.mark.spec("ALN-2")
def test_a_map_file_is_written_and_read_back(tmp_path: Path) -> None:
    entry = Entry(
        ("l.{i}.q", "l.{i}.k"),
        ("h.{i}.qk/output",),
        {"i": ("0", "1", "2", "7")},
        ('rearrange "b s (h d) -> b h s d" h=4', "split 1 2"),
        "rule",
        'says "so"',
    )
    alignment = Alignment(
        (entry, Entry(("n",), ("m",))),
        (LeftOver("target", ("kv",), "a cache"), LeftOver("reference", ("odd",), "could be n", False)),
    )
    text = map_text(alignment, title="made by a test")
    assert text == (
        "# made by a test\n\n"
        "[[pair]]\n"
        'reference = ["l.{i}.q", "l.{i}.k"]\n'
        'target = "h.{i}.qk/output"\n'
        'i = "0-2,7"\n'
        """steps = ['rearrange "b s (h d) -> b h s d" h=4', "split 1 2"]\n"""
        'evidence = "rule"\n'
        """reason = 'says "so"'\n"""
        "\n"
        "[[pair]]\n"
        'reference = "n"\n'
        'target = "m"\n'
        'evidence = "user"\n'
        "\n"
        "[[left_over]]\n"
        'side = "target"\n'
        'sites = ["kv"]\n'
        'reason = "a cache"\n'
        "\n"
        "[[left_over]]\n"
        'side = "reference"\n'
        'sites = ["odd"]\n'
        'reason = "could be n"\n'
        "explained = false\n"
    )
    path = tmp_path / "map.toml"
    path.write_text(text)
    read = read_mapping(path)
    assert map_text(read, title="made by a test") == text
    assert [e.where for e in read.entries] == [f"{path}:3", f"{path}:11"]
    assert [left.is_explained for left in read.left_over] == [True, False]


@pytest.mark.spec("ALN-2")
def test_a_map_file_holds_any_text(tmp_path: Path) -> None:
    texts = ("a\x7fb", "a\nb", "a\tb", "a \"b\" 'c'", "\\", "é", "")
    entries = tuple(Entry(("a",), ("b",), reason=text) for text in texts)
    path = tmp_path / "map.toml"
    path.write_text(map_text(Alignment(entries), title="two lines\n\nand an empty one"), encoding="utf-8")
    assert path.read_text(encoding="utf-8").startswith("# two lines\n#\n# and an empty one\n\n[[pair]]\n")
    assert tuple(entry.reason for entry in read_mapping(path).entries) == texts


def _pair(reference: str, target: str, **further: str) -> str:
    lines = {"reference": reference, "target": target, **further}
    return "[[pair]]\n" + "".join(f'{name} = "{value}"\n' for name, value in lines.items())


@pytest.mark.spec("ALN-2")
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[[pair]\n", "is no TOML"),
        ("", r"has no \[\[pair\]\]"),
        ('[[pairs]]\nreference = "a"\n', "has a table 'pairs', expected"),
        ('\n[[pair]]\nreference = "a"\n', "map.toml:2: target: found nothing, expected a text or a list"),
        ('[[pair]]\nreference = "a"\ntarget = 3\n', "map.toml:1: target: found 3"),
        (_pair("a.{i}", "b"), "map.toml:1: a.{i} = b: variable 'i' has no values"),
        (_pair("a", "b", j="0-2"), "variable 'j' has values, and no place uses it"),
        (_pair("a.{i}", "b", i="3-1"), "map.toml:1: i: .* ends before it begins"),
        (_pair("a", "b", steps="slize 1"), "map.toml:1: a = b: step 'slize 1': is unknown"),
        (_pair("a", "b", evidence="luck"), "evidence 'luck', expected one of"),
        ('[[left_over]]\nside = "both"\nsites = "a"\n', "side 'both', expected 'reference' or 'target'"),
        (
            '[[left_over]]\nside = "target"\nsites = "a"\nexplained = "no"\n',
            "map.toml:1: explained: found 'no', expected true or false",
        ),
    ],
)
def test_a_map_file_that_makes_no_sense_is_refused_with_its_line(
    tmp_path: Path, text: str, message: str
) -> None:
    path = tmp_path / "map.toml"
    path.write_text(text)
    with pytest.raises((UsageError, ReadError), match=message):
        read_mapping(path)


@pytest.mark.parametrize("text", ["0", "0-31", "3,7,11", "0-2,7,q,9-10", "up,down"])
def test_values_are_written_as_they_were_read(text: str) -> None:
    assert values_text(parse_values(text)) == text


@pytest.mark.spec("ALN-3")
def test_steps_that_move_elements_are_of_main_results_only(tmp_path: Path) -> None:
    x, y = _drawn(3, 8), _drawn(3, 8)
    entry = Entry(("q_proj",), ("q",), steps=("flip -1",))
    target = {"0/q/input.x": x, "0/q/output": y[:, ::-1]}
    found = _mapped(tmp_path, Alignment((entry,)), {"0/q_proj/input.x": x, "0/q_proj/output": y}, target)
    assert [
        (r.key.text, np.array_equal(found.read(r), a)) for r, a in zip(found.records, (x, y), strict=True)
    ] == [
        ("0/q/input.x", True),
        ("0/q_proj/output", True),
    ]


@pytest.mark.spec("ALN-3")
def test_steps_that_move_none_are_of_all_that_they_fit(tmp_path: Path) -> None:
    x, y, mask = _drawn(1, 3, 8), _drawn(1, 3, 8), _drawn(3, 3)
    entry = Entry(("q_proj",), ("q",), steps=("unsqueeze 0",))
    target = {"0/q/input.x": x[0], "0/q/input.mask": mask, "0/q/output": y[0]}
    one = {"0/q_proj/input.x": x, "0/q_proj/input.mask": mask, "0/q_proj/output": y}
    found = _mapped(tmp_path, Alignment((entry,)), one, target)
    assert {r.key.text: r.shape for r in found.records} == {
        "0/q_proj/input.x": (1, 3, 8),
        "0/q/input.mask": (3, 3),
        "0/q_proj/output": (1, 3, 8),
    }
