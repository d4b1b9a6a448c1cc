"""The plan of a merge: for each tensor its rule, how that is known, and what is wrong with it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np

from tensorcap_formats.archive import Archive
from tensorcap_formats.dtypes import Array, decode
from tensorcap_formats.errors import UsageError
from tensorcap_formats.ranks.members import Members, Shards
from tensorcap_formats.ranks.recorded import GivenRules, KnownRule, RecordedRules
from tensorcap_formats.ranks.rule import MeshRule, Rule, Shape
from tensorcap_formats.ranks.rule_search import RuleSearch, rule_by_shape
from tensorcap_formats.run_info import RankProblem

_BY_SHAPE: Final = "by the reference's shape"
_COPIES: Final = "by values: every rank holds the same"
_ALIKE: Final = 0.99  # cosine above which unlike tensors are copies: terms of a sum share less
_RELATED: Final = 0.8  # cosine below which what should be a copy has nothing of the other


@dataclass(frozen=True, slots=True)
class MergedTensor:
    """A tensor that is put together.

    Attributes:
        shards: It on each rank, in the order of the rule's mesh.
        known: The rule, and how it is known.
        shape: Shape of the whole.
    """

    shards: Shards
    known: KnownRule
    shape: Shape

    @property
    def rule(self) -> MeshRule:
        """The rule."""
        return self.known.rule

    @property
    def is_whole(self) -> bool:
        """Whether the first rank's tensor is the whole one."""
        return self.rule.is_replicated

    @property
    def sizes(self) -> dict[str, list[int]]:
        """The sizes that the ranks of the mesh have of each axis that they hold parts of."""
        ndim = len(self.shape)
        return {str(axis): [s[axis] for s in self.shards.shapes] for axis in self.rule.concat_axes(ndim)}


@dataclass(frozen=True, slots=True)
class Plan:
    """How all tensors of a run of several ranks are put together.

    Attributes:
        tensors: In execution order, what is merged, or the ranks' tensors that stay as they are.
        problems: What is wrong, in the same order.
    """

    tensors: Sequence[MergedTensor | Shards]
    problems: Sequence[RankProblem]

    @property
    def merged(self) -> Sequence[MergedTensor]:
        """The tensors that are put together."""
        return [tensor for tensor in self.tensors if isinstance(tensor, MergedTensor)]


def plan_merge(members: Members, *, rules: Mapping[str, str], reference: Archive | None) -> Plan:
    """Find a rule for each tensor.

    1. A rule that was given for its key, else the one that the ranks recorded.
    2. A tensor of one rank alone is whole if no other rank has its site: a stage of a pipeline.
    3. Equal on all ranks: replicated, unless the reference's shape shows that equal parts are to be joined.
    4. The rule that gives the reference's shape.
    5. What other tensors of the run prove (`RuleSearch`).
    6. Else it stays as it is on each rank, and a problem says so.

    Then ranks that hold copies by the rule are compared bit for bit, and the shape of the whole with what was
    recorded and with the reference's.

    Args:
        members: The archives.
        rules: Rules by glob, which go before all others.
        reference: An archive of the whole tensors, whose shapes are looked at; None if there is none.

    Raises:
        UsageError: A given rule is none, or fits nothing.
    """
    planner = _Planner(members, GivenRules(rules), reference)
    return planner.plan()


class _Planner:
    def __init__(self, members: Members, given: GivenRules, reference: Archive | None) -> None:
        self._members = members
        self._given = given
        self._by_text = {shards.text: shards for shards in members.shards}
        self._recorded = RecordedRules(members.archives)
        self._wholes = {} if reference is None else {r.key.text: r.shape for r in reference.records}
        self._ranks_of_site: dict[str, set[int]] = {}
        for shards in members.shards:
            self._ranks_of_site.setdefault(shards.key.site, set()).update(shards.ranks)
        self._labels: dict[str, list[int]] = {}
        self._problems: dict[str, list[RankProblem]] = {}

    def plan(self) -> Plan:
        known: dict[str, KnownRule] = {}
        open_tensors: list[Shards] = []
        for shards in self._members.shards:
            self._labels[shards.text] = self._members.labels(shards)
            try:
                rule = self._by_metadata(shards)
            except UsageError as error:
                self._leave(shards, str(error))
                continue
            if rule is not None:
                known[shards.text] = rule
            elif len(shards.ranks) < len(self._members):
                absent = [str(r) for r in range(len(self._members)) if r not in shards.ranks]
                self._leave(shards, f"missing on rank {', '.join(absent)}, and no rule says that it may be")
            else:
                open_tensors.append(shards)
        self._given.require_hits()
        search = RuleSearch(self._members, known)
        known |= search.find(open_tensors)
        for shards in open_tensors:
            if shards.text not in known:
                self._leave(shards, self._why_unknown(shards))
        for shards in self._members.shards:
            if shards.text in known:
                known[shards.text] = self._with_halves(search, shards, known)
        return self._result(known)

    def _by_metadata(self, shards: Shards) -> KnownRule | None:
        """The rule of a tensor as far as no values have to be read."""
        labels, whole = self._labels[shards.text], self._wholes.get(shards.text)
        rule = self._given.find(shards) or self._recorded.find(shards)
        if rule is not None:
            return rule
        count = len(shards.ranks)
        if count == 1 and self._ranks_of_site[shards.key.site] == {shards.ranks[0]}:
            mesh = MeshRule((Rule("alone"),), ("",), (1,), shards.ranks)
            return KnownRule(mesh, f"rank {shards.ranks[0]} alone has the module")
        if count < len(self._members):
            return None
        is_equal = len(set(labels)) == 1
        by_shape = None if whole is None else rule_by_shape(shards.shapes, whole, labels)
        if by_shape is not None and by_shape.kind != "replicated":
            return KnownRule(MeshRule((by_shape,), sizes=(count,)), _BY_SHAPE)
        if is_equal:
            return KnownRule(MeshRule((Rule("replicated"),), sizes=(count,)), _COPIES)
        if by_shape is not None and self._are_alike(shards):
            return KnownRule(MeshRule((by_shape,), sizes=(count,)), _BY_SHAPE)
        return None

    def _are_alike(self, shards: Shards) -> bool:
        """Whether unlike tensors of one shape are nearly copies of each other, and so no terms of a sum."""
        if not shards.is_stored or not shards.dtype.is_inexact:
            return not shards.dtype.is_inexact
        values = [decode(a, shards.dtype) for a in self._members.read(shards)]
        wide = [v.astype(np.complex128 if v.dtype.kind == "c" else np.float64) for v in values]
        return all(_cosine(wide[0], other) > _ALIKE for other in wide[1:])

    def _why_unknown(self, shards: Shards) -> str:
        if len(set(shards.shapes)) > 1:
            return (
                f"{_shapes_text(shards)}; no rule is recorded, and nothing shows along which axis its parts "
                "belong together"
            )
        if self._wholes.get(shards.text) == shards.shapes[0]:
            return (
                "ranks hold unlike tensors of the reference's shape, and no later tensor is their sum: an "
                "all-reduce is missing, or they are terms of a sum that is not recorded"
            )
        return "ranks hold unlike tensors, no rule is recorded, and no other tensor shows one"

    def _with_halves(self, search: RuleSearch, shards: Shards, known: Mapping[str, KnownRule]) -> KnownRule:
        """A rule by shape, or by values, of what proves to be a fused gate and up projection on each rank.

        Its parameters, of which the first axis is that of its results, are of two parts likewise.
        """
        own = known[shards.text]
        (rule, *others) = own.rule.rules
        if others or rule.kind != "concat" or rule != Rule("concat", rule.axis):
            return own
        if own.kind != _BY_SHAPE and not own.kind.startswith("by values"):
            return own
        ndim = len(shards.shapes[0])
        halves = replace(own.rule, rules=(replace(rule, parts=(2,)),))
        if shards.key.slot.startswith("param."):
            output = self._by_text.get(replace(shards.key, slot="output").text)
            made = None if output is None or rule.at(ndim) else known.get(output.text)
            is_fused = made is not None and output is not None and self._is_fused(search, output, made)
            why = "in halves, as its results are"
        else:
            is_fused, why = (
                self._is_fused(search, shards, own),
                "its halves a gate and what it is multiplied with",
            )
        return KnownRule(halves, f"{own.kind}, {why}", own.of) if is_fused else own

    def _is_fused(self, search: RuleSearch, shards: Shards, known: KnownRule) -> bool:
        """Whether the last axis of a result is joined of parts that are a gate and an up projection each."""
        (rule, *others) = known.rule.rules
        ndim = len(shards.shapes[0])
        if others or rule.kind != "concat" or rule.at(ndim) != ndim - 1:
            return False
        return rule.parts == (2,) or (rule.parts == (1,) and search.is_fused(shards, ndim - 1))

    def _result(self, known: Mapping[str, KnownRule]) -> Plan:
        tensors: list[MergedTensor | Shards] = []
        for shards in self._members.shards:
            rule = known.get(shards.text)
            tensors.append(shards if rule is None else self._merged(shards, rule))
        problems = [p for shards in self._members.shards for p in self._problems.get(shards.text, ())]
        return Plan(tensors, problems)

    def _merged(self, shards: Shards, known: KnownRule) -> MergedTensor | Shards:
        rule, count = known.rule, len(shards.ranks)
        label = dict(zip(shards.ranks, self._labels[shards.text], strict=True))
        ordered = shards.of_ranks(rule.ranks) if rule.ranks else shards
        labels = tuple(label[rank] for rank in ordered.ranks)
        try:
            shape = rule.merged_shape(ordered.shapes)
            self._require_values(ordered, rule)
            groups = rule.copies(count)
        except UsageError as error:
            is_told = count > 2 and len(set(shards.shapes)) > 1  # of two it is plain
            by_rank = f"; {_shapes_text(shards)}" if is_told else ""
            self._leave(shards, f"{error} ({known.known}){by_rank}", "shape")
            return shards
        unequal = [group for group in groups if len({labels[i] for i in group}) > 1]
        if (
            unequal
            and rule.axes[0] == "group"
            and len(rule.rules) > 1
            and not self._inner_unequal(rule, labels)
        ):
            self._leave(
                shards, "groups of ranks hold unlike tensors, as of unlike data, and no rule joins them"
            )
            return shards
        for group in unequal:
            self._note_unequal(ordered, rule, known.known, group, labels)
        self._compare_part_copies(ordered, rule, known.known)
        self._check_shape(shards, rule, known.known, shape)
        return MergedTensor(ordered, known, shape)

    def _inner_unequal(self, rule: MeshRule, labels: Sequence[int]) -> bool:
        """Whether copies within one group of ranks are unequal."""
        size = len(labels) // rule.sizes[0]
        inner = replace(rule, rules=rule.rules[1:], axes=rule.axes[1:], sizes=rule.sizes[1:], ranks=())
        return any(
            len({labels[start + i] for i in group}) > 1
            for start in range(0, len(labels), size)
            for group in inner.copies(size)
        )

    def _require_values(self, shards: Shards, rule: MeshRule) -> None:
        names = [record.dtype.name for record in shards.records]
        if len(set(names)) > 1:
            other = next(i for i, name in enumerate(names) if name != names[0])
            raise UsageError(
                f"rank {shards.ranks[0]} holds it in {names[0]}, rank {shards.ranks[other]} in {names[other]}"
            )
        if rule.is_replicated:
            return
        if not shards.is_stored:
            raise UsageError(f"{rule.text}: only its statistics were kept")
        is_narrow = shards.dtype.is_inexact and shards.dtype.itemsize < 2
        if is_narrow and any(one.kind in ("sum", "avg", "max", "min") for one in rule.rules):
            raise UsageError(f"{rule.text}: tensors of {shards.dtype.name} are not added")

    def _note_unequal(
        self, shards: Shards, rule: MeshRule, known: str, group: Sequence[int], labels: Sequence[int]
    ) -> None:
        """Say which of the ranks that should hold the same do not, by the majority, and how far."""
        counts = Counter(labels[i] for i in group)
        (most, share), *_ = counts.most_common()
        is_majority = 2 * share > len(group)
        usual = next(i for i in group if labels[i] == (most if is_majority else labels[group[0]]))
        others = [i for i in group if labels[i] != labels[usual]]
        ranks = tuple(shards.ranks[i] for i in others)
        names = f"rank {ranks[0]} holds" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))} hold"
        text = (
            f"{names} another tensor than rank {shards.ranks[usual]}, where {rule.text} ({known}) says the "
            f"same{_distance(self._members, shards, usual, others[0])}"
        )
        self._add(shards, "unequal", text, ranks if is_majority else (shards.ranks[usual], *ranks))

    def _compare_part_copies(self, shards: Shards, rule: MeshRule, known: str) -> None:
        """Say if ranks hold a part unlike of which each has copies of its own."""
        (first, *others) = rule.rules
        if others or not first.part_copies:
            return
        pair = first.unlike_copies(self._members.read(shards))
        if pair is not None:
            one, other = (shards.ranks[number] for number in pair)
            text = (
                f"rank {other} holds another part than rank {one}, where {rule.text} ({known}) says the same"
            )
            self._add(shards, "unequal", text, (one, other))

    def _check_shape(self, shards: Shards, rule: MeshRule, known: str, shape: Shape) -> None:
        if rule.shape is not None and rule.shape != shape:
            text = f"{rule.text} ({known}) gives {list(shape)}, and {list(rule.shape)} was recorded"
            self._add(shards, "shape", text)
        whole = self._wholes.get(shards.text)
        if whole is None or whole == shape:
            return
        other = rule_by_shape(shards.shapes, whole, self._labels[shards.text])
        if other is not None:
            text = f"{rule.text} ({known}) gives {list(shape)}, the reference has {list(whole)}"
            self._add(shards, "shape", f"{text}, as {other.text} would give")
        elif len(shape) == len(whole) and any(shape[a] != whole[a] for a in rule.concat_axes(len(shape))):
            self._add(
                shards, "shape", f"{rule.text} ({known}) gives {list(shape)}, the reference has {list(whole)}"
            )

    def _leave(self, shards: Shards, text: str, kind: str = "unmerged") -> None:
        self._add(shards, kind, text)

    def _add(self, shards: Shards, kind: str, text: str, ranks: tuple[int, ...] = ()) -> None:
        self._problems.setdefault(shards.text, []).append(RankProblem(shards.text, kind, text, ranks))


def _shapes_text(shards: Shards) -> str:
    """The shapes that ranks have: that of the first rank, and of the first that has another."""
    other = next(i for i, shape in enumerate(shards.shapes) if shape != shards.shapes[0])
    ranks = (0, other)
    return " and ".join(f"rank {shards.ranks[i]} has {list(shards.shapes[i])}" for i in ranks)


def _cosine(one: Array, other: Array) -> float:
    """The cosine of two tensors, of their finite elements; 1 if one has no length."""
    flat = [np.nan_to_num(array.ravel(), posinf=0, neginf=0) for array in (one, other)]
    norms = [float(np.linalg.norm(array)) for array in flat]
    return abs(complex(np.vdot(*flat))) / (norms[0] * norms[1]) if all(norms) else 1.0


def _distance(members: Members, shards: Shards, one: int, other: int) -> str:
    """How far two ranks' tensors lie apart, as the end of a sentence; "" if it is not known."""
    records = shards.records[one], shards.records[other]
    if records[0].shape != records[1].shape:
        return f": shapes {list(records[0].shape)} and {list(records[1].shape)}"
    if not all(record.stored for record in records):
        return ""
    values = [
        decode(members.archives[shards.ranks[i]].read(record), record.dtype)
        for i, record in zip((one, other), records, strict=True)
    ]
    unequal = int(np.count_nonzero(values[0] != values[1]))
    wide = [value.astype(np.complex128 if value.dtype.kind == "c" else np.float64) for value in values]
    with np.errstate(all="ignore"):
        largest = float(np.nanmax(np.abs(wide[0] - wide[1]), initial=0.0))
    text = f"; {unequal} of {values[0].size} elements differ, by {largest:.3g} at most"
    return text if _cosine(*wide) > _RELATED else f"{text}, as terms of a sum would that was not taken"


def problem_json(problem: RankProblem) -> dict[str, Any]:
    """A problem as the run metadata have it."""
    entry: dict[str, Any] = {"key": problem.key, "kind": problem.kind, "text": problem.text}
    return {**entry, "ranks": list(problem.ranks)} if problem.ranks else entry


def iterate_rules(tensors: Sequence[MergedTensor]) -> Iterator[dict[str, Any]]:
    """The rules as the run metadata have them; tensors of one rule are together."""
    groups: dict[str, tuple[dict[str, Any], list[str]]] = {}
    for tensor in tensors:
        entry: dict[str, Any] = {"rule": tensor.rule.text, "known": tensor.known.known}
        if tensor.rule.mesh is not None:
            entry["mesh"] = tensor.rule.mesh
        if tensor.sizes:
            entry["sizes"] = tensor.sizes
        groups.setdefault(repr(entry), (entry, []))[1].append(tensor.shards.text)
    for entry, keys in groups.values():
        yield {**entry, "keys": keys}
