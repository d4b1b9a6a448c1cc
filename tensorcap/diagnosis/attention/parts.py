"""Collect queries, keys, values, angles, masks and biases of an attention from its records."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from tensorcap.diagnosis.attention.core import Parts
from tensorcap.diagnosis.attention.readings import LAYOUTS, read_layout
from tensorcap.diagnosis.attention.rotary import read_angles
from tensorcap.diagnosis.context import values_of
from tensorcap.diagnosis.values import Values
from tensorcap.wording import name_pattern
from tensorcap_formats.archive import Archive
from tensorcap_formats.keys import module_of
from tensorcap_formats.records import Record

_NAMES: Final = {
    "q": ("q_proj", "query", "wq", "q_lin", "to_q", "q"),
    "k": ("k_proj", "key", "wk", "k_lin", "to_k", "k"),
    "v": ("v_proj", "value", "wv", "v_lin", "to_v", "v"),
    "qkv": ("qkv_proj", "c_attn", "query_key_value", "Wqkv", "in_proj", "qkv"),
}
_NORMS: Final = {
    "q": ("q_norm", "q_layernorm", "query_layernorm", "norm_q"),
    "k": ("k_norm", "k_layernorm", "key_layernorm", "norm_k"),
    "v": ("v_norm",),
}
_MASKS: Final = ("attention_mask", "mask", "attn_mask", "encoder_attention_mask")
_HIDDEN: Final = -1e4  # what is added to scores that are not visible is below
_HIDDEN_BY_TWO_VALUES: Final = -99.0  # if there is nothing else but 0, as in windows of images
_CACHES: Final = ("cache", "past")
_FOREIGN: Final = ("key_value_states", "encoder_hidden_states", "context")  # what a cross attention looks at
_MOST_TABLES: Final = 4  # of other modules that angles are read of
_EVEN_GAIN: Final = (
    1e-3  # by which the logarithm of what a norm does may miss a product of tokens and channels
)
Sides = tuple[Parts, Parts]  # of the reference and of the target


@dataclass(frozen=True, slots=True)
class _Site:
    """An attention module, and the record of its core's result.

    Attributes:
        archive: The archive.
        record: The result of the core.
        parent: The attention's site.
        batch: Sequences of the core's result.
        tokens: Its tokens.
        count: Its heads.
        dims: Channels of a head.
    """

    archive: Archive
    record: Record
    parent: str
    batch: int
    tokens: int
    count: int
    dims: int

    def records_of(self, step: int | None) -> list[Record]:
        """Records of a step up to the core's result."""
        key = self.record.key
        return [
            r
            for r in self.archive.records
            if (r.key.step, r.key.call, r.key.rank) == (step, key.call, key.rank)
            and r.stored
            and r.order <= self.record.order
        ]

    def arguments(self, records: Sequence[Record]) -> dict[str, Record]:
        """Arguments of the attention itself, by name."""
        return {
            r.key.slot.removeprefix("input."): r
            for r in records
            if r.key.site == self.parent and r.key.slot.startswith("input.")
        }

    def results(self, records: Sequence[Record]) -> dict[str, Record]:
        """Results of modules within it, by their names."""
        return {
            name: r
            for r in records
            for parent, _, name in [r.key.site.rpartition(".")]
            if parent == self.parent and r.key.slot == "output"
        }


@dataclass(frozen=True, slots=True)
class _Projections:
    """Queries, keys and values of one step, (batch, head, token, channel), as far as they are recorded.

    Attributes:
        tensors: By `q`, `k` and `v`.
        bare: `q` and `k` before their norm.
        has_norm: Which of them have a norm.
        sites: Of the projections, by the same names.
        layout: How they lie in one result, a key of `LAYOUTS`; "" if they do not.
    """

    tensors: Mapping[str, Values]
    bare: Mapping[str, Values]
    has_norm: frozenset[str]
    sites: Mapping[str, str]
    layout: str = ""

    @property
    def is_whole(self) -> bool:
        return len(self.tensors) == len("qkv")


def collect_sides(
    reference: tuple[Archive, Record], target: tuple[Archive, Record], shape: tuple[int, int, int, int]
) -> Iterator[Sides]:
    """Collect the tensors that the attention of a core's result computed with, of both sides, in each layout.

    What the target has no record of is that of the reference: under replay that was made of what the target's
    attention was given.

    Args:
        reference: The archive, and the result of the core.
        target: Those of the target.
        shape: Of the result, (batch, token, head, channel).
    """
    site = module_of(reference[1].key.site)
    for parent in (site.rpartition(".")[0], site):
        ours = _Site(*reference, parent, *shape)
        other = module_of(target[1].key.site)
        theirs = _Site(*target, other.rpartition(".")[0] if parent != site else other, *shape)
        layouts = [
            layout for layout in ("", *LAYOUTS) if _project(ours, ours.record.key.step, layout).is_whole
        ]
        for layout in layouts:
            parts = _collect(ours, layout)
            if parts is not None:
                yield parts, _complete(_collect(theirs, layout, parts), parts)
        if layouts:
            return


def _complete(theirs: Parts | None, ours: Parts) -> Parts:
    """Add what is the reference's in any case, and angles, mask and bias if the target has none."""
    if theirs is None or theirs.q.shape != ours.q.shape or theirs.k.shape[2:] != ours.k.shape[2:]:
        return ours
    return replace(
        theirs,
        angles=ours.angles if theirs.angles is None else theirs.angles,
        mask=ours.mask if theirs.mask is None else theirs.mask,
        bias=ours.bias if theirs.bias is None else theirs.bias,
        sinks=ours.sinks,
        tables=ours.tables,
        others=ours.others,
    )


def _collect(site: _Site, layout: str, other: Parts | None = None) -> Parts | None:
    """Collect the parts of an attention module.

    1. Queries, keys and values are results of modules within, by their names, or parts of a fused one.
    2. If the attention was given a cache, keys, values and angles of the steps before come first.
    3. A mask of floats, and a bias with a mask added to it, are split into what is visible and what is added.

    Args:
        site: The attention.
        layout: How queries, keys and values lie in one result; "" if they do not.
        other: What stands for queries, keys and values that are not recorded; None if all have to be.
    """
    key = site.record.key
    records = site.records_of(key.step)
    arguments, results = site.arguments(records), site.results(records)
    own = _project(site, key.step, layout)
    if other is not None:
        own = _stand_in(own, other)
    if not own.is_whole:
        return None
    q, k, v = (own.tensors[name] for name in "qkv")
    angles = _read_angles(site, arguments)
    bare = dict(own.bare)
    is_cached = any(word in name for name in arguments for word in _CACHES)
    if q.shape[2] == k.shape[2] and is_cached and not any(name in arguments for name in _FOREIGN):
        for earlier in reversed(_earlier_steps(site)):
            past = _project(site, earlier, layout)
            if not past.is_whole:
                return None
            k, v = (np.concatenate((past.tensors[n], x), axis=2) for n, x in (("k", k), ("v", v)))
            if "k" in bare and "k" in past.bare:
                bare["k"] = np.concatenate((past.bare["k"], bare["k"]), axis=2)
            angles = _join(_read_angles(site, site.arguments(site.records_of(earlier))), angles)
    is_whole = q.shape[1] == site.count and k.shape == v.shape and k.shape[1] and site.count % k.shape[1] == 0
    if not is_whole or k.shape[3] != q.shape[3] or k.shape[0] != q.shape[0]:
        return None
    scores = (q.shape[0], site.count, q.shape[2], k.shape[2])
    mask = next((arguments[name] for name in _MASKS if name in arguments), None)
    visible, added = _read_mask(site.archive, mask, scores)
    bias = _read_bias(site.archive, arguments, results, scores)
    if bias is not None and (bias <= _HIDDEN).any():  # a mask that was added to it
        shown = (bias > _HIDDEN).any(axis=1, keepdims=True)
        shown = np.broadcast_to(shown, (scores[0], *shown.shape[1:]))
        visible = shown if visible is None else np.asarray(visible & shown)
        bias = np.where(bias > _HIDDEN, bias, 0.0)
    bias = bias if added is None else added if bias is None else bias + added
    angles = angles if angles is not None and angles.shape[1] == k.shape[2] else None
    tables = {} if angles is None else dict(_read_other_tables(site, arguments, angles))
    return Parts(
        q,
        k,
        v,
        angles,
        visible,
        bias,
        _read_sinks(site),
        tables=tables,
        others=_read_others(site, mask, scores, angles),
        bare={name: x for name, x in bare.items() if x.shape == {"q": q, "k": k}[name].shape},
        added=_read_added(site, own),
        layout=layout,
    )


def _stand_in(own: _Projections, other: Parts) -> _Projections:
    """Take those of the other side where none is recorded, or one without the norm that the other one has."""
    theirs = {"q": other.q, "k": other.k, "v": other.v}
    is_equal = {
        name: name in own.tensors and (name in other.bare) == (name in own.has_norm) for name in "qkv"
    }
    if all(is_equal.values()):
        return own
    tensors = {name: own.tensors[name] if is_equal[name] else theirs[name] for name in "qkv"}
    bare = {name: own.bare.get(name, x) for name, x in other.bare.items()}
    for name in bare:
        if not is_equal[name] and name in own.tensors:
            bare[name] = own.tensors[name]
    return replace(own, tensors=tensors, bare=bare, layout="")


def _read_added(site: _Site, own: _Projections) -> dict[str, Values]:
    """Biases of the projections whose results queries, keys and values are, in shapes that fit these."""
    added = {}
    for record in site.archive.records:
        for name, path in own.sites.items():
            is_there = record.key.site == path and record.key.slot == "param.bias" and record.stored
            if is_there and name not in own.has_norm and record.size % site.dims == 0:
                added[name] = values_of(site.archive, record).reshape(1, -1, 1, site.dims)
    return {name: x for name, x in added.items() if x.shape[1] == own.tensors[name].shape[1]}


def _earlier_steps(site: _Site) -> list[int]:
    key = site.record.key
    if key.step is None:
        return []
    within = [r.key.step for r in site.archive.records if r.key.site.rpartition(".")[0] == site.parent]
    steps = {step for step in within if step is not None}
    return sorted(step for step in steps if step < key.step)


def _project(site: _Site, step: int | None, layout: str) -> _Projections:
    """Read queries, keys and values of one step, as far as they are recorded.

    Args:
        site: The attention.
        step: The step.
        layout: How they lie in one result; "" if each has its own.
    """
    results = site.results(site.records_of(step))
    bare: dict[str, Values] = {}
    sites: dict[str, str] = {}
    if layout:
        name = next((name for name in _NAMES["qkv"] if name in results), None)
        bare = {} if name is None else _split_fused(site, results[name], layout)
    else:
        for slot in "qkv":
            name = next((name for name in _NAMES[slot] if name in results), None)
            values = _split_heads(site, None if name is None else results[name])
            if name is not None and values is not None:
                bare[slot], sites[slot] = values, results[name].key.site
    normed = {}
    tokens = next((x.shape[2] for x in bare.values()), site.tokens)  # an earlier step has others
    for slot, names in _NORMS.items():
        name = next((name for name in names if name in results), None)
        values = _split_heads(site, None if name is None else results[name], tokens)
        if values is not None:
            normed[slot] = values
    return _Projections(
        {**bare, **normed},
        {slot: bare[slot] for slot in ("q", "k") if slot in normed and slot in bare},
        frozenset(normed),
        sites,
        layout,
    )


def _split_fused(site: _Site, record: Record, layout: str) -> dict[str, Values]:
    """Queries, keys and values of a result that has all three, (batch, token, channel)."""
    shape = record.shape
    if len(shape) != 3 or shape[0] != site.batch or shape[2] % site.dims:
        return {}
    keys, rest = divmod(shape[2] // site.dims - site.count, 2)
    if rest or keys < 1 or site.count % keys:
        return {}
    sides = read_layout(values_of(site.archive, record), layout, site.count, keys, site.dims)
    return {} if sides is None else dict(zip("qkv", sides, strict=True))


def _split_heads(site: _Site, record: Record | None, tokens: int | None = None) -> Values | None:
    """A projection as (batch, head, token, channel).

    Args:
        site: The attention.
        record: The projection; None if there is none.
        tokens: Its tokens; those of the core's result if None.
    """
    if record is None or len(record.shape) < 3 or record.shape[0] != site.batch or not record.size:
        return None
    values = values_of(site.archive, record)
    if len(record.shape) == 4 and record.shape[-1] == site.dims:
        is_headed = record.shape[2] == (tokens or site.tokens) != record.shape[1]
        return values if is_headed else values.transpose(0, 2, 1, 3)
    if len(record.shape) != 3 or record.shape[2] % site.dims:
        return None
    return values.reshape(*record.shape[:2], -1, site.dims).transpose(0, 2, 1, 3)


def _read_angles(site: _Site, arguments: dict[str, Record]) -> Values | None:
    """Angles of one step, by batch, token and pair of channels."""
    sides = []
    for number in (0, 1):
        record = arguments.get(f"position_embeddings.{number}")
        if record is None or record.dtype.kind != "float" or len(record.shape) != 3:
            return None
        sides.append(values_of(site.archive, record))
    return _of_batch(site, read_angles(*sides)) if sides[0].shape == sides[1].shape else None


def _of_batch(site: _Site, angles: Values) -> Values | None:
    if angles.shape[0] not in (1, site.batch):
        return None
    return np.broadcast_to(angles, (site.batch, *angles.shape[1:]))


def _read_other_tables(
    site: _Site, arguments: dict[str, Record], angles: Values
) -> Iterator[tuple[str, Values]]:
    """Angles of other layers that are not those of this one: what they are, the angles."""
    own = arguments["position_embeddings.0"]
    digests = {own.digest}
    cosines = [
        r
        for r in site.archive.records
        if r.key.slot.endswith("position_embeddings.0") and (r.key.step, r.shape) == (own.key.step, own.shape)
    ]
    tables = 0
    for record in cosines:
        sine = replace(record.key, slot=f"{record.key.slot[:-1]}1").text
        if record.digest in digests or sine not in site.archive or tables == _MOST_TABLES:
            continue
        digests.add(record.digest)
        sides = [values_of(site.archive, r) for r in (record, site.archive.get(sine))]
        other = _of_batch(site, read_angles(*sides)) if sides[0].shape == sides[1].shape else None
        if other is not None and not np.array_equal(other, angles):
            tables += 1
            yield f"the angles of {record.key.site}", other


def _read_others(
    site: _Site, mask: Record | None, scores: tuple[int, ...], angles: Values | None
) -> dict[tuple[str, ...], tuple[Values, Values | None]]:
    """What other layers see by masks that are not this one's, and their angles if these are not, by sites."""
    if mask is None:
        return {}
    pattern, step = name_pattern(site.parent), site.record.key.step
    found: dict[tuple[str, str], tuple[list[str], Values, Values | None]] = {}
    for record in site.archive.records:
        place = record.key.site
        if record.key.slot != mask.key.slot or record.key.step != step or not record.stored:
            continue
        if record.digest == mask.digest or record.shape != mask.shape or name_pattern(place) != pattern:
            continue
        slots = [f"input.position_embeddings.{number}" for number in (0, 1)]
        texts = [replace(record.key, slot=slot).text for slot in slots]
        sides = [site.archive.get(text) for text in texts if text in site.archive]
        digest = sides[0].digest if sides else ""
        if (record.digest, digest) in found:
            found[record.digest, digest][0].append(place)
            continue
        if len(found) == _MOST_TABLES:
            continue
        visible, added = _read_mask(site.archive, record, scores)
        if visible is None or added is not None:
            continue
        arguments = {side.key.slot.removeprefix("input."): side for side in sides}
        theirs = None if angles is None else _read_angles(site, arguments)
        is_own = theirs is None or angles is None or np.array_equal(theirs, angles)
        is_fitting = is_own or (theirs is not None and angles is not None and theirs.shape == angles.shape)
        if is_fitting:
            found[record.digest, digest] = [place], visible, None if is_own else theirs
    return {tuple(sites): (visible, other) for sites, visible, other in found.values()}


def _join(before: Values | None, after: Values | None) -> Values | None:
    return None if before is None or after is None else np.concatenate((before, after), axis=1)


def _read_mask(
    archive: Archive, record: Record | None, scores: tuple[int, ...]
) -> tuple[Values | None, Values | None]:
    """Which keys a mask shows, (batch, 1, query, key), and what it adds to scores besides."""
    if record is None or len(record.shape) not in (2, 3, 4):
        return None, None
    values = values_of(archive, record)
    if values.ndim == 2:
        values = values[:, None, None]
    if values.ndim == 3:  # of windows, the same in each image
        values = np.tile(values, (max(1, scores[0] // max(1, len(values))), 1, 1))[:, None]
    values = values[..., : scores[3]]
    if not _fits(values.shape, scores):
        return None, None
    if record.dtype.kind != "float":
        visible, added = np.asarray(values != 0), None
    else:
        is_two_valued = len(np.unique(values)) <= 2
        visible = np.asarray(values > (_HIDDEN_BY_TWO_VALUES if is_two_valued else _HIDDEN))
        rest = np.where(visible, values, 0.0)
        added = np.broadcast_to(rest, (*rest.shape[:2], *scores[2:])) if rest.any() else None
    shown = np.broadcast_to(visible, (scores[0], *visible.shape[1:2], *scores[2:]))
    return np.asarray(shown.any(axis=1, keepdims=True)), added


def _read_bias(
    archive: Archive, arguments: dict[str, Record], results: dict[str, Record], scores: tuple[int, ...]
) -> Values | None:
    """What positions add to scores, (batch or 1, head or 1, query, key)."""
    biases = [record for name, record in results.items() if "bias" in name and len(record.shape) in (3, 4)]
    if "position_bias" in arguments and len(arguments["position_bias"].shape) == 4:
        biases.insert(0, arguments["position_bias"])
    if "alibi" in arguments:
        values = values_of(archive, arguments["alibi"])
        values = values.reshape(-1, scores[1], *values.shape[-2:]) if values.size % scores[1] == 0 else values
        if _fits(values.shape, scores):
            return np.broadcast_to(values, (*values.shape[:2], *scores[2:]))
    for record in biases:
        values = values_of(archive, record)
        values = values.transpose(2, 0, 1)[None] if values.ndim == 3 else values
        if _fits(values.shape, scores):
            return np.broadcast_to(values, (*values.shape[:2], *scores[2:]))
    return None


def _fits(shape: tuple[int, ...], scores: tuple[int, ...]) -> bool:
    return len(shape) == 4 and all(size in (1, whole) for size, whole in zip(shape, scores, strict=True))


def _read_sinks(site: _Site) -> Values | None:
    for record in site.archive.records:
        is_there = module_of(record.key.site) == site.parent and record.key.slot == "param.sinks"
        if is_there and record.stored and record.size == site.count:
            return values_of(site.archive, record).reshape(-1)
    return None
