"""The Equivalence method's stage 2 and stage 3 JSON files: R of each component, and the faults among them.

A stage 2 file holds `results`, in execution order, each with `component`, `r_ratio` and `passed`; a stage 3
file `faults`, each with `component`, `r_ratio`, `pattern`, `root_cause` and `description`, and which of them
is the primary one. Patterns are those of `curves.change_points` for own errors: components are tested alone.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, cast, get_args

from tensorcap.localization import Suspect, runs_of
from tensorcap.rerun import OwnError
from tensorcap_formats.errors import ReadError, UsageError, abbreviate
from tensorcap_formats.output_path import publish_text

Pattern = Literal["step", "spike", "error"]
_CAUSES: Final = (  # R above which one is named; Equivalence's words
    (10.0, "missing_algorithm", "another computation, or a step of it is missing"),
    (3.0, "missing_multiplier", "a factor is missing"),
    (1.2, "precision_ordering", "another precision, or order of operations"),
    (-math.inf, "unknown", "within tolerance"),
)
_HINTS: Final = (  # words in the name of a component, the cause that they go with, and the usual mistake
    (
        ("rotary", "rope", "position"),
        "missing_algorithm",
        "scaling of the rotary frequencies is the usual one",
    ),
    (
        ("moe", "expert", "router"),
        "missing_algorithm",
        "routing weights that are not applied are the usual one",
    ),
    (("norm",), "precision_ordering", "a variance in low precision is the usual one"),
)
_ROUTED: Final = ("moe", "expert", "router")
_PRECISE: Final = 0.85  # R below which a component is more precise by more than chance


@dataclass(frozen=True, slots=True)
class Component:
    """A result of stage 2.

    Attributes:
        name: The component.
        ratio: R; None if it could not be computed.
        passed: Whether it passed.
        error: What went wrong in its test, "" if nothing did.
    """

    name: str
    ratio: float | None
    passed: bool
    error: str = ""


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault of stage 3.

    Attributes:
        component: Its name.
        ratio: R; None if it could not be computed.
        pattern: `step` if it is one of a run of components that failed, `spike` if not, `error` without R.
        root_cause: What R means, in Equivalence's words.
        description: The fault as a sentence.
    """

    component: str
    ratio: float | None
    pattern: Pattern
    root_cause: str
    description: str


def components(own_errors: Iterable[OwnError], suspects: Sequence[Suspect] = ()) -> tuple[Component, ...]:
    """Own errors as results of stage 2: each module once, with the worst of its own errors.

    Args:
        own_errors: In execution order. What a module hands on to others counts if it is accused.
        suspects: The modules that are accused; none of them has passed.
    """
    accused = {one.module: one for suspect in suspects for one in (suspect, *suspect.others)}
    by_module: dict[str, Component] = {}
    for own in own_errors:
        if own.made != "result" and not (own.is_bad and own.module in accused):
            continue
        known = by_module.get(own.module)
        ratio, passed, error = own.ratio, not own.is_bad, ""
        if own.status == "unjudged":
            passed, error = False, f"{own.key} could not be judged"
        if known is not None:
            ratios = [r for r in (ratio, known.ratio) if r is not None]
            ratio, passed, error = max(ratios, default=None), passed and known.passed, error or known.error
        by_module[own.module] = Component(own.module, ratio, passed, error)
    for module, suspect in accused.items():
        known = by_module.get(module)
        if known is None or known.ratio is None or known.passed:
            ratio = suspect.ratio if known is None or known.ratio is None else known.ratio
            by_module[module] = Component(module, ratio, passed=False, error=suspect.reason)
    return tuple(by_module.values())


def faults(results: Sequence[Component], *, by_place: bool = False) -> tuple[Fault, ...]:
    """Find the faults among results: steps in execution order, then spikes by falling R, then errors.

    Args:
        results: In execution order.
        by_place: Whether spikes are in execution order, too.

    Example:
        >>> ratios = [("rotary", 2.0), ("ok", 1.0), ("gate", 1.5), ("attn", 20.0), ("decoder", 40.0)]
        >>> suspects = faults([Component(name, r, r < 1.2) for name, r in ratios])
        >>> [(one.component, one.pattern) for one in suspects]
        [('gate', 'step'), ('attn', 'step'), ('decoder', 'step'), ('rotary', 'spike')]
    """
    in_step = {at for start, stop in runs_of([not r.passed for r in results]) for at in range(start, stop)}
    listed = [
        _fault(component, is_step=at in in_step)
        for at, component in enumerate(results)
        if not component.passed
    ]
    order = {"step": 0, "spike": 1, "error": 2}
    listed.sort(
        key=lambda f: (order[f.pattern], -(f.ratio or 0.0) if f.pattern == "spike" and not by_place else 0.0)
    )
    return tuple(listed)


def stage2(results: Sequence[Component]) -> dict[str, Any]:
    """The content of a stage 2 file."""
    passed = sum(one.passed for one in results)
    return {
        "results": [
            {
                "component": one.name,
                "r_ratio": one.ratio,
                "passed": one.passed,
                **({"error": one.error} if one.error else {}),
            }
            for one in results
        ],
        "passed": passed,
        "failed": len(results) - passed,
        "total": len(results),
    }


def stage3(known: Sequence[Fault]) -> dict[str, Any]:
    """The content of a stage 3 file."""
    listed = [
        {
            "component": one.component,
            "r_ratio": one.ratio,
            "pattern": one.pattern,
            "root_cause": one.root_cause,
            "description": one.description,
        }
        for one in known
    ]
    first = {"primary_fault": listed[0]} if listed else {}
    return {"faults": listed, "num_faults": len(listed), **first}


def write_stage(path: str | os.PathLike[str], content: Mapping[str, Any]) -> None:
    """Write the content of a file of either stage; an infinite R as `Infinity`, which Python reads.

    Raises:
        WriteError: Something else than a file of that stage is there, or it cannot be written.
    """
    first = next(iter(content))
    with publish_text(path, beginning=f'{{"{first}":') as file:
        file.write(json.dumps(content, indent=2, ensure_ascii=False) + "\n")


def read_faults(path: str | os.PathLike[str]) -> tuple[Fault, ...]:
    """Read the faults of a file of either stage.

    Raises:
        ReadError: It cannot be read, or is no JSON.
        UsageError: It is of neither stage, or its counts are not those of what it lists.
    """
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ReadError(f"{path}: cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ReadError(f"{path}: is no JSON: {error}") from error
    if isinstance(content, dict) and isinstance(content.get("results"), list):
        return faults(parse_components(str(path), content))
    if isinstance(content, dict) and isinstance(content.get("faults"), list):
        return _faults(str(path), content)
    raise UsageError(f"{path}: has neither results (stage 2) nor faults (stage 3) of Equivalence")


def parse_components(path: str, content: Mapping[str, Any]) -> tuple[Component, ...]:
    """Parse the content of a stage 2 file, in its order.

    Raises:
        UsageError: It is none, or its counts are not those of what it lists.
    """
    if not isinstance(content, Mapping) or not isinstance(content.get("results"), list):
        raise UsageError(f"{path}: has no results (stage 2) of Equivalence")
    results = []
    for number, entry in enumerate(content["results"], 1):
        where = f"{path}: result {number}"
        passed = _member(where, entry, "passed", bool)
        ratio, error = _ratio(where, entry), str(entry.get("error") or "")
        if ratio is None and passed and not error and entry.get("r_ratio") is not None:
            passed = False  # NaN is no pass
        results.append(Component(_member(where, entry, "component", str), ratio, passed, error))
    counts = stage2(results)
    for name in ("passed", "failed", "total"):
        if content.get(name, counts[name]) != counts[name]:
            raise UsageError(f"{path}: {name}: found {content[name]!r}, expected {counts[name]} as it lists")
    return tuple(results)


def _faults(path: str, content: Mapping[str, Any]) -> tuple[Fault, ...]:
    known = []
    for number, entry in enumerate(content["faults"], 1):
        where = f"{path}: fault {number}"
        texts = [_member(where, entry, n, str) for n in ("component", "pattern", "root_cause", "description")]
        if texts[1] not in get_args(Pattern):
            raise UsageError(f"{where}: pattern: found {texts[1]!r}, expected step, spike or error")
        known.append(Fault(texts[0], _ratio(where, entry), cast("Pattern", texts[1]), texts[2], texts[3]))
    if content.get("num_faults", len(known)) != len(known):
        raise UsageError(f"{path}: num_faults: found {content['num_faults']!r}, expected {len(known)}")
    primary = content.get("primary_fault")
    name = primary.get("component") if isinstance(primary, dict) else primary
    return tuple(sorted(known, key=lambda fault: fault.component != name))


def _fault(component: Component, *, is_step: bool) -> Fault:
    """Name the fault of a component that failed, by its R and by its name."""
    ratio = component.ratio
    if ratio is None:
        error = component.error or "R could not be had"
        text = f"{error[:1].upper()}{error[1:].rstrip('.')}."
        return Fault(component.name, None, "error", "test_error", text)
    cause, text = next((cause, text) for least, cause, text in _CAUSES if ratio > least)
    if ratio < _PRECISE:
        cause, text = "over_precision", "more precise than the reference in that precision"
    name = component.name.lower()
    hints = [hint for words, of, hint in _HINTS if of == cause and any(word in name for word in words)]
    if cause == "missing_algorithm" and any(word in name for word in _ROUTED):
        cause = "routing_ignored"
    description = f"R is {ratio:.4g}: {text}" + "".join(f"; {hint}" for hint in hints) + "."
    return Fault(component.name, ratio, "step" if is_step else "spike", cause, description)


def _member(where: str, entry: object, name: str, kind: type) -> Any:
    """Take a member of an entry.

    Raises:
        UsageError: It is missing, or of another kind.
    """
    value = entry.get(name) if isinstance(entry, dict) else None
    if not isinstance(value, kind):
        expected = {str: "a text", bool: "true or false"}[kind]
        raise UsageError(f"{where}: {name}: found {abbreviate(repr(value))}, expected {expected}")
    return value


def _ratio(where: str, entry: Mapping[str, Any]) -> float | None:
    """R of an entry; None if there is none, or it is no number."""
    ratio = entry.get("r_ratio")
    if isinstance(ratio, str) and ratio in ("inf", "nan", "-inf"):
        ratio = float(ratio)
    if ratio is None or (isinstance(ratio, float) and math.isnan(ratio)):
        return None
    if isinstance(ratio, bool) or not isinstance(ratio, int | float) or ratio < 0:
        raise UsageError(
            f"{where}: r_ratio: found {abbreviate(repr(ratio))}, expected a number of at least 0"
        )
    return float(ratio)
