"""Workloads from Hugging Face models: a folder or an id, and options, become a model and its inputs.

A model in a lower precision is made as `from_pretrained(dtype=…)` makes it: rotary tables and other
buffers that are not saved keep their float32 values. Random weights are drawn in float32, so that the
float32 reference and its twin have the same weights up to rounding.
"""

from __future__ import annotations

import copy
import difflib
import inspect
import pickle
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch

from tensorcap.adapters.huggingface.generation import Generation, quiet, tokens_fed
from tensorcap.adapters.torch.tensors import device_named, dtype_named, from_stored
from tensorcap.workload.workload import StoredInput, Workload, archived_inputs
from tensorcap_formats.errors import ReadError, TensorcapError, UsageError, abbreviate, missing_package
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
_FEW: Final = 4  # as many names are told, more are counted
_IDS: Final = re.compile(r"\s*-?\d+(?:(?:\s*,\s*|\s+)-?\d+)*\s*")  # one row
_LAYER_COUNTS: Final = ("num_hidden_layers", "num_decoder_layers", "decoder_layers")


def build(path: str, options: dict[str, Any], inputs: Mapping[str, StoredInput] | None = None) -> Workload:
    """Make a workload.

    Args:
        path: A folder or an id; a folder with a configuration alone is enough for random weights.
        options: As `tcap capture torch` has them; see `_KNOWN`.
        inputs: Archived inputs, in place of those that the options name.

    Raises:
        UsageError: There is no such model, option, or input; the checkpoint lacks weights of the model.
        ReadError: A file of weights is damaged.
        MissingPackageError: transformers is not installed.
    """
    path = _checked(path, options)
    device = device_named(options.get("device") or "cpu")
    with quiet():
        config = load_config(path, options)
        model = load_model(path, config, options)
        arguments = _arguments(path, model, options, inputs)
    model.to(device)
    arguments = {name: value.to(model.device) for name, value in arguments.items()}
    count, forced = options.get("max_new_tokens"), None
    if options.get("teacher_forced") is not None:
        with open_archive(options["teacher_forced"]) as file:
            forced = tokens_fed(file, arguments, _vocabulary(model))
        count = len(forced) + 1 if count is None else count
    if count is None:
        return Workload(model, _for_one_forward(model, arguments))
    if not model.can_generate():
        raise UsageError(
            f"{path}: {type(model).__name__} cannot generate",
            hint="Leave --max-new-tokens and --teacher-forced out.",
        )
    return Workload(model, arguments, Generation(count, forced))


def build_without_weights(path: str, options: Mapping[str, Any]) -> Any:
    """Make a model on no device, of its configuration alone: what is in it, and no numbers.

    Raises:
        UsageError: There is no such model or option; the configuration makes no model.
        MissingPackageError: transformers is not installed.
    """
    path = _checked(path, options)
    drawn = {"random_weights": 0, **options}
    with quiet():
        config = load_config(path, drawn)
        with torch.device("meta"):
            return load_model(path, config, drawn)


def _checked(path: str, options: Mapping[str, Any]) -> str:
    """The path with a home folder written out."""
    unknown = sorted(set(options) - set(_KNOWN))
    if unknown:
        raise UsageError(f"{path}: option {unknown[0]!r} is unknown for a Hugging Face model")
    try:
        import transformers  # noqa: F401  # found missing now, with a hint
    except ModuleNotFoundError:
        raise missing_package(f"a Hugging Face model ({path})", "transformers", extra="hf") from None
    return str(Path(path).expanduser()) if path.startswith("~") else path


def load_config(path: str, options: Mapping[str, Any]) -> Any:
    """Read the configuration and change what the options say."""
    from transformers import AutoConfig

    trust = bool(options.get("trust_remote_code"))
    if Path(path).is_dir() and not (Path(path) / "config.json").is_file():
        raise UsageError(f"{path}: a folder without config.json, expected that of a Hugging Face model")
    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=trust)
    except (OSError, ValueError) as error:
        reason = str(error).strip().partition("\n")[0]
        hint = "If you trust its code: --trust-remote-code." if "trust_remote_code" in str(error) else None
        raise UsageError(f"{path}: no Hugging Face model can be read there: {reason}", hint=hint) from error
    may_grow = options.get("random_weights") is not None
    if options.get("num_hidden_layers") is not None:
        _set_layers(path, config, options["num_hidden_layers"], may_grow=may_grow)
    for key, value in dict(options.get("config") or {}).items():
        _set_option(path, config, key, value, may_grow=may_grow)
    return config


def load_model(path: str, config: Any, options: Mapping[str, Any]) -> Any:
    """Load the model, or draw its weights.

    Raises:
        UsageError: The checkpoint has no weights, or not all; the configuration makes no model.
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
        return _loaded(path, cls, config, dtype or "auto")
    torch.manual_seed(options["random_weights"])
    # a configuration that names a dtype would have the weights drawn in it
    drawn = cls._from_config(copy.deepcopy(config), **_dtype_option(torch.float32)).eval()
    if dtype is None or dtype == torch.float32:
        return drawn
    weights = dict(drawn.state_dict())
    return _loaded(path, cls, config, dtype, state_dict=weights)


def _loaded(path: str, cls: Any, config: Any, dtype: Any, **weights: Any) -> Any:
    """Load all weights; transformers would draw those that are missing, or have another shape.

    Those that it makes of others (tied ones), or that a model does not save, are none of them.
    """
    model, found = cls.from_pretrained(
        None if weights else path,
        config=config,
        output_loading_info=True,
        ignore_mismatched_sizes=True,  # they are told here, by name
        **weights,
        **_dtype_option(dtype),
    )
    unlike = [key if isinstance(key, str) else key[0] for key in found["mismatched_keys"]]
    for what, keys in (("lacks", found["missing_keys"]), ("has, in another shape,", unlike)):
        if keys:
            names = sorted(keys)
            more = f" and {len(names) - _FEW} more" if len(names) > _FEW else ""
            raise UsageError(
                f"{path}: the checkpoint {what} weights of {cls.__name__}: {', '.join(names[:_FEW])}{more}",
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
            found = mapping[type(config)]
            return found[0] if isinstance(found, tuple) else found
    wanted = ", ".join(config.architectures or [config.model_type])
    raise UsageError(
        f"{path}: transformers has no model class for {wanted}",
        hint="If you trust its code: --trust-remote-code." if remote else None,
    )


def _dtype_option(dtype: Any) -> dict[str, Any]:
    import transformers

    major = int(transformers.__version__.partition(".")[0])
    return {"dtype" if major >= 5 else "torch_dtype": dtype}


def _set_layers(path: str, config: Any, count: int, *, may_grow: bool) -> None:
    """Cut the model to its first layers, and with it every list that has an entry a layer."""
    parts = {id(c): c for c in (config, config.get_text_config())}.values()
    names = [(part, name) for part in parts for name in _LAYER_COUNTS if hasattr(part, name)]
    if not names:
        raise UsageError(f"{path}: its configuration has no num_hidden_layers")
    for part, name in names:
        _cut(f"{path}: --num-hidden-layers", part, name, count, may_grow=may_grow)


def _cut(where: str, part: Any, name: str, count: Any, *, may_grow: bool) -> None:
    before = getattr(part, name)
    if type(count) is not int or count < 1 or (count > before and not may_grow):
        raise UsageError(f"{where} is {count!r}, expected 1 to {before}")
    for key, value in list(vars(part).items()):
        if isinstance(value, list) and len(value) == before and key.lstrip("_").endswith(("types", "layers")):
            setattr(part, key, value[:count])
    setattr(part, name, count)


def _counts_layers(part: Any, name: str) -> bool:
    """Whether the option is a count of layers, under its common name or the model's own."""
    own = getattr(part, "attribute_map", None) or {}
    return name in _LAYER_COUNTS or name in [own.get(common) for common in _LAYER_COUNTS]


def _set_option(path: str, config: Any, key: str, value: Any, *, may_grow: bool) -> None:
    if key == "attn_implementation":  # a property under another name
        config._attn_implementation = value
        return
    *parents, last = key.split(".")
    place = config
    for name in (*parents, last):
        known = list(place) if isinstance(place, Mapping) else list(place.to_dict())
        if name not in known and not (not isinstance(place, Mapping) and hasattr(place, name)):
            close = difflib.get_close_matches(name, known, n=3)
            raise UsageError(
                f"{path}: its configuration has no {abbreviate(key)!r}",
                hint=f"Did you mean {' or '.join(map(repr, close))}?" if close else None,
            )
        if name is not last:
            place = place[name] if isinstance(place, Mapping) else getattr(place, name)
            if not isinstance(place, Mapping) and not hasattr(place, "to_dict"):
                raise UsageError(f"{path}: {name!r} of its configuration holds no further options")
    if isinstance(place, Mapping):
        place[last] = value  # type: ignore[index]  # a dict; Mapping is what isinstance narrows to
    elif _counts_layers(place, last):
        _cut(f"{path}: --config {key}", place, last, value, may_grow=may_grow)
    else:
        try:
            setattr(place, last, value)
        except Exception as error:  # huggingface_hub checks types by errors of its own
            reason = " ".join(str(error).split())
            raise UsageError(f"{path}: --config {key}={value}: {abbreviate(reason, 200)}") from error


def _arguments(
    path: str, model: Any, options: Mapping[str, Any], inputs: Mapping[str, StoredInput] | None
) -> dict[str, torch.Tensor]:
    """The model's arguments, on the CPU."""
    given = [name for name in ("prompt", "input_ids", "inputs") if options.get(name) is not None]
    if inputs is None and not given and options.get("teacher_forced") is not None:
        with open_archive(options["teacher_forced"]) as file:
            inputs = archived_inputs(file)
    if len(given) > 1:
        raise UsageError(f"--{given[0]} and --{given[1]} exclude each other".replace("_", "-"))
    if inputs is None and not given:
        raise UsageError(f"{path}: no inputs, expected --prompt, --input-ids or --inputs")
    if inputs is None and given == ["prompt"]:
        return _tokenized(path, model, options)
    if inputs is None and given == ["input_ids"]:
        return {"input_ids": _parse_ids(options["input_ids"], model)}
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


def _tokenized(path: str, model: Any, options: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    from transformers import AutoTokenizer

    trust = bool(options.get("trust_remote_code"))
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=trust)
    except (OSError, ValueError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise UsageError(
            f"{path}: no tokenizer can be read there: {reason}", hint="Give --input-ids instead."
        ) from error
    encoded = tokenizer(options["prompt"], return_tensors="pt")
    parameters = inspect.signature(model.forward).parameters
    return {name: value for name, value in encoded.items() if name in parameters}


def _parse_ids(text: str, model: Any) -> torch.Tensor:
    parts = text.split(";")
    is_list = all(_IDS.fullmatch(part) for part in parts)
    rows = [[int(n) for n in re.findall(r"-?\d+", part)] for part in parts]
    if not is_list or len({len(row) for row in rows}) != 1:
        raise UsageError(f"--input-ids {abbreviate(text)!r}: expected numbers such as 1,2,3 or 1,2;3,4")
    most = (_vocabulary(model) or torch.iinfo(torch.int64).max) - 1
    if not all(0 <= n <= most for row in rows for n in row):
        raise UsageError(f"--input-ids {abbreviate(text)!r}: expected numbers from 0 to {most}")
    return torch.tensor(rows)


def _vocabulary(model: Any) -> int | None:
    size = getattr(model.config.get_text_config(), "vocab_size", None)
    return size if isinstance(size, int) else None


def _check_names(path: str, model: Any, arguments: Mapping[str, torch.Tensor]) -> None:
    parameters = inspect.signature(model.forward).parameters
    for name in arguments:
        if name not in parameters:
            close = difflib.get_close_matches(name, list(parameters), n=3)
            raise UsageError(
                f"{path}: {type(model).__name__} has no argument {abbreviate(name)!r}",
                hint=f"Did you mean {' or '.join(map(repr, close))}?" if close else None,
            )


def _for_one_forward(model: Any, arguments: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Add what a plain forward needs: a first token for the decoder, and no cache."""
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
