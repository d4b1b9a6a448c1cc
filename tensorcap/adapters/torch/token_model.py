"""A torch workload as what gives logits for token ids: its own arguments, made for other tokens."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import torch

from tensorcap.workload import Workload, class_name
from tensorcap_formats.dtypes import Array
from tensorcap_formats.errors import UsageError, abbreviate

_TOKENS: Final = "input_ids"
_CACHES: Final = (
    "cache",
    "past_key_values",
)  # what transformers calls the argument and the field of a result
_DERIVED: Final = ("attention_mask", "position_ids", "cache_position", "token_type_ids")
_HINT: Final = "Return a tensorcap.Workload of a model that takes input_ids and returns logits for them."


class TorchTokenModel:
    """A workload that is run on other tokens; see `tensorcap.workload.TokenModel`.

    Tokens take the place of `input_ids`, or of the one input of whole numbers and two axes. Masks are all
    ones, positions count from 0, and what is no tensor stays as it is. A Hugging Face model that generates
    goes on through its cache; any other model is given the whole prefix again.
    """

    def __init__(self, workload: Workload) -> None:
        """Look at the workload's inputs, without a run.

        Raises:
            UsageError: No input is of tokens, or one cannot be made for other tokens.
        """
        self._workload = workload
        model = workload.model
        self.name = class_name(type(model))
        self._names = self._argument_names()
        self._tokens_name = self._find_tokens()
        inputs = self._inputs()
        self._device = inputs[self._tokens_name].device
        self._dtype = inputs[self._tokens_name].dtype
        self.device = probe_devices(str(self._device))
        config = getattr(model, "config", None)
        find_text = getattr(config, "get_text_config", None)
        text = find_text() if callable(find_text) else config
        size = getattr(text, "vocab_size", None)
        self.vocabulary: int | None = size if isinstance(size, int) and size > 0 else None
        self.end_tokens = _end_tokens(model, text)
        self._prefix: list[int] = []
        self._cache: Any = None
        can_generate = getattr(model, "can_generate", None)
        parameters = inspect.signature(model.forward).parameters if hasattr(model, "forward") else {}
        generates = workload.run is None and callable(can_generate) and bool(can_generate())
        named = (name for name in _CACHES if name in parameters and "use_cache" in parameters)
        self._cache_name = next(named, "") if generates else ""

    @property
    def prompts(self) -> tuple[tuple[int, ...], ...]:
        """The rows of the workload's own tokens, without what its mask leaves out."""
        inputs = self._inputs()
        tokens, mask = inputs[self._tokens_name], inputs.get("attention_mask")
        is_kept = torch.ones_like(tokens, dtype=torch.bool)
        if isinstance(mask, torch.Tensor) and mask.shape == tokens.shape:
            is_kept = mask.bool()
        return tuple(tuple(row[kept].tolist()) for row, kept in zip(tokens.cpu(), is_kept.cpu(), strict=True))

    def rows(self, tokens: Sequence[int], start: int = 0) -> Array:
        """Logits at each position from `start` on, [len(tokens) - start, V]."""
        logits = self._logits(self._run(self._arguments(tokens)), len(tokens))
        if len(logits) == len(tokens):
            return _as_array(logits[start:])
        prefixes = (self._last(tokens[: end + 1]) for end in range(start, len(tokens) - 1))
        return _as_array(torch.stack([*prefixes, logits[-1]]))

    def begin(self, prompt: Sequence[int]) -> Array:
        """Logits [V] of the token after the prompt."""
        self._prefix = list(prompt)
        if not self._cache_name:
            return _as_array(self._last(prompt))
        return self._go_on(self._arguments(prompt), len(prompt), None)

    def step(self, token: int) -> Array:
        """Logits [V] of the token after `token`, which goes on what was begun."""
        self._prefix.append(token)
        if not self._cache_name:
            return _as_array(self._last(self._prefix))
        names = (self._tokens_name, "attention_mask")
        whole = {name: value for name, value in self._arguments(self._prefix).items() if name in names}
        whole[self._tokens_name] = whole[self._tokens_name][:, -1:]
        return self._go_on(whole, 1, self._cache)

    def _go_on(self, arguments: Mapping[str, Any], count: int, cache: Any) -> Array:
        known = {
            name: value for name, value in arguments.items() if name not in ("position_ids", "use_cache")
        }
        result = self._run({**known, self._cache_name: cache, "use_cache": True})
        self._cache = getattr(result, self._cache_name, None)
        if self._cache is None:  # the model keeps none after all
            self._cache_name = ""
        return _as_array(self._logits(result, count)[-1])

    def _last(self, tokens: Sequence[int]) -> torch.Tensor:
        return self._logits(self._run(self._arguments(tokens)), len(tokens))[-1]

    def _run(self, arguments: Mapping[str, Any]) -> Any:
        inputs: Any = dict(arguments)
        if not isinstance(self._workload.inputs, Mapping):
            inputs = tuple(inputs.values())
        with torch.no_grad():
            return replace(self._workload, inputs=inputs).call(self._workload.model)

    def _argument_names(self) -> tuple[str, ...]:
        inputs = self._workload.inputs
        if isinstance(inputs, Mapping):
            return tuple(inputs)
        function = self._workload.run or getattr(self._workload.model, "forward", self._workload.model)
        parameters = list(inspect.signature(function).parameters)[self._workload.run is not None :]
        return tuple(parameters[: len(inputs)])

    def _inputs(self) -> dict[str, Any]:
        inputs = self._workload.inputs
        values = inputs.values() if isinstance(inputs, Mapping) else inputs
        return dict(zip(self._names, values, strict=False))

    def _find_tokens(self) -> str:
        inputs = self._inputs()
        ids = [
            name
            for name, value in inputs.items()
            if isinstance(value, torch.Tensor)
            and value.ndim == 2
            and value.dtype in (torch.int32, torch.int64)
            and name not in _DERIVED
        ]
        if _TOKENS in ids or len(ids) == 1:
            name = _TOKENS if _TOKENS in ids else ids[0]
        else:
            listed = ", ".join(inputs) or "none"
            raise UsageError(
                f"{self.name}: expected one input of token ids [rows, tokens], found {listed}", hint=_HINT
            )
        for other, value in inputs.items():
            if other != name and other not in _DERIVED and isinstance(value, torch.Tensor):
                raise UsageError(
                    f"{self.name}: its input {abbreviate(other)!r} cannot be made for other tokens",
                    hint=_HINT,
                )
        return name

    def _arguments(self, tokens: Sequence[int]) -> dict[str, Any]:
        count = len(tokens)
        return {
            name: self._argument(name, value, tokens, count) if isinstance(value, torch.Tensor) else value
            for name, value in self._inputs().items()
        }

    def _argument(self, name: str, value: torch.Tensor, tokens: Sequence[int], count: int) -> torch.Tensor:
        if name == self._tokens_name:
            return torch.tensor([list(tokens)], dtype=self._dtype, device=self._device)
        if name == "attention_mask":
            return torch.ones(1, count, dtype=value.dtype, device=value.device)
        if name == "token_type_ids":
            return torch.zeros(1, count, dtype=value.dtype, device=value.device)
        positions = torch.arange(count, dtype=value.dtype, device=value.device)
        return positions[None] if name == "position_ids" else positions

    def _logits(self, result: Any, count: int) -> torch.Tensor:
        """The logits of a result, [positions, V], positions being all or the last one.

        Raises:
            UsageError: It has none.
        """
        value = result
        if not isinstance(value, torch.Tensor):
            is_mapping = isinstance(result, Mapping)
            value = result.get("logits") if is_mapping else getattr(result, "logits", None)
            if value is None and isinstance(result, (tuple, list)) and result:
                value = result[0]
        if not isinstance(value, torch.Tensor) or not value.is_floating_point() or value.ndim not in (2, 3):
            kind = (
                f"a tensor of {value.ndim} axes and dtype {str(value.dtype).removeprefix('torch.')}"
                if isinstance(value, torch.Tensor)
                else class_name(type(result))
            )
            raise UsageError(
                f"{self.name}: returned {kind}, expected logits [1, tokens, vocabulary]", hint=_HINT
            )
        shape = tuple(value.shape)
        rows = value[0] if value.ndim == 3 else value
        if (value.ndim == 3 and shape[0] != 1) or len(rows) not in (1, count):
            raise UsageError(
                f"{self.name}: returned logits {list(shape)} for {count} tokens, expected those of all "
                "positions or of the last one",
                hint="Cut what a graph pads in the function that returns the workload.",
            )
        if self.vocabulary is not None and shape[-1] < self.vocabulary:
            raise UsageError(
                f"{self.name}: returned {shape[-1]} numbers a token, expected logits of the "
                f"{self.vocabulary} tokens of its configuration",
                hint=_HINT,
            )
        return rows


def _as_array(logits: torch.Tensor) -> Array:
    wide = torch.float64 if logits.dtype == torch.float64 else torch.float32
    return logits.to("cpu", wide).numpy()


def _end_tokens(model: Any, config: Any) -> frozenset[int]:
    for holder in (getattr(model, "generation_config", None), config):
        value = getattr(holder, "eos_token_id", None)
        if isinstance(value, int):
            return frozenset({value})
        if isinstance(value, (list, tuple)):
            return frozenset(token for token in value if isinstance(token, int))
    return frozenset()


def probe_devices(device: str) -> str:
    """What a model ran on, in words, with the accelerators that are here.

    Args:
        device: What its tokens lie on, as torch names it.

    Example:
        >>> probe_devices("cpu").startswith("a CPU")
        True
    """
    present = [name for name, is_here in _accelerators() if is_here]
    if device != "cpu":
        return device
    return f"a CPU ({' and '.join(present)} not used)" if present else "a CPU (no accelerator is here)"


def _accelerators() -> tuple[tuple[str, bool], ...]:
    return (
        ("CUDA", torch.cuda.is_available()),
        ("Metal", torch.backends.mps.is_available()),
        ("Neuron", Path("/dev/neuron0").exists()),
    )
