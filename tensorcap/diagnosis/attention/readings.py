"""Where queries, keys and values are read from: layouts of a result that has all three, heads, channels."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Final

import numpy as np

from tensorcap.diagnosis.attention.core import Parts
from tensorcap.diagnosis.values import Values

Index = tuple[Values, Values, Values]  # of the channels of q, k and v
_ORDERS: Final = tuple(order for order in itertools.permutations("qkv") if order != ("q", "k", "v"))
_NAMES: Final = ("q", "k", "v")
_TOGETHER: Final = (("q",), ("k",), ("v",), ("q", "k", "v"))


def _in_blocks(heads: int, keys: int, dims: int) -> Index:
    q, k, v = np.split(np.arange((heads + 2 * keys) * dims), np.cumsum([heads * dims, keys * dims]))
    return q, k, v


def _by_group(heads: int, keys: int, dims: int) -> Index:
    groups = np.arange((heads + 2 * keys) * dims).reshape(keys, heads // keys + 2, dims)
    return groups[:, :-2].reshape(-1), groups[:, -2].reshape(-1), groups[:, -1].reshape(-1)


def _with_pairs(heads: int, keys: int, dims: int) -> Index:
    pairs = heads * dims + np.arange(2 * keys * dims).reshape(keys, 2, dims)
    return np.arange(heads * dims), pairs[:, 0].reshape(-1), pairs[:, 1].reshape(-1)


def _by_channel(heads: int, keys: int, dims: int) -> Index | None:
    if heads != keys:
        return None
    q, k, v = np.arange(3 * heads * dims).reshape(-1, 3).T
    return q, k, v


LAYOUTS: Final[Mapping[str, Callable[[int, int, int], Index | None]]] = {
    "in blocks": _in_blocks,
    "group by group": _by_group,  # the queries of a head of keys, the keys, the values
    "with keys and values head by head": _with_pairs,
    "channel by channel": _by_channel,
}


def read_layout(fused: Values, layout: str, heads: int, keys: int, dims: int) -> tuple[Values, ...] | None:
    """Read queries, keys and values, (batch, head, token, channel), of a result that has all three.

    Args:
        fused: The result, (batch, token, channel).
        layout: A key of `LAYOUTS`.
        heads: Of the queries.
        keys: Heads of the keys, and of the values.
        dims: Channels of a head.
    """
    index = LAYOUTS[layout](heads, keys, dims)
    if index is None:
        return None
    return tuple(_split(fused[..., part], dims) for part in index)


def reread(parts: Parts) -> Iterator[tuple[str, Parts]]:
    """Read queries, keys and values in another layout than they lie in, or one in the place of another.

    Where they do not lie in one result, the target may have joined them in any layout and read another.
    """
    heads, keys, dims = parts.q.shape[1], parts.k.shape[1], parts.q.shape[3]
    if parts.v.shape != parts.k.shape or parts.q.shape[2] != parts.k.shape[2]:
        return
    indices = {name: make(heads, keys, dims) for name, make in LAYOUTS.items()}
    sides = [_join(x) for x in (parts.q, parts.k, parts.v)]
    known = {_as_bytes(np.arange((heads + 2 * keys) * dims))}
    for lies, reads in itertools.permutations(LAYOUTS, 2):
        index, other = indices[lies], indices[reads]
        if index is None or other is None or parts.layout not in ("", lies):
            continue
        fused = np.empty((*sides[0].shape[:2], (heads + 2 * keys) * dims))
        at = np.empty(fused.shape[-1], np.int64)
        at[np.concatenate(index)] = np.arange(fused.shape[-1])
        if (order := _as_bytes(at[np.concatenate(other)])) in known:
            continue
        known.add(order)
        for side, part in zip(sides, index, strict=True):
            fused[..., part] = side
        q, k, v = (_split(fused[..., part], dims) for part in other)
        yield f"reads q, k and v {reads} where they lie {lies}", replace(parts, q=q, k=k, v=v)
    tensors = {"q": parts.q, "k": parts.k, "v": parts.v}
    for names in _ORDERS:
        taken = [tensors[name] for name in names]
        if all(one.shape == own.shape for one, own in zip(taken, tensors.values(), strict=True)):
            text = f"takes {names[0]}, {names[1]} and {names[2]} for q, k and v"
            yield text, replace(parts, q=taken[0], k=taken[1], v=taken[2])


def rearrange(parts: Parts) -> Iterator[tuple[str, Parts]]:
    """Split heads otherwise, leave out a transpose of heads and tokens, put channels in another order.

    Each is done to queries, keys or values alone, and to all.
    """
    ways: Mapping[str, Callable[[Values], Values]] = {
        "splits the channels of {} into (channel, head) where it has to be (head, channel)": _nest,
        "joins the heads of {} as (channel, head) where it has to be (head, channel)": _unnest,
        "has tokens and heads of {} not transposed": _view,
        "has {} with its halves put alternately": _alternate,
        "has {} with its alternate channels put into halves": _gather,
        "has the halves of {} exchanged in each head": lambda x: np.roll(x, x.shape[3] // 2, 3),
    }
    tensors = {"q": parts.q, "k": parts.k, "v": parts.v}
    for text, edit in ways.items():
        for names in _TOGETHER:
            if all(tensors[name].shape[3] % 2 == 0 for name in names):
                yield text.format(_list(names)), _edit(parts, {name: edit(tensors[name]) for name in names})


def drop_biases(parts: Parts) -> Iterator[tuple[str, Parts]]:
    """Leave out the bias of a projection."""
    tensors = {"q": parts.q, "k": parts.k, "v": parts.v}
    for name, bias in parts.added.items():
        yield f"has {name} without its bias", _edit(parts, {name: tensors[name] - bias})


def _edit(parts: Parts, tensors: Mapping[str, Values]) -> Parts:
    return replace(
        parts,
        q=tensors.get("q", parts.q),
        k=tensors.get("k", parts.k),
        v=tensors.get("v", parts.v),
    )


def _list(names: tuple[str, ...]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _as_bytes(order: Values) -> bytes:
    return np.ascontiguousarray(order).tobytes()


def _split(values: Values, dims: int) -> Values:
    """(batch, token, channel) as (batch, head, token, channel)."""
    return values.reshape(*values.shape[:2], -1, dims).transpose(0, 2, 1, 3)


def _join(x: Values) -> Values:
    """(batch, head, token, channel) as (batch, token, channel)."""
    return x.transpose(0, 2, 1, 3).reshape(x.shape[0], x.shape[2], -1)


def _nest(x: Values) -> Values:
    batch, heads, tokens, dims = x.shape
    return _join(x).reshape(batch, tokens, dims, heads).transpose(0, 3, 1, 2)


def _unnest(x: Values) -> Values:
    return _split(x.transpose(0, 2, 3, 1).reshape(x.shape[0], x.shape[2], -1), x.shape[3])


def _view(x: Values) -> Values:
    return _join(x).reshape(x.shape)


def _alternate(x: Values) -> Values:
    half = x.shape[3] // 2
    return np.stack((x[..., :half], x[..., half:]), axis=-1).reshape(x.shape)


def _gather(x: Values) -> Values:
    return np.concatenate((x[..., ::2], x[..., 1::2]), axis=-1)
