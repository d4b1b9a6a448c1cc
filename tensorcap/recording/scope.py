"""Which records to keep: globs that include and exclude sites and slots, and limits.

What a capture taps beside the outputs of modules.
"""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from tensorcap.recording.limits import Limits, window
from tensorcap_formats.errors import UsageError, abbreviate
from tensorcap_formats.keys import PROBES, Key, module_of


class Scope:
    """Globs of the user; one without `/` is for sites, any other for whole keys (NAM-8).

    Attributes:
        include: What to keep, all if empty.
        exclude: What not to keep; it wins.
        limits: What else is not kept.

    Example:
        >>> scope = Scope(include=["layers.*"], exclude=["*/input*"])
        >>> scope.of_site("norm"), scope.of_site("layers.0")
        (False, None)
        >>> scope.allows(Key("layers.0", "output")), scope.allows(Key("layers.0", "input.x"))
        (True, False)
    """

    def __init__(
        self,
        include: str | Iterable[str] = (),
        exclude: str | Iterable[str] = (),
        limits: Limits | None = None,
    ) -> None:
        self.include = as_tuple(include)
        self.exclude = as_tuple(exclude)
        self.limits = limits or Limits()
        self._unmatched = {p for p in self.include if "/" in p}
        self._unused = set(self.limits.slices.texts)

    def of_site(self, site: str, aliases: Sequence[str] = ()) -> bool | None:
        """Whether records of the site are wanted: all, none, or None where it depends on the key."""
        if any("/" not in p and _fits_any(p, site, aliases) for p in self.exclude):
            return False
        hits = [p for p in self.include if "/" not in p and _fits_any(p, site, aliases)]
        if not hits and self.include and not any("/" in p for p in self.include):
            return False
        by_key = (self.include and not hits) or any("/" in p for p in (*self.include, *self.exclude))
        return None if by_key or not self.limits.are_none else True

    def allows(self, key: Key, aliases: Sequence[str] = ()) -> bool:
        """Whether one record is wanted, whose site is not ruled out."""
        texts = _texts(key, aliases)
        hits = [p for p in self.include if _fits_key(p, texts, key.site, aliases)]
        self._unmatched.difference_update(hits)
        if self.include and not hits:
            return False
        return not any(_fits_key(p, texts, key.site, aliases) for p in self.exclude)

    def part(self, key: Key, aliases: Sequence[str], shape: tuple[int, ...]) -> tuple[slice, ...] | None:
        """What is recorded of a wanted tensor: a slice for each axis, None for all of it.

        Raises:
            NothingLeftError: No element would be.
        """
        for text, glob, entries in self.limits.slices.parts:
            if fits_key(glob, key, aliases):
                self._unused.discard(text)
                return window(entries, shape)
        return None

    def describe(self) -> dict[str, Any]:
        """The globs and limits, as the run's metadata keep them."""
        return {"include": list(self.include), "exclude": list(self.exclude), **self.limits.describe()}

    def unmatched(self, captured: Iterable[tuple[str, Sequence[str]]], steps: int) -> tuple[str, ...]:
        """What was asked for and of which nothing was captured: include globs, slices, steps.

        Args:
            captured: Site and aliases of each site of which there are records.
            steps: How many steps there were.
        """
        sites = list(captured)
        globs = [
            p
            for p in self.include
            if (p in self._unmatched if "/" in p else not any(_fits_any(p, *names) for names in sites))
        ]
        slices = [text for text in self.limits.slices.texts if text in self._unused]
        return (*globs, *slices, *self.limits.unmet(steps))

    def check(self, model: str, sites: Collection[str], further: Iterable[str] = ()) -> None:
        """Refuse a glob of what to record, to cut or to print that cannot match, before anything runs.

        Args:
            model: The model's class, for the message.
            sites: Escaped names of all sites, aliases too.
            further: Globs that are held to the same.

        Raises:
            UsageError: A glob for sites matches none; or one for keys names a site that is not there.
        """
        for pattern in (*self.include, *(glob for _, glob, _ in self.limits.slices.parts), *further):
            site = _site_of(pattern)
            if site is not None and ":" in site:
                site = module_of(site)
                if fnmatch.fnmatchcase(PROBES, site):
                    continue  # which probes there are is known when they are passed
            if site is not None and any(fnmatch.fnmatchcase(s, site) for s in sites):
                continue
            close = difflib.get_close_matches(site or pattern, list(sites), n=3)
            hint = f"Did you mean {' or '.join(map(repr, close))}?" if close else None
            if site is None:
                hint = f"A glob for keys begins with the step: '*/{pattern}'."
            raise UsageError(
                f"{model}: no module matches {abbreviate(pattern)!r} among {len(sites)}", hint=hint
            )


def as_tuple(patterns: str | Iterable[str]) -> tuple[str, ...]:
    """Globs as a tuple, where one alone may be given as a text."""
    return (patterns,) if isinstance(patterns, str) else tuple(patterns)


def fits_key(pattern: str, key: Key, aliases: Sequence[str] = ()) -> bool:
    """Whether a glob fits a key (NAM-8), or that of an alias of its site."""
    return _fits_key(pattern, _texts(key, aliases), key.site, aliases)


def _texts(key: Key, aliases: Sequence[str]) -> list[str]:
    return [key.text, *(Key(alias, key.slot, key.step, key.call, key.rank).text for alias in aliases)]


def _fits_any(pattern: str, site: str, aliases: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for name in (site, *aliases))


def _fits_key(pattern: str, texts: Sequence[str], site: str, aliases: Sequence[str]) -> bool:
    if "/" in pattern:
        return any(fnmatch.fnmatchcase(text, pattern) for text in texts)
    return _fits_any(pattern, site, aliases)


def _site_of(pattern: str) -> str | None:
    """The glob for sites within a glob; `*` where it may match any site, None where it matches no key."""
    if "/" not in pattern:
        return pattern
    parts = pattern.split("/")
    if len(parts) == 2:  # a `*` stands for two components, or there is no step
        return "*" if parts[0][:1] in ("*", "?", "[") or parts[0].isdigit() else None
    if len(parts) == 3 and not parts[0].startswith("rank"):
        site, at, _ = parts[1].rpartition("@")
        return site if at and site else parts[1]
    return "*"


Level = Literal["module", "op", "export"]
LEVELS: Final[tuple[Level, ...]] = Level.__args__  # type: ignore[attr-defined] # no public name for it


@dataclass(frozen=True, slots=True)
class Plan:
    """What is tapped.

    Attributes:
        inputs: Whether the inputs of modules are recorded.
        level: `module`, `op` for every op within them too, or `export` for every node of an exported graph.
        ops_in: Globs of the modules, with all below them, whose ops are recorded; all where it is empty.
        watch: Local variables of functions, as `package.module:Class.method:variable,variable`.
        grads: Whether gradients of activations and of parameters are recorded.
        params: Whether parameters and buffers are recorded, once.
        eager: Whether what is compiled or fused runs as the plain code that it was made from.
        injectable: Which values, `input` or `output`, later runs of the same model are going to replace: what
            has to be compiled makes them replaceable at once.
        inner: Whether a compiled graph prints into files what it cannot give out.
    """

    inputs: bool = True
    level: Level = "module"
    ops_in: tuple[str, ...] = ()
    watch: tuple[str, ...] = ()
    grads: bool = False
    params: bool = False
    eager: bool = False
    injectable: tuple[str, ...] = ()
    inner: bool = False

    def __post_init__(self) -> None:
        """Refuse a plan that contradicts itself.

        Raises:
            UsageError: There is no such level, or `ops_in` is given where no ops are recorded.
        """
        if self.level not in LEVELS:
            raise UsageError(f"level {self.level!r}: expected one of {', '.join(LEVELS)}")
        if self.ops_in and self.level == "module":
            raise UsageError(
                "ops_in is of ops, and the level is module", hint="Take level op, or level export."
            )

    def describe(self) -> dict[str, Any]:
        """The plan, as the run's metadata keep it: what is not as by default, and `inputs`."""
        found: dict[str, Any] = {"inputs": self.inputs}
        if self.level != "module":
            found["level"] = self.level
        if self.ops_in:
            found["ops_in"] = list(self.ops_in)
        if self.watch:
            found["watch"] = list(self.watch)
        if self.grads:
            found["grads"] = True
        if self.params:
            found["params"] = True
        if self.eager:
            found["eager"] = True
        if self.inner:
            found["inner"] = True
        return found
