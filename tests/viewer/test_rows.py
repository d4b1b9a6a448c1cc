"""Rows of the page: order, selection, colours, and the tree of modules."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tensorcap.comparison import Pair
from tensorcap.viewer import Subject, open_subject
from tensorcap.viewer.rows import METRICS, Choice, abbreviated, rows_of_pairs, shortened
from tests.support.archives import write_archive

X = np.random.default_rng(3).standard_normal((4, 16)).astype(np.float32)
OURS = {
    "0/@root/input.x": X,
    "0/layers.0.fc/output": X,
    "0/layers.0.act/output": X * 100,
    "0/layers.1.fc/output": X,
    "0/layers.1.act/output": X + 1,
    "0/norm/output": X,
}
# 10 % of the values in one, 1 % of values a hundred times as large in another; one NaN; one missing.
THEIRS = {
    "0/@root/input.x": X,
    "0/layers.0.fc/output": X * np.float32(1.1),
    "0/layers.0.act/output": X * np.float32(101),
    "0/layers.1.fc/output": np.where(np.arange(16) == 5, np.nan, X).astype(np.float32),
    "0/norm/output": X,
}
Opened = Callable[..., Subject]


@pytest.fixture
def subject(tmp_path: Path) -> Any:
    paths = [write_archive(tmp_path / name, tensors) for name, tensors in (("r.h5", OURS), ("t.h5", THEIRS))]
    opened = open_subject(*paths)
    yield opened
    opened.close()


def keys(subject: Subject, **choice: Any) -> list[str]:
    rows = Choice(**choice).of(subject.rows, subject.scale, subject.classes)
    return [row.key.removeprefix("0/").removesuffix("/output") for row in rows]


@pytest.mark.spec("VIEW-20")
def test_the_least_similar_come_first_and_what_has_no_value_last(subject: Subject) -> None:
    order = ["layers.1.fc", "layers.0.fc", "layers.0.act", "@root/input.x", "norm", "layers.1.act"]
    assert keys(subject) == order
    # By error, values a hundred times as large do not count a hundred times: 0.1 of the peak before 0.01.
    assert keys(subject, metric="max-abs") == order
    assert keys(subject, metric="cosine")[0] == "layers.1.fc"
    execution = ["@root/input.x", "layers.0.fc", "layers.0.act", "layers.1.fc", "layers.1.act", "norm"]
    assert keys(subject, sort="execution") == execution
    assert keys(subject, sort="name") == sorted(execution)


@pytest.mark.spec("VIEW-21")
def test_rows_are_chosen_by_text_status_component_and_module(subject: Subject) -> None:
    assert keys(subject, sort="execution", text="ACT") == ["layers.0.act", "layers.1.act"]
    assert keys(subject, sort="execution", status="missing-in-target") == ["layers.1.act"]
    red = ["layers.0.fc", "layers.0.act", "layers.1.fc", "layers.1.act"]
    assert keys(subject, sort="execution", status="!red") == red
    assert keys(subject, sort="execution", component="fc") == ["layers.0.fc", "layers.1.fc"]
    assert keys(subject, sort="execution", under="layers.1") == ["layers.1.fc", "layers.1.act"]
    assert keys(subject, under="layers") != keys(subject, under="layer")
    assert keys(subject, text="1 ACT") == ["layers.1.act"]  # each word in any place
    assert keys(subject, text="act none") == []
    # The input and the norm hold one tensor on both sides.
    assert keys(subject, sort="execution", once=True) == ["@root/input.x", *red]


@pytest.mark.spec("VIEW-22")
def test_a_dot_is_the_verdict_and_a_score_has_the_colour_of_its_band(subject: Subject) -> None:
    rows = {row.key: row for row in subject.rows}
    assert {key: row.colour for key, row in rows.items()} == {
        "0/@root/input.x": "green",
        "0/layers.0.fc/output": "red",
        "0/layers.0.act/output": "red",
        "0/layers.1.fc/output": "red",
        "0/layers.1.act/output": "red",
        "0/norm/output": "green",
    }
    scale, one_percent = subject.scale, rows["0/layers.0.act/output"]
    # PSNR of 1 %: the peak over the RMS error; in float32 between 40 and 60 dB is yellow.
    peak, rms = float(np.abs(X).max()), float(np.sqrt(np.mean((X.astype("f8") * 0.01) ** 2)))
    assert scale.value(one_percent, "psnr") == pytest.approx(20 * math.log10(peak / rms), abs=1e-3)
    assert scale.colour(one_percent, "psnr") == "yellow"
    assert scale.colour(one_percent, "relative") == "red"
    assert scale.value(one_percent, "relative") == pytest.approx(0.01, rel=1e-4)
    assert scale.text(rows["0/norm/output"], "psnr") == "∞"
    assert [scale.text(rows["0/layers.1.act/output"], metric) for metric in METRICS] == [""] * 7


@pytest.mark.spec("VIEW-23")
def test_modules_have_the_worst_colour_below_them_and_the_share_of_red(subject: Subject) -> None:
    layers = subject.tree.at("layers")
    assert (layers.colour, layers.counts.total(), layers.red_share) == ("red", 4, 1.0)
    assert subject.tree.red_share == pytest.approx(4 / 6)
    assert (subject.tree.at("norm").colour, subject.tree.at("norm").red_share) == ("green", 0.0)
    assert list(subject.tree.children) == ["layers", "norm"]
    with pytest.raises(KeyError):
        subject.tree.at("layers.7")


@pytest.mark.spec("VIEW-1")
def test_one_archive_alone_has_rows_and_nothing_to_compare_with(tmp_path: Path) -> None:
    subject = open_subject(write_archive(tmp_path / "r.h5", OURS))
    assert keys(subject, sort="execution")[0] == "@root/input.x"
    assert "6 tensors" in subject.verdict
    assert {row.colour for row in subject.rows} == {"grey"}
    assert (subject.suspects, subject.counts, subject.curves) == ((), {}, {})
    subject.close()


@pytest.mark.spec("VIEW-13")
def test_long_names_lose_their_middle_and_what_is_not_printable() -> None:
    name = "a" * 1000 + "\x1b[2J\u202e" + "b" * 1000
    assert len(shortened(name)) == 159
    assert shortened(name).isprintable()
    assert shortened("a\u202eb") == "a b"


@pytest.mark.spec("VIEW-94")
@pytest.mark.parametrize(
    ("names", "width", "expected"),
    [
        (("layers.0.mlp", "output"), 18, ("layers.0.mlp", "output")),
        (("layers.10.attention.key", "output"), 27, ("layers.10.attent….key", "output")),
        (("layers.10.attention.key", "output"), 20, ("la….10.at….key", "output")),
        (("h12.conv2d", "output.0"), 3, ("h12.c…2d", "o….0")),  # no room at all: numbers stay
        (("", "output.cache.layers.3.keys"), 22, ("", "out….cac….laye….3.keys")),
        (("12345", "678"), 2, ("12345", "678")),
    ],
)
def test_names_lose_ends_of_words_and_no_numbers(
    names: tuple[str, ...], width: int, expected: tuple[str, ...]
) -> None:
    assert abbreviated(*names, width=width) == expected


@pytest.mark.spec("VIEW-90")
def test_what_only_the_target_has_stands_where_the_target_computed_it(tmp_path: Path) -> None:
    ours = {f"0/{name}/output": X for name in ("a", "silu", "c", "d")}
    theirs = {f"0/{name}/output": X for name in ("first", "a", "gelu", "tanh", "c", "d", "last")}
    paths = [write_archive(tmp_path / name, tensors) for name, tensors in (("r.h5", ours), ("t.h5", theirs))]
    opened = open_subject(*paths, mapping="none")
    assert keys(opened, sort="execution") == ["first", "a", "silu", "gelu", "tanh", "c", "d", "last"]
    assert [row.number for row in opened.rows] == list(range(8))
    assert list(opened.tree.children) == ["first", "a", "silu", "gelu", "tanh", "c", "d", "last"]
    opened.close()


@pytest.mark.spec("VIEW-22")
def test_a_legend_has_the_limits_of_the_chosen_metric(subject: Subject) -> None:
    assert [subject.scale.legend(metric) for metric in ("psnr", "mean-squared", "relative", "cosine")] == [
        "PSNR: green from 60 dB, red below 40 dB (32-bit floats)",
        # 10^-6 and 10^-4: 60 and 40 dB of a power
        "mean-squared: green up to 1e-06, red above 0.0001 of the square of the reference's largest value "
        "(32-bit floats)",
        # 8 and 32 times 2^-24
        "relative: green up to 4.8e-07, red above 1.9e-06 (8 and 32 roundings of float32)",
        "cosine: green up to 4.8e-07 of the angle between both, in radians, red above 1.9e-06 "
        "(8 and 32 roundings of float32)",
    ]


def test_pairs_without_a_record_have_no_row_and_leave_no_gap(subject: Subject) -> None:
    assert subject.source is not None
    pairs = list(subject.source.comparison.pairs)
    pairs.insert(2, Pair("0/nothing/output", "excluded", None, None))
    assert [row.number for row in rows_of_pairs(pairs, {})] == [0, 1, 2, 3, 4, 5]
