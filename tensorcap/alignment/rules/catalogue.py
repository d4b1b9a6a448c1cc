"""The rule files that come with tensorcap, and which of them apply to two archives."""

from __future__ import annotations

from dataclasses import replace
from fnmatch import fnmatchcase
from functools import cache
from importlib.resources import files
from typing import Final

from tensorcap.alignment.rules.reading import RuleFile, parse_rules
from tensorcap.alignment.rules.ruleset import Rules, Side
from tensorcap_formats.archive import Archive

_ORDER: Final = ("wrappers", "transformers", "neuron", "max", "vllm", "gguf")
_OTHER: Final[dict[Side, Side]] = {"reference": "target", "target": "reference"}


@cache
def catalogue() -> tuple[RuleFile, ...]:
    """All rule files of the catalogue, in the order in which they apply."""
    folder = files("tensorcap.alignment.rules")
    return tuple(
        parse_rules((folder / f"{name}.toml").read_text(encoding="utf-8"), f"{name}.toml") for name in _ORDER
    )


def wrapper_rules() -> Rules:
    """What wrappers put before names, and components that are doubled."""
    return catalogue()[0].rules


def builtin_rules(reference: Archive, target: Archive) -> Rules:
    """The rules of the catalogue for two archives.

    Names of all ecosystems are made equal, whichever the runs are of. What is missing in one ecosystem is
    expected only if the classes of one run, and not of the other, say that it is of that ecosystem.
    """
    classes = [_classes(archive) for archive in (reference, target)]
    chosen = []
    for file in catalogue():
        rules = file.rules
        if file.signs:
            is_of = [any(fnmatchcase(c, sign) for c in found for sign in file.signs) for found in classes]
            expected = rules.expected if is_of[0] != is_of[1] else ()
            if is_of[0]:  # the ecosystem that the file calls the target's is the reference's
                expected = tuple(
                    replace(one, only_in=_OTHER[one.only_in] if one.only_in else None) for one in expected
                )
            rules = replace(rules, expected=expected)
        chosen.append(rules)
    return Rules().before(*chosen)


def _classes(archive: Archive) -> set[str]:
    return {module.class_name for module in archive.info.modules.values()}
