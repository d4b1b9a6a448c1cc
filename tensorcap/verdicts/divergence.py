"""Where two runs part: the first pair that is not green, and the module whose code made it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from tensorcap.verdicts.pairing import Pair, points_of, spellings
from tensorcap.verdicts.policy import POLICY
from tensorcap_formats.archive import Archive
from tensorcap_formats.keys import ROOT_SITE, Key

_OWN: Final = (
    "D",
    "D'",
    "T",
    "T'",
    "E",
    "G",
    "integers",
    "mask",
    "routing",
    "zeros",
    "dtype",
)  # tests of what a module itself does

_GROWN: Final = "The error grew past what is expected here; no module stands out."


@dataclass(frozen=True, slots=True)
class Divergence:
    """The first pair, in execution order of the reference, that weighs most among those that are not green.

    Attributes:
        pair: The pair.
        module: Site of the module that made the tensor; for the run's own inputs, `@root`.
        class_name: Class of that module, "" where the reference does not say.
        is_run_input: Whether it is an input of the whole run, so that no module is to blame.
        explanation: How the module was found, as a sentence.
        is_growth: Whether errors only grew past what is expected, so that `module` is a place and not to
            blame.
    """

    pair: Pair
    module: str
    class_name: str
    is_run_input: bool
    explanation: str
    is_growth: bool = False


def first_divergence(reference: Archive, pairs: Sequence[Pair]) -> Divergence | None:
    """Find the first required pair that is not green and weighs most, and name its module (CMP-40, CMP-41).

    Args:
        reference: The trusted archive, whose order and modules count.
        pairs: As `pair_records` orders them.

    Returns:
        None if every required pair is green.
    """
    red = (p for p in pairs if p.reference is not None and p.is_required and not p.is_green)
    inputs = _inputs_by_call(pairs)
    pair = min(red, key=lambda p: _weight(p, inputs.get(_call_of(p), ())), default=None)
    if pair is None or pair.reference is None:
        return None
    found = _explained(reference, pair, pair.reference.key)
    return replace(found, explanation=_GROWN, is_growth=True) if _has_only_grown(pair) else found


def _explained(reference: Archive, pair: Pair, key: Key) -> Divergence:
    if key.is_bare:
        return Divergence(pair, key.text, "", False, "The archive has no modules, only names.")
    kind = key.slot.partition(".")[0]
    if kind == "given" and key.site == ROOT_SITE:
        return Divergence(pair, ROOT_SITE, _class_of(reference, ROOT_SITE), True, _fed(key))
    if kind != "input":
        explanation = f"{key.site} made this tensor."
        return Divergence(pair, key.site, _class_of(reference, key.site), False, explanation)
    if key.site == ROOT_SITE:
        return Divergence(pair, ROOT_SITE, _class_of(reference, ROOT_SITE), True, _fed(key))
    caller = _caller(key.site, _called_sites(reference))
    explanation = f"The code of {caller} made this argument of {key.site}."
    return Divergence(pair, caller, _class_of(reference, caller), False, explanation)


def _weight(pair: Pair, inputs: Sequence[Pair]) -> int:
    """Certain ones first, then a module's own error, then an error that may have come from before it."""
    if pair.status == "unjudged":
        return 3
    tests = {f.test for f in pair.findings if f.status in ("suspect", "diverged")}
    certain = {f.test for f in pair.findings if f.status == "diverged"}
    if pair.status == "diverged" and certain == {"E"} and _inherits_rows(pair, inputs):
        return 1 if tests & (set(_OWN) - {"E"}) else 2
    if pair.status != "suspect":
        return 0
    return 1 if tests & set(_OWN) else 2


def _inherits_rows(pair: Pair, inputs: Sequence[Pair]) -> bool:
    """Whether the same call was given rows that are as wrong, so that an outlier is not its own."""
    if any(f.test == "E" and f.status == "diverged" for given in inputs for f in given.findings):
        return True
    is_no_worse = any(f.test in ("T", "T'") and f.status == "within-rounding" for f in pair.findings)
    return is_no_worse and any(_has_worse_rows(given) for given in inputs)


def _has_worse_rows(pair: Pair) -> bool:
    found = pair.difference
    if found is None or found.row_error_median is None or found.row_error_p95 is None:
        return False
    return found.row_error_p95 > POLICY.outlier_spread * found.row_error_median


def _has_only_grown(pair: Pair) -> bool:
    return pair.status == "suspect" and {f.test for f in pair.findings if f.status == "suspect"} == {"F"}


def _call_of(pair: Pair) -> tuple[int, int, str, int] | None:
    if pair.reference is None or not pair.reference.key.slot.startswith("output"):
        return None
    key = pair.reference.key
    return key.rank, key.step, key.site, key.call


def _inputs_by_call(pairs: Sequence[Pair]) -> dict[tuple[int, int, str, int] | None, list[Pair]]:
    found: dict[tuple[int, int, str, int] | None, list[Pair]] = {}
    for pair in pairs:
        key = pair.reference.key if pair.reference is not None else None
        if key is not None and key.slot.partition(".")[0] == "input":
            found.setdefault((key.rank, key.step, key.site, key.call), []).append(pair)
    return found


def _fed(key: Key) -> str:
    if key.step == 0:
        return "This is an input of the run: the two runs were fed different inputs."
    return f"This is an input of step {key.step}: the code that calls the model made it."


def _caller(site: str, called: Iterable[str]) -> str:
    """The nearest module around a site that was itself called; a list of layers is not."""
    known = set(called)
    around = site
    while "." in around:
        around = around.rpartition(".")[0]
        if around in known:
            return around
    return ROOT_SITE


def _called_sites(reference: Archive) -> set[str]:
    called = {record.key.site for record in reference.records}
    for point in points_of(reference.run):
        if point.get("status") != "never-called":
            called.update(spellings(point["site"]))
    return called


def _class_of(reference: Archive, site: str) -> str:
    modules = reference.run.get("modules")
    for module in modules if isinstance(modules, list) else ():
        if isinstance(module, dict) and site in spellings(str(module.get("path") or ROOT_SITE)):
            return str(module.get("class") or "")
    return ""
