"""What an experiment is about: the nine parameters of the Equivalence method, how both sides run, the limits.

They stand in `equivalence.toml`, in three tables: `[parameters]` under the method's own names, `[run]` and
`[limits]`.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Final

from tensorcap_formats.errors import ReadError, UsageError, abbreviate
from tensorcap_formats.output_path import publish_text

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

FILE: Final = "equivalence.toml"
_BEGINNING: Final = "#Equivalence:"
_HEAD: Final = "# Equivalence: what `tcap equivalence` runs here. Stages whose inputs change are run again.\n"


def _described(text: str, default: Any = "") -> Any:
    """A member with what it means, which the file and `tcap equivalence init` say."""
    return field(default=default, metadata={"help": text})


@dataclass(frozen=True, slots=True)
class Parameters:
    """The method's nine parameters; only the first two are needed, and a function if the second is a file.

    Attributes:
        source_model_path: The trusted model: a Hugging Face model by folder or id, or FILE.py:FUNCTION.
        target_modeling_file: The code of the port, FILE.py; or a Hugging Face model as above.
        target_causal_class: What in that file makes the port: a function that returns a workload.
        target_inner_class: The class of the inner model, whose modules are the port's.
        target_config_class: The class of the port's configuration.
        compiled_model_path: Where the port compiled for a device lies; "" if there is no device.
        venv: The Python environment in which processes of the port run; "" for the running one.
        exp_dir: The folder of the experiment.
        vllm_neuron_dir: A folder that the port's code is imported from.
    """

    source_model_path: str = _described(
        "The trusted model: a Hugging Face model by folder or id, or FILE.py:FUNCTION."
    )
    target_modeling_file: str = _described("The code of the port, FILE.py; or a Hugging Face model.")
    target_causal_class: str = _described(
        "What in that file makes the port: a function that returns tensorcap.Workload."
    )
    target_inner_class: str = _described("The class of the port's inner model.")
    target_config_class: str = _described("The class of the port's configuration.")
    compiled_model_path: str = _described("The port compiled for a device, if there is one.")
    venv: str = _described("The Python environment of the port's processes, if it is not the running one.")
    exp_dir: str = _described("The folder of the experiment.", ".")
    vllm_neuron_dir: str = _described("A folder that the port's code is imported from.")

    @property
    def missing(self) -> tuple[str, ...]:
        """Names of what is needed and empty."""
        needed = ["source_model_path", "target_modeling_file"]
        if self.target_modeling_file.endswith(".py"):
            needed.append("target_causal_class")
        return tuple(name for name in needed if not getattr(self, name))


@dataclass(frozen=True, slots=True)
class RunSettings:
    """How both sides run.

    Attributes:
        target_framework: `neuron` for a port of parallel layers, which the ranks join before it is built.
        tp: Ranks that hold the port together, a process each.
        neuron_src: Folders with sources of NxD Inference, if the port needs them and none are installed.
        reference_dtype: The wide precision, or "" if the source cannot run in one: the two-tensor way then.
        dtype: The precision under test, of the port and of the source beside it.
        num_tokens: How many tokens are generated.
        prompts: Texts, for a Hugging Face model's own tokenizer; the original's if empty.
        options: Options of a Hugging Face model, as of `tcap capture torch`: `prompt`, `input_ids`, ….
        seed: Of the random generators.
        plots: Whether stages 2 and 5 draw pictures, which needs matplotlib.
    """

    target_framework: str = _described("torch, or neuron for a port of parallel layers.", "torch")
    tp: int = _described("Ranks that hold the port together, a process each.", 1)
    neuron_src: tuple[str, ...] = _described(
        "Folders with sources of NxD Inference, if it is not installed.", ()
    )
    reference_dtype: str = _described(
        "The wide precision; empty if the source cannot run in one (two-tensor way).", "float32"
    )
    dtype: str = _described("The precision under test.", "bfloat16")
    num_tokens: int = _described("How many tokens are generated.", 32)
    prompts: tuple[str, ...] = _described("Texts for the source's own tokenizer.", ())
    options: Mapping[str, Any] = field(
        default_factory=dict, metadata={"help": "Options of Hugging Face models, as of tcap capture torch."}
    )
    seed: int = _described("Of the random generators.", 0)
    plots: bool = _described("Whether stages 2 and 5 draw pictures.", True)


@dataclass(frozen=True, slots=True)
class Limits:
    """The numbers that gates decide by; the defaults are the method's.

    Attributes:
        tau_r: R of a component, and the 95th percentile of R of tokens, has to be below.
        token_match: Share of greedy tokens that agree, at least (stage 1).
        theta_cosine: 5th percentile of the cosine of logits, at least.
        rho_tail: Share of positions whose cosine may lie below `theta_cosine`.
        delta_kl: 95th percentile of the Kullback-Leibler divergence, at most, nats.
        delta_kl_max: The largest one, at most, nats.
        top1: Share of positions with the same best token, more than.
        tolerance: How much worse a task may be, in points of 1 (stage 7).
    """

    tau_r: float = _described("R of a component, and p95 of R of tokens, has to be below.", 1.2)
    token_match: float = _described("Share of greedy tokens that agree, at least.", 0.30)
    theta_cosine: float = _described("5th percentile of the cosine of logits, at least.", 0.95)
    rho_tail: float = _described("Share of positions whose cosine may lie below that.", 0.05)
    delta_kl: float = _described("95th percentile of the KL divergence, at most, nats.", 0.1)
    delta_kl_max: float = _described("The largest KL divergence, at most, nats.", 1.0)
    top1: float = _described("Share of positions with the same best token, more than.", 0.5)
    tolerance: float = _described("How much worse a task may be, of 1.", 0.02)


@dataclass(frozen=True, slots=True)
class Settings:
    """The content of `equivalence.toml`."""

    parameters: Parameters
    run: RunSettings = field(default_factory=RunSettings)
    limits: Limits = field(default_factory=Limits)


_TABLES: Final = {"parameters": Parameters, "run": RunSettings, "limits": Limits}


def read_settings(path: Path) -> Settings:
    """Read `equivalence.toml`.

    Raises:
        ReadError: It cannot be read, or is no TOML.
        UsageError: A name is unknown, a value of another type, or a parameter is missing.
    """
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ReadError(
            f"{path}: cannot be read: {error.strerror}",
            hint=f"`tcap equivalence init {path.parent}` writes one.",
        ) from error
    except (ValueError, RecursionError) as error:  # also no UTF-8, and numbers of too many digits
        raise ReadError(f"{path}: is no TOML: {error}") from None
    return _settings(str(path), tables)


def new_settings(folder: Path, parameters: Mapping[str, Any], run: Mapping[str, Any]) -> Settings:
    """Make the settings of a new experiment.

    Args:
        folder: Where it is going to be; paths of files that are there become relative to it.
        parameters: The method's parameters, by name.
        run: How both sides run, by name.

    Raises:
        UsageError: A parameter is missing, a name unknown, or a value of another type.
    """
    relative = {name: _relative(value, folder) for name, value in parameters.items()}
    return _settings(str(folder / FILE), {"parameters": relative, "run": run})


def changed_settings(settings: Settings, values: Mapping[str, Any]) -> Settings:
    """Settings with some of them changed.

    Args:
        settings: As they are.
        values: By table and name, as `run.dtype`.

    Raises:
        UsageError: There is no such setting, or a value is of another type.
    """
    tables: dict[str, dict[str, Any]] = {}
    for text, value in values.items():
        table, _, name = text.partition(".")
        tables.setdefault(table, {})[name] = value
    _refuse_unknown("settings", tables, _TABLES)
    checked = {
        name: replace(getattr(settings, name), **_members(f"[{name}]", _TABLES[name], table))
        for name, table in tables.items()
    }
    return replace(settings, **checked)


def write_settings(path: Path, settings: Settings) -> None:
    """Write `equivalence.toml`, with what each member means beside it.

    Raises:
        WriteError: Something else is there, or it cannot be written.
    """
    import tomlkit

    document = tomlkit.document()
    for name in _TABLES:
        table = tomlkit.table()
        for member in fields(getattr(settings, name)):
            value = getattr(getattr(settings, name), member.name)
            if isinstance(value, Mapping):
                item: Any = tomlkit.inline_table()
                item.update(value)
            else:
                item = tomlkit.item(list(value) if isinstance(value, tuple) else value)
            item.comment(member.metadata["help"])
            table.add(member.name, item)
        document.add(name, table)
    with publish_text(path, beginning=_BEGINNING) as file:
        file.write(_HEAD + document.as_string())


def _relative(text: str, folder: Path) -> str:
    """A path of a file relative to a folder; what is no path of a file stays as it is."""
    path, colon, name = text.rpartition(":")
    if not (colon and path.endswith(".py")):
        path, colon, name = text, "", ""
    is_path = path and Path(path).expanduser().exists()
    return f"{os.path.relpath(Path(path).expanduser(), folder)}{colon}{name}" if is_path else text


def _settings(where: str, tables: Mapping[str, Any]) -> Settings:
    _refuse_unknown(where, tables, _TABLES)
    read = {
        name: kind(**_members(f"{where}: [{name}]", kind, tables.get(name, {})))
        for name, kind in _TABLES.items()
    }
    settings = Settings(**read)
    if missing := settings.parameters.missing:
        raise UsageError(
            f"{where}: [parameters]: missing: {', '.join(missing)}",
            hint="Give them to `tcap equivalence init`, which asks for them on a terminal.",
        )
    return settings


def _members(where: str, kind: type[Any], values: object) -> dict[str, Any]:
    """The members of a table, checked.

    Raises:
        UsageError: A name is unknown, or a value of another type.
    """
    if not isinstance(values, dict):
        raise UsageError(f"{where}: found {abbreviate(repr(values))}, expected a table")
    members = {member.name: member for member in fields(kind)}
    _refuse_unknown(where, values, members)
    read: dict[str, Any] = {}
    for name, value in values.items():
        default = members[name].default
        default = {} if default is MISSING else default
        if isinstance(default, float) and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
        if isinstance(default, tuple) and isinstance(value, list) and all(isinstance(v, str) for v in value):
            value = tuple(value)
        is_wrong = type(value) is not type(default)
        if is_wrong or (isinstance(value, float) and not math.isfinite(value)):
            expected = {str: "a text", int: "a whole number", float: "a number", tuple: "a list of texts"}
            expected[bool] = "true or false"
            raise UsageError(
                f"{where}: {name}: found {abbreviate(repr(value))}, expected "
                f"{expected.get(type(default), 'a table')}"
            )
        read[name] = value
    return read


def _refuse_unknown(where: str, values: Mapping[str, Any], known: Mapping[str, Any]) -> None:
    for name in values:
        if name not in known:
            raise UsageError(f"{where}: found {abbreviate(name)!r}, expected one of {', '.join(known)}")
