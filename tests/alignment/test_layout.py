"""Layout steps: what each does, in numpy or einops written here; that it can be undone; what is refused."""

from __future__ import annotations

from collections.abc import Callable

import einops
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tensorcap.alignment.layout import Layout, parse_step
from tensorcap_formats.dtypes import DTYPES, Array
from tensorcap_formats.errors import UsageError

_F32 = DTYPES["float32"]


def _numbers(*shape: int, start: int = 0) -> Array:
    return (np.arange(int(np.prod(shape))) + start).astype(np.float32).reshape(shape)


def _applied(texts: list[str], *arrays: Array) -> list[Array]:
    return Layout.parse(texts).apply(arrays, _F32)[0]


X = _numbers(2, 6, 8)
Y = _numbers(2, 6, 8, start=1000)

CASES: list[tuple[str, list[str], list[Array], Callable[..., list[Array]]]] = [
    ("transpose", ["transpose 1 2"], [X], lambda x: [np.swapaxes(x, 1, 2)]),
    (
        "heads",
        ['rearrange "b s (h d) -> b h s d" h=4'],
        [X],
        lambda x: [x.reshape(2, 6, 4, 2).transpose(0, 2, 1, 3)],
    ),
    ("nhwc", ['rearrange "... c -> c ..."'], [X], lambda x: [np.moveaxis(x, -1, 0)]),
    ("squeeze", ["squeeze 0"], [X[:1]], lambda x: [x[0]]),
    ("unsqueeze", ["unsqueeze -1"], [X], lambda x: [x[..., None]]),
    ("concat", ["concat 1"], [X, Y], lambda x, y: [np.hstack([x, y])]),
    ("split", ["split -1 4,2,2"], [X], lambda x: [x[..., :4], x[..., 4:6], x[..., 6:]]),
    ("split equally", ["split 1 3"], [X], lambda x: [x[:, :2], x[:, 2:4], x[:, 4:]]),
    ("stack", ["stack 1"], [X, Y], lambda x, y: [np.array([x, y]).transpose(1, 0, 2, 3)]),
    ("unstack", ["unstack 1"], [X], lambda x: [x[:, i] for i in range(6)]),
    (
        "rope to halves",
        ["rope_halves 4"],
        [X],
        # head (x0 x1 x2 x3), pairs (x0 x1) and (x2 x3), becomes (x0 x2 x1 x3)
        lambda x: [einops.rearrange(x, "b s (h i two) -> b s (h two i)", h=2, two=2)],
    ),
    (
        "rope to interleaved",
        ["rope_interleaved 8"],
        [X],
        lambda x: [x[..., [0, 4, 1, 5, 2, 6, 3, 7]]],
    ),
    (
        "partial rope, of weights",
        ["rope_halves 6 rotary=4 axis=1"],
        [X],
        lambda x: [x[:, [0, 2, 1, 3, 4, 5]]],
    ),
    ("flip", ["flip 1"], [X], lambda x: [x[:, ::-1]]),
    ("repeat", ["repeat 1 2"], [X], lambda x: [x[:, [0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5]]]),
    ("unrepeat", ["unrepeat -1 2"], [X[..., [0, 0, 3, 3]]], lambda x: [x[..., [0, 2]]]),
    ("concat of two", ["concat 0 of=2"], [X, Y, Y, X], lambda a, b, c, d: [np.r_[a, b], np.r_[c, d]]),
    (
        "names that are words of Python",
        ['rearrange "in is_ _x -> _x in is_"'],
        [X],
        lambda x: [np.moveaxis(x, -1, 0)],
    ),
    ("copies", ["dereplicate 2"], [X, X.copy(), Y, Y.copy()], lambda a, b, c, d: [a, c]),
    (
        "fused qkv, by head",
        ['rearrange "b s (h three d) -> three b s (h d)" h=2 three=2', "unstack 0"],
        [X],
        lambda x: [x[..., [0, 1, 4, 5]], x[..., [2, 3, 6, 7]]],
    ),
    (
        "fused qkv, grouped",  # 2 groups of (2 queries, key, value), head of 1
        ['rearrange "b s (g c) -> b s g c" c=4', "split 3 2,1,1", 'rearrange "b s g c -> b s (g c)"'],
        [X],
        lambda x: [x[..., [0, 1, 4, 5]], x[..., [2, 6]], x[..., [3, 7]]],
    ),
]
LOSSY: list[tuple[str, list[str], list[Array], Callable[..., list[Array]]]] = [
    ("slice", ["slice 1 2:-1"], [X], lambda x: [x[:, 2:5]]),
    ("last position", ["slice 1 -1:"], [X], lambda x: [x[:, 5:]]),
    ("vocabulary", ["cut_vocab 5"], [X], lambda x: [x[..., :5]]),
    ("rank", ["take_rank 1"], [X, Y], lambda x, y: [y]),
]


@pytest.mark.spec("ALN-12", "ALN-13")
@pytest.mark.parametrize(
    ("texts", "arrays", "expected"), [c[1:] for c in CASES + LOSSY], ids=[c[0] for c in CASES + LOSSY]
)
def test_a_step_gives_what_numpy_gives(
    texts: list[str], arrays: list[Array], expected: Callable[..., list[Array]]
) -> None:
    layout = Layout.parse(texts)
    found, dtype = layout.apply(arrays, _F32)
    wanted = expected(*arrays)
    assert dtype.name == "float32"
    assert len(found) == len(wanted)
    assert all(np.array_equal(one, other) for one, other in zip(found, wanted, strict=True))
    assert layout.shapes([a.shape for a in arrays]) == tuple(w.shape for w in wanted)


@pytest.mark.spec("ALN-15")
@pytest.mark.parametrize(("texts", "arrays"), [c[1:3] for c in CASES], ids=[c[0] for c in CASES])
def test_what_loses_nothing_is_undone_bit_for_bit(texts: list[str], arrays: list[Array]) -> None:
    layout = Layout.parse(texts)
    found, _ = layout.apply(arrays, _F32)
    back = layout.undo(found, [a.shape for a in arrays])
    assert all(np.array_equal(one, other) for one, other in zip(back, arrays, strict=True))


@pytest.mark.spec("ALN-15")
@pytest.mark.parametrize(("texts", "arrays"), [c[1:3] for c in LOSSY], ids=[c[0] for c in LOSSY])
def test_what_leaves_elements_out_is_undone_only_into_natural_values(
    texts: list[str], arrays: list[Array]
) -> None:
    layout = Layout.parse(texts)
    found, _ = layout.apply(arrays, _F32)
    shapes = [a.shape for a in arrays]
    with pytest.raises(UsageError, match="cannot be undone"):
        layout.undo(found, shapes)
    natural = [a + 5000 for a in arrays]
    back = layout.undo(found, shapes, natural)
    again, _ = layout.apply(back, _F32)
    assert all(np.array_equal(one, other) for one, other in zip(again, found, strict=True))
    changed = sum(int((b != n).sum()) for b, n in zip(back, natural, strict=True))
    assert changed == sum(f.size for f in found)


@pytest.mark.spec("ALN-14")
def test_partial_sums_are_added_in_float64_and_cannot_be_undone() -> None:
    bits = np.array([0x3F80, 0x3B80], np.uint16)  # 1 and 2^-8 in bfloat16, whose sum it does not have
    layout = Layout.parse(["sum"])
    found, dtype = layout.apply([bits[:1], bits[1:]], DTYPES["bfloat16"])
    assert (dtype.name, found[0].tolist()) == ("float64", [1.00390625])
    with pytest.raises(UsageError, match="step 'sum': cannot be undone"):
        layout.undo(found, [(1,), (1,)])


@pytest.mark.spec("ALN-16")
def test_steps_that_move_nothing_give_views() -> None:
    texts = ["transpose 1 2", "split 2 3", 'rearrange "b d s -> s b d"', "slice 2 1:3", "unsqueeze 0"]
    assert all(np.shares_memory(array, X) for array in _applied(texts, X))


@pytest.mark.spec("ALN-11")
@pytest.mark.parametrize(
    ("texts", "shapes", "message"),
    [
        (["transpose 1 3"], [(2, 3)], "step 'transpose 1 3': there is no axis 3, the tensor has 2"),
        (["unsqueeze 4"], [(2, 3)], "step 'unsqueeze 4': there is no axis 4, the tensor has 2"),
        (["squeeze 1"], [(2, 3)], "step 'squeeze 1': axis 1 has 3 elements, expected 1"),
        (["slice 0 1:4"], [(2, 3)], "step 'slice 0 1:4': reaches outside axis 0, which has 2 elements"),
        (["split 1 2"], [(2, 3)], "axis 1 has 3 elements, expected a multiple of 2"),
        (["split 1 1,1"], [(2, 3)], "axis 1 has 3 elements, the parts 2"),
        (["split 1 3"], [(2, 3), (2, 3)], "found 2 tensors, expected one"),
        (["concat 1"], [(2, 3), (3, 3)], r"shapes \[2, 3\] and \[3, 3\] differ in more than axis 1"),
        (["stack 0"], [(2, 3), (3, 3)], r"shapes \[2, 3\] and \[3, 3\] are not equal"),
        (["sum"], [(2,), (1,)], r"shapes \[2\] and \[1\] are not equal"),
        (["take_rank 2"], [(2,), (2,)], "there are 2 tensors, numbered from 0"),
        (["dereplicate 2"], [(2,), (2,), (2,)], "there are 3 tensors, expected a multiple of 2"),
        (["rope_halves 3"], [(6,)], "3 of 3 elements, expected an even number within a head"),
        (["rope_halves 4"], [(6,)], "axis -1 has 6 elements, expected heads of 4"),
        (["cut_vocab 9"], [(6,)], "reaches outside axis -1, which has 6 elements"),
        (['rearrange "b s -> s b"'], [(1, 2, 3)], r"shape \[1, 2, 3\] has 3 axes, expected 2"),
        (['rearrange "b (h d) -> h b d" h=4'], [(1, 6)], r"an axis of 6 does not fit \(h d\) with h = 4"),
        (['rearrange "b (h d) -> h b d"'], [(1, 6)], "the sizes of h and d are not known"),
        (["sum"], [], "there are no tensors"),
        (["unstack 0"], [(0, 2)], "axis 0 has no elements"),
        (["slice 0 2:1"], [(3, 2)], "step 'slice 0 2:1': keeps nothing of axis 0, which has 3 elements"),
        (["slice 0 3:"], [(3, 2)], "keeps nothing of axis 0"),
        (["split 0 4,-1"], [(3, 2)], "found a part of -1, expected 1 or more"),
        (["split 0 0,3"], [(3, 2)], "found a part of 0, expected 1 or more"),
        (["unrepeat 0 2"], [(3, 2)], "axis 0 has 3 elements, expected a multiple of 2"),
        (["flip 2"], [(3, 2)], "there is no axis 2, the tensor has 2"),
        (["concat 0 of=2"], [(2,)] * 3, "there are 3 tensors, expected a multiple of 2"),
        (["concat 0 of=2"], [(2,), (2,), (2, 1), (2,)], r"shapes \[2, 1\] and \[2\] differ in more"),
        (["sum of=2"], [(2,), (2,), (2,), (1,)], r"shapes \[2\] and \[1\] are not equal"),
    ],
)
def test_shapes_that_do_not_fit_are_refused_before_any_data(
    texts: list[str], shapes: list[tuple[int, ...]], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        Layout.parse(texts).shapes(shapes)


@pytest.mark.spec("ALN-17")
def test_copies_that_differ_are_no_copies() -> None:
    unlike = Y.copy()
    unlike[0, 0, :2] += 1
    with pytest.raises(UsageError, match="'dereplicate 2': tensors 2 and 3 are no copies: 2 of 96 elements"):
        _applied(["dereplicate 2"], X, X.copy(), Y, unlike)
    with pytest.raises(UsageError, match="step 'unrepeat 2 2': found no copies: 48 of 48 elements differ"):
        _applied(["unrepeat 2 2"], X)


@pytest.mark.spec("ALN-17")
def test_copies_are_equal_bit_for_bit() -> None:
    nan = np.array([np.nan, 0.0], np.float32)
    assert _applied(["dereplicate 2"], nan, nan.copy())[0] is nan
    with pytest.raises(UsageError, match="1 of 2 elements differs"):
        _applied(["dereplicate 2"], nan, np.array([np.nan, -0.0], np.float32))


@pytest.mark.spec("ALN-16")
def test_packed_elements_are_not_taken_apart() -> None:
    with pytest.raises(UsageError, match="elements of float4_e2m1fn_x2 are packed, two in a byte"):
        Layout.parse(["transpose 0 1"]).apply([np.zeros((2, 2), np.uint8)], DTYPES["float4_e2m1fn_x2"])


@pytest.mark.spec("ALN-10")
@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        ("rearange 1", "step 'rearange 1': is unknown", "Did you mean 'rearrange'?"),
        ("slice 1", "expected 'slice AXIS START:STOP'", None),
        ("slice 1 2", "expected 'slice AXIS START:STOP'", None),
        ("concat", "expected 'concat AXIS of=COUNT'", None),
        ("concat 1 if=2", "expected 'concat AXIS of=COUNT'", None),
        ("concat 1 of=2 of=3", "says one argument twice", None),
        ("repeat 1 0", "found 0 copies, expected 1 or more", None),
        ("cut_vocab -5", "found a size of -5, expected 1 or more", None),
        ('rearrange "(a b) -> a b" a=0', "a = 0, expected 1 or more", None),
        ("transpose 1 2 3", "expected 'transpose AXIS AXIS'", None),
        ("squeeze x", "expected 'squeeze AXIS'", None),
        ("rope_halves 4 size=2", "expected 'rope_halves HEAD", None),
        ("", "step '': nothing, expected a name and arguments", None),
        ('rearrange "a', "No closing quotation", None),
        ('rearrange "a b"', "expected axes, one '->', and axes", None),
        ('rearrange "a b -> a c"', "axis 'b' is on one side only", None),
        ('rearrange "a a -> a"', "axis 'a' stands twice on one side", None),
        ('rearrange "a (b -> a b"', "a parenthesis is not closed", None),
        ('rearrange "a ((b)) -> a b"', r"'\(' is not understood there", None),
        ('rearrange "a b -> b a" c=2', "has no axis 'c', whose size is given", None),
    ],
)
def test_a_step_that_makes_no_sense_is_refused(text: str, message: str, hint: str | None) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        parse_step(text)
    assert hint is None or caught.value.hint == hint


@pytest.mark.spec("ALN-10")
@pytest.mark.parametrize(
    "text",
    [
        "concat -1",
        "concat -1 of=4",
        "sum of=2",
        "flip 0",
        "repeat 2 4",
        "unrepeat -1 2",
        "cut_vocab 32000",
        "dereplicate 2",
        'rearrange "b s (h d) -> b h s d" h=4',
        'rearrange "1 ... c -> c ..."',
        "rope_halves 64",
        "rope_interleaved 64 rotary=32 axis=0",
        "slice 1 -1:",
        "slice 1 :5",
        "split -1 3",
        "split -1 4,2,2",
        "squeeze 0",
        "stack 0",
        "sum",
        "take_rank 3",
        "transpose 1 2",
        "unsqueeze -1",
        "unstack 0",
    ],
)
def test_a_step_is_written_as_it_was_read(text: str) -> None:
    assert parse_step(text).text == text


@pytest.mark.spec("ALN-12")
@settings(max_examples=100)
@given(st.data())
def test_a_rearrangement_is_that_of_einops(data: st.DataObject) -> None:
    sizes = {name: data.draw(st.integers(1, 3)) for name in "abcde"[: data.draw(st.integers(1, 5))]}
    sides = []
    for _ in range(2):
        names, side = data.draw(st.permutations(list(sizes))), ""
        while names:
            count = data.draw(st.integers(1, len(names)))
            side += f" ({' '.join(names[:count])})" if data.draw(st.booleans()) else f" {names[0]}"
            names = names[count if side.endswith(")") else 1 :]
            side += " 1" if data.draw(st.booleans()) else ""
        sides.append(side.strip())
    pattern = " -> ".join(sides)
    whole = einops.rearrange(_numbers(*sizes.values()), f"{' '.join(sizes)} -> {sides[0]}")
    text = f'rearrange "{pattern}" {" ".join(f"{name}={size}" for name, size in sizes.items())}'
    (found,) = _applied([text], whole)
    assert np.array_equal(found, einops.rearrange(whole, pattern, **sizes))


@pytest.mark.spec("ALN-15")
@settings(max_examples=200)
@given(st.data())
def test_any_chain_of_steps_that_lose_nothing_is_undone(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 4), min_size=2, max_size=4)))
    arrays = [_numbers(*shape, start=1000 * i) for i in range(data.draw(st.integers(1, 3)))]
    texts: list[str] = []
    shapes = tuple(a.shape for a in arrays)
    for _ in range(data.draw(st.integers(1, 5))):
        axis = data.draw(st.integers(-len(shapes[0]) if shapes[0] else 0, max(len(shapes[0]) - 1, 0)))
        text = data.draw(
            st.sampled_from(
                [
                    f"transpose {axis} 0",
                    f"unsqueeze {axis}",
                    f"squeeze {axis}",
                    f"concat {axis}",
                    f"split {axis} 2",
                    f"stack {axis}",
                    f"unstack {axis}",
                    'rearrange "a ... -> ... a"',
                    'rearrange "a (b c) ... -> c (a b) ..." b=2',
                    f"rope_interleaved 4 axis={axis}",
                    "dereplicate 1",
                    f"flip {axis}",
                    f"repeat {axis} 2",
                    f"repeat {axis} 2; unrepeat {axis} 2",
                    f"concat {axis} of=2",
                ]
            )
        )
        try:
            shapes = Layout.parse([*texts, *text.split("; ")]).shapes([a.shape for a in arrays])
        except UsageError:
            continue
        texts += text.split("; ")
    layout = Layout.parse(texts)
    found, _ = layout.apply(arrays, _F32)
    assert tuple(f.shape for f in found) == layout.shapes([a.shape for a in arrays])
    back = layout.undo(found, [a.shape for a in arrays])
    assert all(np.array_equal(one, other) for one, other in zip(back, arrays, strict=True))


@pytest.mark.spec("ALN-14")
def test_what_is_added_has_each_its_own_dtype() -> None:
    layout, dtypes = Layout.parse(["sum"]), [DTYPES["float32"], DTYPES["bfloat16"]]
    found, dtype = layout.apply([np.array([0.25], np.float32), np.array([0x3F80], np.uint16)], dtypes)
    assert (dtype.name, found[0].tolist()) == ("float64", [1.25])
    assert layout.dtype(dtypes).name == "float64"
    tiny = [np.array([x], np.float32) for x in (1, 2**-30)]  # whose sum float32 does not have
    assert layout.apply(tiny, DTYPES["float32"])[0][0].tolist() == [1 + 2**-30]


@pytest.mark.spec("ALN-14")
def test_the_imaginary_part_of_a_sum_is_kept() -> None:
    halves = [np.array([1 + 2j], np.complex64), np.array([3 - 1j], np.complex64)]
    found, dtype = Layout.parse(["sum"]).apply(halves, DTYPES["complex64"])
    assert (dtype.name, found[0].tolist()) == ("complex128", [4 + 1j])


@pytest.mark.spec("ALN-14")
def test_whole_numbers_are_not_added() -> None:
    with pytest.raises(UsageError, match="step 'sum': found tensors of int64, expected floats"):
        Layout.parse(["sum"]).apply([np.array([2**53]), np.array([1])], DTYPES["int64"])


@pytest.mark.spec("ALN-16")
def test_tensors_of_two_dtypes_are_not_joined() -> None:
    layout = Layout.parse(["concat 0"])
    arrays: list[Array] = [np.zeros(2, np.float32), np.zeros(2, np.uint16)]
    dtypes = [_F32, DTYPES["bfloat16"]]
    with pytest.raises(UsageError, match="'concat 0': found tensors of float32 and bfloat16, expected one"):
        layout.apply(arrays, dtypes)
    with pytest.raises(UsageError, match="expected one dtype"):
        layout.dtype(dtypes)


@pytest.mark.spec("ALN-15")
@pytest.mark.parametrize(
    "natural", [np.zeros((2, 6, 8), np.float64), np.zeros((2, 5, 8), np.float32)], ids=["dtype", "shape"]
)
def test_natural_values_have_the_shape_and_dtype_of_what_goes_in(natural: Array) -> None:
    layout = Layout.parse(["slice 1 -1:"])
    with pytest.raises(UsageError, match=r"expected \[2, 6, 8\] of float32"):
        layout.undo([X[:, 5:]], [X.shape], [natural])


@pytest.mark.spec("ALN-15")
def test_one_step_done_twice_is_undone_twice() -> None:
    step = parse_step("slice 1 1:")
    layout = Layout((step, step))
    back = layout.undo([X[:, 2:] + 1], [X.shape], [X])[0]
    assert np.array_equal(back[:, :2], X[:, :2])
    assert np.array_equal(back[:, 2:], X[:, 2:] + 1)


H, G, HEAD, HIDDEN = 4, 2, 3, 5  # case 27: heads, groups, elements of a head


@pytest.mark.spec("ALN-18")
@pytest.mark.parametrize("tokens", [None, 7], ids=["weight", "activation"])
@pytest.mark.parametrize(
    ("fused", "steps"),
    [
        ("block", ["split {at} 12,12,12"]),
        (
            "by head",
            ['rearrange "{a} (h three d) {b} -> three {a} (h d) {b}" h=4 three=3', "unstack 0"],
        ),
        (
            "grouped",
            [
                'rearrange "{a} (g n d) {b} -> {a} g n d {b}" g=2 d=3',
                "split {at1} 2,1,1",
                'rearrange "{a} g n d {b} -> {a} (g n d) {b}"',
            ],
        ),
    ],
    ids=["block", "by-head", "grouped"],
)
def test_queries_keys_and_values_come_out_of_each_fused_layout(
    fused: str, steps: list[str], tokens: int | None
) -> None:
    rng = np.random.default_rng(1)
    q, k, v = (rng.integers(-9, 9, (H, HEAD, HIDDEN)).astype(np.float64) for _ in range(3))
    if fused == "grouped":
        k, v = k[:G], v[:G]
        weight = np.concatenate(
            [part for g in range(G) for part in (q[2 * g : 2 * g + 2], k[g : g + 1], v[g : g + 1])]
        )
    elif fused == "by head":
        weight = np.stack([q, k, v], 1)
    else:
        weight = np.concatenate([q, k, v])
    tensors = [array.reshape(-1, HIDDEN) for array in (weight, q, k, v)]
    if tokens:
        x = rng.integers(-9, 9, (tokens, HIDDEN)).astype(np.float64)
        tensors = [x @ array.T for array in tensors]
    names = {"a": "s", "b": "", "at": -1, "at1": 2} if tokens else {"a": "", "b": "c", "at": 0, "at1": 1}
    found, _ = Layout.parse(step.format(**names) for step in steps).apply(tensors[:1], DTYPES["float64"])
    assert [np.array_equal(one, other) for one, other in zip(found, tensors[1:], strict=True)] == [True] * 3
    if fused == "by head":  # the trap: a plain split has the right shapes, and the first head's queries
        wrong, _ = Layout.parse([f"split {names['at']} 3"]).apply(tensors[:1], DTYPES["float64"])
        same = wrong[0] == tensors[1]
        assert same.any()
        assert not same.all()


@pytest.mark.spec("ALN-18")
@pytest.mark.parametrize("shape", [(18, 6), (6, 6)], ids=["c_attn", "c_proj"])
def test_weights_of_conv1d_are_transposed_square_ones_too(shape: tuple[int, int]) -> None:
    weight = np.random.default_rng(0).standard_normal(shape)
    found = Layout.parse(["transpose 0 1"]).apply([weight], DTYPES["float64"])[0][0]
    assert found.shape == shape[::-1]
    assert all(found[j, i] == weight[i, j] for i in range(shape[0]) for j in range(shape[1]))
