"""Weights in few bits that are not the reference's, rounded: who has them, and what is wrong with them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

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
    """What a module does with a weight in few bits, as a diagnosis; None if nothing is known to be wrong.

    What a wrong weight leaves is what rounding to the nearest number leaves.
    """
    for site, name, pair, weight in _wrong_weights(free):
        error = pair.difference.relative_frobenius if pair.difference is not None else None
        if site != module or not weight.mistake.text or error is None or pair.reference is None:
            continue
        text = f"in its parameter {name}: {weight.mistake.text}"
        left = error / weight.rounding.ratio
        return _explained(pair, weight.mistake.kind, text, error, left, weight.text, {"parameter": name})
    for pair in free.pairs:
        result, unfinite = free.layers.results.get(pair.key), free.layers.unfinite.get(pair.key)
        mistake = unfinite if result is None else result.mistake
        error = pair.difference.relative_frobenius if pair.difference is not None else None
        if pair.status not in BAD or pair.reference is None or pair.reference.key.site != module:
            continue
        if mistake is not None and mistake.kind and error is not None:
            error = error if result is None else result.own
            text = "" if result is None else result.text
            return _explained(pair, mistake.kind, mistake.text, error, mistake.left, text, {})
    return None


def _explained(
    pair: Pair, kind: str, text: str, error: float, left: float, numbers: str, facts: Mapping[str, str]
) -> Diagnosis:
    """A diagnosis of one explanation."""
    elements = pair.reference.size if pair.reference is not None else 0
    explanation = Explanation(kind, text, "", error, left, left, 0, elements, 0.0, facts)
    return Diagnosis(pair.key, pair.key, "explained", error, left, numbers, 0.0, (explanation,), {}, ())


def _wrong_weights(free: Comparison) -> Iterator[tuple[str, str, Pair, QuantisedWeight]]:
    """Yield site, name and pair of each weight that is wrong, with what became of it."""
    for pair in free.pairs:
        weight = free.layers.weights.get(pair.key)
        if weight is not None and pair.is_required and pair.status in BAD and pair.reference is not None:
            key = pair.reference.key
            yield key.site, unescape(key.slot.partition(".")[2]), pair, weight
