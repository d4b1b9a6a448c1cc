"""The inputs of a Hugging Face model: from a prompt, token ids, or archived inputs."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch

from tensorcap.adapters.huggingface.token_ids import parse_token_ids, vocabulary_size
from tensorcap.adapters.torch.tensors import dtype_named, from_stored
from tensorcap.workload import StoredInput, archived_inputs
from tensorcap_formats.errors import UsageError, abbreviate, did_you_mean
from tensorcap_formats.open import open_archive


def load_arguments(
    path: str, model: Any, options: Mapping[str, Any], inputs: Mapping[str, StoredInput] | None
) -> dict[str, torch.Tensor]:
    """The model's arguments, on the CPU, from archived inputs or from the one option that names some.

    Raises:
        UsageError: No option names inputs, or several do; the model has no such argument.
    """
    sources = [name for name in ("prompt", "input_ids", "inputs") if options.get(name) is not None]
    if inputs is None and not sources and options.get("teacher_forced") is not None:
        with open_archive(options["teacher_forced"]) as file:
            inputs = archived_inputs(file)
    if len(sources) > 1:
        raise UsageError(f"--{sources[0]} and --{sources[1]} exclude each other".replace("_", "-"))
    if inputs is None and not sources:
        raise UsageError(f"{path}: no inputs, expected --prompt, --input-ids or --inputs")
    if inputs is None and sources == ["prompt"]:
        return _tokenize(path, model, options)
    if inputs is None and sources == ["input_ids"]:
        rows = parse_token_ids(options["input_ids"], vocabulary_size(model.config))
        return {"input_ids": torch.tensor(rows)}
    if inputs is None:
        with open_archive(options["inputs"]) as file:
            inputs = archived_inputs(file)
    arguments = {}
    for name, value in inputs.items():
        tensor = from_stored(*value)
        if options.get("dtype") is not None and tensor.is_floating_point():
            tensor = tensor.to(dtype_named(options["dtype"]))
        arguments[name] = tensor
    _check_names(path, model, arguments)
    return arguments


def _tokenize(path: str, model: Any, options: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    tokenizer = load_tokenizer(path, trust_remote_code=bool(options.get("trust_remote_code")))
    encoded = tokenizer(options["prompt"], return_tensors="pt")
    parameters = inspect.signature(model.forward).parameters
    return {name: value for name, value in encoded.items() if name in parameters}


def load_tokenizer(path: str, *, trust_remote_code: bool = False) -> Any:
    """Load the tokenizer of a model.

    Raises:
        UsageError: There is none.
    """
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise UsageError(
            f"{path}: no tokenizer can be read there: {reason}", hint="Give --input-ids instead."
        ) from error


def _check_names(path: str, model: Any, arguments: Mapping[str, torch.Tensor]) -> None:
    parameters = inspect.signature(model.forward).parameters
    for name in arguments:
        if name not in parameters:
            raise UsageError(
                f"{path}: {type(model).__name__} has no argument {abbreviate(name)!r}",
                hint=did_you_mean(name, parameters),
            )


def with_forward_defaults(model: Any, arguments: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Add the defaults of a plain forward: a first token for the decoder, and no cache."""
    parameters = inspect.signature(model.forward).parameters
    whole: dict[str, Any] = dict(arguments)
    decoder = {"decoder_input_ids", "decoder_inputs_embeds"}
    if getattr(model.config, "is_encoder_decoder", False) and not decoder & whole.keys():
        start = model.config.decoder_start_token_id
        if start is not None and "decoder_input_ids" in parameters:
            first = next(iter(arguments.values()))
            whole["decoder_input_ids"] = torch.full((first.shape[0], 1), start, device=first.device)
    if "use_cache" in parameters:
        whole["use_cache"] = False
    return whole
