"""Rules that were recorded with a run, or given, by key."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from tensorcap_formats.archive import Archive
from tensorcap_formats.errors import UsageError
from tensorcap_formats.keys import Key, matches
from tensorcap_formats.ranks.members import Shards
from tensorcap_formats.ranks.rule import MeshRule, Rule
from tensorcap_formats.run_info import RanksInfo, TensorRule


@dataclass(frozen=True, slots=True)
class KnownRule:
    """A rule, and how it is known.

    Attributes:
        rule: The rule.
        kind: How it is known, in words.
        of: The tensor that shows it, by key text; "" if none does.
    """

    rule: MeshRule
    kind: str
    of: str = ""

    @property
    def known(self) -> str:
        """How it is known, in words, with the tensor that shows it."""
        return f"{self.kind} {self.of}" if self.of else self.kind


class RuleBook:
    """The rules of one archive by key: exact keys first, then globs in their order.

    Attributes:
        entries: All rules.
    """

    def __init__(self, info: RanksInfo | None) -> None:
        self.entries: Sequence[TensorRule] = () if info is None else info.tensors
        self._exact: dict[str, TensorRule] = {}
        self._sites: dict[str, tuple[int, TensorRule]] = {}
        self._globs: list[tuple[int, str, TensorRule]] = []
        for number, entry in enumerate(self.entries):
            for key in entry.keys:
                if any(c in key for c in "*?["):
                    self._globs.append((number, key, entry))
                    continue
                self._exact.setdefault(key, entry)
                if "/" not in key:
                    self._sites.setdefault(key, (number, entry))

    def find(self, key: Key) -> TensorRule | None:
        """The rule of a key; None if it has none."""
        text = key.text
        if entry := self._exact.get(text):
            return entry
        number, of_site = self._sites.get(key.site, (math.inf, None))
        globs = (entry for n, glob, entry in self._globs if n < number and matches(text, glob))
        return next(globs, of_site)


class RecordedRules:
    """The rules that the archives of all ranks have."""

    def __init__(self, archives: Sequence[Archive]) -> None:
        self._books = [RuleBook(archive.info.ranks) for archive in archives]

    def find(self, shards: Shards) -> KnownRule | None:
        """The rule of a tensor; None if no rank recorded one.

        Ranks of unlike meshes, as the groups of a tensor-parallel mesh within a larger run, are together a
        mesh with one more axis, over which the tensor is replicated.

        Raises:
            UsageError: Ranks recorded unlike rules, or meshes that do not fit each other.
        """
        entries = {rank: self._books[rank].find(shards.key) for rank in shards.ranks}
        known = {rank: entry for rank, entry in entries.items() if entry is not None}
        if not known:
            return None
        rules = {
            rank: MeshRule.parse(entry.rule, entry.mesh or None, entry.shape) for rank, entry in known.items()
        }
        first = min(rules)
        how = known[first].known or "recorded"
        for rank in shards.ranks:
            if rank not in rules:
                raise UsageError(f"rank {first} recorded {rules[first].text!r}, and rank {rank} no rule")
            if rules[rank].text != rules[first].text or rules[rank].sizes != rules[first].sizes:
                raise UsageError(
                    f"rank {first} recorded {rules[first].text!r}, and rank {rank} {rules[rank].text!r}"
                )
        groups = list(dict.fromkeys(rule.ranks for rule in rules.values()))
        if not groups[0]:
            return KnownRule(rules[first].over(len(shards.ranks)), how)
        ranks = tuple(rank for group in groups for rank in group)
        if sorted(ranks) != list(shards.ranks):
            raise UsageError(
                f"its mesh has the ranks {', '.join(map(str, sorted({*ranks})))}, and "
                f"{', '.join(map(str, shards.ranks))} have the tensor"
            )
        if len(groups) == 1:
            return KnownRule(rules[first], how)
        rule = rules[first]
        whole = replace(
            rule,
            rules=(Rule("replicated"), *rule.rules),
            axes=("group", *rule.axes),
            sizes=(len(groups), *rule.sizes),
            ranks=ranks,
        )
        return KnownRule(whole, how)


class GivenRules:
    """Rules that the caller gave, by glob; the first that fits counts."""

    def __init__(self, rules: Mapping[str, str]) -> None:
        """Read the rules.

        Raises:
            UsageError: One is none.
        """
        self._rules = {glob: MeshRule.parse(text) for glob, text in rules.items()}
        self._used: set[str] = set()

    def find(self, shards: Shards) -> KnownRule | None:
        """The rule of a tensor; None if no glob fits its key."""
        for glob, rule in self._rules.items():
            if matches(shards.text, glob):
                self._used.add(glob)
                return KnownRule(rule.over(len(shards.ranks)), "given")
        return None

    def require_hits(self) -> None:
        """Refuse globs that fitted nothing.

        Raises:
            UsageError: There is one.
        """
        unused: Iterable[str] = [glob for glob in self._rules if glob not in self._used]
        for glob in unused:
            raise UsageError(f"rule {glob!r}: fits no tensor of several ranks", hint="Look at: tcap ls")
