"""Weights in few bits that are not the reference's, rounded: who has them, and what is wrong with them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tensorcap.comparison import Comparison, Pair, QuantisedWeight
from tensorcap.diagnosis import Diagnosis, Explanation
from tensorcap.localization.evidence import Evidence, EvidenceSource
from tensorcap.rerun import BAD
from tensorcap_formats.archive import Archive
from tensorcap_formats.keys import unescape


def evidence_of_weights(reference: Archive, target: Archive, free: Comparison) -> EvidenceSource | None:
    """The modules whose weights are wrong, in the order of the reference; None if there are none.

    A result may hide it: of a zero point that is 1 off the rounding of inputs makes more than that.
    """
    wrong: dict[str, list[tuple[Pair, str]]] = {}
    for site, name, pair, weight in _wrong_weights(free):
        text = f"its parameter {name} is not the reference's, rounded to {weight.text}"
        wrong.setdefault(site, []).append((pair, text))
    evidence = tuple(_of_module(site, *zip(*weights, strict=True)) for site, weights in wrong.items())
    return EvidenceSource("weights", reference, target, None, evidence) if evidence else None


def _of_module(site: str, pairs: Sequence[Pair], texts: Sequence[str]) -> Evidence:
    keys, first = tuple(pair.key for pair in pairs), pairs[0]
    return Evidence(site, keys, first.status, first.findings, None, None, "; ".join(texts))


def explain_by_weights(free: Comparison, module: str) -> Diagnosis | None:
    """What is wrong with a weight in few bits of a module, as a diagnosis; None if nothing is known to be.

    What it leaves is what rounding to the nearest number leaves.
    """
    for site, name, pair, weight in _wrong_weights(free):
        error = pair.difference.relative_frobenius if pair.difference is not None else None
        if site != module or not weight.mistake.text or error is None or pair.reference is None:
            continue
        left = error / weight.rounding.ratio
        explanation = Explanation(
            weight.mistake.kind,
            f"in its parameter {name}: {weight.mistake.text}",
            "",
            error,
            left,
            left,
            0,
            pair.reference.size,
            0.0,
            {"parameter": name},
        )
        key = pair.key
        return Diagnosis(key, key, "explained", error, left, weight.text, 0.0, (explanation,), {}, ())
    return None


def _wrong_weights(free: Comparison) -> Iterator[tuple[str, str, Pair, QuantisedWeight]]:
    """Yield site, name and pair of each weight that is wrong, with what became of it."""
    for pair in free.pairs:
        weight = free.layers.weights.get(pair.key)
        if weight is not None and pair.is_required and pair.status in BAD and pair.reference is not None:
            key = pair.reference.key
            yield key.site, unescape(key.slot.partition(".")[2]), pair, weight
