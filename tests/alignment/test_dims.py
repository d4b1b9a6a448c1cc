"""Dims: the notation, and the layout steps that follow from it; what ranks hold put together."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from tensorcap import compare
from tensorcap.alignment import Alignment, Entry, MappedArchive, resolve
from tensorcap.alignment.layout import Dims, Layout, steps_between
from tensorcap.comparison import Comparison
from tensorcap_formats.dtypes import DTYPES, Array
from tensorcap_formats.errors import UsageError
from tests.support.archives import new_archive

_F64 = DTYPES["float64"]
RNG = np.random.default_rng(0)


def _layout(target: str, reference: str, shapes: list[tuple[int, ...]], shape: tuple[int, ...]) -> Layout:
    return steps_between(Dims.parse(target), Dims.parse(reference), shapes, shape)


@pytest.mark.spec("ALN-78")
@pytest.mark.parametrize(
    "text",
    [
        "b s d",
        "b s (h d)",
        "b s (h[tp] d) h=8",
        "b s d [tp:partial]",
        "b s d [tp:replicated]",
        "b[dp] s h[tp] d dp=2 tp=4",
        "b s ...",
        "1 b s d",
        "",
    ],
)
def test_dims_are_written_as_they_were_read(text: str) -> None:
    assert Dims.parse(text).text == text


@pytest.mark.spec("ALN-78")
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("b s (h d", r"dims 'b s \(h d': a parenthesis is not closed"),
        ("b b", "axis 'b' stands there twice"),
        ("b[tp] s[tp]", "mesh axis 'tp' stands there twice"),
        ("b[tp] s [tp:partial]", "mesh axis 'tp' stands there twice"),
        ("b s h=4", "has no axis 'h', whose size is given"),
        ("b s=0", "is not understood there"),
        ("b s [tp:sum]", "is not understood there"),
        ("b h=2 h=4", "'h' stands there twice"),
    ],
)
def test_dims_that_make_no_sense_are_refused(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Dims.parse(text)


@pytest.mark.spec("ALN-79")
@pytest.mark.parametrize(
    ("target", "reference", "shapes", "shape", "steps"),
    [
        ("b s d", "b s d", [(2, 3, 8)], (2, 3, 8), ()),
        ("b s (h d)", "b h s d", [(2, 3, 8)], (2, 4, 3, 2), ('rearrange "b s (h d) -> b h s d" h=4 d=2',)),
        ("b h s d", "b s (h d)", [(2, 4, 3, 2)], (2, 3, 8), ('rearrange "b h s d -> b s (h d)"',)),
        ("s b (h d)", "b s (h d)", [(3, 2, 8)], (2, 3, 8), ('rearrange "s b h_d -> b s h_d"',)),
        ("b 1 s d", "b s d", [(2, 1, 3, 8)], (2, 3, 8), ('rearrange "b 1 s d -> b s d"',)),
        ("b c y x", "b y x c", [(1, 2, 3, 4)], (1, 3, 4, 2), ('rearrange "b c y x -> b y x c"',)),
        ("b s h[tp] d", "b s h d", [(2, 3, 1, 4)] * 2, (2, 3, 2, 4), ("concat 2",)),
        ("b s (h[tp] d)", "b s (h d)", [(2, 3, 4)] * 2, (2, 3, 8), ("concat 2",)),
        (
            "b s (d h[tp])",
            "b s (h d)",
            [(2, 3, 4)] * 2,
            (2, 3, 8),
            "the size of 'd' is not known",
        ),
        (
            "b s (d h[tp]) d=4",
            "b s (h d)",
            [(2, 3, 4)] * 2,
            (2, 3, 8),
            ('rearrange "b s (d h) -> b s d h" d=4 h=1', "concat 3", 'rearrange "b s d h -> b s (h d)"'),
        ),
        ("b s d [tp:partial]", "b s d", [(2, 3, 8)] * 4, (2, 3, 8), ("sum",)),
        ("b s d [tp:replicated]", "b s d", [(2, 3, 8)] * 4, (2, 3, 8), ("dereplicate 4",)),
        ("b h[tp] s d", "b s h d", [(1, 1, 3, 4)] * 4, (1, 3, 2, 4), ("dereplicate 2", "concat 1", "R")),
        ("b s (h[tp] d)", "b s (h d)", [(1, 3, 4)] * 4, (1, 3, 8), ("dereplicate 2", "concat 2")),
        ("b s h[tp] d", "b s h d", [(1, 3, 2, 4)] * 4, (1, 3, 2, 4), ("dereplicate 4",)),
        (
            "b[dp] s d [tp:partial] dp=2 tp=2",
            "b s d",
            [(1, 3, 8)] * 4,
            (2, 3, 8),
            ("sum of=2", "concat 0"),
        ),
        (
            "b[dp] s h[tp] d dp=2",
            "b s h d",
            [(1, 3, 1, 4)] * 8,
            (2, 3, 4, 4),
            "the sizes of",
        ),
    ],
)
def test_steps_follow_from_the_names_of_axes(
    target: str,
    reference: str,
    shapes: list[tuple[int, ...]],
    shape: tuple[int, ...],
    steps: tuple[str, ...] | str,
) -> None:
    if target.endswith("dp=2"):  # one size may be left out
        steps = ("concat 2 of=4", "concat 0")
    if isinstance(steps, str):
        with pytest.raises(UsageError, match=steps):
            _layout(target, reference, shapes, shape)
        return
    layout = _layout(target, reference, shapes, shape)
    assert layout.texts == tuple('rearrange "b h s d -> b s h d"' if step == "R" else step for step in steps)
    assert layout.shapes(shapes) == (shape,)


@pytest.mark.spec("ALN-78")
@pytest.mark.parametrize(
    ("target", "reference", "shapes", "shape", "message"),
    [
        (
            "b s d",
            "b h s d",
            [(2, 3, 8)],
            (2, 4, 3, 2),
            "'b h s d': axis 'h' is missing from the target's 'b s d'",
        ),
        (
            "b s e",
            "b s d",
            [(2, 3, 8)],
            (2, 3, 8),
            "'b s e': axis 'e' is missing from the reference's 'b s d'",
        ),
        ("b s d", "b s d", [(2, 3, 8)] * 2, (2, 3, 8), "found 2 tensors, expected those of 1 ranks"),
        ("b s h[tp] tp=4", "b s h", [(2, 3, 2)] * 2, (2, 3, 8), "found 2 tensors, expected those of 4 ranks"),
        ("b s h[tp]", "b s h", [(2, 3, 3)] * 2, (2, 3, 8), "2 ranks with 3 of 'h' do not make 8"),
        ("b s h[tp]", "b s h", [(2, 3, 2)] * 2, (2, 3, 8), "2 ranks with 2 of 'h' do not make 8"),
        ("b s h[tp]", "b s h", [(2, 3, 3)] * 4, (2, 3, 8), "4 ranks with 3 of 'h' do not make 8"),
        ("b s h[tp]", "b s h", [(2, 3, 4)] * 3, (2, 3, 6), "3 ranks with 4 of 'h' do not make 6"),
        ("b s d", "b s d", [(2, 3)], (2, 3, 8), r"shape \[2, 3\] has 2 axes, expected 3"),
        ("b s d", "b s d", [(2, 3, 8)], (2, 4, 8), r"an axis of 3 does not fit \(s\) with s = 4"),
        ("b s d", "b s h[tp]", [(2, 3, 8)], (2, 3, 8), "the reference is sharded, expected whole tensors"),
        ("b[dp] h[tp]", "b h", [(1, 1)] * 4, (2, 2), "the sizes of dp and tp are not known"),
    ],
)
def test_dims_that_do_not_fit_are_refused(
    target: str, reference: str, shapes: list[tuple[int, ...]], shape: tuple[int, ...], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        _layout(target, reference, shapes, shape)


@pytest.mark.spec("ALN-78")
def test_axes_behind_dots_count_from_the_end() -> None:
    dims = Dims.parse("b ... s d")
    assert [dims.at("s", ndim) for ndim in (2, 3, 4, 5)] == [None, 1, 2, 3]
    assert [dims.at("b", ndim) for ndim in (2, 3, 4, 5)] == [None, 0, 0, 0]
    assert [Dims.parse("b s d").at("s", ndim) for ndim in (2, 3, 4)] == [None, 1, None]
    assert Dims.parse("b (s d)").at("s", 2) is None


@pytest.mark.spec("ALN-79")
def test_a_mesh_of_two_axes_is_put_together_from_the_last_one_on() -> None:
    whole = RNG.standard_normal((4, 3, 8))
    summands = RNG.standard_normal((2, 4, 3, 8))
    summands[1] = whole - summands[0]
    ranks = [summands[tp][2 * dp : 2 * dp + 2] for dp in range(2) for tp in range(2)]
    layout = _layout("b[dp] s d [tp:partial] dp=2 tp=2", "b s d", [(2, 3, 8)] * 4, (4, 3, 8))
    (found,), _ = layout.apply(ranks, _F64)
    assert np.abs(found - whole).max() < 1e-12


TP, HQ, HKV, D, S = 4, 8, 2, 4, 5  # case 33


def _compared(
    tmp_path: Path, one: Mapping[str, Array], other: Mapping[str, Array], *entries: Entry
) -> Comparison:
    reference, target = new_archive(tmp_path / "ref.h5", one), new_archive(tmp_path / "tgt.h5", other)
    links = resolve(Alignment(entries), reference, target).links
    return compare(reference, MappedArchive(reference, target, links), atol=1e-12)


def _ranks(site: str, arrays: list[Array]) -> dict[str, Array]:
    return {f"{f'rank{r}/' if r else ''}0/{site}/output": array for r, array in enumerate(arrays)}


@pytest.mark.spec("ALN-79")
def test_shards_replicas_and_partial_sums_of_four_ranks_make_the_references_tensors(tmp_path: Path) -> None:
    q, k = RNG.standard_normal((S, HQ, D)), RNG.standard_normal((S, HKV, D))
    x, w, bias = (RNG.standard_normal(shape) for shape in ((S, HQ * D), (6, HQ * D), (6,)))
    n = HQ * D // TP
    parts = [x[:, r * n : r * n + n] @ w[:, r * n : r * n + n].T for r in range(TP)]
    parts[0] = parts[0] + bias  # once
    other = {
        **_ranks("q", [q[:, 2 * r : 2 * r + 2] for r in range(TP)]),
        **_ranks("k", [k[:, r // 2 : r // 2 + 1] for r in range(TP)]),
        **_ranks("o", parts),
    }
    one = {"0/q_proj/output": q, "0/k_proj/output": k, "0/o_proj/output": x @ w.T + bias}
    entries = [
        Entry(("q_proj",), ("rank*/q",), dims="s h[tp] d"),
        Entry(("k_proj",), ("rank*/k",), dims="s h[tp] d"),
        Entry(("o_proj",), ("rank*/o",), dims="s d [tp:partial]"),
    ]
    statuses = {pair.key: pair.status for pair in _compared(tmp_path, one, other, *entries).pairs}
    assert statuses == {
        "0/q_proj/output": "identical",
        "0/k_proj/output": "identical",
        "0/o_proj/output": "match",
    }


@pytest.mark.spec("ALN-79")
def test_a_bias_that_each_rank_adds_is_seen_three_times(tmp_path: Path) -> None:
    x, w, bias = (RNG.standard_normal(shape) for shape in ((S, HQ * D), (6, HQ * D), (6,)))
    n = HQ * D // TP
    parts = [x[:, r * n : r * n + n] @ w[:, r * n : r * n + n].T + bias for r in range(TP)]
    entry = Entry(("o_proj",), ("rank*/o",), dims="s d [tp:partial]")
    found = _compared(tmp_path, {"0/o_proj/output": x @ w.T + bias}, _ranks("o", parts), entry)
    (pair,) = found.pairs
    assert pair.status == "diverged"
    assert pair.difference is not None
    assert abs(pair.difference.max_abs - 3 * np.abs(bias).max()) < 1e-12


@pytest.mark.spec("ALN-16")
def test_shards_of_two_dtypes_are_refused_before_they_are_read(tmp_path: Path) -> None:
    shards: list[Array] = [np.zeros((S, 2)), np.zeros((S, 2), np.float32)]
    entry = Entry(("q_proj",), ("rank*/q",), steps=("concat 1",), where="map.toml:3")
    with pytest.raises(UsageError, match=r"map.toml:3: .*'concat 1': found tensors of float64 and float32"):
        _compared(tmp_path, {"0/q_proj/output": np.zeros((S, 4))}, _ranks("q", shards), entry)


@pytest.mark.spec("ALN-79")
def test_kv_heads_that_should_be_copies_and_are_not_are_told(tmp_path: Path) -> None:
    k = RNG.standard_normal((S, HKV, D))
    ranks = [k[:, r // 2 : r // 2 + 1].copy() for r in range(TP)]
    ranks[3][0, 0, 0] += 1
    entry = Entry(("k_proj",), ("rank*/k",), dims="s h[tp] d")
    (pair,) = _compared(tmp_path, {"0/k_proj/output": k}, _ranks("k", ranks), entry).pairs
    assert pair.status == "unreadable"
    assert "tensors 2 and 3 are no copies: 1 of 20 elements differs" in pair.reason


@pytest.mark.spec("ALN-79")
@pytest.mark.parametrize(("at", "is_right"), [(0, True), (1, False)], ids=["layers", "batch"])
def test_the_axis_of_stacked_layers_is_the_one_that_is_named(
    tmp_path: Path, at: int, *, is_right: bool
) -> None:
    layers = RNG.standard_normal((3, 3, 5, 4))  # as many layers as sequences
    one = {f"0/layers.{i}/output": layers[i] for i in range(3)}
    entry = Entry(("layers.0", "layers.1", "layers.2"), ("scan",), steps=(f"unstack {at}",))
    found = _compared(tmp_path, one, {"0/scan/output": layers}, entry)
    assert {pair.status for pair in found.pairs} == ({"identical"} if is_right else {"diverged"})
