"""The adapter protocol: what the library asks of a framework, and how the adapter of a model is found.

Only adapters import frameworks, so that each is a dependency only of those who use it. An adapter is found by
the class of the model, or of a base class, and imported when it is found; no framework is imported to look
for it. To write one, copy the layout of `torch/` and `max/` (`tensorcap.adapters`) and hold to four rules:

- Names are checked before the first hook is set: a wrong one is an error before anything runs.
- The model is as before when a block ends, however it ends: no hook, wrapper or value of ours stays.
- A tap changes no result. It records a value before the model can write to it in place.
- What cannot be recorded is a loss with a reason (`Recorder.lose`), never an error of the user's model.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from fnmatch import fnmatchcase
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal, Protocol, TypeVar, cast

from tensorcap.recording import CaptureOptions, Recorder
from tensorcap_formats.errors import MissingPackageError, UsageError, abbreviate, missing_package

if TYPE_CHECKING:
    from tensorcap.adapters.edits import Rerun
    from tensorcap.adapters.operation_graph import OperationGraph
    from tensorcap.recording import Substitution
    from tensorcap.workload import StoredInput, TokenModel, Workload
    from tensorcap_formats.dtypes import Array
    from tensorcap_formats.keys import Key

PROBE_HINT: Final = "tensorcap.probe in the model's code names a value within a module."
_Module = TypeVar("_Module")
_ADAPTERS: Final = {  # root package of the model's class, or of a base class; sorted
    "coreai": "tensorcap.adapters.coreai.adapter:CoreAIAdapter",
    "executorch": "tensorcap.adapters.executorch.adapter:ExecuTorchAdapter",
    "flax": "tensorcap.adapters.jax.adapter:JaxAdapter",
    "jax": "tensorcap.adapters.jax.adapter:JaxAdapter",
    "max": "tensorcap.adapters.max.adapter:MaxAdapter",
    "onnx": "tensorcap.adapters.onnx.adapter:OnnxAdapter",
    "torch": "tensorcap.adapters.torch.adapter:TorchAdapter",
}
_OF_TORCH: Final = {  # what runs as models of torch, by its name, and by the root package of its classes
    "neuron": "tensorcap.adapters.neuron.adapter:NeuronAdapter",
    "neuronx_distributed_inference": "tensorcap.adapters.neuron.adapter:NeuronAdapter",
}


_EXTRAS: Final = {"flax": "jax"}  # what is installed for a framework, if it is not called like it


@dataclass(frozen=True, slots=True)
class Site:
    """A place in a model that can be recorded.

    Attributes:
        name: The module path in the framework's form; empty for the whole model.
        aliases: Further paths that lead to the same module.
        reason: Why it cannot be captured, or is not expected to be called.
        is_capturable: Whether it may be tapped.
    """

    name: str
    aliases: tuple[str, ...] = ()
    reason: str = ""
    is_capturable: bool = True


@dataclass(frozen=True, slots=True)
class ProgramOperation:
    """An operation of a compiled program in a file.

    Attributes:
        op_id: Its number.
        op: Its name, as the compiler has it.
        types: The types of its results.
        made_of: The nodes of the graph that it was made of.
        holds: Those of whose outputs it holds the value.
        instances: The instances of modules that it lies in, the model first: `Mlp$1`, `Block$2`.
        file: Source file, "" if it is not known.
        line: Line in it; None if it is not known.
    """

    op_id: int
    op: str
    types: tuple[str, ...] = ()
    made_of: tuple[str, ...] = ()
    holds: tuple[str, ...] = ()
    instances: tuple[str, ...] = ()
    file: str = ""
    line: int | None = None


@dataclass(frozen=True, slots=True)
class CompiledAhead:
    """A graph that was compiled before a run needs it.

    Attributes:
        text: What it is for.
        seconds: How long that took.
        is_cached: Whether the framework had compiled it before.
    """

    text: str
    seconds: float
    is_cached: bool


GraftSide = Literal["reference", "target"]


@dataclass(frozen=True, slots=True)
class Layer:
    """A module of a target that can be exchanged with the reference's.

    Attributes:
        path: Its path, in both models.
        class_name: Its class in the target.
        reference_bytes: Bytes of its tensors in the reference.
        target_bytes: The same in the target.
    """

    path: str
    class_name: str
    reference_bytes: int
    target_bytes: int


class Grafts(Protocol):
    """Two models whose modules can stand in each other's place.

    Attributes:
        layers: The modules that are not the same in both, by path.
        left_out: Modules that cannot be exchanged, and why.
    """

    layers: dict[str, Layer]
    left_out: dict[str, str]

    def output(self, side: GraftSide, exchanged: Collection[str] = ()) -> Array:
        """Run one of the models with some layers of the other one.

        Args:
            side: Whose model is run, on its own inputs.
            exchanged: Paths of layers that are the other model's.

        Returns:
            Its logits, or the first tensor of floats that it returns, float64.

        Raises:
            UsageError: There is no such tensor, or it is not finite.
        """
        ...


def first_names(named: Iterable[tuple[str, _Module]]) -> tuple[dict[str, _Module], dict[str, str]]:
    """Each module by its first name, and the first name by each further one of modules that have several."""
    modules: dict[str, _Module] = {}
    first: dict[int, str] = {}
    aliases: dict[str, str] = {}
    for name, module in named:
        known = first.setdefault(id(module), name)
        if known == name:
            modules[name] = module
        else:
            aliases[name] = known
    return modules, aliases


def most_common_dtype(tensors: Iterable[tuple[str, int]]) -> str | None:
    """The dtype of most elements of tensors that are given by dtype and count of elements; None of none."""
    sizes: Counter[str] = Counter()
    for dtype, count in tensors:
        sizes[dtype] += count
    return sizes.most_common(1)[0][0] if sizes else None


def further_names(aliases: Mapping[str, str]) -> dict[str, tuple[str, ...]]:
    """The further names of each module, by its first name, of the aliases that `first_names` gives."""
    further: dict[str, tuple[str, ...]] = {}
    for alias, name in aliases.items():
        further[name] = (*further.get(name, ()), alias)
    return further


@dataclass(slots=True)
class CalledRoot:
    """A model that a program calls.

    Attributes:
        name: Its class; from the second of the same class on with `@N`, counted from 0.
        calls: How often it, or a part of it, was called from outside.
        is_taken: Whether it is the one that is captured.
    """

    name: str
    calls: int = 0
    is_taken: bool = False


class RootSearch:
    """The search of a framework for the model to capture among those that a program calls.

    Attributes:
        called: The models that were called outermost, in the order of their first calls.
        glob: A glob for the class of the wanted one, qualified or not; None if none is given.
        number: Which of the models of such a class, from 0; None for the first that is called.
        is_over: Whether a model was taken.
    """

    def __init__(self, pattern: str | None, take: Callable[[Any], bool]) -> None:
        """Look for a model.

        Args:
            pattern: A glob for its class; with `@N` behind it, for the N-th model of such a class, from 0.
                None for the first model with parameters.
            take: Gets the model before its call goes on; returns whether it takes it.
        """
        glob, _, number = (pattern or "").rpartition("@")
        is_numbered = bool(glob) and number.isdigit()
        self.glob = glob if is_numbered else pattern
        self.number = int(number) if is_numbered else None
        self.called: list[CalledRoot] = []
        self.is_over = False
        self._take = take

    def fits(self, name: str, package: str) -> bool:
        """Whether a class of this name in this package fits the glob."""
        glob = self.glob
        return glob is not None and (fnmatchcase(name, glob) or fnmatchcase(f"{package}.{name}", glob))

    def add(self, name: str) -> CalledRoot:
        """Add a further model of a class, numbered if others of that class were called before."""
        same = sum(root.name.partition("@")[0] == name for root in self.called)
        self.called.append(CalledRoot(f"{name}@{same}" if same else name))
        return self.called[-1]

    def take(self, model: Any, entry: CalledRoot) -> bool:
        """Offer a model, which ends the search if it is taken; return whether it is."""
        if self._take(model):
            self.is_over = entry.is_taken = True
        return entry.is_taken


class NotCapturableError(Exception):
    """A tensor has no elements that an archive can store; the text says why. Never leaves an adapter."""


class Adapter(Protocol):
    """What the library asks of a framework.

    Four groups: the model (`list_sites`, `describe`, `read_sources`), the workload (`seed`, `dtype_named`,
    `prepare`, `perturb`, `run`), the capture (`tap`, `record_inputs`, `watch_roots`, `process_rank`), and the
    references' (`export`, `rerun`, `with_eager_attention`), which need a framework that runs models as Python
    code. The last group has defaults, for adapters that derive from this class, and so have `perturb`,
    `watch_roots`, `process_rank`, `gather_texts`, `token_model`, `compile_ahead`, `decompose`,
    `operation_graph`, `program_workload`, `program_mappings` and `program_operations`, and `load`, `check`
    and `adopt`, which are for frameworks that run files, or models of another one that they convert.

    Attributes:
        has_operations: Whether its operations can be recorded one by one (level op).
        decompositions: The framework's own name, if its models are compiled from exported graphs: a
            reference whose nodes are those that were compiled is captured with it (CAP-191); else empty.
        title: The framework as messages name it; empty where none does.
        settings: Names of the options of a run that are the framework's own.
        is_of_one_shape: Whether its models run on inputs of one shape alone, to which they are padded.
    """

    decompositions: ClassVar[str] = ""
    has_operations: ClassVar[bool] = False
    title: ClassVar[str] = ""
    settings: ClassVar[tuple[str, ...]] = ()
    is_of_one_shape: ClassVar[bool] = False

    def list_sites(self, model: Any, *, eager: bool = False) -> list[Site]:
        """List all sites, the model itself first, in the order of the module tree.

        Args:
            model: The model.
            eager: Whether compiled and fused parts will run as plain code.
        """

    def describe(self, model: Any, *, digests: bool = False) -> dict[str, Any]:
        """The run's metadata that the framework knows (`specs/archive.md`).

        Args:
            model: The model.
            digests: Whether parameters and buffers are read, for their digests and statistics.
        """

    def read_sources(self, model: Any, names: Iterable[str]) -> dict[str, Any]:
        """Read the source text of the classes of the named sites, by qualified class name."""

    def load(
        self,
        path: str,
        settings: Mapping[str, Any],
        inputs: Mapping[str, StoredInput] | None = None,
        *,
        seed: int = 0,
    ) -> Workload:
        """The workload of a model in a file, with inputs that the settings name or an archive holds.

        Raises:
            UsageError: The framework runs no files, or the file is no model of it; a setting is unknown.
        """
        raise UsageError(
            f"{abbreviate(path)}: expected FILE.py:FUNCTION",
            hint="The function returns tensorcap.Workload(model, inputs).",
        )

    def refuse_unknown_settings(self, path: str, settings: Mapping[str, Any]) -> None:
        """Refuse settings of a model in a file that are none of the framework's own.

        Raises:
            UsageError: One is not.
        """
        for name in settings:
            if name not in self.settings:
                raise UsageError(f"{path}: takes no --{name.replace('_', '-')}, which is for torch models")

    def refuse_requests(
        self,
        plan: CaptureOptions,
        substitution: Substitution | None = None,
        *,
        levels: Collection[str] = ("module",),
        lacks: Collection[str] = (),
        why: str = "",
        hint: str | None = None,
    ) -> None:
        """Refuse what a framework without watched functions and gradients does not have for a capture.

        Args:
            plan: What the capture is to record.
            substitution: What it is to put in.
            levels: Those that the framework has.
            lacks: What else it does not have: `parameters`, `injection`.
            why: What the framework does in its place, a clause.
            hint: What to do.

        Raises:
            UsageError: Something of that is asked for.
        """
        for request, is_asked in (
            (f"level {plan.level}", plan.level not in levels),
            ("watched functions", bool(plan.watch)),
            ("gradients", plan.grads),
            ("parameters", "parameters" in lacks and bool(plan.params)),
            ("injection", "injection" in lacks and substitution is not None),
        ):
            if is_asked:
                clause = f", which {why}" if why else ""
                raise UsageError(f"{request}: not to be had of {self.title}{clause}", hint=hint)

    def check(self, path: str, settings: Mapping[str, Any]) -> None:
        """Refuse early what `load` would refuse: whatever can be known before anything is run.

        Raises:
            UsageError: A setting or the path is wrong.
            MissingPackageError: A package is absent.
        """

    def adopt(self, workload: Workload, settings: Mapping[str, Any], *, seed: int = 0) -> Workload:
        """The workload as the framework runs it, which may convert its model, with settings of a run."""
        return workload

    def seed(self, seed: int) -> None:
        """Set the framework's random generators."""

    def dtype_named(self, name: str) -> Any:
        """The framework's dtype of a name on the command line, for a user's function that takes one.

        Raises:
            UsageError: There is no floating dtype of that name.
        """

    def prepare(
        self,
        workload: Workload,
        *,
        dtype: str | None = None,
        input_dtype: str | None = None,
        device: str | None = None,
        inputs: Mapping[str, StoredInput] | None = None,
    ) -> Workload:
        """The workload with archived inputs, in another precision, on a device.

        Raises:
            UsageError: An input of the archive is none of the model's arguments; a dtype or a device is
                unknown, or cannot be changed.
        """

    def perturb(self, workload: Workload, dtype: str) -> Workload:
        """The workload with its inputs changed by the machine epsilon of a dtype, at random (POL-64).

        Raises:
            UsageError: There is nothing to perturb, or no such dtype; the framework runs no references.
        """
        raise UsageError(f"perturb: not to be had of {self.title}, expected a torch model")

    def run(self, workload: Workload, *, grads: bool = False) -> None:
        """Run a workload once, and with `grads` a backward pass from its loss.

        Raises:
            UsageError: A backward pass is wanted, and the run returned no loss.
        """

    def tap(
        self,
        model: Any,
        names: Collection[str],
        recorder: Recorder,
        plan: CaptureOptions,
        substitution: Substitution | None = None,
    ) -> AbstractContextManager[None]:
        """Report every call of the named sites in the block to the recorder, and all else in the plan.

        The inputs of the model itself are recorded even if the plan wants no inputs and it is not named.
        With a substitution, calls of named sites go on with its values in the place of those that were
        recorded (`specs/injection.md`).
        """

    def record_inputs(self, inputs: Any, recorder: Recorder) -> None:
        """Record the inputs of a workload with a function of its own, as slots `given.NAME` of the root."""

    def watch_roots(
        self, pattern: str | None, take: Callable[[Any], bool]
    ) -> AbstractContextManager[list[CalledRoot]]:
        """Find the models that a program calls in the block (`specs/capture.md`, 9).

        Args:
            pattern: A glob for the class of the wanted one, or such a glob and `@N`; None for the first.
            take: Gets the model before its call goes on, and returns whether it takes it.

        Returns:
            What was called until then; of a framework whose programs are not watched nothing.
        """
        return nullcontext([])

    def export(self, workload: Workload, plan: CaptureOptions) -> Callable[[Recorder], None]:
        """Export the workload's model as a graph; the result runs it once and records its nodes.

        Raises:
            UsageError: The framework has no such graph, or the workload is no single forward.
            CaptureError: The model cannot be exported.
        """
        raise UsageError("level export: this framework exports no graphs, expected level module")

    def operation_graph(self, workload: Workload, decompositions: str) -> OperationGraph:
        """Export the workload's model as a graph whose nodes can be computed one by one.

        Args:
            workload: A model and its inputs.
            decompositions: The framework as whose converter it is decomposed (CAP-191).

        Raises:
            UsageError: The framework has no such graph, or the workload is no single forward.
            CaptureError: The model cannot be exported.
        """
        raise UsageError("replay of operations: this framework exports no graphs")

    def decompose(self, program: Any) -> Any:
        """Decompose an exported graph as the framework's converter does before it compiles one.

        Raises:
            UsageError: The framework compiles no exported graphs.
        """
        raise UsageError("decompositions: this framework compiles no exported graphs")

    def program_workload(self, program: Any, inputs: Any) -> Workload:
        """A workload for level export, of a program that is exported already.

        Args:
            program: The program.
            inputs: Its positional arguments in a tuple or list, or arguments by name.

        Raises:
            UsageError: It is no exported program of this framework, or the inputs do not fit it.
        """
        raise UsageError(f"a {type(program).__name__} is no exported program, expected one of torch.export")

    def program_mappings(self, program: Any) -> dict[str, Any]:
        """Which operator of a compiled program is which node of its graph: `mappings` of the metadata.

        Raises:
            UsageError: It is no compiled program of this framework.
        """
        raise UsageError(f"a {type(program).__name__} is no compiled program with mappings")

    def program_operations(self, path: Path) -> list[ProgramOperation]:
        """The operations of a compiled program in a file or a folder.

        Raises:
            UsageError: The framework has no such files.
            ReadError: It cannot be read.
        """
        raise UsageError(f"{path}: this framework keeps no programs in files")

    def rerun(self, workload: Workload, substitution: Substitution, site: str, key: Key) -> Rerun | None:
        """Run a workload until a call of a module is over, which can then be made again.

        Args:
            workload: The reference's.
            substitution: The arguments and results of the target's calls.
            site: The module.
            key: A tensor that its code computes: its result, or an argument of a call within it.

        Returns:
            The call; None if it did not come, or the framework cannot call a module again.
        """
        return None

    def grafts(self, reference: Workload, target: Workload) -> Grafts:
        """Two models of this framework whose modules can stand in each other's place.

        Raises:
            UsageError: The framework cannot exchange modules.
        """
        raise UsageError(
            f"a {type(target.model).__name__} cannot be grafted: this framework exchanges no modules",
            hint="Sensitivities are measured of PyTorch models.",
        )

    def token_model(self, workload: Workload) -> TokenModel:
        """A workload as what gives logits for other token ids than its own.

        Raises:
            UsageError: The framework has no such runs, or the workload is of no tokens.
        """
        raise UsageError("logits of tokens: this framework runs no model on other tokens than a workload's")

    def compile_ahead(self, workload: Workload) -> list[CompiledAhead]:
        """Compile what captures, injections and bisections of a workload will need.

        Raises:
            UsageError: The framework compiles nothing, or the workload runs no graph.
            CaptureError: The compiler failed.
        """
        raise UsageError("compiling ahead: this framework runs models as they are written")

    def process_rank(self) -> tuple[int, int] | None:
        """Which of several processes this is that run one model together, from 0, and how many they are.

        None if the framework does not know of others.
        """
        return None

    def gather_texts(self, text: str) -> list[str]:
        """What each process of one run says here, by rank; it waits until all have said it.

        Of a run that `process_rank` knows no others of, the text alone.
        """
        return [text]

    def with_eager_attention(self, workload: Workload) -> Workload | None:
        """The workload with an attention that computes its scores as tensors and rounds them.

        Returns:
            None if it has one already, or the model has no such choice.
        """
        return None


def adapter_for(model: object) -> Adapter:
    """Find the adapter for a model by its class.

    Raises:
        UsageError: There is none.
    """
    for base in type(model).__mro__:
        # a class of ours that stands for a framework's model names the framework
        framework = getattr(base, "tensorcap_framework", base.__module__.partition(".")[0])
        if framework in _ADAPTERS or framework in _OF_TORCH:
            return adapter_named(framework)
    raise UsageError(
        f"no adapter for {type(model).__qualname__}, expected a model of: {', '.join(sorted(_ADAPTERS))}"
    )


def adapter_named(framework: str) -> Adapter:
    """Import the adapter of a framework.

    Raises:
        MissingPackageError: The framework is not installed.
    """
    package = "torch" if framework in _OF_TORCH else _EXTRAS.get(framework, framework)
    module, _, name = {**_ADAPTERS, **_OF_TORCH}[framework].partition(":")
    try:
        return cast("Adapter", getattr(import_module(module), name)())
    except ModuleNotFoundError as error:
        if error.name not in (package, framework, "torch", "onnxruntime"):  # torch: some convert its models
            raise
        article = "an" if framework in ("executorch", "onnx") else "a"
        raise missing_package(f"capturing {article} {framework} model", error.name, extra=package) from None


def decomposed(program: Any, framework: str) -> Any:
    """Decompose an exported graph as the converter of a framework does (CAP-191).

    Raises:
        UsageError: There is no such framework, or it compiles no exported graphs.
        MissingPackageError: It is not installed.
    """
    if framework not in _ADAPTERS:
        raise UsageError(f"decompositions {framework!r}: expected the name of a framework, such as coreai")
    try:
        adapter = adapter_named(framework)
    except MissingPackageError:
        raise missing_package(f"decompositions {framework!r}", framework, extra=framework) from None
    return adapter.decompose(program)
