"""Calls of modules in a run, from its records: their inputs and outputs, leaves, attention cores, depth."""

from __future__ import annotations

import math
import re
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Final
from weakref import WeakKeyDictionary

from tensorcap.runs.record_kinds import is_gradient, is_inner, is_parameter
from tensorcap_formats.archive import Archive
from tensorcap_formats.keys import ROOT_SITE, Key, module_of
from tensorcap_formats.records import Record

# Leaves that are elementwise, linear or norms, and so add little to an error: by class name, or by the last
# part of the site if the class is not known.
_SIMPLE: Final = re.compile(
    r"linear|conv|dense|proj|embedding|norm|gelu|silu|relu|swish|mish|tanh|sigmoid|activation|identity|dropout"
    r"|^(?:q|k|v|o|w[123]|fc\d?|c_fc|c_attn|act|act_fn|ln_\w+|wte|wpe|lm_head)$",
    re.IGNORECASE,
)
_SENSITIVE: Final = re.compile(r"softmax|router|gate$|experts|attention|attn|moe(?!\w*norm)", re.IGNORECASE)
_ROUTER: Final = re.compile(r"router|gate$", re.IGNORECASE)
_LINEAR: Final = re.compile(r"linear|conv1d|dense|proj|^(?:query|key|value|o)$", re.IGNORECASE)
_PRODUCT: Final = re.compile(rf"conv|{_LINEAR.pattern}", re.IGNORECASE)
_CENTRED: Final = re.compile(r"(?:layer|group|batch|instance)_?norm", re.IGNORECASE)
_ATTENTION: Final = re.compile(r"attention|attn", re.IGNORECASE)
_BLOCK: Final = re.compile(r"(?:^|(?<=\.))\d+(?=\.|$)")
_STATE: Final = re.compile(r"cache|past|memory|mems|(?<!hidden_)state", re.IGNORECASE)
_NUMBER: Final = re.compile(r"(?:^|[./_-])(\d+)(?=[./_-]|$)")


@dataclass(slots=True)
class Call:
    """One call of one module.

    Attributes:
        place: Rank, step, site, and number of the call.
        inputs: Records of its arguments, in order.
        outputs: Records of its results, in order.
    """

    place: tuple[int, int, str, int]
    inputs: list[Record] = field(default_factory=list)
    outputs: list[Record] = field(default_factory=list)

    @property
    def site(self) -> str:
        """The module's site."""
        return self.place[2]

    @property
    def start(self) -> int:
        """Order of its first record."""
        return (self.inputs or self.outputs)[0].order

    @property
    def end(self) -> int:
        """Order of its last record."""
        return (self.outputs or self.inputs)[-1].order


@dataclass(frozen=True, slots=True)
class Core:
    """The part of an attention between its projections.

    Attributes:
        attention: The module.
        sources: Records that queries, keys and values are computed from.
        results: Records of the result: mostly the input of the output projection.
        arguments: Records of what else the attention was given and no leaf took: a bias, tables of positions.
    """

    attention: str
    sources: Sequence[Record]
    results: Sequence[Record]
    arguments: Sequence[Record] = ()


class Calls:
    """All calls of an archive's run.

    Attributes:
        calls: In execution order of their first records.
    """

    def __init__(self, archive: Archive) -> None:
        calls: dict[tuple[int, int, str, int], Call] = {}
        for record in archive.records:
            key = record.key
            kind = key.slot.partition(".")[0]
            if kind in ("input", "output") and not is_inner(key):
                place = (key.rank, key.step, key.site, key.call)
                call = calls.setdefault(place, Call(place))
                (call.inputs if kind == "input" else call.outputs).append(record)
        self.calls: Sequence[Call] = tuple(calls.values())
        self._is_ordered = archive.is_ordered
        self._modules = archive.info.modules
        self._parents = _parents_of(call.site for call in self.calls)
        self._ends = _ends_of_blocks(archive.records)
        self._records = archive.records
        self._own_depths: dict[str, int] = {}  # by key

    def class_of(self, site: str) -> str:
        """Return the class of the module that a site is or lies in, without its package; "" if not known."""
        module = self._modules.get(module_of(site))
        return module.short_class if module else ""

    def has_own_tensors(self, site: str) -> bool:
        """Whether a module is known to have parameters or buffers of its own, as a norm with frozen ones."""
        module = self._modules.get(site)
        return module is not None and bool(module.parameters or module.buffers)

    def is_leaf(self, site: str) -> bool:
        """Whether no module below the site was called."""
        return site not in self._parents and site != ROOT_SITE

    def is_simple(self, site: str) -> bool:
        """Whether a leaf is known to be elementwise, linear or a norm."""
        name = self._kind(site)
        return _SIMPLE.search(name) is not None and _SENSITIVE.search(name) is None

    def is_router(self, site: str) -> bool:
        """Whether a leaf is known to choose experts."""
        return self.is_leaf(site) and _ROUTER.search(self._kind(site)) is not None

    def is_linear(self, site: str) -> bool:
        """Whether a leaf is known to be a product with a weight, which may be summed in any order."""
        return _PRODUCT.search(self._kind(site)) is not None

    def is_centred(self, site: str) -> bool:
        """Whether a leaf subtracts the mean first, as LayerNorm does."""
        return _CENTRED.search(self._kind(site)) is not None

    def depth(self, record: Record) -> int:
        """Count the blocks that an error has passed through, its own too, in execution order (POL-13)."""
        return max(self._depth(record), self._carried.get(record.key.text, 0))

    @cached_property
    def _carried(self) -> Mapping[str, int]:
        """Depth of arguments by key: that of the result that they are, or of the step that left a state."""
        result_depths: dict[str, int] = {}  # by digest
        blocks: dict[int, dict[int, int]] = {}  # of each rank and step
        depths = {}
        for record in self._records if self._is_ordered else ():
            key = record.key
            if key.is_bare or is_inner(key) or is_gradient(key) or not record.dtype.is_inexact:
                continue
            steps = blocks.setdefault(key.rank, {})
            steps[key.step] = len(self._ends.get((key.rank, key.step, False), ()))
            if key.slot.startswith("output") and record.digest:
                result_depths[record.digest] = max(self._depth(record), result_depths.get(record.digest, 0))
            elif key.slot.startswith("input"):
                depth = result_depths.get(record.digest, 0) if record.digest else 0
                if not depth and is_state(key):
                    depth = max((count for step, count in steps.items() if step < key.step), default=0)
                if depth:
                    depths[key.text] = depth
        return depths

    def _depth(self, record: Record) -> int:
        depth = self._own_depths.get(record.key.text)
        if depth is None:
            depth = self._own_depths[record.key.text] = self._own_depth(record)
        return depth

    def _own_depth(self, record: Record) -> int:
        key = record.key
        if key.is_bare:
            number = _NUMBER.search(key.site)
            return int(number[1]) + 1 if number else 0
        site = module_of(key.site)
        if not self._is_ordered:
            number = _BLOCK.search(site)
            return int(number[0]) + 1 if number else 0
        is_backward = is_gradient(key)
        forward = len(self._ends.get((key.rank, key.step, False), ())) if is_backward else 0
        ends = self._ends.get((key.rank, key.step, is_backward), ())
        return forward + bisect_left(ends, record.order) + (_block_of(site) is not None)

    @cached_property
    def callers(self) -> Mapping[tuple[int, int, str, int], Call | None]:
        """For each call, by its place, the nearest one around it that was under way; None if there is none.

        One of which no result was recorded was under way until the next call of its module.
        """
        at: dict[tuple[int, int, str], list[tuple[Call, float]]] = {}
        for call in reversed(self.calls):
            of_module = at.setdefault(call.place[:3], [])
            next_start = of_module[-1][0].start if of_module else math.inf
            of_module.append((call, call.end if call.outputs else next_start))
        return {
            call.place: next(
                (
                    around
                    for outer in enclosing_sites(call.site)
                    for around, end in at.get((*call.place[:2], outer), ())
                    if around.start <= call.start and call.end <= end
                ),
                None,
            )
            for call in self.calls
        }

    @cached_property
    def called_by(self) -> Mapping[tuple[int, int, str, int], Sequence[Call]]:
        """The calls that each call makes itself, by its place, in execution order."""
        children: dict[tuple[int, int, str, int], list[Call]] = {}
        for call in self.calls:
            around = self.callers[call.place]
            if around is not None:
                children.setdefault(around.place, []).append(call)
        return children

    @cached_property
    def leaves(self) -> Sequence[Call]:
        """Calls of leaves."""
        return tuple(call for call in self.calls if self.is_leaf(call.site))

    def cores(self) -> Iterator[Core]:
        """Find attention cores, by the order of calls and by which records are equal."""
        if not self._is_ordered:
            return
        attentions = [call for call in self.calls if self._is_attention(call.site)]
        inner = {site for call in attentions for site in enclosing_sites(call.site)} - {ROOT_SITE}
        for call in attentions:
            if call.site not in inner and not self.is_leaf(call.site):
                yield from self._core(call)

    def within(self, call: Call) -> Iterator[Call]:
        """Yield the calls of modules below that of a call, while it was under way."""
        prefix = "" if call.site == ROOT_SITE else f"{call.site}."
        for other in self._by_step.get(call.place[:2], ()):
            if (
                other is not call
                and other.site.startswith(prefix)
                and call.start <= other.start
                and other.end <= call.end
            ):
                yield other

    @cached_property
    def _by_step(self) -> Mapping[tuple[int, int], Sequence[Call]]:
        calls: dict[tuple[int, int], list[Call]] = {}
        for call in self.calls:
            calls.setdefault((call.place[0], call.place[1]), []).append(call)
        return calls

    def _is_attention(self, site: str) -> bool:
        return _ATTENTION.search(self._kind(site)) is not None

    def _core(self, attention: Call) -> Iterator[Core]:
        """Find what an attention computes between its projections.

        1. The input projections are the linear leaves that take an argument of the attention; the last
           linear leaf that takes none is the output projection, whose inputs are the results.
        2. The sources are the results of leaves before it that no other leaf before it takes.
        """
        within = [call for call in self.within(attention) if self.is_leaf(call.site)]
        arguments = {record.digest for record in attention.inputs if _is_float(record)}
        linear = [leaf for leaf in within if _LINEAR.search(self._kind(leaf.site))]
        projections = [
            leaf for leaf in linear[1:] if not any(r.digest in arguments for r in leaf.inputs if _is_float(r))
        ]
        results = projections[-1].inputs if projections else attention.outputs
        before = [leaf for leaf in within if leaf.outputs and leaf.end < (results[0].order if results else 0)]
        used = {record.digest for leaf in before for record in leaf.inputs if record.digest}
        sources = [
            record
            for leaf in before
            for record in leaf.outputs
            if _is_float(record) and record.digest not in used
        ]
        first = [record for record in results if _is_float(record)][:1]
        rest = [record for record in attention.inputs if _is_float(record) and record.digest not in used]
        if len(linear) > 1 and sources and first:
            yield Core(attention.site, sources, first, rest)

    def _kind(self, site: str) -> str:
        return self.class_of(site) or site.rpartition(".")[2]


def calls_of(archive: Archive) -> Calls:
    """Return the calls of an archive; they are looked for once, as long as the archive exists."""
    calls = _KNOWN.get(archive)
    if calls is None:
        calls = _KNOWN[archive] = Calls(archive)
    return calls


_KNOWN: Final[WeakKeyDictionary[Archive, Calls]] = WeakKeyDictionary()


def is_state(key: Key) -> bool:
    """Whether a tensor is, by the name of its slot, kept from one step to the next, such as a cache."""
    return _STATE.search(key.slot) is not None


def state_path(slot: str) -> str:
    """Return where in the object a state lies, the name of an argument that is one itself, "" of all else.

    Example:
        >>> state_path("input.past_key_values.layers.0.keys")
        'layers.0.keys'
        >>> state_path("input.state")
        'state'
        >>> state_path("output.last_hidden_state")
        ''
    """
    kind, *parts = slot.split(".")
    at = next((at for at, part in enumerate(parts) if _STATE.search(part)), None)
    if at is None or kind not in ("input", "output"):
        return ""
    return ".".join(parts[at + 1 :]) or parts[at]


def _is_float(record: Record) -> bool:
    return record.dtype.is_inexact


def enclosing_sites(site: str) -> Iterator[str]:
    """Yield the sites of the modules around one, the nearest first and the root last; none for the root."""
    while site != ROOT_SITE:
        site = site.rpartition(".")[0] or ROOT_SITE
        yield site


def lies_within(site: str, outer: str) -> bool:
    """Whether a module lies in another one, and is not that itself.

    Example:
        >>> [lies_within(site, "layers.0") for site in ("layers.0.mlp", "layers.0", "layers.00")]
        [True, False, False]
    """
    return site != outer and (outer == ROOT_SITE or site.startswith(f"{outer}."))


def _parents_of(sites: Iterable[str]) -> set[str]:
    """Return the sites of all modules around some."""
    parents: set[str] = set()
    for site in sites:
        for parent in enclosing_sites(site):
            if parent in parents:
                break  # and so are those around it
            parents.add(parent)
    return parents


def _block_of(site: str) -> str | None:
    """Return the block of a stack that a site belongs to: its path up to the first part that is a number."""
    number = _BLOCK.search(site)
    return site[: number.end()] if number else None


def _ends_of_blocks(records: Sequence[Record]) -> dict[tuple[int, int, bool], list[int]]:
    """Return for each rank and step when each block ends: in the forward pass, and in the backward pass."""
    last: dict[tuple[int, int, bool], dict[str, int]] = {}
    for record in records:
        key = record.key
        block = None if key.is_bare or is_parameter(key) else _block_of(module_of(key.site))
        if block is not None:
            ends = last.setdefault((key.rank, key.step, is_gradient(key)), {})
            ends[block] = max(ends.get(block, 0), record.order)
    return {place: sorted(ends.values()) for place, ends in last.items()}
