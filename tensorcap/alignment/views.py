"""Views of two archives through a resolved mapping.

`MappedArchive` is the target under the reference's keys and in its layouts, `GatheredArchive` the reference
reduced to the tokens that both sides have, `WholeTensors` the target in the places that these have in the
reference, `OrderedArchive` the reference in the target's order, `ReversedArchive` the reference as the target
would have it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

import numpy as np

from tensorcap.alignment.choice_order import SortedChoices
from tensorcap.alignment.common_part import CutArchive, cut_texts, values_dtype
from tensorcap.alignment.coverage import MappingSummary, summary_of
from tensorcap.alignment.joined_steps import JoinedArchive
from tensorcap.alignment.layout import Layout, Shape, Sum
from tensorcap.alignment.links import Link
from tensorcap.alignment.mapping import Alignment, LeftOver, layout_texts
from tensorcap.alignment.resolution import ResolvedMapping
from tensorcap.alignment.tokens import Gather, TokenAxes
from tensorcap.runs import BESIDE_WEIGHT, is_fact, is_parameter
from tensorcap_formats.archive import Archive
from tensorcap_formats.dtypes import Array, DType, dtype_of
from tensorcap_formats.errors import ReadError, UsageError
from tensorcap_formats.keys import (
    ROOT_SITE,
    Key,
    inner_site,
    module_of,
    module_path,
    module_site,
    unescape,
)
from tensorcap_formats.records import Record
from tensorcap_formats.run_info import ModuleInfo, RunInfo, TensorInfo
from tensorcap_formats.view import ArchiveView

UNMAPPED = "unmapped"  # stands before the site of a record that nothing was mapped to


class MappedArchive(ArchiveView):
    """A target under the reference's keys, its tensors in the reference's layout.

    A record that is only renamed keeps its statistics and digest. Any other is made, when it is read, of
    the tensors that its steps take, and has neither. A record of the target that is part of no link keeps
    its key, unless that is the key of a record of the reference that a link makes: then it gets another.

    Attributes:
        links: The link that made a record, by key text.
        alignment: The mapping as it is written; None for a view by links alone.
        map_path: The map file that it was read from, or what else it is called; "" if it was computed.
        left_over: What the mapping says has no counterpart.
        names: The reference's names of the target's sites, of those that are one of its.
        parts: The reference's modules whose weights in few bits are parts of one of the target's, which has
            no calls of their own.
    """

    def __init__(
        self,
        reference: Archive,
        target: Archive,
        links: Sequence[Link],
        *,
        alignment: Alignment | None = None,
        map_path: str = "",
        tokens: Sequence[str] = (),
    ) -> None:
        self.alignment = alignment
        self.map_path = map_path
        self.left_over: Sequence[LeftOver] = alignment.left_over if alignment else ()
        self._summed_up = partial(
            summary_of, links, self.left_over, reference, target, path=map_path, tokens=tokens
        )
        self.names = names = _names(links, target)
        self.links: dict[str, Link] = {}
        self._parts: dict[str, int] = {}
        self._of_parts = tuple(_fused_in_few_bits(links, target))
        self.parts = frozenset(record.key.site for link in self._of_parts for record in link.reference)
        records, sources = self._linked((*links, *_links_beside(self._of_parts, target)))
        taken = set(sources)
        used = {source.key.text for behind in sources.values() for source in behind}
        beside = dict(self._kept_beside())
        for record in target.records:
            if record.key.text in used:
                continue
            key = beside.get(record.key.text, record.key)
            key = _elsewhere(record.key) if key.text in taken else key
            records.append(replace(record, key=key))
            sources[key.text] = (record,)
        records.sort(key=lambda record: record.order)
        super().__init__(
            target,
            records,
            sources,
            values=renamed_values(target.values, names),
            is_direct=target.is_direct and all(link.is_renaming for link in links),
        )

    @cached_property
    def info(self) -> RunInfo:
        """What the target's metadata say, with the reference's names for sites that are one of its."""
        info, names = self.source.info, self.names
        return replace(
            info,
            modules={
                **{
                    site if site == ROOT_SITE else names.get(site, site): module  # the model stays the model
                    for site, module in info.modules.items()
                },
                **_modules_of_parts(info, self._of_parts),
            },
            points=tuple(replace(point, site=names.get(point.site, point.site)) for point in info.points),
        )

    @cached_property
    def summary(self) -> MappingSummary:
        """What the mapping comes to."""
        return self._summed_up()

    def _linked(self, links: Sequence[Link]) -> tuple[list[Record], dict[str, Sequence[Record]]]:
        records: list[Record] = []
        sources: dict[str, Sequence[Record]] = {}
        for link in links:
            outputs = zip(link.reference, link.shapes, link.dtypes, strict=True)
            for part, (own, shape, dtype) in enumerate(outputs):
                text = own.key.text
                self.links[text], self._parts[text] = link, part
                if link.is_renaming:
                    sources[text] = (link.target[part],)
                    records.append(replace(link.target[part], key=own.key))
                else:
                    sources[text] = link.target
                    records.append(_computed_record(link.target, own.key, dtype, shape))
        return records, sources

    def _kept_beside(self) -> Iterator[tuple[str, Key]]:
        """Yield keys of what is kept beside weights in few bits (CAP-330), and the keys they get."""
        for link in self.links.values():
            if link.is_renaming and is_parameter(link.target[0].key):
                for theirs, ours in zip(link.target, link.reference, strict=True):
                    for end in BESIDE_WEIGHT:
                        yield _beside(theirs.key, end).text, _beside(ours.key, end)

    def remark(self, record: Record) -> str:
        """What is to be known of the tensors behind it, and of what the link does to them."""
        remarks = super().remark(record), self.doubt(record)
        return "; ".join(dict.fromkeys(remark for remark in remarks if remark))

    def doubt(self, record: Record) -> str:
        """Why the tensor may not be the one that the key means; "" if nothing is in doubt."""
        link = self.links.get(record.key.text)
        return link.remark if link else ""

    def _read_flat(self, record: Record, start: int, out: Array) -> None:
        text = record.key.text
        link = self.links.get(text)
        if link is None or link.is_renaming:
            super()._read_flat(record, start, out)
            return
        try:
            tensors = self._computed(link, lambda: link.make(self.source.read))
        except UsageError as error:
            raise ReadError(f"{self.path}: {text}: {error}", hint=error.hint) from None
        out[:] = tensors[self._parts[text]][start : start + out.size]


def _fused_in_few_bits(links: Sequence[Link], target: Archive) -> Iterator[Link]:
    """Yield the links that divide a weight in few bits, with its steps beside it, among modules."""
    for link in links:
        if len(link.target) == 1 and len({record.key.site for record in link.reference}) > 1:
            key = link.target[0].key
            if is_parameter(key) and any(_beside(key, end).text in target for end in BESIDE_WEIGHT):
                yield link


def _links_beside(links: Iterable[Link], target: Archive) -> Iterator[Link]:
    """Yield links that divide the steps and zero points of such weights, or hand them on if all share one."""
    for link in links:
        for end in BESIDE_WEIGHT:
            key = _beside(link.target[0].key, end)
            if key.text not in target:
                continue
            held = target.get(key.text)
            reference = tuple(replace(record, key=_beside(record.key, end)) for record in link.reference)
            if not held.shape or held.shape[0] == 1:
                whole = (held,) * len(reference)
                yield replace(link, reference=reference, target=whole, layout=Layout(()), remark="")
                continue
            divided = replace(link, reference=reference, target=(held,), remark="")
            try:
                is_whole = len(divided.shapes) == len(reference)
            except UsageError:  # steps that go by the size of the weight
                continue
            if is_whole:
                yield divided


def _modules_of_parts(info: RunInfo, links: Iterable[Link]) -> dict[str, ModuleInfo]:
    """The modules of the reference that hold a part of such weights, as the module that holds the whole."""
    parts: dict[str, ModuleInfo] = {}
    for link in links:
        whole = info.modules.get(link.target[0].key.site)
        for record, shape in zip(link.reference, link.shapes, strict=True):
            site, name = record.key.site, unescape(record.key.slot.partition(".")[2])
            if whole is None:
                continue
            held = whole.parameters.get(name)  # none of what is packed under another name
            part = parts.get(site, replace(whole, parameters={}, buffers={}))
            tensor = replace(held or TensorInfo(shape, link.target[0].dtype.name), shape=shape)
            tensor = replace(tensor, digest="", statistics=None)
            parts[site] = replace(part, parameters={**part.parameters, name: tensor})
    return parts


def _beside(key: Key, end: str) -> Key:
    """The key of what is kept beside a weight in few bits."""
    return replace(key, slot=key.slot + end)


def _computed_record(sources: Sequence[Record], key: Key, dtype: DType, shape: Shape) -> Record:
    """The record of a tensor that is computed when it is read: without statistics and digest."""
    stored = all(record.stored for record in sources)
    record = replace(sources[0], key=key, dtype=dtype, shape=shape, stored=stored)
    return replace(record, digest="", statistics=None)


def is_elsewhere(key: Key) -> bool:
    """Whether a key is that of a target's record which nothing was mapped to, beside one of its name."""
    return key.site.startswith(f"{UNMAPPED}:")


def _elsewhere(key: Key) -> Key:
    return replace(key, site=inner_site(UNMAPPED, key.site)) if key.slot else Key(f"{UNMAPPED}:{key.site}")


def renamed_values(values: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """Values that are no tensors, and facts of ops, under the reference's names of their sites."""
    renamed = {}
    for text, value in values.items():
        new_text = _renamed_key(text, names)
        if is_fact(text, value) and isinstance(value, Mapping):
            value = _renamed_op(value, new_text, names)
        renamed[new_text] = value
    return renamed


def _renamed_op(facts: Mapping[str, Any], text: str, names: Mapping[str, str]) -> dict[str, Any]:
    """The facts of an op whose key is now `text`, with new names in all that they refer to (CAP-12)."""
    renamed = {**facts, "module": module_of(Key.parse(text).site)}
    for kind in ("inputs", "outputs"):
        entries = facts.get(kind)
        if isinstance(entries, list):
            renamed[kind] = [
                _renamed_reference(entry, names) if isinstance(entry, Mapping) else entry for entry in entries
            ]
    return renamed


def _renamed_reference(entry: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    renamed = {**entry}
    for kind in ("record", "view", "view_of"):
        if isinstance(entry.get(kind), str):
            renamed[kind] = _renamed_key(entry[kind], names)
    parameter = entry.get("parameter")
    if isinstance(parameter, str):
        module, _, own = parameter.rpartition(".")
        site = names.get(module_site(module))
        if site is not None:
            renamed["parameter"] = own if site == ROOT_SITE else f"{module_path(site)}.{own}"
    return renamed


def _renamed_key(text: str, names: Mapping[str, str]) -> str:
    try:
        key = Key.parse(text)
    except UsageError:  # a reference of a damaged archive: whoever follows it reports it
        return text
    name = names.get(key.site)
    return text if name is None else replace(key, site=name).text


def _names(links: Sequence[Link], target: Archive) -> dict[str, str]:
    """The reference's names of the target's sites, of those whose results are those of one of its sites.

    Of those that make none, as all where weights alone are compared, of those whose parameters are.
    """
    names: dict[str, set[str]] = {}
    makers = {record.key.site for record in target.records if _is_made(record.key)}
    for link in links:
        for source in link.target:
            if _is_made(source.key) or (source.key.site not in makers and is_parameter(source.key)):
                names.setdefault(source.key.site, set()).update(r.key.site for r in link.reference)
    return {name: sites.pop() for name, sites in names.items() if len(sites) == 1}


def _is_made(key: Key) -> bool:
    return key.is_bare or key.slot.startswith("output")


def apply_mapping(mapping: ResolvedMapping, *, path: str = "") -> tuple[GatheredArchive, MappedArchive]:
    """View both archives as `compare` takes them: the target under the reference's keys and in its layout.

    Args:
        mapping: The mapping, resolved on the two archives.
        path: The map file; empty for a mapping that was computed.

    Returns:
        The reference, reduced to the tokens that both sides have if the mapping matches tokens, and the
        target. They read from the archives of the mapping, which the caller closes.
    """
    links = mapping.links
    tested = MappedArchive(
        mapping.reference,
        mapping.target,
        links,
        alignment=mapping.alignment,
        map_path=path,
        tokens=(
            *cut_texts(mapping.reference),
            *cut_texts(mapping.target),
            *layout_texts(mapping.alignment.entries),
            *(tokens.text for tokens in mapping.tokens),
        ),
    )
    return GatheredArchive(mapping.reference, links), tested


class ReversedArchive(ArchiveView):
    """A reference under the target's keys, its tensors in the target's layout.

    Records that no link is about are those of the same key and shape. What the reference has not, such as
    padding or tokens that only the target was given, is filled from the target's own tensors. A record that
    is at most renamed keeps its dtype and its digest; any other has values, in float32 where the reference
    has a narrower float, and neither statistics nor digest. Arguments and results that are no tensors are
    left out, as they have keys of the reference.

    Attributes:
        left_out: Keys of the target that are mapped and cannot be made, and why.
    """

    def __init__(self, reference: Archive, target: Archive, links: Iterable[Link]) -> None:
        self._target = target
        self.left_out: dict[str, str] = {}
        self._links: dict[str, tuple[Link, int]] = {}  # and which of its target's records it is
        self._why: dict[tuple[object, ...], str] = {}
        sources: dict[str, Sequence[Record]] = {}
        all_links = list(links)
        moved = _moved_grids(all_links)
        linked_targets = {record.key.text for link in all_links for record in link.target}
        references = {record.key.text: record for record in reference.records}
        records: list[Record] = []
        for link in sorted(all_links, key=lambda link: (not link.is_renaming, len(link.target))):
            free_parts = [p for p, r in enumerate(link.target) if r.key.text not in self._links]
            reason = (self._why_not(link) or _why_moved(link, moved)) if free_parts else ""
            for part in free_parts:
                partner, text = link.target[part], link.target[part].key.text
                if reason:
                    self.left_out.setdefault(text, reason)
                    continue
                self.left_out.pop(text, None)
                self._links[text] = link, part
                if link.is_renaming:
                    sources[text] = (link.reference[part],)
                    records.append(replace(references[link.reference[part].key.text], key=partner.key))
                else:
                    sources[text] = link.reference
                    dtype = dtype_of(np.empty(0, self._dtype(link)))
                    records.append(_computed_record(link.reference, partner.key, dtype, partner.shape))
        linked = {record.key.text for link in all_links for record in link.reference}
        for partner in target.records:
            text = partner.key.text
            same = None if text in linked or text in linked_targets else references.get(text)
            if same is not None and same.shape == partner.shape:
                sources[text] = (same,)
                records.append(same)
        records.sort(key=lambda record: record.order)
        super().__init__(reference, records, sources, values={}, root=reference.root)

    @cached_property
    def info(self) -> RunInfo:
        """What the reference's metadata say; its aliases are none of the target's."""
        return replace(self.source.info, aliases={})

    def _why_not(self, link: Link) -> str:
        """Why a link cannot be undone; "" if it can. Tried on zeros, once for each entry and its shapes."""
        if link.is_renaming:
            return ""
        shapes = tuple(record.shape for record in (*link.reference, *link.target))
        name = (id(link.entry), bool(link.gathers), shapes)
        if name not in self._why:
            zeros = [np.zeros(record.shape, self._dtype(link)) for record in link.reference]
            naturals = [np.zeros(record.shape, self._dtype(link)) for record in link.target]
            try:
                _undone(link, zeros, naturals)
                self._why[name] = ""
            except UsageError as error:
                self._why[name] = str(error)
        return self._why[name]

    def _dtype(self, link: Link) -> str:
        return max((values_dtype(record) for record in link.reference), key=np.dtype)

    def _read_flat(self, record: Record, start: int, out: Array) -> None:
        text = record.key.text
        link, part = self._links.get(text, (None, 0))
        if link is None or link.is_renaming:
            super()._read_flat(record, start, out)
            return
        tensors = self._computed(link, lambda: self._undo_link(link, text))
        out[:] = tensors[part][start : start + out.size]

    def _undo_link(self, link: Link, text: str) -> list[Array]:
        dtype = self._dtype(link)
        ours = [self.source.load(record).astype(dtype) for record in link.reference]
        naturals = [self._target.load(record).astype(dtype) for record in link.target]
        try:
            return _undone(link, ours, naturals)
        except UsageError as error:
            raise ReadError(f"{self.path}: {text}: {error}", hint=error.hint) from None


def _undone(link: Link, reference: Sequence[Array], naturals: Sequence[Array]) -> list[Array]:
    """The target's tensors of which a link makes the reference's."""
    if not link.gathers:
        return _undo(link.layout, reference, naturals)
    runs = link.runs(naturals)
    laid = [_laid(link.layout, run) for run in runs]
    for part, gather in enumerate(link.gathers):
        filled = _filled(gather, reference[part], [run[part] for run in laid])
        for run, array in zip(laid, filled, strict=True):
            run[part] = array
    return [array for run, own in zip(laid, runs, strict=True) for array in _undo(link.layout, run, own)]


def _undo(layout: Layout, arrays: Sequence[Array], naturals: Sequence[Array]) -> list[Array]:
    if not layout.steps:
        return list(arrays)
    first = layout.steps[0]
    if isinstance(first, Sum) and len(first.shapes(tuple(array.shape for array in naturals))) == 1:
        natural = sum(naturals[1:], naturals[0])
        (whole,) = _undo(Layout(layout.steps[1:]), arrays, [natural])
        return [whole, *map(np.zeros_like, naturals[1:])]
    return layout.undo(arrays, [array.shape for array in naturals], naturals)


def _laid(layout: Layout, arrays: Sequence[Array]) -> list[Array]:
    laid, _ = layout.apply(arrays, [dtype_of(array) for array in arrays])
    return list(laid)


def _filled(gather: Gather, reference: Array, naturals: Sequence[Array]) -> list[Array]:
    """The target's tensors with the reference's tokens in the places of the same tokens."""
    if any(axes.is_shared for axes in gather.target):
        raise UsageError("one row stands for all: its tokens cannot be put back")
    parts = [axes.rows(array) for axes, array in zip(gather.target, naturals, strict=True)]
    rows = np.concatenate(parts)
    rows[gather.target_rows] = gather.reference.rows(reference)[gather.reference_rows]
    ends = np.cumsum([len(part) for part in parts])[:-1]
    filled = zip(gather.target, naturals, np.split(rows, ends), strict=True)
    return [_unrowed(axes, array.shape, part) for axes, array, part in filled]


def _unrowed(axes: TokenAxes, shape: Shape, rows: Array) -> Array:
    """A tensor of this shape out of its tokens along the first axis: `TokenAxes.rows` backwards."""
    front = rows.reshape(*(shape[axis] for axis in axes.axes), *axes.rest(shape))
    return np.moveaxis(front, range(len(axes.axes)), axes.axes)


class GatheredArchive(ArchiveView):
    """A reference whose tensors are reduced to the tokens that links compare.

    A record of which all tokens count, or that has none, stays as it is. Any other has its tokens along its
    first axis, and neither statistics nor digest.

    Attributes:
        links: The links.
        gathers: Those that reduce a record, by key text.
    """

    def __init__(self, reference: Archive, links: Sequence[Link]) -> None:
        self.links = links
        self.gathers: dict[str, Gather] = {}
        for link in links:
            for record, gather in zip(link.reference, link.gathers, strict=bool(link.gathers)):
                if not gather.is_whole:
                    self.gathers[record.key.text] = gather
        super().__init__(
            reference,
            [self._reduced(record) for record in reference.records],
            {record.key.text: (record,) for record in reference.records},
            root=None if self.gathers else reference.root,
            is_direct=reference.is_direct and not self.gathers,
        )

    def _reduced(self, record: Record) -> Record:
        gather = self.gathers.get(record.key.text)
        if gather is None:
            return record
        return _computed_record([record], record.key, record.dtype, gather.shape(record.shape))

    def _read_flat(self, record: Record, start: int, out: Array) -> None:
        text = record.key.text
        if text not in self.gathers:
            super()._read_flat(record, start, out)
            return
        (whole,) = self.sources[text]
        (rows,) = self._computed(whole, lambda: [self.gathers[text].of_reference(self.source.read(whole))])
        out[:] = rows[start : start + out.size]


def as_seen(view: Archive, run: Archive) -> Archive:
    """View another run of the reference's model as a view of the reference shows that.

    Args:
        view: The view, as `sides` gives it.
        run: The other run, under the same keys.
    """
    if not isinstance(view, ArchiveView):
        return run
    run = as_seen(view.source, run)
    if isinstance(view, GatheredArchive):
        return GatheredArchive(run, view.links) if view.gathers else run
    return view.of_run(run) if isinstance(view, (CutArchive, JoinedArchive, SortedChoices)) else run


class WholeTensors(ArchiveView):
    """A target that is compared by tokens, in the reference's tensors: it can stand in the reference's model.

    Tokens that both sides have are in the reference's places, all else is the reference's own. If they lie at
    other places of the target, a tensor with tokens that was not reduced to them, such as an attention mask,
    is left out; so is one row that stands for all.

    Args:
        target: The target, as it is compared with `gathered`; the caller closes it.
        gathered: The reference in the tokens that both sides have.
    """

    def __init__(self, target: Archive, gathered: GatheredArchive) -> None:
        self._gathered = gathered
        moved = _moved_grids(gathered.links)
        records = []
        for record in target.records:
            gather = gathered.gathers.get(record.key.text)
            grid = moved.get(record.key.step, ())
            if gather is None and not (grid and _counts_tokens(record.shape, grid)):
                records.append(record)
            elif gather is not None and not gather.reference.is_shared:
                (whole,) = gathered.sources[record.key.text]
                dtype = dtype_of(np.empty(0, values_dtype(record)))
                records.append(_computed_record([record], record.key, dtype, whole.shape))
        super().__init__(target, records, {record.key.text: (record,) for record in records})

    def _read_flat(self, record: Record, start: int, out: Array) -> None:
        text = record.key.text
        gather = self._gathered.gathers.get(text)
        if gather is None:
            super()._read_flat(record, start, out)
            return
        (whole,) = self._gathered.sources[text]
        (filled,) = self._computed(whole, lambda: [self._filled(gather, text, whole)])
        out[:] = filled[start : start + out.size]

    def _filled(self, gather: Gather, text: str, whole: Record) -> Array:
        target = self.source.get(text)
        rows = gather.reference.rows(self._gathered.source.load(whole)).astype(values_dtype(target))
        rows[gather.reference_rows] = self.source.load(target)
        return _unrowed(gather.reference, whole.shape, rows)


def _moved_grids(links: Iterable[Link]) -> dict[int, Shape]:
    """Rows and positions of the reference's steps whose tokens lie at other places of the target."""
    return {
        record.key.step: gather.reference.grid
        for link in links
        for record, gather in zip(link.reference, link.gathers, strict=bool(link.gathers))
        if not gather.is_whole and not gather.is_in_place
    }


def _why_moved(link: Link, moved: Mapping[int, Shape]) -> str:
    """Why a tensor cannot stand in the target, whose tokens lie at other places; "" if it can."""
    record = link.reference[0]
    grid = moved.get(record.key.step, ())
    if link.gathers or not (grid and _counts_tokens(record.shape, grid)):
        return ""
    return f"its tokens, of {list(record.shape)}, lie at other places of the target"


def _counts_tokens(shape: Shape, grid: Shape) -> bool:
    """Whether a tensor of some shape may have a token along its axes, of rows and positions."""
    return len(shape) > 1 and shape[0] in (grid[0], 1) and grid[-1] in shape[1:]


def in_whole_tensors(target: Archive, view: Archive) -> Archive:
    """View a target so that it can stand in the reference's model, see `WholeTensors`.

    Args:
        target: The target, as it was compared.
        view: The reference, as it was compared.
    """
    while isinstance(view, ArchiveView):
        if isinstance(view, GatheredArchive) and view.gathers:
            return WholeTensors(target, view)
        view = view.source
    return target


class OrderedArchive(ArchiveView):
    """A reference without an order of execution, in the target's.

    A record that the target has not comes after the one that it follows by name.
    """

    def __init__(self, reference: Archive, target: Archive) -> None:
        orders = {record.key.text: record.order for record in target.records}
        known = -1
        places: dict[str, int] = {}
        for record in reference.records:
            known = places[record.key.text] = orders.get(record.key.text, known)
        records = sorted(reference.records, key=lambda record: places[record.key.text])
        super().__init__(
            reference,
            [replace(record, order=order) for order, record in enumerate(records)],
            {record.key.text: (record,) for record in records},
            root=reference.root,
            is_direct=reference.is_direct,
        )
        self.is_ordered = True
