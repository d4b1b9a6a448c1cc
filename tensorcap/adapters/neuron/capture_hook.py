"""A hook for NxDI's `generate(tensor_capture_hook=…)` that writes what the device captured into an archive.

NxDI calls it after each run of a graph with the application and the list of captured tensors, which has no
names: they follow from the order of the configuration. Not run on a device.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch

from tensorcap.adapters.torch.tensors import stored
from tensorcap.workload.sources import class_name
from tensorcap_formats.errors import CaptureError, UsageError
from tensorcap_formats.json_values import json_value
from tensorcap_formats.keys import PROBES, ROOT_SITE, Key, inner_site, module_site
from tensorcap_formats.writing import Writer

_NOT_CAPTURED: Final = (
    "the device handed out zeros of shape [1], which stand for a module that returned no tensor or was not "
    "called"
)
_RANK_NOTE: Final = "NxDI hands out the tensors of rank 0: of a sharded module its part alone."
_ARGUMENTS: Final = ("input_ids", "attention_mask", "position_ids", "seq_ids", "sampling_params")
_PLAIN: Final = (bool, int, float, str)


def tensor_capture_hook(
    path: str | os.PathLike[str],
    *,
    capture_indices: Collection[int] | None = None,
    manual_names: Sequence[str] = (),
) -> TensorCaptureHook:
    """Make a hook that writes an archive, in the place of NxDI's `get_tensor_capture_hook`.

    Args:
        path: The archive to write.
        capture_indices: Numbers of the runs to keep, from 1 as NxDI counts; all if None.
        manual_names: Names of the tensors that code registers with `register_tensor`, in the order of the
            calls; the device does not hand them out.

    Raises:
        WriteError: The archive cannot be written there.
        UsageError: The suffix names no container.

    Example:
        with tensor_capture_hook("tgt.h5") as hook:
            model.generate(
                input_ids, tensor_capture_hook=hook, input_capture_hook=hook.record_inputs
            )
    """
    return TensorCaptureHook(path, capture_indices=capture_indices, manual_names=manual_names)


class TensorCaptureHook:
    """A hook with the signature of NxDI's; `close` it, or use `with`, or the archive stays unfinished.

    Attributes:
        runs: How many times NxDI has called it.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        capture_indices: Collection[int] | None = None,
        manual_names: Sequence[str] = (),
    ) -> None:
        """Reserve the path; arguments are those of `tensor_capture_hook`."""
        self.runs = 0
        self._indices = None if capture_indices is None else frozenset(capture_indices)
        self._manual_names = tuple(manual_names)
        self._phases: list[str] = []
        self._lost: dict[str, dict[str, str]] = {}
        self._captured: dict[str, int] = {}
        self._inputs: dict[str, torch.Tensor] = {}
        self._application = ""
        self._settings: dict[str, Any] = {}
        self._writer = Writer(path, run=self._run())

    def __call__(self, application_model: Any, captured_tensors: Sequence[torch.Tensor]) -> None:
        """Write the tensors of one run of a graph.

        Args:
            application_model: NxDI's application, of which the configuration is read.
            captured_tensors: The outputs behind tokens and logits: for each configured module its result
                and, if inputs are captured, its first argument; then those that code registered.

        Raises:
            CaptureError: They are not as many as the configuration says, so that their names are unknown.
        """
        config = _neuron_config(application_model)
        names = list(_names(config, self._manual_names))
        if len(names) != len(captured_tensors):
            raise CaptureError(
                f"NxDI handed out {len(captured_tensors)} tensors, expected {len(names)} by its "
                "tensor_capture_config: their names are unknown"
            )
        self._application = class_name(application_model)
        self._settings = dict(_settings(config))
        self.runs += 1
        phase = self._phase(captured_tensors, config)
        self._phases.append(phase)
        inputs, self._inputs = self._inputs, {}
        if self._indices is not None and self.runs not in self._indices:
            return
        if phase == "prefill":
            inputs = _padded(inputs, _token_axis(captured_tensors), application_model)
        for name, tensor in inputs.items():
            self._add(Key(ROOT_SITE, f"input.{name}", self.runs - 1), tensor)
        for (site, slot, is_manual), tensor in zip(names, captured_tensors, strict=True):
            self._write(Key(site, slot, self.runs - 1), tensor, is_manual=is_manual)

    def record_inputs(self, application_model: Any, inputs: Sequence[Any]) -> None:
        """Keep what the next run is given; has the signature of NxDI's `input_capture_hook`.

        Args:
            application_model: NxDI's application, which is not used.
            inputs: Token ids, attention mask, position ids, sequence ids and sampling parameters.
        """
        self._inputs = {
            name: tensor.detach().cpu().clone()
            for name, tensor in zip(_ARGUMENTS, inputs, strict=False)
            if isinstance(tensor, torch.Tensor) and tensor.numel()
        }

    def __enter__(self) -> TensorCaptureHook:
        return self

    def __exit__(self, error: object, *_: object) -> None:
        self.close(complete=error is None)

    def close(self, *, complete: bool = True) -> Path:
        """Finish the archive.

        Args:
            complete: Whether the run ended as it should.

        Returns:
            Its path.

        Raises:
            CaptureError: Nothing was captured.
            WriteError: The disk is full.
        """
        if complete and not self._captured:
            self._writer.abandon()
            raise CaptureError(
                f"{self._writer.path}: NxDI handed out no tensor in {self.runs} runs",
                hint="Is tensor_capture_config set, and the model compiled with it? See tcap plan.",
            )
        return self._writer.close(run=self._run(), complete=complete, ordered=False)

    def _write(self, key: Key, tensor: torch.Tensor, *, is_manual: bool) -> None:
        values = tensor.detach().cpu()
        if tuple(values.shape) == (1,) and values.dtype == torch.bfloat16:
            number = float(values)
            if is_manual and number != number:
                return  # padding up to max_intermediate_tensors
            if not is_manual and number == 0:
                self._lost.setdefault(key.site, {})[key.slot] = _NOT_CAPTURED
                return
        self._add(key, values)
        self._captured[key.site] = self._captured.get(key.site, 0) + 1

    def _add(self, key: Key, values: torch.Tensor) -> None:
        bits, dtype, shape = stored(values)
        self._writer.add(key, bits, dtype, shape)

    def _phase(self, tensors: Sequence[torch.Tensor], config: Any) -> str:
        """Prefill, if the token axis is longer than what token generation computes at once."""
        at_once = max(1, int(getattr(config, "speculation_length", 0) or 0))
        return "prefill" if not self._phases or _token_axis(tensors) > at_once else "decode"

    def _run(self) -> dict[str, Any]:
        run: dict[str, Any] = {
            "framework": {"name": "neuron", "settings": self._settings},
            "model": {"class": self._application},
            "steps": len(self._phases),
            "phases": self._phases,
            "notes": [_RANK_NOTE],
        }
        points: list[dict[str, Any]] = [
            {"site": site, "status": "captured", "calls": calls} for site, calls in self._captured.items()
        ]
        for site, slots in self._lost.items():
            entry = {"site": site, "status": "not-capturable", "reason": next(iter(slots.values()))}
            points.append({**entry, "slots": list(slots)} if site in self._captured else entry)
        return {**run, "points": points} if points else run


def _neuron_config(application_model: Any) -> Any:
    """The configuration that captures; of a model of images and text that of the text model."""
    for owner in (getattr(application_model, "text_config", None), application_model):
        config = getattr(owner, "neuron_config", None)
        if getattr(config, "tensor_capture_config", None):
            return config
    raise UsageError(
        f"{class_name(application_model)}: its neuron_config has no tensor_capture_config",
        hint="See tcap plan, which writes one.",
    )


def _names(config: Any, manual_names: Sequence[str]) -> Iterator[tuple[str, str, bool]]:
    """Site and slot of each captured tensor, in order, and whether code registered it."""
    capture = config.tensor_capture_config
    for module in capture.modules_to_capture or ():
        yield module_site(module), "output", False
        if capture.capture_inputs:
            yield module_site(module), "input.0", False
    for number in range(capture.max_intermediate_tensors or 0):
        name = manual_names[number] if number < len(manual_names) else f"manual_tensor_{number}"
        yield inner_site(PROBES, name), "value", True


def _token_axis(tensors: Sequence[torch.Tensor]) -> int:
    """The longest token axis of tensors of three axes or more, 0 if there is none."""
    return max((tensor.shape[-2] for tensor in tensors if tensor.ndim >= 3), default=0)


def _padded(
    inputs: Mapping[str, torch.Tensor], length: int, application_model: Any
) -> dict[str, torch.Tensor]:
    """Inputs of context encoding as NxDI pads them on the right, up to the tokens that the graph computed.

    Token ids are padded with the model's `pad_token_id` or 0, the mask with 0, positions with 1, as
    `ModelWrapper.pad_inputs` does.
    """
    token = getattr(getattr(application_model, "config", None), "pad_token_id", None) or 0
    fills = {"input_ids": token, "attention_mask": 0, "position_ids": 1}
    padded = dict(inputs)
    for name, fill in fills.items():
        tensor = inputs.get(name)
        if tensor is not None and tensor.ndim == 2 and tensor.shape[1] < length:
            width = (0, length - tensor.shape[1])
            padded[name] = torch.nn.functional.pad(tensor, width, value=fill)
    return padded


def _settings(config: Any) -> Mapping[str, Any]:
    """The settings of a configuration that are plain values; an infinite number is a text."""
    return {
        name: json_value(value)
        for name, value in sorted(vars(config).items())
        if isinstance(value, _PLAIN) and not name.startswith("_") and "path" not in name and "dir" not in name
    }
