"""Small archives whose right answer is not the likely one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np

from tensorcap_formats.dtypes import Array
from tests.support.floats import bfloat16

Tensors = Mapping[str, Array]  # by site; in order of execution


@dataclass(frozen=True)
class Trap:
    """Two archives, and what is right.

    Attributes:
        reference: Its results.
        target: Its results.
        pairs: What has to be found, whatever else is.
        silent: Pairs that may only be found if a reader is told that something is wrong with them.
        unproven: Pairs that values do not prove, so that another evidence has to be named, or a doubt.
        never: Pairs that may not be found.
        doubts: Sites of the reference of which a reader has to be told something.
        as_is: Sites that are paired without a step, unless a reader is told something.
        sure: Sites of the reference of which nothing has to be told, so that doubts keep their meaning.
        equal: Sites whose pair's steps have to make the target's tensor equal to theirs.
        by: What may be looked at.
    """

    reference: Tensors
    target: Tensors
    pairs: frozenset[tuple[str, str]] = frozenset()
    silent: frozenset[tuple[str, str]] = frozenset()
    unproven: frozenset[tuple[str, str]] = frozenset()
    never: frozenset[tuple[str, str]] = frozenset()
    doubts: tuple[str, ...] = ()
    as_is: tuple[str, ...] = ()
    sure: tuple[str, ...] = ()
    equal: tuple[str, ...] = ()
    by: Literal["all", "values"] = "all"


_RNG = np.random.default_rng(5)


def drawn(*shape: int) -> Array:
    return _RNG.standard_normal(shape).astype(np.float32)


def all_pairs(reference: Tensors, target: Tensors) -> frozenset[tuple[str, str]]:
    return frozenset((one, other) for one in reference for other in target)


def constants() -> Trap:
    """Zeros are equal to zeros, which says nothing."""
    one = {"a.bias": np.zeros((2, 4), np.float32), "b.bias": np.zeros((2, 4), np.float32), "c": drawn(2, 4)}
    other = {"u": np.zeros((2, 4), np.float32), "v": np.zeros((2, 4), np.float32), "w": one["c"]}
    unproven = frozenset({(a, b) for a in ("a.bias", "b.bias") for b in ("u", "v")})
    return Trap(one, other, frozenset({("c", "w")}), unproven=unproven, by="values")


def twins() -> Trap:
    """Two sites of each side have the same values: which is which, values do not say."""
    x, y = drawn(2, 4), drawn(2, 4)
    one, other = {"a": x, "b": x.copy(), "c": y}, {"u": x.copy(), "w": y, "v": x.copy()}
    silent = frozenset({(a, b) for a in "ab" for b in "uv"})
    return Trap(one, other, frozenset({("c", "w")}), silent=silent, doubts=("a", "b"), by="values")


def shuffled() -> Trap:
    """The same elements in another order: count, extremes, mean and norm agree, and no layout does."""
    x, y = drawn(4, 8), drawn(4, 8)
    mixed = _RNG.permutation(x.reshape(-1)).reshape(4, 8)
    one, other = {"a": x, "b": y}, {"u": mixed, "v": y}
    return Trap(one, other, frozenset({("b", "v")}), silent=frozenset({("a", "u")}), by="values")


def negated() -> Trap:
    """The magnitudes are the same, the values are not."""
    x, y = drawn(4, 8), drawn(4, 8)
    one, other = {"a": x, "b": y}, {"u": -x, "v": y}
    return Trap(one, other, frozenset({("b", "v")}), silent=frozenset({("a", "u")}), by="values")


def scaled() -> Trap:
    """A missing scale of 1.001 is no rounding."""
    x, y = drawn(4, 8), drawn(4, 8)
    one, other = {"a": x, "b": y}, {"u": x * np.float32(1.001), "v": y}
    return Trap(one, other, frozenset({("b", "v")}), silent=frozenset({("a", "u")}), by="values")


def one_wrong_element() -> Trap:
    """Names agree, and one element in a thousand does not: the pair is right, its values are wrong."""
    x = drawn(4, 250)
    wrong = x.copy()
    wrong[2, 17] += 3.0
    one, other = {"mlp.fc1": x, "mlp.fc2": drawn(4, 10)}, {"mlp.fc1": wrong, "mlp.fc2": drawn(4, 10)}
    return Trap(one, other, frozenset({("mlp.fc1", "mlp.fc1"), ("mlp.fc2", "mlp.fc2")}))


def swapped_names() -> Trap:
    """The port's gate holds the values of up, and up those of gate: a bug to be found, not to be undone."""
    gates, ups = [drawn(2, 3, 8) for _ in range(3)], [drawn(2, 3, 8) for _ in range(3)]
    one: dict[str, Array] = {}
    other: dict[str, Array] = {}
    for i in range(3):
        one |= {f"layers.{i}.mlp.gate_proj": gates[i], f"layers.{i}.mlp.up_proj": ups[i]}
        other |= {f"layers.{i}.mlp.gate_proj": ups[i], f"layers.{i}.mlp.up_proj": gates[i]}
    pairs = {(f"layers.{i}.mlp.{n}_proj",) * 2 for i in range(3) for n in ("gate", "up")}
    crossed = {
        (f"layers.{i}.mlp.{a}_proj", f"layers.{j}.mlp.{b}_proj")
        for i in range(3)
        for j in range(3)
        for a in ("gate", "up")
        for b in ("gate", "up")
        if (i, a) != (j, b)
    }
    return Trap(one, other, frozenset(pairs), never=frozenset(crossed), doubts=("layers.0.mlp.gate_proj",))


def swapped_layers() -> Trap:
    """The port's layers 1 and 2 were exchanged when its weights were loaded."""
    values = [drawn(2, 3, 8) for _ in range(4)]
    one = {f"model.layers.{i}.mlp": values[i] for i in range(4)}
    other = {f"model.layers.{i}.mlp": values[j] for i, j in enumerate((0, 2, 1, 3))}
    never = frozenset(
        {("model.layers.1.mlp", "model.layers.2.mlp"), ("model.layers.2.mlp", "model.layers.1.mlp")}
    )
    pairs = frozenset({(name, name) for name in one})
    return Trap(one, other, pairs, never=never, doubts=("model.layers.1.mlp",))


def shifted_layers() -> Trap:
    """Equal names are neighbours: the port counts its layers from 1, and calls its embedding layer 0."""
    values = [drawn(2, 3, 8) for _ in range(5)]
    one = {"embed": values[0]} | {f"layers.{i}": values[i + 1] for i in range(4)}
    other = {f"layers.{i}": values[i] for i in range(5)}
    return Trap(one, other, silent=frozenset({(f"layers.{i}", f"layers.{i}") for i in range(4)}))


def equal_layers() -> Trap:
    """Two layers with the same values: their order is known by their indices, which start at 1 there."""
    x = drawn(2, 3, 8)
    one = {
        "layers.0.norm": x,
        "layers.0.mlp": drawn(2, 3, 8),
        "layers.1.norm": x.copy(),
        "layers.1.mlp": drawn(2, 3, 8),
    }
    other = {
        "blocks.1.ln": x.copy(),
        "blocks.1.ff": one["layers.0.mlp"],
        "blocks.2.ln": x.copy(),
        "blocks.2.ff": one["layers.1.mlp"],
    }
    pairs = {
        (f"layers.{i}.{a}", f"blocks.{i + 1}.{b}") for i in (0, 1) for a, b in (("norm", "ln"), ("mlp", "ff"))
    }
    never = {("layers.0.norm", "blocks.2.ln"), ("layers.1.norm", "blocks.1.ln")}
    return Trap(one, other, frozenset(pairs), never=frozenset(never))


def symmetric() -> Trap:
    """A symmetric matrix is equal to itself transposed: it is taken as it is."""
    x = drawn(8, 8)
    one, other = {"a": x + x.T, "b": drawn(8, 3)}, {"u": x + x.T, "v": drawn(8, 3)}
    silent = frozenset({("b", "v")})
    return Trap(one, other, frozenset({("a", "u")}), silent=silent, as_is=("a",), by="values")


def square_weight() -> Trap:
    """Of two weights, the port holds the square one transposed: a bug, as the other one shows."""
    square, wide = drawn(8, 8), drawn(12, 8)
    one = {"fc1/param.weight": square, "fc2/param.weight": wide}
    other = {"fc1/param.weight": np.ascontiguousarray(square.T), "fc2/param.weight": wide}
    pairs = frozenset({(name, name) for name in one})
    return Trap(one, other, pairs, as_is=("fc1/param.weight",))


def transposed_weights() -> Trap:
    """The port keeps all weights transposed, and the shape of the square one does not show it."""
    one = {"c_attn/param.weight": drawn(6, 18), "c_proj/param.weight": drawn(6, 6)}
    other = {name: np.ascontiguousarray(weight.T) for name, weight in one.items()}
    return Trap(one, other, frozenset({(name, name) for name in one}), equal=tuple(one))


def as_many_layers_as_sequences() -> Trap:
    """A scan's tensor has the layers of a model on an axis as long as that of the batch."""
    one = {f"layers.{i}.mlp": drawn(3, 5, 4) for i in range(3)}
    other = {"scan.mlp": np.stack(list(one.values()))}
    return Trap(one, other, frozenset({(site, "scan.mlp") for site in one}), equal=tuple(one))


def fused_backwards() -> Trap:
    """A projection that is called gate_up holds up first, and is used as if it held gate first."""
    one: dict[str, Array] = {}
    other: dict[str, Array] = {}
    for i in range(3):
        gate, up = drawn(2, 3, 8), drawn(2, 3, 8)
        one |= {f"layers.{i}.mlp.gate_proj": gate, f"layers.{i}.mlp.up_proj": up}
        other[f"layers.{i}.mlp.gate_up_proj"] = np.concatenate([up, gate], -1)
    return Trap(one, other, doubts=("layers.0.mlp.gate_proj", "layers.0.mlp.up_proj"))


def coarser() -> Trap:
    """The port computes in bfloat16: what is equal to its rounding is equal."""
    x, y = drawn(4, 64), drawn(4, 64)
    kept = {"u": y, "v": x}
    other = {name: bfloat16(a) for name, a in kept.items()}
    return Trap({"a": x, "b": y}, other, frozenset({("a", "v"), ("b", "u")}), sure=("a", "b"), by="values")


def nothing_finite() -> Trap:
    """All of it is NaN on both sides."""
    one = {"a": np.full((2, 4), np.nan, np.float32), "b": drawn(2, 4)}
    other = {"u": np.full((2, 4), np.nan, np.float32), "v": one["b"]}
    return Trap(one, other, frozenset({("b", "v")}), unproven=frozenset({("a", "u")}), by="values")


def norms_of_ones() -> Trap:
    """The weights of two norms are all ones; their results say which is which, whatever comes first."""
    x, y, ones = drawn(2, 4), drawn(2, 4), np.ones(4, np.float32)
    one = {"ln1": x, "ln1/param.weight": ones, "ln2": y, "ln2/param.weight": ones.copy()}
    other = {"u": y, "u/param.weight": ones.copy(), "v": x, "v/param.weight": ones.copy()}
    pairs = frozenset({("ln1", "v"), ("ln2", "u")})
    never = frozenset({("ln1/param.weight", "u/param.weight"), ("ln2/param.weight", "v/param.weight")})
    return Trap(one, other, pairs, never=never, by="values")


def another_layout() -> Trap:
    """Nothing looks alike, shapes included, and all of it is the same."""
    q, conv, ids = drawn(2, 6, 32), drawn(2, 5, 4, 4), drawn(1, 7, 16)
    one = {"attn.q": q, "conv": conv, "embed": ids}
    other = {
        "p7": np.ascontiguousarray(conv.transpose(0, 2, 3, 1)),
        "p8": ids[0],
        "p9": np.ascontiguousarray(q.reshape(2, 6, 4, 8).transpose(0, 2, 1, 3)),
    }
    pairs = frozenset({("attn.q", "p9"), ("conv", "p7"), ("embed", "p8")})
    return Trap(one, other, pairs, equal=tuple(one), by="values")


def reordered_heads() -> Trap:
    """The heads of the port stand in an order that no layout has: a bug, which a mapping must not undo."""
    q = drawn(2, 6, 32)
    heads = q.reshape(2, 6, 4, 8)[:, :, [2, 0, 3, 1]].reshape(2, 6, 32)
    one, other = {"attn.q_proj": q}, {"attn.q_proj": heads}
    return Trap(one, other, frozenset({("attn.q_proj", "attn.q_proj")}))


def unrelated() -> Trap:
    """Same shapes, other values, other names: nothing belongs together."""
    one, other = {"a": drawn(2, 4), "b": drawn(2, 4)}, {"u": drawn(2, 4), "v": drawn(2, 4)}
    return Trap(one, other, silent=all_pairs(one, other), by="values")


def same_names(reference: Tensors, target: Tensors, *, sure: tuple[str, ...] = ()) -> Trap:
    """Names pair both sides; all sites but the sure ones are to be doubted."""
    doubts = tuple(name for name in reference if name not in sure)
    pairs = frozenset((name, name) for name in reference)
    return Trap(reference, target, pairs, doubts=doubts, sure=sure)


def swapped_halves() -> Trap:
    """The two halves of a tensor stand in the other order: the same elements, and no layout of a port."""
    x, y = drawn(2, 6, 32), drawn(2, 6, 32)
    one, other = {"q": x, "k": y}, {"q": np.roll(x, 16, -1), "k": y}
    return same_names(one, other, sure=("k",))


def swapped_halves_by_values() -> Trap:
    """The same without names."""
    x, y = drawn(2, 6, 32), drawn(2, 6, 32)
    one, other = {"q": x, "k": y}, {"u": y, "v": np.roll(x, 16, -1)}
    return Trap(
        one, other, frozenset({("k", "u")}), silent=frozenset({("q", "v")}), doubts=("q",), by="values"
    )


def shifted_tokens() -> Trap:
    """Each token has the values of the one before."""
    x, y = drawn(2, 6, 32), drawn(2, 6, 32)
    one, other = {"a": x, "b": y}, {"u": np.roll(x, 1, 1), "v": y}
    return Trap(
        one, other, frozenset({("b", "v")}), silent=frozenset({("a", "u")}), doubts=("a",), by="values"
    )


def half_negated() -> Trap:
    """Half of the elements have another sign: count, magnitudes and norm agree."""
    x, y = drawn(4, 8), drawn(4, 8)
    wrong = np.where(np.arange(8) < 4, x, -x)
    one, other = {"a": x, "b": y}, {"u": wrong, "v": y}
    return Trap(
        one, other, frozenset({("b", "v")}), silent=frozenset({("a", "u")}), doubts=("a",), by="values"
    )


def doubled() -> Trap:
    """A scale is missing: no site of the port has the values, one has half of them."""
    x, y = drawn(4, 8), drawn(4, 8)
    one, other = {"a": x, "b": y}, {"u": x / 2, "v": y}
    return Trap(
        one, other, frozenset({("b", "v")}), silent=frozenset({("a", "u")}), doubts=("a",), by="values"
    )


def one_scaled_layer() -> Trap:
    """One layer of four lacks a scale of 1.01, which the others do not show."""
    values = [drawn(2, 3, 8) for _ in range(4)]
    one = {f"layers.{i}.mlp": x for i, x in enumerate(values)}
    other = {f"blocks.{i}.ff": x * np.float32(1.01 if i == 2 else 1) for i, x in enumerate(values)}
    pairs = frozenset((f"layers.{i}.mlp", f"blocks.{i}.ff") for i in (0, 1, 3))
    return Trap(one, other, pairs, doubts=("layers.2.mlp",), by="values")


def repeated_layer() -> Trap:
    """The port's layer 2 computes what layer 1 does."""
    values = [drawn(2, 3, 8) for _ in range(4)]
    one = {f"layers.{i}": x for i, x in enumerate(values)}
    other = {f"layers.{i}": values[j] for i, j in enumerate((0, 1, 1, 3))}
    return Trap(one, other, frozenset((name, name) for name in one), doubts=("layers.2",))


def off_by_one() -> Trap:
    """Each layer of the port holds the values of the next one, the last those of the first."""
    values = [drawn(2, 3, 8) for _ in range(4)]
    one = {f"layers.{i}": x for i, x in enumerate(values)}
    other = {f"layers.{i}": values[(i + 1) % 4] for i in range(4)}
    return same_names(one, other)


def shuffled_layers() -> Trap:
    """The port's layers have other names and numbers in another order, as their values say."""
    values = [drawn(2, 3, 8) for _ in range(5)]
    one = {f"layers.{i}": x for i, x in enumerate(values)}
    order = (3, 0, 4, 1, 2)
    other = {f"blocks.{j}": values[i] for i, j in enumerate(order)}
    pairs = frozenset((f"layers.{i}", f"blocks.{j}") for i, j in enumerate(order))
    return Trap(one, other, pairs, doubts=("layers.0",), by="values")


def equal_rows() -> Trap:
    """All rows of a square tensor are equal, in the port all columns are."""
    row, y = drawn(8), drawn(8, 3)
    one = {"a": np.tile(row, (8, 1)), "b": y}
    other = {"u": np.ascontiguousarray(one["a"].T), "v": y}
    return Trap(one, other, frozenset({("b", "v")}), as_is=("a",), by="values")


def square_activation() -> Trap:
    """A tensor with as many tokens as channels is transposed: nothing but its values says so."""
    x = drawn(1, 8, 8)
    return Trap({"q": x}, {"q": np.ascontiguousarray(x.swapaxes(1, 2))}, as_is=("q",))


def other_ids() -> Trap:
    """Whole numbers are equal or not: ids that are one too high, positions that are right."""
    ids, positions = np.arange(100000, 100016).reshape(2, 8), np.arange(16).reshape(2, 8)
    one = {"embed/input.ids": ids, "embed/input.positions": positions, "embed": drawn(2, 8, 4)}
    other = {**one, "embed/input.ids": ids + 1}
    return Trap(one, other, frozenset({("embed", "embed")}), doubts=("embed/input.ids",))


def ids_as_results() -> Trap:
    """The same of what modules give: the one's ids are far too large for a difference of one to be seen."""
    ids, y = np.arange(100000, 100016).reshape(2, 8), drawn(2, 8, 4)
    return same_names({"route": ids, "embed": y}, {"route": ids + 1, "embed": y}, sure=("embed",))


def inverted_mask() -> Trap:
    """The one's mask says what is seen, the other's what is hidden."""
    mask, y = np.tril(np.ones((8, 8), np.bool_)), drawn(8, 3)
    return same_names({"mask": mask, "b": y}, {"mask": ~mask, "b": y}, sure=("b",))


def other_constants() -> Trap:
    """Names agree, and both are constant: the one is all zeros, the other all ones."""
    y = drawn(2, 4)
    one = {"bias": np.zeros((2, 4), np.float32), "b": y}
    return same_names(one, {"bias": np.ones((2, 4), np.float32), "b": y}, sure=("b",))


def one_nan() -> Trap:
    """One element of the port's tensor is not a number."""
    x, y = drawn(4, 8), drawn(4, 8)
    wrong = x.copy()
    wrong[1, 3] = np.nan
    return same_names({"a": x, "b": y}, {"a": wrong, "b": y}, sure=("b",))


def one_outlier() -> Trap:
    """One huge element is all that the statistics see, and the others have nothing in common."""
    x, y, z = drawn(4, 64), drawn(4, 64), drawn(4, 64)
    x[0, 0] = y[0, 0] = 1e7
    one, other = {"a": x, "b": z}, {"u": y, "v": z}
    return Trap(one, other, frozenset({("b", "v")}), silent=frozenset({("a", "u")}), by="values")


def cut_vocabulary() -> Trap:
    """Names agree, sizes do not."""
    x = drawn(2, 40)
    return same_names({"head": x}, {"head": x[:, :33].copy()})


def near_twins() -> Trap:
    """Two sites differ by rounding only, in the other order on the other side."""
    x, y = drawn(4, 8), drawn(4, 8)
    near = x * np.float32(1 + 2e-7)
    one, other = {"a": x, "b": near, "c": y}, {"u": near, "v": x, "w": y}
    silent = frozenset({(a, b) for a in "ab" for b in "uv"})
    return Trap(one, other, frozenset({("c", "w")}), silent=silent, by="values")


def fused_in_another_order() -> Trap:
    """A tensor called qkv_proj holds keys first."""
    q, k, v = (drawn(2, 3, 8) for _ in range(3))
    one = {f"attn.{name}_proj": x for name, x in (("query", q), ("key", k), ("value", v))}
    return Trap(one, {"attn.qkv_proj": np.concatenate([k, q, v], -1)}, doubts=tuple(one))


def fused_as_named() -> Trap:
    """Whatever is usual, a name says in which order parts stand, and they do."""
    gate, up = drawn(2, 3, 8), drawn(2, 3, 8)
    one = {"mlp.gate_proj": gate, "mlp.up_proj": up}
    return Trap(one, {"mlp.up_gate_proj": np.concatenate([up, gate], -1)}, equal=tuple(one), sure=tuple(one))


def swapped_weights() -> Trap:
    """The weights of keys and values are exchanged in two modules whose names and results agree."""
    x, y, a, b = drawn(2, 4), drawn(2, 4), drawn(8, 4), drawn(8, 4)
    one = {"k": x, "k/param.weight": a, "v": y, "v/param.weight": b}
    other = {"k": x, "k/param.weight": b, "v": y, "v/param.weight": a}
    return Trap(one, other, frozenset((name, name) for name in one), doubts=("k", "v"))


def fused_weights() -> Trap:
    """Weights of parts are rows of the whole's, whose results and biases have no rows."""
    q, k, v = (drawn(2, 3, 8) for _ in range(3))
    weights, biases = [drawn(8, 5) for _ in range(3)], [drawn(8) for _ in range(3)]
    one: dict[str, Array] = {}
    for name, x, weight, bias in zip("qkv", (q, k, v), weights, biases, strict=True):
        one |= {f"attn.{name}": x, f"attn.{name}/param.weight": weight, f"attn.{name}/param.bias": bias}
    other = {
        "attn.qkv": np.concatenate([q, k, v], -1),
        "attn.qkv/param.weight": np.concatenate(weights),
        "attn.qkv/param.bias": np.concatenate(biases),
    }
    return Trap(one, other, equal=tuple(one), sure=tuple(one))


def fused_weights_alone() -> Trap:
    """The same without results, kept transposed by the port."""
    weights = {f"attn.{name}/param.weight": drawn(8, 5) for name in "qkv"}
    other = {"attn.qkv/param.weight": np.ascontiguousarray(np.concatenate(list(weights.values())).T)}
    return Trap(weights, other, equal=tuple(weights), sure=tuple(weights))


def stacked_weights() -> Trap:
    """The weights of all layers are one tensor."""
    one = {f"layers.{i}.mlp/param.weight": drawn(5, 4) for i in range(3)}
    return Trap(one, {"scan.mlp/param.w": np.stack(list(one.values()))}, equal=tuple(one), sure=tuple(one))


def renamed_weights() -> Trap:
    """Parameters of paired modules have other names."""
    x, weight, bias = drawn(2, 4), drawn(9, 4), drawn(9)
    one = {"norm": x, "norm/param.weight": weight, "norm/param.bias": bias}
    other = {"ln": x, "ln/param.scale": weight, "ln/param.offset": bias}
    pairs = frozenset(zip(one, other, strict=True))
    return Trap(one, other, pairs, sure=tuple(one), by="values")


def lost_weight() -> Trap:
    """The port has no such buffer and no such bias, and another weight."""
    x, y, weight = drawn(2, 4), drawn(2, 4), drawn(9, 4)
    one = {
        "fc": x,
        "fc/param.weight": weight,
        "fc/param.bias": drawn(9),
        "fc/buffer.scale": drawn(1),
        "b": y,
    }
    other = {"fc": drawn(2, 4), "fc/param.weight": drawn(9, 4), "b": y}
    return Trap(one, other, frozenset({("fc", "fc")}), doubts=("fc",), sure=("b",))


def other_gradient() -> Trap:
    """Results agree, and a gradient has the other sign."""
    x, g = drawn(2, 4), drawn(2, 4)
    one, other = {"fc": x, "fc/grad_output": g}, {"fc": x, "fc/grad_output": -g}
    pairs = frozenset({("fc", "fc"), ("fc/grad_output", "fc/grad_output")})
    return Trap(one, other, pairs, doubts=("fc/grad_output",))


def coarser_weights() -> Trap:
    """The port keeps its weights in bfloat16: they are right, and nothing is to be told."""
    x = drawn(16, 8)
    kept = bfloat16(x)
    return Trap({"fc/param.weight": x}, {"fc/param.weight": kept}, equal=(), sure=("fc/param.weight",))


def symmetric_weight() -> Trap:
    """A symmetric weight is equal to itself transposed: values prove nothing."""
    x = drawn(8, 8)
    one, other = {"fc/param.weight": x + x.T}, {"p/param.w": x + x.T}
    unproven = frozenset({("fc/param.weight", "p/param.w")})
    return Trap(one, other, unproven=unproven, as_is=tuple(one), by="values")


def not_transposed() -> Trap:
    """The port keeps its weights transposed, but for the square one."""
    square, wide, long = drawn(8, 8), drawn(12, 8), drawn(8, 20)
    one = {"q/param.weight": square, "up/param.weight": wide, "down/param.weight": long}
    other = {name: np.ascontiguousarray(w if w is square else w.T) for name, w in one.items()}
    sure = ("up/param.weight", "down/param.weight")
    return Trap(one, other, frozenset((n, n) for n in one), doubts=("q/param.weight",), sure=sure)


def fused_twins() -> Trap:
    """Two layers with equal values, fused by the port: which is which, values do not say."""
    gate, up, y = drawn(2, 3, 8), drawn(2, 3, 8), drawn(2, 4)
    one = {"a": gate, "b": up, "c": y, "d": gate.copy(), "e": up.copy()}
    fused = np.concatenate([gate, up], -1)
    other = {"u": fused, "v": y, "w": fused.copy()}
    return Trap(one, other, frozenset({("c", "v")}), doubts=("a", "b", "d", "e"), by="values")


def attention(q: Array, k: Array, v: Array, mixed: Array) -> Tensors:
    """Results of a layer under the names of the reference."""
    names = ("q_proj", "k_proj", "v_proj", "o_proj")
    return {f"layers.0.self_attn.{n}": x for n, x in zip(names, (q, k, v, mixed), strict=True)}


def renamed_attention(q: Array, k: Array, v: Array, mixed: Array) -> Tensors:
    """Results of a layer under names of a port."""
    names = ("to_q", "to_k", "to_v", "merge")
    return {f"blocks.0.mixer.{n}": x for n, x in zip(names, (q, k, v, mixed), strict=True)}


ROLES = frozenset(
    (f"layers.0.self_attn.{n}_proj", f"blocks.0.mixer.to_{m}") for n, m in zip("qkv", "qkv", strict=True)
)


def swapped_projections() -> Trap:
    """Queries have the weights of keys and keys those of queries, so that attention is another: a bug."""
    q, k, v, mixed, other = (drawn(2, 3, 8) for _ in range(5))
    before, after = drawn(2, 3, 9), drawn(2, 3, 7)
    one = {"front": before, **attention(q, k, v, mixed), "head": after}
    two = {"table": before, **renamed_attention(k, q, v, other), "last": after + drawn(2, 3, 7)}
    return Trap(one, two, ROLES, doubts=("layers.0.self_attn.q_proj", "layers.0.self_attn.k_proj"))


def doubled_projection() -> Trap:
    """Keys have the weights of queries, which have them too."""
    q, k, v, mixed, other = (drawn(2, 3, 8) for _ in range(5))
    before, after = drawn(2, 3, 9), drawn(2, 3, 7)
    one = {"front": before, **attention(q, k, v, mixed), "head": after}
    two = {"table": before, **renamed_attention(q, q, v, other), "last": after + drawn(2, 3, 7)}
    return Trap(one, two, ROLES, doubts=("layers.0.self_attn.k_proj",))


def misnamed_projections() -> Trap:
    """What the port calls a query is a key in its code too, and what attention makes of it is right."""
    q, k, v, mixed = (drawn(2, 3, 8) for _ in range(4))
    before, after = drawn(2, 3, 9), drawn(2, 3, 7)
    one = {"front": before, **attention(q, k, v, mixed), "head": after}
    two = {"table": before, **renamed_attention(k, q, v, mixed), "last": after}
    pairs = {("layers.0.self_attn.q_proj", "blocks.0.mixer.to_k")}
    return Trap(one, two, frozenset(pairs), sure=("layers.0.self_attn.q_proj", "layers.0.self_attn.k_proj"))


def misnamed_behind_a_mistake() -> Trap:
    """The same in two layers, with another mistake between them: the second has wrong results for that."""
    one: dict[str, Array] = {"front": drawn(2, 3, 9)}
    two: dict[str, Array] = {"table": one["front"]}
    for i in range(2):
        q, k, v, mixed = (drawn(2, 3, 8) for _ in range(4))
        error = np.float32(0.004 * i)
        wrong = [x + error * drawn(2, 3, 8) for x in (k, q, v, mixed)]
        for name, x in attention(q, k, v, mixed).items():
            one[name.replace("0", str(i))] = x
        for name, x in renamed_attention(*wrong).items():
            two[name.replace("0", str(i))] = x
        hidden = drawn(2, 3, 7)
        one[f"layers.{i}.fc"] = hidden
        two[f"blocks.{i}.inner"] = hidden + np.float32(0.004) * drawn(2, 3, 7)
    pairs = {(f"layers.{i}.self_attn.q_proj", f"blocks.{i}.mixer.to_k") for i in range(2)}
    return Trap(one, two, frozenset(pairs), sure=("front",))


def misnamed_in_a_wrong_block() -> Trap:
    """The same in a block without a module for attention, which errs behind that."""
    q, k, v, mixed, hidden = (drawn(2, 3, 8) for _ in range(5))
    before, after = drawn(2, 3, 9), drawn(2, 3, 7)
    one = {"front": before, **attention(q, k, v, mixed), "layers.0.self_attn.fc": hidden, "head": after}
    two = {"table": before, **renamed_attention(k, q, v, mixed)}
    two |= {"blocks.0.mixer.inner": hidden + drawn(2, 3, 8), "last": after + drawn(2, 3, 7)}
    pairs = {("layers.0.self_attn.q_proj", "blocks.0.mixer.to_k")}
    return Trap(one, two, frozenset(pairs), sure=("layers.0.self_attn.q_proj", "layers.0.self_attn.k_proj"))


TRAPS = {
    make.__name__: make()
    for make in (
        constants,
        twins,
        shuffled,
        negated,
        scaled,
        one_wrong_element,
        swapped_names,
        swapped_layers,
        shifted_layers,
        equal_layers,
        symmetric,
        square_weight,
        transposed_weights,
        as_many_layers_as_sequences,
        fused_backwards,
        coarser,
        nothing_finite,
        norms_of_ones,
        another_layout,
        reordered_heads,
        unrelated,
        swapped_halves,
        swapped_halves_by_values,
        shifted_tokens,
        half_negated,
        doubled,
        one_scaled_layer,
        repeated_layer,
        off_by_one,
        shuffled_layers,
        equal_rows,
        square_activation,
        other_ids,
        ids_as_results,
        inverted_mask,
        other_constants,
        one_nan,
        one_outlier,
        cut_vocabulary,
        near_twins,
        fused_in_another_order,
        fused_as_named,
        swapped_weights,
        fused_weights,
        fused_weights_alone,
        stacked_weights,
        renamed_weights,
        lost_weight,
        other_gradient,
        coarser_weights,
        symmetric_weight,
        not_transposed,
        fused_twins,
        swapped_projections,
        doubled_projection,
        misnamed_projections,
        misnamed_behind_a_mistake,
        misnamed_in_a_wrong_block,
    )
}
