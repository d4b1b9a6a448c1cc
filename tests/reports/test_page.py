"""The report page: what it says, by archives of numpy arrays, without a browser."""

from __future__ import annotations

import base64
import hashlib
import re
import struct
import zlib
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tensorcap.drawing import Point, draw_curves, draw_heat_map, quantile_pairs
from tensorcap.reports.html import Page, gather_page, html_of, markdown_of, source_of
from tensorcap.reports.html.panels import draw_tensors
from tests.support.archives import write_archive

GENERATOR = np.random.default_rng(7)
X = GENERATOR.standard_normal((4, 16)).astype(np.float32)


def page_of(folder: Path, ours: dict[str, Any], theirs: dict[str, Any], **options: Any) -> Page:
    reference = write_archive(folder / "ref.h5", ours, **options)
    target = write_archive(folder / "tgt.h5", theirs, **options)
    with source_of(reference, target) as source:
        return gather_page(source)


def layers(*wrong: int, count: int = 3) -> dict[str, Any]:
    """A chain of layers; of wrong ones the result is doubled."""
    tensors: dict[str, Any] = {"0/@root/input.x": X}
    for number in range(count):
        tensors[f"0/layers.{number}.fc/input.x"] = X + number
        tensors[f"0/layers.{number}.fc/output"] = (X * (number + 2)) * (2 if number in wrong else 1)
    return tensors


class Reader(HTMLParser):
    """Tags, attributes and text of a page, as a browser sees them."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data


def pixels(url: str) -> list[list[tuple[int, ...]]]:
    """The colours of a palette PNG, decoded by hand."""
    data = base64.b64decode(url.removeprefix("data:image/png;base64,"))
    chunks, at = {}, 8
    while at < len(data):
        (size,) = struct.unpack(">I", data[at : at + 4])
        chunks[data[at + 4 : at + 8]] = data[at + 8 : at + 8 + size]
        at += size + 12
    width, height = struct.unpack(">II", chunks[b"IHDR"][:8])
    raw, palette = zlib.decompress(chunks[b"IDAT"]), chunks[b"PLTE"]
    lines = [raw[row * (width + 1) + 1 : (row + 1) * (width + 1)] for row in range(height)]
    return [[tuple(palette[3 * i : 3 * i + 3]) for i in line] for line in lines]


@pytest.mark.spec("RPT-10", "RPT-11")
def test_the_first_screen_has_the_verdict_its_denominator_and_what_to_do(tmp_path: Path) -> None:
    page = page_of(tmp_path, layers(), layers(1))
    assert "7 of 7 tensors compared, 1 not green" in page.verdict
    assert page.culprit.startswith("layers.1.fc is suspected: ")
    assert "2" in page.suspects[0].mistake  # twice the reference
    paths = f"{tmp_path}/ref.h5 {tmp_path}/tgt.h5"
    assert page.next.command == f"tcap localize {paths} --reference-model FILE.py:FUNCTION"
    text = Reader(html_of(page)).text
    assert text.index(page.verdict) < text.index(page.culprit) < text.index(page.next.command)
    assert text.index(page.next.command) < text.index("Is the comparison fair?")


@pytest.mark.spec("RPT-10", "RPT-11")
def test_a_green_report_says_so_and_has_nothing_to_do(tmp_path: Path) -> None:
    page = page_of(tmp_path, layers(), layers())
    assert page.is_green
    assert "7 of 7 tensors compared" in page.verdict
    assert (page.culprit, page.next.command, page.suspects, page.panels) == ("", "", (), ())
    assert "Suspects" not in Reader(html_of(page)).text


@pytest.mark.spec("RPT-12")
def test_runs_stand_side_by_side_with_differences_marked(tmp_path: Path) -> None:
    runs = [
        {"dtype": name, "compute_dtype": name, "packages": {"torch": version}}
        for name, version in (("float32", "2.9"), ("bfloat16", "2.8"))
    ]
    paths = [
        write_archive(tmp_path / name, layers(), run=run)
        for name, run in zip(("a.h5", "b.h5"), runs, strict=True)
    ]
    with source_of(*paths) as source:
        page = gather_page(source)
    facts = {fact.name: fact for fact in page.facts}
    assert (facts["computed in"].reference, facts["computed in"].target) == ("float32", "bfloat16")
    assert facts["computed in"].differs
    assert not facts["run ended"].differs
    assert ("2.9", "2.8") in {(fact.reference, fact.target) for fact in page.facts if fact.differs}


@pytest.mark.spec("RPT-13")
def test_one_mistake_in_several_layers_is_one_card(tmp_path: Path) -> None:
    page = page_of(tmp_path, layers(count=5), layers(1, 2, 3, count=5))
    assert [card.name for card in page.suspects] == ["layers.{1-3}.fc"]
    assert page.suspects[0].modules == ("layers.1.fc", "layers.2.fc", "layers.3.fc")


@pytest.mark.spec("RPT-14")
def test_curves_have_own_errors_if_they_are_known() -> None:
    points = [
        Point("layers.0.fc", 0.0, 0.0, 0.0, True),
        Point("layers.0.act", 0.1, 0.0, 0.1, False),
        Point("layers.1.fc", float("inf"), 0.1, 0.001, False),
    ]
    total, own = draw_curves(points)
    assert {dots.component for dots in total.dots} == {"fc", "act"}
    assert total.line
    assert own.line == ""
    heights = [int(y) for dots in total.dots for y in re.findall(r",(\d+)h0", dots.path)]
    assert sorted(heights)[0] < 10  # what is not finite, on top
    assert sorted(heights)[-1] > 185  # no error, at the foot
    (alone,) = draw_curves([Point("fc", 0.5, None, None, False)])
    assert alone.line == ""
    assert draw_curves([Point("fc", None, None, None, True)]) == ()


@pytest.mark.spec("RPT-15")
def test_the_heat_map_has_the_largest_error_of_each_component_in_each_layer() -> None:
    points = [
        Point("h.0.fc", 1e-6, None, None, True),
        Point("h.0.fc", 1e-2, None, None, False),  # a second call
        Point("h.1.act", 0.0, None, None, True),
        Point("norm", 0.5, None, None, False),
    ]
    drawn = draw_heat_map(points)
    assert drawn is not None
    assert drawn.columns == ("fc", "act")
    (first, (fc, no_act)), (second, (no_fc, act)) = drawn.rows
    assert (first, second, no_act, no_fc) == ("h.0", "h.1", None, None)
    assert fc is not None
    assert act is not None
    assert (fc.error, fc.is_green, act.error, act.level) == (1e-2, False, 0.0, 0)
    assert fc.level > 5
    assert draw_heat_map(points[-1:]) is None


@pytest.mark.spec("RPT-16")
def test_keys_of_one_tensor_share_a_row(tmp_path: Path) -> None:
    ours = {"0/a/output": X, "0/b/input.x": X, "0/b/output": X + 1}
    page = page_of(tmp_path, ours, ours)
    assert [(row.key, row.also) for row in page.rows] == [("0/a/output", 1), ("0/b/output", 0)]


@pytest.mark.spec("RPT-17")
def test_quantiles_of_both_sides_stand_on_one_scale() -> None:
    values = np.arange(97.0)
    ours, theirs = quantile_pairs(values, values[::-1] * 3) or ([], [])
    assert list(ours[:3]) == [0, 2, 4]  # 48 steps over 97 values, whatever their order
    assert list(theirs) == [3 * value for value in ours]
    assert quantile_pairs(values, np.full(97, np.nan)) is None
    picture = draw_tensors(values.reshape(1, 97), values.reshape(1, 97) / 2).quantiles
    assert picture is not None
    assert (picture.low, picture.high) == (0, 96)
    points = [tuple(map(float, point.split(","))) for point in picture.points.split()]
    assert (points[0], points[-1]) == ((0, 48), (48, 24))  # the target ends half way up


@pytest.mark.spec("RPT-17")
def test_one_wrong_element_among_a_million_is_on_all_three_maps() -> None:
    reference = np.zeros((1000, 1000))
    reference[0, 0] = 8.0
    target = reference.copy()
    target[517, 902] = 4.0
    pictures = draw_tensors(reference, target)
    assert pictures.cell == (21, 21)
    cell = 517 // 21, 902 // 21
    ours, difference, theirs = (pixels(one.picture) for one in pictures.maps)
    others = [(r, c) for r in range(48) for c in range(48) if (r, c) not in (cell, (0, 0))]
    for picture in (difference, theirs):
        assert picture[cell[0]][cell[1]] not in {picture[r][c] for r, c in others}
    assert ours[cell[0]][cell[1]] == ours[1][1]
    assert difference[cell[0]][cell[1]] == (0x7F, 0, 0)  # the darkest
    assert [(axis.worst, axis.share) for axis in pictures.axes] == [(517, 1.0), (902, 1.0)]
    assert [(one.low, one.high) for one in pictures.maps] == [(0, 8), (0, 4), (0, 8)]


@pytest.mark.spec("RPT-17")
def test_values_that_are_not_finite_are_magenta() -> None:
    target = np.array([[1.0, np.nan], [np.inf, -1e308]])
    pictures = draw_tensors(np.array([[1.0, 2.0], [np.inf, 1e308]]), target)
    _, difference, theirs = (pixels(one.picture) for one in pictures.maps)
    magenta = (255, 0, 255)
    assert [colour == magenta for row in theirs for colour in row] == [False, True, True, False]
    assert [colour == magenta for row in difference for colour in row] == [False, True, False, True]


@pytest.mark.spec("RPT-17")
def test_a_wrong_phase_is_a_difference() -> None:
    pictures = draw_tensors(np.array([3 + 4j, 1j]), np.array([3 - 4j, 1j]))
    assert [(one.low, one.high) for one in pictures.maps] == [(1, 5), (0, 8), (1, 5)]


@pytest.mark.spec("RPT-3")
def test_the_page_loads_nothing_and_allows_its_own_script_alone(tmp_path: Path) -> None:
    text = html_of(page_of(tmp_path, layers(), layers(1)))
    tags = Reader(text).tags
    (policy,) = [a["content"] for tag, a in tags if a.get("http-equiv") == "Content-Security-Policy"]
    script = text.partition("<script>")[2].partition("</script>")[0]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert policy is not None
    assert "default-src 'none'" in policy
    assert f"script-src 'sha256-{digest}'" in policy
    links = [a[name] for _, a in tags for name in ("src", "href") if name in a]
    assert all(link is not None and link.startswith(("data:image/png", "#")) for link in links)
    assert re.search("https?:", text) is None
    assert [tag for tag, attributes in tags if any(name.startswith("on") for name in attributes)] == []
    (filters,) = [attributes for tag, attributes in tags if attributes.get("id") == "filters"]
    assert "hidden" in filters  # until the script runs; the table is not
    for row in ("0/layers.0.fc/output", "0/layers.2.fc/output"):
        assert row in Reader(text).text


@pytest.mark.spec("RPT-16")
def test_what_the_reference_could_not_capture_has_a_row_without_a_shape(tmp_path: Path) -> None:
    lost = {"site": "layers.0.act", "status": "not-capturable", "calls": 1, "reason": "a nested tensor"}
    page = page_of(tmp_path, layers(), layers(), run={"points": [lost]})
    (row,) = [row for row in page.rows if row.status == "not-capturable"]
    assert (row.key, row.component, row.order, row.shape) == ("0/layers.0.act/output", "act", None, "")
    assert row.reason == "in the reference: a nested tensor"
    assert "0/layers.0.act/output" in Reader(html_of(page)).text


@pytest.mark.spec("RPT-20", "RPT-30")
@pytest.mark.parametrize(
    "name",
    [
        pytest.param("<script>alert(1)</script>", id="markup"),
        pytest.param('"><img src=x onerror=alert(1)>', id="attribute"),
        pytest.param("a\x1b[2J\x00b", id="control"),
        pytest.param("\u202eevil\u2066", id="direction"),
        pytest.param("מודל", id="right-to-left"),
        pytest.param("x" * 2000, id="long"),
        pytest.param("@team [a](http://b) | `c`", id="markdown"),
        pytest.param("]]>{{ 7*7 }}", id="template"),
    ],
)
def test_no_name_is_more_than_text(tmp_path: Path, name: str) -> None:
    run = {"model": {"class": name}, "error": {"type": name, "message": name}}
    tensors = {"0/a/output": X}
    paths = [write_archive(tmp_path / f"{i}.h5", tensors, run=run) for i in range(2)]
    with source_of(*paths) as source:
        page = gather_page(source)
    text = html_of(page)
    plain = Reader(html_of(page_of(tmp_path, tensors, tensors)))
    tags = {tag for tag, _ in Reader(text).tags}
    assert tags <= {tag for tag, _ in plain.tags} | {"section", "ul", "li", "h2", "small", "b", "tr", "td"}
    assert "49" not in re.findall(r"]]&gt;[^<]*", text)
    assert not any(c for c in text if not c.isprintable() and c != "\n")
    assert max(map(len, re.findall(r"x+", text)), default=0) <= 161
    markdown = markdown_of(page)
    assert "](http" not in markdown
    assert "@team" not in markdown
    assert re.search(r"(?<!\\)[<`|]", markdown.removeprefix("<!-- tensorcap report -->")) is None


@pytest.mark.spec("RPT-21")
def test_panels_say_why_there_are_no_pictures(tmp_path: Path) -> None:
    page = page_of(tmp_path, layers(), layers(1), stats_only=True)
    assert page.panels + tuple(card.panel for card in page.suspects if card.panel)
    for panel in page.panels:
        assert (
            panel.pictures.missing == "Only statistics were kept of the reference and the target, no values."
        )
    html_of(page)
    other = page_of(tmp_path, {"0/a/output": X, "0/b/output": X}, {"0/a/output": X[:2], "0/c/output": X})
    missing = [panel.pictures.missing for panel in other.panels]
    missing += [card.panel.pictures.missing for card in other.suspects if card.panel]
    assert "Values of unlike shapes, [4, 16] and [2, 16], are not drawn." in missing
    assert "0/b/output" in Reader(html_of(other)).text


@pytest.mark.spec("RPT-21")
def test_values_that_are_nan_everywhere_do_not_break_a_page(tmp_path: Path) -> None:
    nothing = np.full((3, 5), np.nan, np.float32)
    page = page_of(tmp_path, {"0/a/output": X[:3, :5]}, {"0/a/output": nothing})
    assert not page.is_green
    assert "not finite" in Reader(html_of(page)).text


@pytest.mark.spec("RPT-22")
def test_a_page_of_2000_tensors_with_20_panels_has_at_most_a_megabyte(tmp_path: Path) -> None:
    generator = np.random.default_rng(1)
    ours, theirs = {}, {}
    for number in range(2000):
        key = f"0/model.language_model.layers.{number // 10}.self_attn.projection_{number % 10}/output"
        ours[key] = generator.standard_normal((48, 48)).astype(np.float32)
        noise = generator.standard_normal((48, 48)).astype(np.float32)
        theirs[key] = ours[key] + (noise / 100 if number >= 1000 else 0)
    page = page_of(tmp_path, ours, theirs)
    assert len(page.rows) == 2000
    text = html_of(page)
    assert text.count('alt="map of the difference"') == 20
    assert len(text.encode()) <= 1_000_000


@pytest.mark.spec("RPT-30")
def test_markdown_has_at_most_60_lines_and_the_verdict_first(tmp_path: Path) -> None:
    page = page_of(tmp_path, layers(count=90), layers(*range(90), count=90))
    lines = markdown_of(page).splitlines()
    assert len(lines) <= 60
    assert "compared" in lines[3]
    assert "And 80 more tensors." in lines
