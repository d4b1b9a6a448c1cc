"""What the metadata of two runs differ in: mode, configuration, modules, settings, versions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any, Final

from tensorcap.comparison.preflight.configuration import ABSENT, CAUSES, config_differences
from tensorcap.comparison.preflight.item import Item, UnknownError, common_modules, item, short
from tensorcap_formats.archive import Archive
from tensorcap_formats.keys import ROOT_SITE
from tensorcap_formats.run_info import RunInfo

_PRECISIONS: Final = ("dtype", "compute_dtype", "device")
# Settings of a framework that change the numbers that the same operators give
_SETTINGS: Final = ("float32_matmul_precision", "deterministic_algorithms")


def mode(reference: Archive, target: Archive) -> Iterator[Item]:
    """Random modules, and runs of which one was in training mode."""
    sides = [archive.info.modules for archive in (reference, target)]
    if not any(sides):
        raise UnknownError("no archive lists its modules")
    for name, side in zip(("reference", "target"), sides, strict=True):
        training = [site for site, module in side.items() if module.is_training]
        random = [site for site in training if "dropout" in side[site].class_name.lower()]
        if random:
            text = (
                f"The {name} ran in training mode: dropout is random in {len(random)} modules, "
                f"first {random[0]}."
            )
            flags = [random[0] in side and bool(side[random[0]].is_training) for side in sides]
            yield item("mode", random[0], flags[0], flags[1], text, explains=True)
    # only of the whole model: a child that somebody put in is in training mode, and mostly does not care
    roots = [side[ROOT_SITE].is_training if ROOT_SITE in side else None for side in sides]
    if None not in roots and roots[0] != roots[1]:
        text = "One run was in training mode, the other in evaluation mode."
        yield item("mode", ROOT_SITE, roots[0], roots[1], text, explains=True, rank=1)


def config(reference: Archive, target: Archive) -> Iterator[Item]:
    """Entries of the model's configuration."""
    ours, theirs = reference.info.config, target.info.config
    for name, found in (("reference", ours), ("target", theirs)):
        if not found:
            raise UnknownError(f"the {name} has no configuration")
    is_same_framework = reference.info.framework == target.info.framework
    for d in config_differences(ours, theirs):
        if not is_same_framework and ABSENT in (d.reference, d.target):
            continue  # what another framework's configuration has no word for
        text = f"{d.why[:1].upper()}{d.why[1:]}." if d.why else "Its influence is not known."
        # what only matters in training, at the end of a table or for a special token alone explains nothing
        explains = d.rank < len(CAUSES) - 3
        yield item("config", d.name, d.reference, d.target, text, explains=explains, rank=d.rank)


def classes(reference: Archive, target: Archive) -> Iterator[Item]:
    """Modules that are of another class, apart: some of a class, which were replaced, and all of one."""
    common = common_modules(reference, target)
    found = {path: (one.class_name, other.class_name) for path, (one, other) in common.items()}
    counts = Counter(found.values())
    mostly: dict[str, str] = {}
    for ours, theirs in sorted(counts, key=lambda names: (names[0] != names[1], -counts[names])):
        mostly.setdefault(ours, theirs)
    for path, (ours, theirs) in found.items():
        if theirs != mostly[ours]:
            stayed = "stayed what they are" if mostly[ours] == ours else f"became {short(mostly[ours])}"
            text = f"Other modules of this class {stayed}."
            yield item("modules", path, ours, theirs, text, explains=True)
    for ours, theirs in mostly.items():
        if ours != theirs:
            text = f"All {counts[ours, theirs]} modules of this class are of another implementation."
            yield item("modules", short(ours), ours, theirs, text, explains=False, rank=1)


def attention(reference: Archive, target: Archive) -> Iterator[Item]:
    """How attention is computed."""
    ours, theirs = _attention_of(reference.info), _attention_of(target.info)
    if not (ours and theirs):
        raise UnknownError("not both runs say how attention is computed")
    if ours != theirs:
        text = "Attention is computed by another implementation: other rounding, and perhaps another mask."
        yield item("attention", "attn_implementation", ours, theirs, text, explains=False)


def _attention_of(info: RunInfo) -> Any:
    names = "_attn_implementation", "attn_implementation", "_attn_implementation_internal"
    asked = info.workload.options.get("attn_implementation")
    found = [asked, info.attention_implementation, *map(info.config.get, names)]
    return next((value for value in found if value), None)


def buffers(reference: Archive, target: Archive) -> Iterator[Item]:
    """Tables that modules hold besides their parameters: their dtypes."""
    common = common_modules(reference, target)
    unlike = []
    for path, sides in common.items():
        ours, theirs = (side.buffers for side in sides)
        for name in ours:
            one, other = ours[name].dtype, theirs[name].dtype if name in theirs else ""
            if one and other and one != other:
                unlike.append((f"{path}.{name}", one, other))
    if unlike:
        name, one, other = unlike[0]
        text = (
            f"{len(unlike)} of the buffers have another dtype, as after model.to(…), which rounds tables "
            "such as rotary frequencies; from_pretrained(dtype=…) keeps them."
        )
        yield item("buffers", name, one, other, text, explains=True)


def settings(reference: Archive, target: Archive) -> Iterator[Item]:
    """Settings of the framework that change what its operators give."""
    sides = [archive.info.settings for archive in (reference, target)]
    if not all(sides):
        raise UnknownError("not both runs say how their framework was set")
    for name in _SETTINGS:
        one, other = sides[0].get(name), sides[1].get(name)
        if name in sides[0] and name in sides[1] and one != other:
            text = "The same operators give other numbers."
            yield item("settings", name, one, other, text, explains=name == _SETTINGS[0])


def precision(reference: Archive, target: Archive) -> Iterator[Item]:
    """Dtypes and devices of the runs."""
    ours, theirs = ([i.dtype, i.compute_dtype, i.device] for i in (reference.info, target.info))
    known = [sides for sides in zip(_PRECISIONS, ours, theirs, strict=True) if all(sides)]
    if not known:
        raise UnknownError("not both runs say what they computed in")
    for name, one, other in known:
        if one != other:
            text = "Rounding differs; that alone is no mistake."
            yield item("precision", name, one, other, text, explains=False)


def versions(reference: Archive, target: Archive) -> Iterator[Item]:
    """Versions of packages."""
    sides = [archive.info.packages for archive in (reference, target)]
    if not all(sides):
        raise UnknownError("not both runs list their packages")
    for name in sides[0]:
        one, other = sides[0][name], sides[1].get(name)
        if other and one != other:
            yield item("versions", name, one, other, "Another version of the code.", explains=False)
