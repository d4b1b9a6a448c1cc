"""Hugging Face models: a configuration, changed by options, and the model with loaded or random weights.

A model in a lower precision is made as `from_pretrained(dtype=…)` makes it: rotary tables and other
buffers that are not saved keep their float32 values. Random weights are drawn in float32, so that the
float32 reference and its twin have the same weights up to rounding.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Mapping
from typing import Any, Final

import torch

from tensorcap.adapters.torch.tensors import dtype_named
from tensorcap.wording import some
from tensorcap_formats.errors import ReadError, TensorcapError, UsageError

_FEW: Final = 4  # names that are listed; the others are counted


def load_model(path: str, config: Any, options: Mapping[str, Any]) -> Any:
    """Load the model, or draw its weights.

    Raises:
        UsageError: The checkpoint lacks weights; no model can be made of the configuration.
        ReadError: A file of weights is damaged.
    """
    from safetensors import SafetensorError

    try:
        return _load_model(path, config, options)
    except TensorcapError:
        raise
    except (SafetensorError, pickle.UnpicklingError, EOFError) as error:
        raise ReadError(f"{path}: a file of weights is damaged: {_first_line(error)}") from error
    except (OSError, ImportError) as error:
        hint = "Draw weights with --random-weights 0." if "no file named" in str(error) else None
        raise UsageError(f"{path}: no weights can be loaded: {_first_line(error)}", hint=hint) from error
    except Exception as error:
        if not options.get("config"):
            raise
        changed = ", ".join(f"{key}={value}" for key, value in options["config"].items())
        raise UsageError(
            f"{path}: no model can be made with {changed}: {type(error).__name__}: {_first_line(error)}"
        ) from error


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0].rstrip(".")


def _load_model(path: str, config: Any, options: Mapping[str, Any]) -> Any:
    trust = bool(options.get("trust_remote_code"))
    cls = _model_class(path, config, trust)
    dtype = None if options.get("dtype") is None else dtype_named(options["dtype"])
    if options.get("random_weights") is None:
        return _load_weights(path, cls, config, dtype or "auto")
    torch.manual_seed(options["random_weights"])
    # a configuration that names a dtype would have the weights drawn in it
    drawn = cls._from_config(copy.deepcopy(config), **_dtype_option(torch.float32)).eval()
    if dtype is None or dtype == torch.float32:
        return drawn
    weights = dict(drawn.state_dict())
    return _load_weights(path, cls, config, dtype, state_dict=weights)


def _load_weights(path: str, cls: Any, config: Any, dtype: Any, **weights: Any) -> Any:
    """Load all weights; transformers would draw those that are missing or have another shape.

    Weights that it derives from others (tied ones), or that a model does not save, are not missing.
    """
    model, report = cls.from_pretrained(
        None if weights else path,
        config=config,
        output_loading_info=True,
        ignore_mismatched_sizes=True,  # they are reported below, by name
        **weights,
        **_dtype_option(dtype),
    )
    mismatched = [key if isinstance(key, str) else key[0] for key in report["mismatched_keys"]]
    for complaint, keys in (("lacks", report["missing_keys"]), ("has, in another shape,", mismatched)):
        if keys:
            raise UsageError(
                f"{path}: the checkpoint {complaint} weights of {cls.__name__}: {some(sorted(keys), _FEW)}",
                hint="Does the configuration fit the checkpoint?",
            )
    return model.eval()


def _model_class(path: str, config: Any, trust: bool) -> Any:
    import transformers

    remote = getattr(config, "auto_map", None) or {}
    if trust:
        names = [n for n in remote if n.startswith("AutoModel")]
        if names:
            from transformers.dynamic_module_utils import get_class_from_dynamic_module

            chosen = next((n for n in names if n != "AutoModel"), names[0])
            return get_class_from_dynamic_module(remote[chosen], path)
    for name in config.architectures or []:
        if hasattr(transformers, name):
            return getattr(transformers, name)
    autos = ["AutoModelForCausalLM", "AutoModel"]
    if getattr(config, "is_encoder_decoder", False):
        autos = ["AutoModelForSeq2SeqLM", "AutoModelForSpeechSeq2Seq", "AutoModel"]
    for name in autos:
        mapping = getattr(transformers, name)._model_mapping
        if type(config) in mapping:
            cls = mapping[type(config)]
            return cls[0] if isinstance(cls, tuple) else cls
    wanted = ", ".join(config.architectures or [config.model_type])
    raise UsageError(
        f"{path}: transformers has no model class for {wanted}",
        hint="If you trust its code: --trust-remote-code." if remote else None,
    )


def _dtype_option(dtype: Any) -> dict[str, Any]:
    import transformers

    major = int(transformers.__version__.partition(".")[0])
    return {"dtype" if major >= 5 else "torch_dtype": dtype}
