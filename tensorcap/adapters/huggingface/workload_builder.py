"""Workloads from Hugging Face models: a folder or an id, and options, become a model and its inputs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch

from tensorcap.adapters.huggingface.configuration import load_config
from tensorcap.adapters.huggingface.generation import Generation, quiet, tokens_fed
from tensorcap.adapters.huggingface.model import load_model
from tensorcap.adapters.huggingface.model_inputs import load_arguments, with_forward_defaults
from tensorcap.adapters.huggingface.token_ids import vocabulary_size
from tensorcap.adapters.torch.tensors import device_named
from tensorcap.workload import StoredInput, Workload
from tensorcap_formats.errors import UsageError, missing_package
from tensorcap_formats.open import open_archive

_KNOWN: Final = (
    "config",
    "device",
    "dtype",
    "input_ids",
    "inputs",
    "max_new_tokens",
    "num_hidden_layers",
    "prompt",
    "random_weights",
    "teacher_forced",
    "trust_remote_code",
)


def build(path: str, options: dict[str, Any], inputs: Mapping[str, StoredInput] | None = None) -> Workload:
    """Build a workload.

    Args:
        path: A folder or an id; a folder with a configuration alone is enough for random weights.
        options: The options of `tcap capture torch`; see `_KNOWN`.
        inputs: Archived inputs, in place of those that the options name.

    Raises:
        UsageError: There is no such model, option, or input; the checkpoint lacks weights of the model.
        ReadError: A file of weights is damaged.
        MissingPackageError: transformers is not installed.
    """
    path = _check_options(path, options)
    device = device_named(options.get("device") or "cpu")
    with quiet():
        config = load_config(path, options)
        model = load_model(path, config, options)
        arguments = load_arguments(path, model, options, inputs)
    model.to(device)
    arguments = {name: value.to(model.device) for name, value in arguments.items()}
    count, forced = options.get("max_new_tokens"), None
    if options.get("teacher_forced") is not None:
        with open_archive(options["teacher_forced"]) as file:
            forced = tokens_fed(file, arguments, vocabulary_size(model.config))
        count = len(forced) + 1 if count is None else count
    if count is None:
        return Workload(model, with_forward_defaults(model, arguments))
    if not model.can_generate():
        raise UsageError(
            f"{path}: {type(model).__name__} cannot generate",
            hint="Leave --max-new-tokens and --teacher-forced out.",
        )
    return Workload(model, arguments, Generation(count, forced))


def build_without_weights(path: str, options: Mapping[str, Any]) -> Any:
    """Build a model on the meta device from its configuration alone: its modules, without values.

    Raises:
        UsageError: There is no such model or option; no model can be made of the configuration.
        MissingPackageError: transformers is not installed.
    """
    path = _check_options(path, options)
    with_random_weights = {"random_weights": 0, **options}
    with quiet():
        config = load_config(path, with_random_weights)
        with torch.device("meta"):
            return load_model(path, config, with_random_weights)


def _check_options(path: str, options: Mapping[str, Any]) -> str:
    """Refuse unknown options; return the path with the home folder written out."""
    unknown = sorted(set(options) - set(_KNOWN))
    if unknown:
        raise UsageError(f"{path}: option {unknown[0]!r} is unknown for a Hugging Face model")
    try:
        import transformers  # noqa: F401  # if it is absent, the error has a hint
    except ModuleNotFoundError:
        raise missing_package(f"a Hugging Face model ({path})", "transformers", extra="hf") from None
    return str(Path(path).expanduser()) if path.startswith("~") else path
