"""Ports of transformers' models in plain PyTorch, as the functions that an experiment names."""

from __future__ import annotations

from typing import Any

from torch import nn

import tensorcap
from tests.alignment.ports import bert, gpt2


def gpt2_source() -> tensorcap.Workload:
    """Transformers' decoder."""
    return tensorcap.Workload(*gpt2.reference())


def gpt2_port() -> tensorcap.Workload:
    """Its port, with fused projections, other names, and transposed weights."""
    return _port(gpt2)


def gpt2_wrong() -> tensorcap.Workload:
    """The same with the exact GELU in the second layer, where the source has the approximation by tanh."""
    workload = _port(gpt2)
    activations = [module for module in workload.model.modules() if isinstance(module, nn.GELU)]
    activations[1].approximate = "none"
    return workload


def bert_source() -> tensorcap.Workload:
    """Transformers' encoder."""
    return tensorcap.Workload(*bert.reference())


def bert_port() -> tensorcap.Workload:
    """Its port, which has another order of axes."""
    return _port(bert)


def _port(module: Any) -> tensorcap.Workload:
    model, inputs = module.reference()
    port, arguments = module.target(model.state_dict(), inputs)
    return tensorcap.Workload(port.eval(), arguments)
