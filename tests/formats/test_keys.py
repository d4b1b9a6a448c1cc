"""Keys: canonical text, escaping, natural order, globs."""

from __future__ import annotations

import random

import pytest

from tensorcap_formats.errors import UsageError
from tensorcap_formats.keys import (
    Key,
    escape,
    escape_bare,
    inner_site,
    matches,
    module_of,
    module_site,
    natural,
    unescape,
)


@pytest.mark.spec("NAM-1", "NAM-3")
@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("0/model.layers.2.mlp/output", Key("model.layers.2.mlp", "output")),
        ("1/act@2/input.0", Key("act", "input.0", step=1, call=2)),
        ("rank3/0/@root/output.logits", Key("@root", "output.logits", rank=3)),
        ("rank3/7/@root@4/output", Key("@root", "output", step=7, call=4, rank=3)),
        ("999999999999999999/a/b", Key("a", "b", step=999999999999999999)),
        ("0/größe/字", Key("größe", "字")),
        ("0/a%2Fb/..c", Key("a%2Fb", "..c")),
        ("0/mlp:aten.mm.default@1/output", Key("mlp:aten.mm.default", "output", call=1)),
        ("0/@root:generate/scores", Key("@root:generate", "scores")),
        ("0/a%3Ab:c:d/output", Key("a%3Ab:c:d", "output")),
    ],
)
def test_a_full_key_is_read_into_its_parts_and_written_back(text: str, key: Key) -> None:
    assert Key.parse(text) == key
    assert key.text == text
    assert not key.is_bare


@pytest.mark.spec("NAM-5")
@pytest.mark.parametrize(
    "text",
    [
        "weight",
        "encoder/layer.0/weight",
        "a@b",
        "0/a@b/output",
        "1000000000000000000/a/b",
        "rank1/a/b",
        "/abs",
        "0/a",
        "0/a/b/c",
        "x//y",
    ],
)
def test_any_other_text_is_a_bare_key(text: str) -> None:
    key = Key.parse(text)
    assert (key.text, key.is_bare, key.step, key.call, key.rank) == (text, True, 0, 0, 0)


@pytest.mark.spec("NAM-3")
@pytest.mark.parametrize(
    ("text", "canonical"),
    [("rank0/0/a/output", "0/a/output"), ("0/a@0/output", "0/a/output")],
)
def test_another_spelling_of_the_same_parts_is_refused(text: str, canonical: str) -> None:
    with pytest.raises(UsageError, match=rf"not canonical, expected '{canonical}' \(NAM-3\)"):
        Key.parse(text)


@pytest.mark.spec("NAM-3")
@pytest.mark.parametrize("text", ["00/a/output", "01/a/output", "0/a@01/output", "rank01/0/a/output"])
def test_a_number_with_leading_zeros_makes_no_full_key(text: str) -> None:
    assert Key.parse(text).is_bare


@pytest.mark.spec("NAM-4")
@pytest.mark.parametrize(
    ("name", "escaped"),
    [
        ("model.layers.2.mlp", "model.layers.2.mlp"),
        ("a/b c", "a%2Fb%20c"),
        (".", "%2E"),
        ("..", "%2E%2E"),
        ("...", "..."),
        ("@root", "%40root"),
        ("h[0]", "h%5B0%5D"),
        ("größe", "größe"),
        ("a\0b\n", "a%00b%0A"),
        ("100%", "100%25"),
        ("%41", "%2541"),
        ("€", "%E2%82%AC"),
        ("\ud800", "%ED%A0%80"),
        ("a,b:c+d=e-f_g", "a,b:c+d=e-f_g"),
        ("*?$`'\"\\;&|<>(){}~#!", "".join(f"%{ord(c):02X}" for c in "*?$`'\"\\;&|<>(){}~#!")),
    ],
)
def test_a_name_of_any_characters_is_escaped_and_comes_back(name: str, escaped: str) -> None:
    assert escape(name) == escaped
    assert unescape(escaped) == name


@pytest.mark.spec("NAM-4")
def test_every_random_name_comes_back_through_a_key() -> None:
    r = random.Random(0)
    for _ in range(2000):
        name = "".join(
            chr(r.choice([r.randrange(128), r.randrange(0x3000)])) for _ in range(r.randrange(1, 9))
        )
        key = Key(escape(name), escape(name), step=r.randrange(3), call=r.randrange(3), rank=r.randrange(3))
        assert Key.parse(key.text) == key
        assert unescape(key.site) == unescape(key.slot) == name
        assert unescape(Key.parse(escape_bare(name)).site) == name or "/" in name


@pytest.mark.spec("NAM-4")
@pytest.mark.parametrize("name", [".", ".."])
def test_a_field_that_is_called_as_a_folder_is_escaped_as_a_name_of_its_own(name: str) -> None:
    key = Key("a", f"output.{escape(name)}.b")
    assert key.text == f"0/a/output.{'%2E' * len(name)}.b"
    assert Key.parse(key.text) == key


@pytest.mark.spec("NAM-4")
@pytest.mark.parametrize(
    "text",
    [
        "0/a/..",
        "0/a/.",
        "0/a/output.%2Eb",
        "0/a/output.%2E%2E%2E",
        "0/%41/output",
        "0/a/%41",
        "0/../output",
        "0/./output",
        "0/a b/output",
        "0/a/b*",
        "0/a%2/x",
        "0/%2f/x",
        "0/%FF/x",
        "0/%/x",
    ],
)
def test_a_full_key_with_too_much_or_too_little_escaped_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match=r"\(NAM-4\)"):
        Key.parse(text)


@pytest.mark.spec("NAM-4")
@pytest.mark.parametrize("text", ["a b", "../evil", "a/../b", "a\0b", "tab\t", "%41", "[", "*"])
def test_a_bare_key_with_too_much_or_too_little_escaped_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match=r"must escape \(NAM-4\)"):
        Key.parse(text)


@pytest.mark.spec("NAM-6")
def test_a_key_has_at_most_4096_bytes() -> None:
    assert Key.parse("é" * 2048).site == "é" * 2048
    for text in ("é" * 2048 + "a", "", "x" * 65536):
        with pytest.raises(UsageError, match=r"expected 1 to 4096 \(NAM-6\)") as caught:
            Key.parse(text)
        assert len(str(caught.value)) < 300


@pytest.mark.spec("ARC-20")
@pytest.mark.parametrize(
    ("text", "path"),
    [
        ("0/model.layers.2.mlp/output", "steps/0/model.layers.2.mlp/output"),
        ("rank2/1/act@3/input.0", "ranks/2/steps/1/act@3/input.0"),
        ("encoder/layer.0/weight", "tensors/encoder%2Flayer.0%2Fweight"),
        ("weight", "tensors/weight"),
    ],
)
def test_the_path_in_a_container_follows_from_the_key(text: str, path: str) -> None:
    assert Key.parse(text).path == path


@pytest.mark.parametrize(
    ("text", "where"), [("0/act@2/input.0", "0/act@2"), ("rank1/0/a/output", "rank1/0/a"), ("a/b", "a/b")]
)
def test_where_is_the_call_that_a_tensor_belongs_to(text: str, where: str) -> None:
    assert Key.parse(text).where == where


@pytest.mark.spec("NAM-7")
def test_natural_order_counts() -> None:
    ordered = ["", "1", "a", "a.1", "a.01", "a.2", "a.10", "a.10.b", "a.b", "b", "layers.2", "layers.10"]
    mixed = random.Random(1).sample(ordered, len(ordered))
    assert sorted(mixed, key=natural) == [*ordered[:3], "a.01", "a.1", *ordered[5:]]


@pytest.mark.spec("NAM-8")
@pytest.mark.parametrize(
    ("text", "pattern", "expected"),
    [
        ("0/model.layers.2.mlp/output", "*.mlp", True),
        ("0/model.layers.2.mlp/output", "model.layers.?.mlp", True),
        ("0/model.layers.12.mlp/output", "model.layers.?.mlp", False),
        ("0/model.layers.2.mlp/output", "model.layers.[13].mlp", False),
        ("0/model.layers.2.mlp/output", "output", False),
        ("0/model.layers.2.mlp/output", "*/output", True),
        ("0/model.layers.2.mlp/output", "0/*.mlp/*", True),
        ("0/model.layers.2.mlp/output", "0/*/input*", False),
        ("0/model.layers.2.mlp/output", "1/*", False),
        ("0/act@2/output", "act", True),
        ("rank1/0/act/output", "act", True),
        ("rank1/0/act/output", "0/act/output", False),
        ("0/Act/output", "act", False),
        ("encoder/weight", "*weight", True),
        ("encoder/weight", "weight", False),
        ("weight", "w*t", True),
    ],
)
def test_a_glob_is_held_against_the_site_or_the_whole_key(text: str, pattern: str, expected: bool) -> None:
    assert matches(text, pattern) is expected


@pytest.mark.spec("NAM-4", "NAM-9")
@pytest.mark.parametrize(
    ("module", "point", "site"),
    [
        ("model.layers.2.mlp", "aten.mm.default", "model.layers.2.mlp:aten.mm.default"),
        ("", "generate", "@root:generate"),
        ("a:b", "f/g", "a%3Ab:f%2Fg"),
    ],
)
def test_the_first_colon_of_a_site_parts_the_module_from_a_place_within(
    module: str, point: str, site: str
) -> None:
    assert inner_site(module_site(module), point) == site
    assert module_of(site) == module_site(module)
    assert Key.parse(f"0/{site}/x").site == site


@pytest.mark.spec("NAM-4")
@pytest.mark.parametrize("site", ["@root%3Ab", "a:b%3A", "a%2fb:c"])
def test_a_site_that_is_escaped_otherwise_is_refused(site: str) -> None:
    with pytest.raises(UsageError, match="NAM-4"):
        Key.parse(f"0/{site}/x")
