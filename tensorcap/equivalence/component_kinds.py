"""The components of an experiment: which modules are tested, of which kind, the simplest kinds first."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from tensorcap.rerun import module_results
from tensorcap.runs import lies_within
from tensorcap_formats.archive import Archive
from tensorcap_formats.keys import ROOT_SITE
from tensorcap_formats.records import Record

KINDS: Final = (  # from the simplest to the most composed
    "norm",
    "embedding",
    "activation",
    "linear",
    "rotary",
    "other",
    "mlp",
    "attention",
    "head",
    "layer",
    "model",
)
_ROTARY: Final = re.compile(r"rotary|rope(?![a-z])", re.IGNORECASE)
_NORM: Final = re.compile(r"norm\d*$|norm(?=[_.\d])|^ln_|(?<![a-z])ln(?![a-z])", re.IGNORECASE)
_EMBEDDING: Final = re.compile(r"embed", re.IGNORECASE)
_ATTENTION: Final = re.compile(r"attn|attention", re.IGNORECASE)
_MLP: Final = re.compile(r"mlp|feed_?forward|ffn|expert|moe|router", re.IGNORECASE)
_HEADS: Final = ("lm_head", "head", "classifier", "score", "output_layer", "embed_out")
_LINEAR: Final = re.compile(r"linear|conv1d|proj$|dense$|query$|key$|value$|fc\d*$", re.IGNORECASE)
_ACTIVATION: Final = re.compile(r"act(?:ivation)?(?:_fn|_func)?$|gelu|silu|relu|swish", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Component:
    """A module that both sides have.

    Attributes:
        site: Its site in the source.
        kind: One of `KINDS`.
        place: Its place in the order in which the source's modules end, from 0.
        source_class: Its class in the source, "" if unknown.
        keys: Key texts of its results, in the source's names.
        shapes: Their shapes.
    """

    site: str
    kind: str
    place: int
    source_class: str
    keys: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]


def find_components(source: Archive, target: Archive) -> tuple[Component, ...]:
    """Find the modules of which both sides have results that are floats, the simplest first.

    Args:
        source: The trusted archive, as `tensorcap.alignment.sides` gives it.
        target: The target under its keys.
    """
    records = {
        site: [one for one in module_results(source, site) if _is_tested(one, target)]
        for site in dict.fromkeys(record.key.site for record in source.records)
    }
    tested = {site: listed for site, listed in records.items() if listed}
    order = sorted(tested, key=lambda site: max(record.order for record in tested[site]))
    classes = {
        path or ROOT_SITE: module.short_class
        for path, module in ((module.path, module) for module in source.info.modules.values())
    }
    components = [
        Component(
            site,
            kind_of(site, classes, list(tested)),
            place,
            classes.get(site, ""),
            tuple(record.key.text for record in tested[site]),
            tuple(record.shape for record in tested[site]),
        )
        for place, site in enumerate(order)
    ]
    return tuple(sorted(components, key=lambda one: (KINDS.index(one.kind), one.place)))


def untested(source: Archive, components: Sequence[Component], target: Archive) -> Iterator[tuple[str, str]]:
    """Modules of the source that are no components, each with the reason.

    Args:
        source: The trusted archive, as `tensorcap.alignment.sides` gives it.
        components: Those that are tested.
        target: The target under its keys.
    """
    known = {component.site for component in components}
    with_results = {record.key.site for record in target.records if _is_result(record)}
    called = {record.key.site for record in source.records if _is_result(record)}
    for site, module in source.info.modules.items():
        if site in known or (site not in called and not module.parameters):
            continue
        if site not in called:
            yield site, "never called"
        elif site in with_results:
            yield site, "the port has no argument of it"
        else:
            yield site, "has no counterpart"


def _is_result(record: Record) -> bool:
    return record.key.slot.partition(".")[0] == "output" and record.dtype.kind == "float"


def kind_of(site: str, classes: Mapping[str, str], sites: Sequence[str]) -> str:
    """The kind of a module, by its class, its name, and what lies within it.

    Args:
        site: Its site.
        classes: Classes of all modules, without the package, by site.
        sites: The sites of all components.
    """
    within = [other for other in classes if lies_within(other, site)]
    name, class_name = site.rpartition(".")[2], classes.get(site, "")
    if site == ROOT_SITE or any(_is_layer(other, classes) for other in within):
        return "model"
    if _is_layer(site, classes):
        return "layer"
    own = f"{name} {class_name}"
    if _ROTARY.search(own):
        return "rotary"
    if within:
        return next(
            (k for k, is_it in (("attention", _ATTENTION), ("mlp", _MLP)) if is_it.search(own)), "other"
        )
    if _NORM.search(name) or _NORM.search(class_name):
        return "norm"
    if _EMBEDDING.search(class_name):
        return "embedding"
    if name in _HEADS:
        return "head"
    if _LINEAR.search(class_name) or _LINEAR.search(name):
        return "linear"
    if _ACTIVATION.search(name) or _ACTIVATION.search(class_name):
        return "activation"
    if _ATTENTION.search(own):
        return "attention"
    return "mlp" if _MLP.search(own) else "other"


def _is_layer(site: str, classes: Mapping[str, str]) -> bool:
    """Whether a module is a numbered one with others in it, and not an expert or the like within a layer."""
    if not site.rpartition(".")[2].isdigit() or not any(lies_within(other, site) for other in classes):
        return False
    return not any(part.isdigit() for part in site.split(".")[:-1])


def _is_tested(record: Record, target: Archive) -> bool:
    return record.dtype.kind == "float" and record.key.text in target and not record.key.is_bare
