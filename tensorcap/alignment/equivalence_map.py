"""Read and write the Equivalence method's `component_mapping.json`.

It has a list `component_mapping` of entries of two sides, each a list of module paths, whose variables `{i}`
take the values of `variables`, and in `reasoning`, under the names of the sides, a text for each path.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, get_args

from tensorcap.alignment.map_file import parse_map, write_text
from tensorcap.alignment.mapping import SIDE_NAMES, Alignment, Entry, Evidence, LeftOver, SideName, Values
from tensorcap_formats.errors import ReadError, UsageError, abbreviate

_KNOWN_SIDES: Final[Mapping[str, SideName]] = {
    **dict.fromkeys(("ref", "reference", "source", "hf"), "reference"),
    **dict.fromkeys(("port", "target", "vllm", "nxdi", "neuron"), "target"),
}
_KEYS: Final = ("mapping_size", "component_mapping", "variables", "reasoning", "tensorcap")
_OURS: Final = ("steps", "dims", "reference_dims", "evidence")  # under `tensorcap`, by number of entry
_VARIABLE: Final = re.compile(r"\{([A-Za-z_]\w*)\}")
_OFFSET: Final = re.compile(r"\{[A-Za-z_]\w*[+-]\d+\}")
_RANK: Final = re.compile(r"rank(?:\d+|\*)/")


def read_mapping(path: str | os.PathLike[str]) -> Alignment:
    """Read a map file or a `component_mapping.json`, whichever the content is.

    Raises:
        ReadError: It cannot be read, or is neither TOML nor JSON.
        UsageError: An entry makes no sense; the message says which.
    """
    try:
        text = Path(path).read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise ReadError(f"{path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ReadError(f"{path}: is no text in UTF-8: {error}") from error
    if not text.lstrip().startswith("{"):  # no TOML begins so, and nothing else of JSON is a mapping
        return parse_map(text, path)
    try:
        content = json.loads(text, object_pairs_hook=lambda pairs: _without_twins(path, pairs))
    except (ValueError, RecursionError) as error:  # also of numbers of too many digits
        raise ReadError(f"{path}: is no JSON: {error}") from None
    return _Reader(str(path), content).alignment()


@dataclass(slots=True)
class ForeignMapping:
    """A mapping as JSON.

    Attributes:
        content: What the file holds.
        remarks: What readers other than tensorcap do not understand of it.
    """

    content: dict[str, Any]
    remarks: tuple[str, ...]


def component_mapping(
    alignment: Alignment, *, reference: str = "ref", target: str = "port"
) -> ForeignMapping:
    """Convert a mapping to the form of `component_mapping.json`, which `read_mapping` reads back.

    Args:
        alignment: What to write.
        reference: The name that the reference has in it.
        target: The name that the target has in it.

    Raises:
        UsageError: Both sides have one name; an entry makes no sense; there is a rule for tokens.
    """
    if reference == target:
        raise UsageError(f"both sides are named {reference!r}, expected two names")
    if alignment.tokens is not None:
        raise UsageError(
            "component_mapping.json has no place for [tokens]", hint="Write the mapping as TOML."
        )
    return _Writer((reference, target)).written(alignment)


def write_component_mapping(
    alignment: Alignment,
    path: str | os.PathLike[str],
    *,
    reference: str = "ref",
    target: str = "port",
    replace: bool = False,
) -> tuple[str, ...]:
    """Write a mapping as `component_mapping.json`.

    Args:
        alignment: What to write.
        path: Where to.
        reference: The name that the reference has in it.
        target: The name that the target has in it.
        replace: Whether a file that is there may be replaced.

    Returns:
        What readers other than tensorcap do not understand of it, a sentence each.

    Raises:
        UsageError: See `component_mapping`.
        WriteError: A file is there, or it cannot be written.
    """
    mapping = component_mapping(alignment, reference=reference, target=target)
    write_text(json.dumps(mapping.content, indent=2, ensure_ascii=False) + "\n", path, replace=replace)
    return mapping.remarks


class _Reader:
    """Parser of one file's content."""

    def __init__(self, path: str, content: Mapping[str, Any]) -> None:
        self._path = path
        self._content = content
        listed = content.get("component_mapping")
        if not isinstance(listed, list) or not listed:
            raise self._refuse("component_mapping", listed, "a list of entries")
        size = content.get("mapping_size", len(listed))
        if size != len(listed):
            raise self._refuse("mapping_size", size, f"{len(listed)}, the count of entries")
        for name in content:
            if name not in _KEYS:
                raise UsageError(f"{path}: has {abbreviate(name)!r}, expected {', '.join(_KEYS)}")
        self._listed: list[Any] = listed
        self._variables = {name: self._values(name, v) for name, v in self._object("variables").items()}
        self._names = self._sides()

    def alignment(self) -> Alignment:
        extras = self._object("tensorcap")
        entries = [self._entry(i, entry, extras.get(str(i), {})) for i, entry in enumerate(self._listed, 1)]
        for number in extras:
            if not (number.isdigit() and 1 <= int(number) <= len(entries)):
                raise self._refuse("tensorcap", number, f"numbers of entries, 1 to {len(entries)}")
        reasons: dict[int, list[tuple[str, str, str]]] = {}
        left = []
        places = {
            (side, place): i
            for i, entry in reversed(list(enumerate(entries)))
            for side in SIDE_NAMES
            for place in self._places_of(entry, side)
        }
        for side, path, text in self._reasons():
            if (side, path) in places:
                reasons.setdefault(places[side, path], []).append((side, path, text))
            else:
                where = f"{self._path}: reasoning of {abbreviate(path)!r}"
                left.append(LeftOver(side, self._expanded(path, where), text))
        for i, texts in reasons.items():
            entry = entries[i]
            entries[i] = replace(entry, reason=_reason_text(entry, texts))
        return Alignment(tuple(entries), tuple(left))

    def _entry(self, number: int, entry: object, extras: object) -> Entry:
        where = f"{self._path}: entry {number}"
        sides: Any = [entry[name] for name in self._names] if isinstance(entry, dict) else entry
        reference, target = (self._paths(where, paths) for paths in sides)
        used = {name for side in (reference, target) for path in side for name in _VARIABLE.findall(path)}
        for name in sorted(used - set(self._variables)):
            known = ", ".join(self._variables) or "none"
            raise UsageError(f"{where}: variable {name!r} has no values, expected one of variables: {known}")
        variables = {name: values for name, values in self._variables.items() if name in used}
        if not isinstance(extras, dict) or any(name not in _OURS for name in extras):
            raise UsageError(
                f"{where}: tensorcap: found {abbreviate(repr(extras))}, expected {', '.join(_OURS)}"
            )
        steps, evidence = extras.get("steps", []), extras.get("evidence", "user")
        texts = dims, reference_dims = extras.get("dims", ""), extras.get("reference_dims", "")
        if not isinstance(steps, list) or not all(isinstance(s, str) for s in [*steps, *texts]):
            raise UsageError(f"{where}: tensorcap: found {abbreviate(repr(extras))}, expected texts")
        if evidence not in get_args(Evidence):
            known = ", ".join(get_args(Evidence))
            raise UsageError(f"{where}: evidence {abbreviate(repr(evidence))}, expected one of {known}")
        written = Entry(reference, target, variables, tuple(steps), evidence, "", where, dims, reference_dims)
        written.check()
        return written

    def _sides(self) -> tuple[str, str]:
        """Find the names of the two sides: keys of the entries if they are objects, else of the reasons."""
        names: list[str] | None = None
        for i, entry in enumerate(self._listed, 1):
            where = f"{self._path}: entry {i}"
            if not isinstance(entry, (list, dict)) or len(entry) != 2:
                raise UsageError(
                    f"{where}: found {abbreviate(repr(entry))}, expected two lists of paths",
                    hint='An entry is [["q", "k"], ["qk"]]: paths of the reference, then of the port.',
                )
            if isinstance(entry, dict):
                if names is not None and set(entry) != set(names):
                    raise UsageError(
                        f"{where}: has the sides {', '.join(entry)}, expected {', '.join(names)}"
                    )
                names = names or list(entry)
        reasoning = list(self._object("reasoning"))
        if len(reasoning) > 2 or (names is not None and not set(reasoning) <= set(names)):
            raise self._refuse("reasoning", reasoning, f"texts of {' and '.join(names or ['two', 'sides'])}")
        names = names or reasoning
        sides = {_KNOWN_SIDES.get(name.lower()): name for name in names}
        if len(names) < 2:
            if None in sides:
                raise self._refuse("reasoning", reasoning, "both sides, the reference's first")
            return sides.get("reference", ""), sides.get("target", "")
        is_turned = sides.get("target") == names[0] or sides.get("reference") == names[1]
        return (names[1], names[0]) if is_turned else (names[0], names[1])

    def _reasons(self) -> list[tuple[SideName, str, str]]:
        reasons: list[tuple[SideName, str, str]] = []
        reasoning = self._object("reasoning")
        for i, name in enumerate(self._names):
            side = SIDE_NAMES[i]
            texts = reasoning.get(name, {})
            if not isinstance(texts, dict):
                raise self._refuse(f"reasoning of {name}", texts, "a text for each path")
            for path, text in texts.items():
                if not path or not isinstance(text, str):
                    raise self._refuse(f"reasoning of {name}: {abbreviate(path)!r}", text, "a text")
                reasons.append((side, path, text))
        return reasons

    def _places_of(self, entry: Entry, side: SideName) -> Iterable[str]:
        yield from (entry.reference if side == "reference" else entry.target)
        for expanded in entry.expanded():
            yield from expanded[SIDE_NAMES.index(side)]

    def _expanded(self, path: str, where: str) -> tuple[str, ...]:
        used = set(_VARIABLE.findall(path))
        for name in sorted(used - set(self._variables)):
            raise UsageError(f"{where}: variable {name!r} has no values")
        variables = {name: values for name, values in self._variables.items() if name in used}
        return tuple(places[0] for places, _ in Entry((path,), (), variables, where=where).expanded())

    def _paths(self, where: str, paths: object) -> tuple[str, ...]:
        listed = [paths] if isinstance(paths, str) else paths
        if not isinstance(listed, list) or not listed or not all(isinstance(p, str) and p for p in listed):
            raise UsageError(f"{where}: found {abbreviate(repr(paths))}, expected a list of paths")
        return tuple(listed)

    def _values(self, name: str, values: object) -> Values:
        if not isinstance(values, list) or not values:
            raise self._refuse(f"variable {name!r}", values, "a list of texts")
        if not all(isinstance(v, (str, int)) and not isinstance(v, bool) and v != "" for v in values):
            raise self._refuse(f"variable {name!r}", values, "a list of texts")
        texts = tuple(map(str, values))
        if len(set(texts)) < len(texts):
            raise self._refuse(f"variable {name!r}", values, "each value once")
        return texts

    def _object(self, name: str) -> Mapping[str, Any]:
        value = self._content.get(name, {})
        if not isinstance(value, dict):
            raise self._refuse(name, value, "an object")
        return value

    def _refuse(self, what: str, value: object, expected: str) -> UsageError:
        return UsageError(f"{self._path}: {what}: found {abbreviate(repr(value))}, expected {expected}")


@dataclass(slots=True)
class _Writer:
    """Writer of a mapping, which collects the file's variables and what other readers do not understand."""

    names: tuple[str, str]
    variables: dict[str, Values] = field(default_factory=dict)
    remarks: dict[str, None] = field(default_factory=dict)

    def written(self, alignment: Alignment) -> ForeignMapping:
        listed: list[list[list[str]]] = []
        ours: dict[str, Any] = {}
        reasoning: dict[str, dict[str, str]] = {name: {} for name in self.names}
        for entry in alignment.entries:
            for places in self._forms(entry):
                listed.append([list(side) for side in places])
                if extra := self._extra(entry):
                    ours[str(len(listed))] = extra
                for side, path, text in _reasons_of(entry, places):
                    reasoning[self.names[SIDE_NAMES.index(side)]].setdefault(path, text)
        for left in alignment.left_over:
            texts = reasoning[self.names[SIDE_NAMES.index(left.side)]]
            for place in self._folded(left.places):
                texts.setdefault(place, left.reason)
        content: dict[str, Any] = {
            "mapping_size": len(listed),
            "component_mapping": listed,
            "variables": {name: list(values) for name, values in self.variables.items()},
            "reasoning": reasoning,
        }
        if ours:
            content["tensorcap"] = ours
        return ForeignMapping(content, tuple(self.remarks))

    def _forms(self, entry: Entry) -> list[tuple[tuple[str, ...], tuple[str, ...]]]:
        """Places with the file's variables; places for each combination of values if an index is offset."""
        places = (*entry.reference, *entry.target)
        if any("/" in place for place in places):
            what = "ranks" if any(_RANK.match(place) for place in places) else "slots"
            self.remarks[f"{what} of places are written as part of the path"] = None
        if any(map(_OFFSET.search, places)):
            self.remarks["an index beside another, as {i+1}, is written out"] = None
            return list(entry.expanded())
        next(entry.expanded(), None)  # which refuses what makes no sense
        renamed = {name: self._variable(name, values) for name, values in entry.variables.items()}
        sides = [
            tuple(_VARIABLE.sub(lambda variable: f"{{{renamed[variable[1]]}}}", place) for place in side)
            for side in (entry.reference, entry.target)
        ]
        return [(sides[0], sides[1])]

    def _variable(self, name: str, values: Values) -> str:
        """Name a variable in the file, whose variables all entries share."""
        wanted, count = name, 1
        while self.variables.get(wanted, values) != values:
            count += 1
            wanted = f"{name}_{count}"
        self.variables[wanted] = values
        return wanted

    def _extra(self, entry: Entry) -> dict[str, Any]:
        extra = {name: getattr(entry, name) for name in _OURS if getattr(entry, name)}
        if extra.get("evidence") == "user":
            del extra["evidence"]
        if entry.steps or entry.dims:
            self.remarks["steps and dims stand under the key `tensorcap`"] = None
        return {name: list(v) if isinstance(v, tuple) else v for name, v in extra.items()}

    def _folded(self, places: tuple[str, ...]) -> tuple[str, ...]:
        """Write places as one with a variable, if they are that place with all its values."""
        for name, values in self.variables.items():
            if len(values) != len(places) or len(values) < 2:
                continue
            number = rf"(?<![^.]){re.escape(values[0])}(?![^.])"
            template = re.sub(number, lambda _: "\0", places[0])
            if places == tuple(template.replace("\0", value) for value in values):
                return (template.replace("\0", f"{{{name}}}"),)
        return places


def _reason_text(entry: Entry, reasons: list[tuple[str, str, str]]) -> str:
    """Join the reasons of an entry's paths; one of its first path alone stays as it is."""
    if [(side, path) for side, path, _ in reasons] == [("reference", entry.reference[0])]:
        return reasons[0][2]
    return "\n".join(f"{side} {path}: {' '.join(text.split())}" for side, path, text in reasons)


def _reasons_of(
    entry: Entry, places: tuple[tuple[str, ...], tuple[str, ...]]
) -> list[tuple[SideName, str, str]]:
    """Split an entry's reason by the paths that it names; it is of the first path if it names none."""
    if not entry.reason:
        return []
    reasons: list[tuple[SideName, str, str]] = []
    for line in entry.reason.split("\n"):
        head, separator, text = line.partition(": ")
        name, _, path = head.partition(" ")
        side = _KNOWN_SIDES.get(name) if name in SIDE_NAMES else None
        if not separator or side is None or not path:
            return [("reference", places[0][0], entry.reason)]
        listed = entry.reference if side == "reference" else entry.target
        renamed = dict(zip(listed, places[SIDE_NAMES.index(side)], strict=True))
        reasons.append((side, renamed.get(path, path), text))
    return reasons


def _without_twins(path: object, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members: dict[str, Any] = {}
    for name, value in pairs:
        if name in members:
            raise UsageError(f"{path}: has {abbreviate(name)!r} twice in one object")
        members[name] = value
    return members
