"""Decide which records of a run are kept, and which part of each tensor, by globs, limits and slices."""

from __future__ import annotations

import fnmatch
from collections.abc import Collection, Iterable, Sequence
from functools import lru_cache

from tensorcap.recording.options import CaptureOptions, span_text
from tensorcap.runs import parse_window
from tensorcap_formats.errors import UsageError, abbreviate, did_you_mean
from tensorcap_formats.keys import PROBES, Key, module_of


class NothingLeftError(Exception):
    """A slice would leave no element of a tensor; the text says which."""


class RecordFilter:
    """Decides which records are kept; a glob without `/` is for sites, any other for whole keys (NAM-8).

    It remembers which globs and slices fitted something, so one is for one run.

    Attributes:
        options: The globs, limits and slices.

    Example:
        >>> records = RecordFilter(CaptureOptions(only=("layers.*",), exclude=("*/input*",)))
        >>> records.keeps_site("norm"), records.keeps_site("layers.0")
        (False, None)
        >>> records.keeps(Key("layers.0", "output")), records.keeps(Key("layers.0", "input.x"))
        (True, False)
    """

    def __init__(self, options: CaptureOptions) -> None:
        self.options = options
        self._unmatched_globs = {glob for glob in options.only if "/" in glob}
        self._unused_slices = {part.text for part in options.slices}

    def keeps_site(self, site: str, aliases: Sequence[str] = ()) -> bool | None:
        """Whether all records of a site are kept, or none, or None if it depends on the key."""
        only, exclude = self.options.only, self.options.exclude
        if any("/" not in glob and _fits_site(glob, site, aliases) for glob in exclude):
            return False
        matches = [glob for glob in only if "/" not in glob and _fits_site(glob, site, aliases)]
        if not matches and only and not any("/" in glob for glob in only):
            return False
        depends_on_key = (only and not matches) or any("/" in glob for glob in (*only, *exclude))
        return None if depends_on_key or self.options.limits_calls else True

    def keeps(self, key: Key, aliases: Sequence[str] = ()) -> bool:
        """Whether one record is kept, whose site is not excluded."""
        texts = _key_texts(key, aliases)
        matches = [glob for glob in self.options.only if _fits_key(glob, texts, key.site, aliases)]
        self._unmatched_globs.difference_update(matches)
        if self.options.only and not matches:
            return False
        return not any(_fits_key(glob, texts, key.site, aliases) for glob in self.options.exclude)

    def find_part(self, key: Key, aliases: Sequence[str], shape: tuple[int, ...]) -> tuple[slice, ...] | None:
        """Find which part of a tensor is recorded: a slice for each axis, None for all of it.

        Raises:
            NothingLeftError: No element would be.
        """
        for part in self.options.slices:
            if fits_key(part.glob, key, aliases):
                self._unused_slices.discard(part.text)
                return _resolve_slice(part.entries, shape)
        return None

    def unmatched(self, captured: Iterable[tuple[str, Sequence[str]]], steps: int) -> tuple[str, ...]:
        """What was asked for and of which nothing was captured: globs of `only`, slices, steps.

        Args:
            captured: Site and aliases of each site that has records.
            steps: How many steps there were.
        """
        sites = list(captured)
        globs = [
            glob
            for glob in self.options.only
            if (
                glob in self._unmatched_globs
                if "/" in glob
                else not any(_fits_site(glob, *names) for names in sites)
            )
        ]
        slices = [part.text for part in self.options.slices if part.text in self._unused_slices]
        beyond_end = [f"steps {span_text(span)}" for span in self.options.steps if span.start >= steps]
        return (*globs, *slices, *beyond_end)

    def check_globs(self, model: str, sites: Collection[str], further: Iterable[str] = ()) -> None:
        """Refuse a glob of what to record, to cut or to print that cannot match, before anything runs.

        Args:
            model: The model's class, for the message.
            sites: Escaped names of all sites, aliases too.
            further: Further globs that must match.

        Raises:
            UsageError: A glob for sites matches none; or one for keys names a site that does not exist.
        """
        for pattern in (*self.options.only, *(part.glob for part in self.options.slices), *further):
            site = _site_glob(pattern)
            if site is not None and ":" in site:
                site = module_of(site)
                if fnmatch.fnmatchcase(PROBES, site):
                    continue  # probes are known only when they are passed
            if site is not None and any(fnmatch.fnmatchcase(s, site) for s in sites):
                continue
            hint = did_you_mean(site or pattern, sites)
            if site is None:
                hint = f"A glob for keys begins with the step: '*/{pattern}'."
            raise UsageError(
                f"{model}: no module matches {abbreviate(pattern)!r} among {len(sites)}", hint=hint
            )


def fits_key(glob: str, key: Key, aliases: Sequence[str] = ()) -> bool:
    """Whether a glob fits a key (NAM-8), or that of an alias of its site."""
    return _fits_key(glob, _key_texts(key, aliases), key.site, aliases)


def _key_texts(key: Key, aliases: Sequence[str]) -> list[str]:
    return [key.text, *(Key(alias, key.slot, key.step, key.call, key.rank).text for alias in aliases)]


def _fits_site(glob: str, site: str, aliases: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, glob) for name in (site, *aliases))


def _fits_key(glob: str, texts: Sequence[str], site: str, aliases: Sequence[str]) -> bool:
    if "/" in glob:
        return any(fnmatch.fnmatchcase(text, glob) for text in texts)
    return _fits_site(glob, site, aliases)


def _site_glob(pattern: str) -> str | None:
    """The glob for sites within a glob; `*` if it may match any site, None if it matches no key."""
    if "/" not in pattern:
        return pattern
    parts = pattern.split("/")
    if len(parts) == 2:  # a `*` stands for two components, or there is no step
        return "*" if parts[0][:1] in ("*", "?", "[") or parts[0].isdigit() else None
    if len(parts) == 3 and not parts[0].startswith("rank"):
        site, at, _ = parts[1].rpartition("@")
        return site if at and site else parts[1]
    return "*"


@lru_cache(maxsize=1024)  # a model has few shapes
def _resolve_slice(entries: tuple[str, ...], shape: tuple[int, ...]) -> tuple[slice, ...] | None:
    """What the entries of a slice leave of a shape.

    Returns:
        A slice for each axis, or None for all of it, also if it has fewer axes than there are entries.

    Raises:
        NothingLeftError: There are elements, and none of them would be left.
    """
    if len(entries) - entries.count("...") > len(shape):
        return None
    text = f"[{', '.join(entries)}]"
    ranges = [r for r in parse_window(text, shape) if isinstance(r, range)]
    if all(len(r) == n for r, n in zip(ranges, shape, strict=True)):
        return None
    if all(shape) and not all(map(len, ranges)):
        raise NothingLeftError(f"slice {text} leaves nothing of shape {list(shape)}")
    return tuple(slice(r.start, r.stop, r.step) for r in ranges)
