"""Where two runs part: the first pair that is not green, and the module whose code made it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from tensorcap.verdicts.pairing import Pair, points_of, spellings
from tensorcap_formats.archive import Archive
from tensorcap_formats.keys import ROOT_SITE, Key

_OWN: Final = ("D", "D'", "E", "G", "integers", "routing", "zeros")  # tests of what a module itself does


@dataclass(frozen=True, slots=True)
class Divergence:
    """The first pair, in execution order of the reference, that weighs most among those that are not green.

    Attributes:
        pair: The pair.
        module: Site of the module that made the tensor; for the run's own inputs, `@root`.
        class_name: Class of that module, "" where the reference does not say.
        is_run_input: Whether it is an input of the whole run, so that no module is to blame.
        explanation: How the module was found, as a sentence.
    """

    pair: Pair
    module: str
    class_name: str
    is_run_input: bool
    explanation: str


def first_divergence(reference: Archive, pairs: Sequence[Pair]) -> Divergence | None:
    """Find the first required pair that is not green and weighs most, and name its module (CMP-40, CMP-41).

    Args:
        reference: The trusted archive, whose order and modules count.
        pairs: As `pair_records` orders them.

    Returns:
        None if every required pair is green.
    """
    red = (p for p in pairs if p.reference is not None and p.is_required and not p.is_green)
    pair = min(red, key=_weight, default=None)
    if pair is None or pair.reference is None:
        return None
    key = pair.reference.key
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


def _weight(pair: Pair) -> int:
    """Certain ones first, then a module's own error, then an error that may have come from before it."""
    if pair.status == "unjudged":
        return 3
    if pair.status != "suspect":
        return 0
    return 1 if any(f.status == "suspect" and f.test in _OWN for f in pair.findings) else 2


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
