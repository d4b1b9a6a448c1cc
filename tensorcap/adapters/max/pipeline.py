"""A MAX pipeline by name: a folder or an id becomes the graph of MAX's own architecture, and its inputs.

The architecture is found in `max.pipelines.PIPELINE_REGISTRY` by the model's configuration, as `max serve`
finds it, and its own processor makes the inputs of token ids. Imports `max.pipelines` only when it is run.
"""

from __future__ import annotations

import asyncio
import copy
import functools
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Final

import numpy as np

from tensorcap.adapters.max.engine import Module
from tensorcap.adapters.max.graph_plan import CompileCache
from tensorcap.adapters.max.model import MaxModel
from tensorcap.adapters.max.pipeline_graph import PipelineGraph, take_graph, traced_by, weights_of
from tensorcap.workload import StoredInput, Workload, archived_inputs, replace_attribute
from tensorcap_formats.dtypes import decode
from tensorcap_formats.errors import (
    MissingPackageError,
    TensorcapError,
    UsageError,
    abbreviate,
    missing_package,
)
from tensorcap_formats.open import open_archive

EXTRA: Final = "max-pipelines"
_KNOWN: Final = (
    "config",
    "device",
    "devices",
    "dtype",
    "encoding",
    "input_ids",
    "inputs",
    "num_hidden_layers",
    "prompt",
    "trust_remote_code",
)
_ENCODINGS: Final = {"bf16": "bfloat16", "fp32": "float32"}
_LENGTH_STEP: Final = 512  # tokens; tables of positions and so the graph are for a multiple, so it is kept
_REASON_CHARACTERS: Final = 300


def load_pipeline(
    path: str, options: Mapping[str, Any], inputs: Mapping[str, StoredInput] | None = None
) -> Workload:
    """The workload of a pipeline: its graph before it is compiled, and the inputs of its first run.

    1. The architecture is found by the configuration, which options change, and checked against them.
    2. The pipeline is made, and run on the token ids, as far as the first model that it would run.
    3. That model is what is captured: all tokens at once, with an empty cache.

    Args:
        path: A folder or an id of a Hugging Face model.
        options: The options of `tcap capture max`; see `_KNOWN`.
        inputs: Archived inputs, in place of those that the options name; token ids are taken from them.

    Raises:
        UsageError: There is no such model, architecture, encoding, device or input; MAX refuses it.
        MissingPackageError: What pipelines need is not installed.
    """
    request = _request(path, options)
    with _quiet(), _refusals(request):
        tokens = _token_ids(request, options, inputs)
        config = _configure(request, len(tokens or ()), options)
        registry, task = request.pipelines.PIPELINE_REGISTRY, request.architecture.task
        with (
            _partial_weights() if _is_changed(options) else nullcontext(),
            _note_left_out(request.architecture) as left_out,
        ):
            retrieved = registry.retrieve_factory(config, task=task)
            if tokens is None:
                tokens = _encode(retrieved.tokenizer, options["prompt"])
            graph = take_graph(_spec_class(), lambda: _run(retrieved, task, tokens))
        if graph is None:
            raise UsageError(f"{path}: {request.architecture.name} of MAX ran no graph")
        return Workload(_model(graph, () if options.get("config") else left_out), graph.buffers)


def check_pipeline(path: str, options: Mapping[str, Any]) -> None:
    """Refuse what `load_pipeline` would refuse before it reads weights.

    Raises:
        UsageError: There is no such model, architecture, encoding, device or option.
        MissingPackageError: What pipelines need is not installed.
    """
    request = _request(path, options)
    with _quiet(), _refusals(request):
        _arguments(request, 0)


@dataclass(frozen=True)
class _Request:
    """What pipeline is wanted.

    Attributes:
        path: The path, as it was named.
        folder: The same with the home folder written out.
        pipelines: The module `max.pipelines`.
        known: The model's own configuration.
        architecture: MAX's architecture for it.
        settings: Arguments of MAX.
    """

    path: str
    folder: str
    pipelines: ModuleType
    known: Any
    architecture: Any
    settings: Mapping[str, Any]


def _request(path: str, options: Mapping[str, Any]) -> _Request:
    """Find the architecture, and check options against it."""
    from tensorcap.adapters.huggingface.configuration import load_config

    settings = _settings(path, options)
    folder = str(Path(path).expanduser()) if path.startswith("~") else path
    pipelines = _import_pipelines(path)
    with _quiet():
        known = load_config(folder, {"trust_remote_code": settings["trust_remote_code"]})
        architecture = _find_architecture(pipelines, folder, known)
    _check_encoding(folder, settings["quantization_encoding"], architecture)
    _check_devices(folder, settings["device_specs"], architecture)
    return _Request(path, folder, pipelines, known, architecture, settings)


def _settings(path: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a pipeline that options name.

    Raises:
        UsageError: One is not for pipelines.
    """
    for name in options:
        if name not in _KNOWN:
            raise UsageError(f"{path}: --{name.replace('_', '-')} is not for a pipeline of MAX")
    encoding = options.get("encoding") or options.get("dtype")
    return {
        "device_specs": options.get("devices") or options.get("device") or "cpu",
        "quantization_encoding": _ENCODINGS.get(str(encoding), encoding),
        "trust_remote_code": bool(options.get("trust_remote_code")),
    }


def _import_pipelines(path: str) -> ModuleType:
    """Import `max.pipelines`, which needs packages that MAX alone does without."""
    try:
        import max.pipelines as pipelines
    except ModuleNotFoundError as error:
        raise missing_package(f"a pipeline of MAX ({path})", error.name or "max", extra=EXTRA) from None
    except ImportError as error:
        raise MissingPackageError(
            f"max.pipelines: {error}; expected a release of MAX with PIPELINE_REGISTRY",
            hint=f"Install it with: pip install 'tensorcap[{EXTRA}]'",
        ) from None
    module: ModuleType = pipelines
    return module


def _spec_class() -> type:
    """The class of specifications of graphs."""
    try:
        from max.pipelines.lib.graph_specs import GraphSpec
    except ImportError:
        raise UsageError("pipelines by name need a release of MAX that has graph_specs: 26.7") from None
    spec_class: type = GraphSpec
    return spec_class


def _arguments(request: _Request, count: int) -> Any:
    """MAX's arguments of a pipeline for one row of `count` tokens; 0 if that is not known yet."""
    limit = getattr(request.known.get_text_config(), "max_position_embeddings", None)
    length = _LENGTH_STEP * -(-(1 + count) // _LENGTH_STEP)
    return request.pipelines.PipelineArgs.from_flat_kwargs(
        model_path=request.folder,
        max_batch_size=1,
        max_length=min(length, limit) if isinstance(limit, int) else length,
        pool_embeddings=False,  # what transformers returns is not pooled
        enable_overlap_scheduler=False,
        enable_prefix_caching=False,
        enable_chunked_prefill=False,
        use_subgraphs=False,  # within which nothing can be replaced
        **{name: value for name, value in request.settings.items() if value is not None},
    )


def _configure(request: _Request, count: int, options: Mapping[str, Any]) -> Any:
    """The configuration of a pipeline for one row of `count` tokens; 0 if that is not known yet."""
    from tensorcap.adapters.huggingface.configuration import change_config

    config = request.pipelines.PipelineConfig.from_args(_arguments(request, count))
    if _is_changed(options):
        changed = copy.deepcopy(config.model.huggingface_config)  # MAX keeps its own for the process
        change_config(request.folder, changed, options)
        config.model._huggingface_config = changed
    return config


def _find_architecture(pipelines: ModuleType, folder: str, config: Any) -> Any:
    """The architecture of the registry that is named as the model's class."""
    name = next(iter(getattr(config, "architectures", None) or ()), None)
    if name is None:
        raise UsageError(f"{folder}: its configuration names no architecture, expected architectures")
    registry = pipelines.PIPELINE_REGISTRY
    architecture = registry.retrieve_architecture(name)
    if architecture is None:
        known = {each.name for each in registry.all_architectures()}
        raise UsageError(f"{folder}: MAX has no pipeline for {name}, among {len(known)} architectures")
    return architecture


def _check_encoding(folder: str, encoding: str | None, architecture: Any) -> None:
    supported = sorted(architecture.supported_encodings)
    if encoding is not None and encoding not in supported:
        raise UsageError(
            f"{folder}: {architecture.name} of MAX has no encoding {abbreviate(encoding)!r}, "
            f"expected one of: {', '.join(supported)}"
        )


def _check_devices(folder: str, devices: str, architecture: Any) -> None:
    """Refuse a CPU for an architecture that writes signals to accelerators; MAX itself may crash at that."""
    from max.driver import accelerator_count
    from max.pipelines.lib.interfaces.pipeline_model import AlwaysSignalBuffersMixin

    if devices.startswith("gpu") and not accelerator_count():
        raise UsageError(f"--devices {devices}: MAX finds no accelerator here, expected cpu")
    if devices == "cpu" and issubclass(architecture.pipeline_model, AlwaysSignalBuffersMixin):
        raise UsageError(
            f"{folder}: {architecture.name} of MAX runs on accelerators alone: its pipeline always allocates "
            "signal buffers (AlwaysSignalBuffersMixin), expected other devices than cpu",
            hint="Name them, such as --devices gpu.",
        )


def _is_changed(options: Mapping[str, Any]) -> bool:
    """Whether options change the configuration, so that the weights are those of a larger model."""
    return options.get("num_hidden_layers") is not None or bool(options.get("config"))


@contextmanager
def _partial_weights() -> Iterator[None]:
    """Let modules ignore weights that they do not have, as those of layers that were cut off."""

    def make(original: Any) -> Any:
        def load_state_dict(module: Any, weights: Mapping[str, Any], **options: Any) -> Any:
            return original(module, weights, **{**options, "strict": False})

        return load_state_dict

    with replace_attribute(Module, "load_state_dict", make):
        yield


@contextmanager
def _note_left_out(architecture: Any) -> Iterator[list[str]]:
    """Note the names of weights that the weight adapters of an architecture take and do not give."""
    adapters = architecture.weight_adapters
    originals, left_out = dict(adapters), list[str]()

    def noting(adapter: Any) -> Any:
        @functools.wraps(adapter)
        def adapt(weights: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
            adapted = adapter(weights, *args, **kwargs)
            kept = {getattr(weight, "name", "") for weight in adapted.values()}
            left_out[:] = [name for name in weights if name not in kept]
            return adapted

        return adapt

    adapters.update({kind: noting(adapter) for kind, adapter in originals.items()})
    try:
        yield left_out
    finally:
        adapters.update(originals)


def _token_ids(
    request: _Request, options: Mapping[str, Any], inputs: Mapping[str, StoredInput] | None
) -> list[int] | None:
    """The token ids of the run; None if they are those of a prompt."""
    from tensorcap.adapters.huggingface.token_ids import parse_token_ids, vocabulary_size

    path = request.path
    sources = [name for name in ("prompt", "input_ids", "inputs") if options.get(name) is not None]
    if len(sources) > 1:
        raise UsageError(f"--{sources[0]} and --{sources[1]} exclude each other".replace("_", "-"))
    if inputs is None and sources == ["inputs"]:
        with open_archive(options["inputs"]) as file:
            inputs = archived_inputs(file)
    if inputs is not None:
        rows = _archived_rows(path, inputs)
    elif sources == ["input_ids"]:
        rows = parse_token_ids(options["input_ids"], vocabulary_size(request.known))
    elif sources:
        return None
    else:
        raise UsageError(f"{path}: no inputs, expected --prompt, --input-ids or --inputs")
    if len(rows) > 1:
        raise UsageError(f"{path}: {len(rows)} rows of token ids, expected one for a pipeline of MAX")
    return rows[0]


def _archived_rows(path: str, inputs: Mapping[str, StoredInput]) -> list[list[int]]:
    """The token ids among archived inputs, of torch or of a pipeline, without those of padding."""
    arrays = {name: np.asarray(decode(*value)) for name, value in inputs.items()}
    ids = next((arrays[name] for name in ("input_ids", "tokens") if name in arrays), None)
    if ids is None or ids.dtype.kind not in "iu":
        raise UsageError(
            f"{path}: no token ids among the inputs ({', '.join(inputs)}), expected input_ids or tokens"
        )
    ids = ids.reshape(-1, ids.shape[-1])
    mask = arrays.get("attention_mask")
    is_valid = mask.reshape(ids.shape) != 0 if mask is not None and mask.size == ids.size else ids >= 0
    return [[int(token) for token in row[valid]] for row, valid in zip(ids, is_valid, strict=True)]


def _encode(tokenizer: Any, prompt: str) -> list[int]:
    """The token ids of a prompt, by MAX's own tokenizer."""
    return [int(token) for token in asyncio.run(tokenizer.encode(prompt, add_special_tokens=True))]


def _run(retrieved: Any, task: Any, tokens: Sequence[int]) -> None:
    """Make a pipeline and run it once."""
    from max.pipelines.lib.generate import generate
    from max.pipelines.modeling.types import EmbeddingsGenerationInputs, RequestID, TextGenerationRequest

    pipeline = retrieved.factory()
    if task.value == "text_generation":
        generate(pipeline, [list(tokens)], max_new_tokens=1)
        return
    if task.value != "embeddings_generation":
        raise UsageError(f"makes {task.value.replace('_', ' ')}, expected text or embeddings")
    request = TextGenerationRequest(request_id=RequestID(), prompt=list(tokens), model_name="model")
    context = asyncio.run(retrieved.tokenizer.new_context(request))
    pipeline.execute(EmbeddingsGenerationInputs([{context.request_id: context}]))


def _model(graph: PipelineGraph, left_out: Sequence[str]) -> MaxModel:
    spec = graph.spec
    return MaxModel(
        spec.module,
        input_types=list(spec.input_types),
        weights=weights_of(spec),
        forward=traced_by(spec),
        extensions=tuple(spec.custom_extensions),
        keeps_state=False,
        left_out_weights=tuple(left_out),
        compiled=CompileCache(graph.session),
    )


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep what MAX logs of its choices, and the hub of its attempts, off the terminal."""
    loggers = [logging.getLogger(name) for name in ("max.pipelines", "huggingface_hub")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


@contextmanager
def _refusals(request: _Request) -> Iterator[None]:
    """Turn a refusal of MAX into one line with its reason."""
    path, encodings = request.path, sorted(request.architecture.supported_encodings)
    try:
        yield
    except UsageError as error:
        if str(error).startswith((path, "--")):
            raise
        raise UsageError(f"{path}: the pipeline {error}", hint=error.hint) from error
    except TensorcapError:
        raise
    except Exception as error:
        reason = _reason(error)
        hint = f"{request.architecture.name} has the encodings: {', '.join(encodings)}."
        raise UsageError(
            f"{path}: MAX makes no pipeline of it: {reason}", hint=hint if "encoding" in reason else None
        ) from error


def _reason(error: Exception) -> str:
    """What MAX says, in one line; of a failed validation the first message."""
    messages = [entry.get("msg", "") for entry in error.errors()] if hasattr(error, "errors") else []
    text = messages[0] if messages else str(error).strip().partition("\n")[0]
    return abbreviate(" ".join(text.split()), _REASON_CHARACTERS) or type(error).__name__
