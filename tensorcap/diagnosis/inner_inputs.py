"""Look for a mistake in the inputs of the last modules within: an attention's core, a gated product."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from tensorcap.diagnosis.activations import propose_activations
from tensorcap.diagnosis.attention import propose_attention_cores
from tensorcap.diagnosis.context import PairContext, read_last_inputs
from tensorcap.diagnosis.scoring import Hypothesis


def propose_mistakes_in_inner_inputs(context: PairContext) -> Iterator[Hypothesis]:
    """Propose other attention cores and activations in the last inputs, with the key of the input."""
    for inner in read_last_inputs(context):
        where = {"key": inner.reference.key.text}
        for hypothesis in (*propose_attention_cores(inner), *propose_activations(inner)):
            text = f"in {where['key']}: {hypothesis.text}"
            yield replace(hypothesis, text=text, facts={**hypothesis.facts, "where": where})
