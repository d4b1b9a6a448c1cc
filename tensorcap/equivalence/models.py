"""Both sides of an experiment: how they are built, with patches of the target, and called on ranks."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, Final, Literal

from tensorcap.equivalence.experiment import Experiment
from tensorcap.session import Recipe, run_on_ranks
from tensorcap.workload import Workload, load_file
from tensorcap_formats.errors import UsageError

SideName = Literal["source", "target"]
MODEL_SETTINGS: Final = (  # what the models themselves are made of
    "parameters.source_model_path",
    "parameters.target_modeling_file",
    "parameters.target_causal_class",
    "parameters.compiled_model_path",
    "run.target_framework",
    "run.neuron_src",
    "run.options",
    "run.seed",
)
_FRAMEWORKS: Final = ("torch", "neuron")
_PREFIX: Final = "apply_"  # of functions that apply a patch


@dataclass(frozen=True, slots=True)
class Side:
    """One side of an experiment.

    Attributes:
        experiment: The experiment.
        name: Which side it is.
        is_patched: Whether the patches of the experiment's folder are applied before it is built.
    """

    experiment: Experiment
    name: SideName
    is_patched: bool = False

    @property
    def recipe(self) -> Recipe:
        """How its workload is built, in its own precision.

        Raises:
            UsageError: The framework is none.
        """
        settings = self.experiment.settings
        parameters, run = settings.parameters, settings.run
        framework = None
        if self.name == "target":
            path = parameters.target_modeling_file
            if path.endswith(".py"):
                path = f"{path}:{parameters.target_causal_class}"
            if run.target_framework not in _FRAMEWORKS:
                raise UsageError(
                    f"[run]: target_framework: found {run.target_framework!r}, expected one of "
                    f"{', '.join(_FRAMEWORKS)}"
                )
            framework = None if run.target_framework == "torch" else run.target_framework
        else:
            path = parameters.source_model_path
        recipe = Recipe(self.experiment.resolve(path), {"seed": run.seed}, framework)
        if recipe.kind == "huggingface":
            recipe = recipe.changed(**run.options)
        return recipe

    @property
    def files(self) -> tuple[Path, ...]:
        """Files and folders that it is made of, patches included."""
        path = Path(self.recipe.path.rpartition(":")[0] or self.recipe.path)
        files = [path] if path.exists() else []
        compiled = self.experiment.settings.parameters.compiled_model_path
        if self.name == "target" and compiled:
            files.append(Path(self.experiment.resolve(compiled)))
        return (*files, *(self.experiment.patches if self.is_patched else ()))

    def build(self, dtype: str | None = None) -> Workload:
        """Build its workload; for a port on ranks this is a rank of it.

        Args:
            dtype: The precision; its own if None.

        Raises:
            UsageError: The path or an option is wrong, or a patch has no function to apply.
        """
        parameters = self.experiment.settings.parameters
        folder = self.experiment.resolve(parameters.vllm_neuron_dir)
        if self.name == "target" and folder and folder not in sys.path:
            sys.path.insert(0, folder)
        use_sources(self.experiment)
        recipe = self.recipe if dtype is None else self.recipe.changed(dtype=dtype)
        if not self.is_patched:
            return recipe.build()
        return recipe.build(prepare=partial(apply_patches, self.experiment))


def use_sources(experiment: Experiment) -> None:
    """Have sources of NxD Inference imported, if the settings name them, before anything of the port is.

    Raises:
        UsageError: They are not there.
    """
    folders = [experiment.resolve(folder) for folder in experiment.settings.run.neuron_src]
    if folders:
        from tensorcap.adapters.neuron import use_neuron_sources

        use_neuron_sources(folders)


def target_side(experiment: Experiment) -> Side:
    """The target, with its patches if there are any."""
    return Side(experiment, "target", is_patched=bool(experiment.patches))


def model_files(experiment: Experiment) -> tuple[Path, ...]:
    """Files that both sides are made of, without patches."""
    return tuple(dict.fromkeys((*Side(experiment, "source").files, *Side(experiment, "target").files)))


def apply_patches(experiment: Experiment, module: ModuleType | None) -> None:
    """Apply the patches of an experiment, in the order of their files' names, before the port is built.

    Args:
        experiment: The experiment.
        module: That of the port, which a patch can import by the name of its file.

    Raises:
        UsageError: A file has no function `apply_…`.
    """
    names = {} if module is None or module.__file__ is None else {Path(module.__file__).stem: module}
    for path in experiment.patches:
        before = {name: sys.modules.get(name) for name in names}
        sys.modules.update(names)
        try:
            functions = [f for name, f in vars(load_file(str(path))).items() if name.startswith(_PREFIX)]
            for function in functions:
                function()
        finally:
            for name, other in before.items():
                if other is None:
                    del sys.modules[name]
                else:
                    sys.modules[name] = other
        if not functions:
            raise UsageError(f"{path}: has no function {_PREFIX}…, expected one that patches the port")


def call_on_ranks(experiment: Experiment, function: str, **arguments: Any) -> None:
    """Call `function(experiment, **arguments)` in a process for each rank of the target, at once.

    Each process has joined the others before; what it hands back it writes into files. Of one rank, it is
    called in this process, unless there are patches, which classes of this process would keep.

    Args:
        experiment: The experiment.
        function: `module:function`.
        arguments: Values of JSON.

    Raises:
        CaptureError: A process did not end with 0; the others were ended.
    """
    count = experiment.settings.run.tp
    if count == 1 and not experiment.patches:
        _function(function)(experiment, **arguments)
        return
    call = json.dumps([str(experiment.folder.absolute()), function, arguments])
    logs = [experiment.path(f"logs/rank{rank}.log") for rank in range(count)]
    run_on_ranks([python(experiment), "-m", "tensorcap.equivalence.rank_process", call], logs)


def call_as_rank(call: str) -> None:
    """What a process of `call_on_ranks` does."""
    from tensorcap.adapters import adapter_named

    folder, function, arguments = json.loads(call)
    experiment = Experiment.open(folder)
    use_sources(experiment)
    adapter_named(experiment.settings.run.target_framework).seed(experiment.settings.run.seed)
    _function(function)(experiment, **arguments)


def python(experiment: Experiment) -> str:
    """The Python in which processes of an experiment run."""
    venv = experiment.settings.parameters.venv
    return str(Path(experiment.resolve(venv)) / "bin" / "python") if venv else sys.executable


def rank() -> int:
    """The rank that this process is, 0 if it is alone."""
    return int(os.environ.get("RANK", "0"))


def _function(name: str) -> Any:
    module, _, member = name.partition(":")
    return getattr(import_module(module), member)
