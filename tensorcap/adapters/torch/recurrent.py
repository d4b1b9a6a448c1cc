"""Recurrent layers written out, step by step, so that each step can be done otherwise.

torch runs a layer of type LSTM, GRU or RNN as one kernel, of which no operation can be mutated. What is
computed here is the same (Hochreiter and Schmidhuber 1997 with a forget gate, Cho et al. 2014, Elman 1990, as
the documentation of torch has them); lines are what a report shows of a step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

# Whether the reset gate of a GRU multiplies what the state contributes, as in torch, or the state before.
VARIANTS: Final = {"reset_after": True}
_MOST_STEPS: Final = 256  # tokens of all layers and directions; longer ones take too long step by step


class _Weights(NamedTuple):
    """Tensors of one direction of one layer; None if it has no such ones."""

    onward: Tensor
    onward_bias: Tensor | None
    projection: Tensor | None


def write_out(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[..., Any] | None:
    """Find the written-out `forward` of a recurrent layer, for what it is given.

    Returns:
        The function; None of any other module, of packed or long sequences, and with dropout at work.
    """
    x = args[0] if args else kwargs.get("input")
    if not isinstance(module, nn.RNNBase) or module.mode not in _STEPS or not isinstance(x, Tensor):
        return None
    if module.training and module.dropout and module.num_layers > 1:
        return None
    length = 1 if x.ndim < 2 else x.shape[1 if module.batch_first and x.ndim > 2 else 0]
    count = length * module.num_layers * (2 if module.bidirectional else 1)
    if count > _MOST_STEPS or x.ndim not in (2, 3):
        return None

    def forward(input: Tensor, hx: Any = None) -> Any:  # its name in torch
        return _run(module, input, hx)

    return forward


def _run(module: nn.RNNBase, x: Tensor, given: Any) -> Any:
    """Run all layers and directions; results as torch returns them."""
    is_batched, has_cell = x.ndim == 3, module.mode == "LSTM"
    if not is_batched:
        x = x.unsqueeze(1)
    elif module.batch_first:
        x = x.transpose(0, 1)
    given = () if given is None else given if isinstance(given, tuple) else (given,)
    starts = [one if is_batched else one.unsqueeze(1) for one in given]
    ends: list[list[Tensor]] = [[] for _ in range(2 if has_cell else 1)]
    for layer in range(module.num_layers):
        results = []
        for direction in range(2 if module.bidirectional else 1):
            at = len(ends[0])
            start = [one[at] for one in starts] or _zeros(module, x)
            outputs, end = _run_direction(module, x, start, layer, is_back=direction == 1)
            results.append(outputs)
            for kept, state in zip(ends, end, strict=True):
                kept.append(state)
        x = results[0] if len(results) == 1 else torch.cat(results, -1)
    states = tuple(torch.stack(kept) if is_batched else torch.stack(kept).squeeze(1) for kept in ends)
    if not is_batched:
        x = x.squeeze(1)
    elif module.batch_first:
        x = x.transpose(0, 1)
    return x, states if has_cell else states[0]


def _zeros(module: nn.RNNBase, x: Tensor) -> list[Tensor]:
    hidden = x.new_zeros(x.shape[1], module.proj_size or module.hidden_size)
    return [hidden, x.new_zeros(x.shape[1], module.hidden_size)] if module.mode == "LSTM" else [hidden]


def _run_direction(
    module: nn.RNNBase, x: Tensor, state: list[Tensor], layer: int, *, is_back: bool
) -> tuple[Tensor, list[Tensor]]:
    """Run one direction of one layer over `[tokens, batch, channels]`."""
    suffix = f"_l{layer}{'_reverse' if is_back else ''}"
    weight, bias = getattr(module, f"weight_ih{suffix}"), getattr(module, f"bias_ih{suffix}", None)
    onward, onward_bias = getattr(module, f"weight_hh{suffix}"), getattr(module, f"bias_hh{suffix}", None)
    weights = _Weights(onward, onward_bias, getattr(module, f"weight_hr{suffix}", None))
    step = _STEPS[module.mode]
    if is_back:
        x = torch.flip(x, (0,))
    inward = functional.linear(x, weight, bias)
    outputs = []
    for row in inward.unbind(0):
        state = step(module, row, state, weights)
        outputs.append(state[0])
    result = torch.stack(outputs)
    if is_back:
        result = torch.flip(result, (0,))
    return result, state


def _step_lstm(_: nn.RNNBase, row: Tensor, state: list[Tensor], weights: _Weights) -> list[Tensor]:
    hidden, cell = state
    gates = row + functional.linear(hidden, weights.onward, weights.onward_bias)
    input_part, forget_part, cell_part, output_part = gates.chunk(4, -1)
    input_gate = torch.sigmoid(input_part)
    forget_part = torch.add(forget_part, 0.0)  # other libraries add 1 to the bias of the forget gate
    forget_gate = torch.sigmoid(forget_part)
    output_gate = torch.sigmoid(output_part)
    candidate = torch.tanh(cell_part)
    kept = forget_gate * cell
    added = input_gate * candidate
    cell = kept + added
    shown = torch.tanh(cell)
    hidden = output_gate * shown
    if weights.projection is not None:
        hidden = functional.linear(hidden, weights.projection)
    return [hidden, cell]


def _step_gru(module: nn.RNNBase, row: Tensor, state: list[Tensor], weights: _Weights) -> list[Tensor]:
    (hidden,) = state
    reset_in, update_in, candidate_in = row.chunk(3, -1)
    onward = functional.linear(hidden, weights.onward, weights.onward_bias)
    reset_part, update_part, candidate_part = onward.chunk(3, -1)
    reset_gate = torch.sigmoid(reset_in + reset_part)
    update_gate = torch.sigmoid(update_in + update_part)
    if getattr(module, "reset_after", True):
        reset_state = reset_gate * candidate_part
    else:
        size = hidden.shape[-1]
        bias = None if weights.onward_bias is None else weights.onward_bias[-size:]
        reset_state = functional.linear(reset_gate * hidden, weights.onward[-size:], bias)
    candidate = torch.tanh(candidate_in + reset_state)
    kept = update_gate * hidden
    added = (1 - update_gate) * candidate
    return [added + kept]


def _step_rnn(module: nn.RNNBase, row: Tensor, state: list[Tensor], weights: _Weights) -> list[Tensor]:
    (hidden,) = state
    total = row + functional.linear(hidden, weights.onward, weights.onward_bias)
    return [torch.tanh(total) if module.mode == "RNN_TANH" else torch.relu(total)]


_STEPS: Final[dict[str, Callable[[nn.RNNBase, Tensor, list[Tensor], _Weights], list[Tensor]]]] = {
    "LSTM": _step_lstm,
    "GRU": _step_gru,
    "RNN_TANH": _step_rnn,
    "RNN_RELU": _step_rnn,
}
