"""How to build a workload from a path and options, and again, with one option changed, from an archive."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import PurePath
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final

from tensorcap.adapters import Adapter, adapter_for, adapter_named
from tensorcap.workload import FRAMEWORKS, Port, PortSide, StoredInput, Workload, load_file, redact
from tensorcap_formats.errors import MissingPackageError, UsageError, abbreviate

if TYPE_CHECKING:
    from tensorcap_formats.archive import Archive

# Options of the inputs; if one of them is given anew, archived inputs are not used.
INPUT_OPTIONS: Final = ("prompt", "input_ids", "inputs")
BY_NAME: Final = ("max",)  # frameworks that have Hugging Face models of their own, as `max:ID`
BY_SUFFIX: Final = {
    ".onnx": "onnx",
    ".pte": "executorch",
}  # frameworks that run files, by the suffix of these
_OF_ANY_RUN: Final = ("seed", "perturb")  # options that are no setting of a model
_NEVER_INHERITED: Final = ("trust_remote_code",)  # an archive must not decide that code is run


@dataclass(frozen=True)
class Recipe:
    """How to build a workload: the path and options of the command line, which an archive keeps.

    Attributes:
        path: `file.py:function`, a folder or id of a Hugging Face model, or a file of a framework's own.
        options: The options, by their Python names.
        framework: The framework of the model; None for torch, or for a function, whose result shows it.
    """

    path: str
    options: Mapping[str, Any] = field(default_factory=dict)
    framework: str | None = None

    @classmethod
    def named(cls, text: str, options: Mapping[str, Any], framework: str | None = None) -> Recipe:
        """The recipe of a path on the command line; `max:PATH` is one of MAX, NAME.onnx of ONNX Runtime.

        Raises:
            UsageError: The path is of another framework than the command.
        """
        prefix, _, path = text.partition(":")
        if prefix not in BY_NAME or not path:
            return cls(text, options, framework or BY_SUFFIX.get(PurePath(text).suffix))
        if framework not in (None, prefix):
            raise UsageError(f"{text}: a model of {prefix}, expected one of {framework}")
        return cls(path, options, prefix)

    @property
    def runs_archived_inputs(self) -> bool:
        """Whether a target is run on the inputs of its reference: it is a model by folder, id or file."""
        return self.kind == "huggingface" or (
            self.kind == "file" and self.framework in (*BY_NAME, *BY_SUFFIX.values())
        )

    @property
    def kind(self) -> str:
        """`function`; `huggingface`; or `file`, of a framework other than torch."""
        file, _, function = self.path.rpartition(":")
        if file.endswith(".py") and function.isidentifier():
            return "function"
        return "huggingface" if self.framework in (None, "torch") else "file"

    @classmethod
    def of(cls, archive: Archive) -> Recipe:
        """The recipe of the run that an archive holds.

        Raises:
            UsageError: The run has no recipe, as one that was captured through the Python API.
        """
        workload, framework = archive.info.workload, archive.info.framework
        if not workload.path:
            raise UsageError(
                f"{archive.path}: does not say how its run was made",
                hint="Name the model; the inputs and filters are then taken from the archive.",
            )
        options = {name: value for name, value in workload.options.items() if name not in _NEVER_INHERITED}
        return cls(workload.path, options, framework if framework in FRAMEWORKS else None)

    def changed(self, **options: Any) -> Recipe:
        """The same recipe with some options changed."""
        kept = dict(self.options)
        if any(name in options for name in INPUT_OPTIONS):
            kept = {name: value for name, value in kept.items() if name not in INPUT_OPTIONS}
        if "teacher_forced" in options:
            kept.pop("max_new_tokens", None)  # the reference has the number
        return replace(self, options={**kept, **options})

    def describe(self) -> dict[str, Any]:
        """The entry `workload` of the run's metadata."""
        options = {name: _redacted(value) for name, value in self.options.items()}
        return {"kind": self.kind, "path": redact(self.path), "options": options}

    def build(
        self,
        inputs: Mapping[str, StoredInput] | None = None,
        *,
        prepare: Callable[[ModuleType | None], None] | None = None,
    ) -> Workload:
        """Build the workload.

        Args:
            inputs: Archived inputs, in place of those that the options name.
            prepare: Called before the model is built, with the module of its function, or None.

        Raises:
            UsageError: The path or an option is wrong.
        """
        expected = self._seeded_adapter()
        options = dict(self.options)
        seed, perturbation = options.pop("seed", 0), options.pop("perturb", None)
        if expected is not None:
            expected.seed(seed)
        module = _load(self.path) if self.kind == "function" else None
        if prepare is not None:
            prepare(module)
        if self.kind == "huggingface":
            from tensorcap.adapters.huggingface.workload_builder import build

            workload = build(self.path, options, inputs)
        elif self.kind == "file":
            workload = adapter_named(self.framework or "").load(self.path, options, inputs, seed=seed)
        else:
            workload = self._call_function(_function_of(module, self.path), expected, options, inputs, seed)
        adapter = adapter_for(workload.model)
        if perturbation is not None:
            workload = adapter.perturb(workload, perturbation)
        adapter.seed(seed)  # the run draws the same numbers however the weights were made
        return replace(workload, seed=seed)

    def check(self) -> None:
        """Refuse early what `build` would refuse, as far as it is known before anything is run.

        Raises:
            UsageError: The path or an option is wrong.
            MissingPackageError: The framework is not installed.
        """
        if self.kind == "file" and self.framework in BY_NAME:
            options = {name: value for name, value in self.options.items() if name not in _OF_ANY_RUN}
            adapter_named(str(self.framework)).check(self.path, options)

    def described(self) -> dict[str, Any]:
        """Describe the model as a run's metadata would, without a run, and without weights if possible.

        Raises:
            UsageError: The path or an option is wrong.
        """
        if self.kind != "huggingface":
            model = self.build({} if self.framework in BY_SUFFIX.values() else None).model
            return adapter_for(model).describe(model)
        from tensorcap.adapters.huggingface.workload_builder import build_without_weights

        model = build_without_weights(self.path, self.options)
        return adapter_for(model).describe(model)

    def _seeded_adapter(self) -> Adapter | None:
        """The adapter of the framework that is seeded before the user's code runs; None if none is installed.

        Raises:
            MissingPackageError: The model's framework is not installed.
        """
        try:
            return adapter_named(self.framework or "torch")
        except MissingPackageError:
            if self.framework is not None or self.kind == "huggingface":
                raise
            return None

    def _call_function(
        self,
        make: Callable[..., Any],
        expected: Adapter | None,
        options: dict[str, Any],
        inputs: Mapping[str, StoredInput] | None,
        seed: int,
    ) -> Workload:
        dtype, device = options.pop("dtype", None), options.pop("device", None)
        own = () if expected is None else expected.settings
        settings = {name: options.pop(name) for name in own if name in options}
        parameters = inspect.signature(make).parameters
        for name in options:
            if name not in parameters:
                raise UsageError(
                    f"{self.path}: takes no --{name.replace('_', '-')}, which is for Hugging Face models",
                    hint=f"A function with a parameter {name} is given it.",
                )
        takes_dtype = dtype is not None and "dtype" in parameters
        if takes_dtype:
            options["dtype"] = _own_dtype(parameters["dtype"], dtype, expected)
        workload = make(**options)
        if not isinstance(workload, Workload):
            raise UsageError(
                f"{self.path}: returned a {type(workload).__name__}, expected a tensorcap.Workload",
                hint="Return tensorcap.Workload(model, inputs).",
            )
        if expected is not None:
            workload = expected.adopt(workload, settings, seed=seed)
        return adapter_for(workload.model).prepare(
            workload, dtype=None if takes_dtype else dtype, input_dtype=dtype, device=device, inputs=inputs
        )


def make_side(
    port: Port,
    side: PortSide,
    *,
    dtype: str | None = None,
    device: str | None = None,
    num_hidden_layers: int | None = None,
    seed: int | None = None,
) -> Workload:
    """Make the workload of a side of a port, as options say.

    Args:
        port: The port.
        side: Which.
        dtype: Its precision: the function of the side is given it as its framework's own if it has such a
            parameter, else weights are cast.
        device: Where it runs.
        num_hidden_layers: How many layers it has, for a function with that parameter.
        seed: Of its run; 0 if None.

    Raises:
        UsageError: The side is not to be had like that.
    """
    parameters, options = port.parameters(side), dict[str, Any]()
    if num_hidden_layers is not None:
        if "num_hidden_layers" not in parameters:
            raise UsageError(
                f"port: {side}: takes no --num-hidden-layers",
                hint="A function with a parameter num_hidden_layers is given it.",
            )
        options["num_hidden_layers"] = num_hidden_layers
    takes_dtype = dtype is not None and "dtype" in parameters
    if takes_dtype:
        options["dtype"] = _own_dtype(parameters["dtype"], dtype or "", None)
    workload = port.make(side, **options)
    prepared = adapter_for(workload.model).prepare(
        workload, dtype=None if takes_dtype else dtype, input_dtype=dtype, device=device
    )
    return replace(prepared, seed=seed or 0)


def _load(path: str) -> ModuleType:
    """Import the file of `FILE.py:FUNCTION`."""
    try:
        return load_file(path.rpartition(":")[0])
    except UsageError as error:
        raise UsageError(f"{path}: {error}") from error


def _function_of(module: ModuleType | None, path: str) -> Callable[..., Any]:
    """The function of `FILE.py:FUNCTION` in its module."""
    file_text, _, name = path.rpartition(":")
    member = getattr(module, name, None)
    if not callable(member):
        names = [n for n, v in vars(module).items() if inspect.isfunction(v) and not n.startswith("_")]
        raise UsageError(
            f"{path}: {file_text!r} has no function {name!r}",
            hint=f"It has: {', '.join(names)}." if names else None,
        )
    function: Callable[..., Any] = member
    return function


def _redacted(value: Any) -> Any:
    if isinstance(value, str):
        return redact(value)
    return [_redacted(item) for item in value] if isinstance(value, (list, tuple)) else value


def _own_dtype(parameter: inspect.Parameter, name: str, expected: Adapter | None) -> Any:
    """The dtype of a name, in the framework that the default of a `dtype` parameter belongs to.

    Args:
        parameter: The parameter. Without a default of a framework it is given the name.
        name: As on the command line.
        expected: The adapter to take if the default is of no framework.
    """
    try:
        adapter = adapter_for(parameter.default)
    except UsageError:
        return name if expected is None else expected.dtype_named(name)
    return adapter.dtype_named(name)


def parse_setting(text: str) -> tuple[str, Any]:
    """Read `key=value`; the value is JSON, or a text if it is none.

    Example:
        >>> parse_setting("rope_parameters.rope_theta=1e4"), parse_setting("hidden_act=gelu")
        (('rope_parameters.rope_theta', 10000.0), ('hidden_act', 'gelu'))
    """
    key, equals, value = text.partition("=")
    if not key or not equals:
        raise UsageError(f"--config {abbreviate(text)!r}: expected key=value")
    try:
        return key, json.loads(value)
    except (ValueError, RecursionError):
        return key, value
