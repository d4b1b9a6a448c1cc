"""What is asked for the guilty module; `tests.zoo.run` measures each by its name."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from tensorcap.comparison import ABSENT, compare
from tensorcap.localization import Localization, localize
from tensorcap.rerun import module_replay
from tensorcap.workload import Workload


@dataclass(frozen=True)
class Suspect:
    """A module that is accused.

    Attributes:
        module: Its site, `@root` for the model itself.
        hypothesis: What is said to be wrong with it, a kind of the zoo; None if nothing is said.
        text: What is said to be wrong with it, as a user reads it, without what such a mistake usually is;
            behind it the operations that differ.
    """

    module: str
    hypothesis: str | None = None
    text: str = ""


# Archives of the reference and of the target, both workloads, and a map file where the author has to give
# one; the suspects, the first one first, none if nothing is wrong.
Localiser = Callable[[Path, Path, Workload, Workload, Path | None], Sequence[Suspect]]


def first_divergence(
    reference: Path, target: Path, _: Workload, __: Workload, mapping: Path | None
) -> Sequence[Suspect]:
    """The module of the first divergence that `compare` finds; what is only missing accuses nobody."""
    found = compare(reference, target, mapping=mapping).divergence
    return [] if found is None or found.pair.status in ABSENT else [Suspect(found.module)]


def first_blame(
    reference: Path, target: Path, _: Workload, __: Workload, mapping: Path | None
) -> Sequence[Suspect]:
    """As `first_divergence`, but nobody where `compare` says that errors only grew past what is expected."""
    found = compare(reference, target, mapping=mapping).divergence
    is_blamed = found is not None and not found.is_growth and found.pair.status not in ABSENT
    return [Suspect(found.module)] if found is not None and is_blamed else []


# What the zoo calls the kinds of specs/diagnosis.md; the first pattern that fits counts.
_KINDS: Final[Mapping[str, str]] = {
    "expert-order": "expert_order",
    "parameter-missing": "missing_module",
    "*-precision": "precision",
    "axes-differ": "axis",
    "groups-differ": "groups",
    "batch-statistics": "statistics",
    "padding-differs": "padding",
    "dilation-differs": "window",
    "positions-differ": "position",
    "interpolation-differs": "interpolation",
    "pooling-differs": "pooling",
    "cache-not-written": "cache",
    "expert-capacity": "capacity",
    "quantis*": "quantisation",
    "operations-order": "order",
    "calls-order": "order",
    "taps-order": "permutation",
    "activation*": "activation",
    "gate-*": "activation",
    "bias-*": "bias",
    "partial-sum": "partial_sum",
    "statistics-differ": "statistics",
    "layout-differs": "permutation",
    "operand-exchanged": "wiring",
    "frequencies-differ": "frequencies",
    "state-missing": "state",
    "function-differs": "activation",
    "clip*": "clip",
    "attention-scale": "factor",
    "attention-rotation": "rope",
    "attention-mask": "mask",
    "attention-softcap": "softcap",
    "attention-heads": "permutation",
    "attention-layout": "permutation",
    "attention-positions": "position",
    "attention-norm": "order",
    "attention-bias": "position",
    "attention-sinks": "missing_module",
    "softcap-*": "softcap",
    "mask-sentinel": "mask",
    "identity": "missing_module",
    "skipped": "missing_module",
    "norm-eps": "norm_eps",
    "norm-with*": "norm_one_plus",
    "norm-*": "precision",
    "rounded": "precision",
    "not-rounded": "precision",
    "term-*": "residual",
    "rotary-*": "rope",
    "router-*": "router_order",
    "routed-scaling": "factor",
    "weight-transposed": "transposition",
    "transposed": "transposition",
    "other-weights": "other_weights",
    "position-offset": "position",
    "padding-side": "position",
    "*-shift": "shift",
    "*-order": "permutation",
    "head-nesting": "permutation",
    "heads-not-moved-back": "permutation",
    "*-offset": "offset",
    "offset": "offset",
    "*factor": "factor",
    "sign": "factor",
    "affine": "factor",
    "softmax-scale": "factor",
    "weight-*": "factor",
    "product-*": "factor",
}


def zoo_kind(kind: str | None) -> str | None:
    """What the zoo calls a kind of diagnosis; None for none."""
    if kind is None:
        return None
    return next((name for glob, name in _KINDS.items() if fnmatch.fnmatchcase(kind, glob)), kind)


def _localised(
    reference: Path, target: Path, workload: Workload | None, mapping: Path | None
) -> Sequence[Suspect]:
    return _suspects(localize(reference, target, reference_model=_seeded(workload), mapping=mapping))


def _seeded(workload: Workload | None) -> Workload | None:
    return None if workload is None else replace(workload, seed=0)


def _suspects(found: Localization) -> Sequence[Suspect]:
    suspects = []
    for suspect in found.suspects:
        kind = zoo_kind(suspect.diagnosis.kind) if suspect.diagnosis else None
        texts = [suspect.diagnosis.text] if suspect.diagnosis else []
        if suspect.code is not None:  # without names of files, which may name a mistake
            texts += [place.op for place in (*suspect.code.reference, *suspect.code.target)]
        suspects.append(Suspect(suspect.module, kind, "; ".join(texts)))
    return suspects


def replay(
    reference: Path, target: Path, workload: Workload, _: Workload, mapping: Path | None
) -> Sequence[Suspect]:
    """`localize` with the reference's model."""
    return _localised(reference, target, workload, mapping)


def archives(
    reference: Path, target: Path, _: Workload, __: Workload, mapping: Path | None
) -> Sequence[Suspect]:
    """`localize` with the archives alone."""
    return _localised(reference, target, None, mapping)


def injection(
    reference: Path, target: Path, _: Workload, into: Workload, mapping: Path | None
) -> Sequence[Suspect]:
    """`localize` with the target run on the reference's arguments."""
    return _suspects(localize(reference, target, target_model=_seeded(into), mapping=mapping))


def both(
    reference: Path, target: Path, workload: Workload, into: Workload, mapping: Path | None
) -> Sequence[Suspect]:
    """`localize` with both models, as `verify` does: by replay, injection and traces of operations."""
    models = _seeded(workload), _seeded(into)
    return _suspects(
        localize(reference, target, reference_model=models[0], target_model=models[1], mapping=mapping)
    )


def forward(
    reference: Path, target: Path, workload: Workload, tested: Workload, mapping: Path | None
) -> Sequence[Suspect]:
    """Modules that make errors in a forward replay: leaves first, then in order of execution."""
    found = module_replay.replay(
        reference,
        target,
        reference_model=_seeded(workload),
        target_model=_seeded(tested),
        mapping=mapping,
    )
    ranked = sorted(found.bad, key=lambda own: (own.status != "diverged", not own.is_leaf))
    return [Suspect(module) for module in dict.fromkeys(own.module for own in ranked)]


LOCALISERS: Final[Mapping[str, Localiser]] = {
    "first-divergence": first_divergence,
    "first-blame": first_blame,
    "replay": replay,
    "injection": injection,
    "both": both,
    "archives": archives,
    "forward": forward,
}
