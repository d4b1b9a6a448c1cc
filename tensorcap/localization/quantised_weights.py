"""Weights in few bits that are not the reference's, rounded: who has them, and what is wrong with them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from tensorcap.comparison import Comparison, Pair, QuantisedWeight
from tensorcap.diagnosis import Diagnosis, Explanation
from tensorcap.localization.evidence import Evidence, EvidenceSource
from tensorcap.rerun import BAD, LEFT_OUT
from tensorcap.runs import enclosing_sites, is_parameter, is_result
from tensorcap_formats.archive import Archive
from tensorcap_formats.keys import unescape


def evidence_of_weights(reference: Archive, target: Archive, free: Comparison) -> EvidenceSource | None:
    """The modules whose weights are wrong, in the order of the reference; None if there are none.

    A result may hide it: of a zero point that is 1 off the rounding of inputs makes more than that. Behind
    them come modules of whose results it is known what they do otherwise.
    """
    wrong: dict[str, list[tuple[Pair, str]]] = {}
    for site, name, pair, weight in _wrong_weights(free):
        text = f"its parameter {name} is not the reference's, rounded to {weight.text}"
        wrong.setdefault(site, []).append((pair, text))
    for pair in free.pairs:
        result = free.layers.results.get(pair.key)
        if result is None or not result.mistake.kind or not pair.is_required or pair.status not in BAD:
            continue
        if pair.reference is not None and pair.reference.key.site not in wrong:
            wrong[pair.reference.key.site] = [(pair, result.finding.text)]
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


def explain_by_held(free: Comparison, module: str) -> Diagnosis | None:
    """What is wrong with parameters of modules within one that the target does not call, as projections.

    Such a parameter is named if it is known what is wrong with it, or which other one of the reference it is.
    """
    called = {
        pair.reference.key.site
        for pair in free.pairs
        if pair.reference is not None and pair.is_compared and is_result(pair.reference.key)
    }
    wrong: dict[str, list[str]] = {}
    first: tuple[Pair, str, float] | None = None
    for pair in free.pairs:
        key = None if pair.reference is None else pair.reference.key
        if key is None or not is_parameter(key) or pair.status not in BAD or key.site in called:
            continue
        error = pair.difference.relative_frobenius if pair.difference is not None else None
        if error is None or next((s for s in enclosing_sites(key.site) if s in called), "") != module:
            continue
        weight = free.layers.weights.get(pair.key)
        kind, text = _held(free, pair) if weight is None else (weight.mistake.kind, weight.mistake.text)
        if text:
            left = 0.0 if weight is None else error / weight.rounding.ratio
            first = first or (pair, kind, left)
            wrong.setdefault(text, []).append(f"{unescape(key.slot.partition('.')[2])} of {key.site}")
    if first is None:
        return None
    said = "; ".join(f"in {' and '.join(names)}: {text}" for text, names in wrong.items())
    pair, kind, left = first
    own = pair.difference.relative_frobenius if pair.difference is not None else None
    return _explained(pair, kind, said, own or 0.0, left, "", {})


def _held(free: Comparison, pair: Pair) -> tuple[str, str]:
    """The kind of what is wrong with a parameter that is another one of the reference, and its name."""
    ours, theirs = pair.reference, pair.target
    if ours is None or theirs is None or not theirs.digest:
        return "", ""
    for other in free.pairs:
        record = other.reference
        if record is None or record.digest != theirs.digest or record.key.slot != ours.key.slot:
            continue
        if other.key != pair.key and record.shape == ours.shape:
            return "other-weights", f"it is {record.key.site}'s"
    return "", ""


def explain_left_out(evidence: Evidence) -> Diagnosis | None:
    """What a leaf does that is given what others undo, and does not undo it; None of any other one."""
    found = next((finding for finding in evidence.findings if finding.test == LEFT_OUT), None)
    if found is None or evidence.own is None:
        return None
    key = evidence.keys[0]
    hint = "Its weight lacks the factors, or the rotation, that the weight of the other one has."
    explanation = Explanation(
        "left-out", found.text, hint, evidence.own, found.value, found.value, 0, 0, 0.0, {}
    )
    return Diagnosis(key, key, "explained", evidence.own, found.value, "", 0.0, (explanation,), {}, ())


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
