"""Adapters: what tensorcap knows of each framework; the only place where frameworks are imported.

An adapter lists a model's sites, taps them and substitutes at them, describes the run, and makes inputs of
stored bits. It is found by the class of the model or of a base class, never by importing the framework; it
is imported when it is found.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final, Protocol, cast

from tensorcap.recording.options import CaptureOptions
from tensorcap.recording.recorder import Recorder
from tensorcap_formats.errors import UsageError, missing_package

if TYPE_CHECKING:
    from tensorcap.adapters.edits import Rerun
    from tensorcap.recording.substitution import Substitution
    from tensorcap.workload.workload import StoredInput, Workload
    from tensorcap_formats.keys import Key

_ADAPTERS: Final = {  # root package of the model's class, or of a base class; sorted
    "max": "tensorcap.adapters.max.adapter:MaxAdapter",
    "torch": "tensorcap.adapters.torch.adapter:TorchAdapter",
}


@dataclass(frozen=True, slots=True)
class Site:
    """A place in a model that records may come from.

    Attributes:
        name: Module path as the framework has it; empty for the whole model.
        aliases: Further paths that lead to the same module.
        reason: Why it cannot be captured, or is not expected to be called.
        is_capturable: Whether it may be tapped.
    """

    name: str
    aliases: tuple[str, ...] = ()
    reason: str = ""
    is_capturable: bool = True


@dataclass(slots=True)
class CalledRoot:
    """A model that a program calls.

    Attributes:
        name: Its class; from the second of the same class on with `@N`, counted from 0.
        calls: How often it was called, or a part of it from outside of it.
        is_taken: Whether it is the one that is captured.
    """

    name: str
    calls: int = 0
    is_taken: bool = False


class Adapter(Protocol):
    """What the library asks of a framework."""

    def sites(self, model: Any, *, eager: bool = False) -> list[Site]:
        """All sites, the model itself first, in the order of the module tree.

        Args:
            model: The model.
            eager: Whether compiled and fused parts will run as plain code.
        """

    def tap(
        self,
        model: Any,
        names: Collection[str],
        recorder: Recorder,
        plan: CaptureOptions,
        substitution: Substitution | None = None,
    ) -> AbstractContextManager[None]:
        """Tell the recorder of every call of the named sites, and of all else that the plan wants.

        The model is as before afterwards. The inputs of the model itself are recorded even if the plan
        wants no inputs and it is not named. With a substitution, calls of named sites go on with its values
        in the place of those that were recorded (`specs/injection.md`).
        """

    def describe(self, model: Any) -> dict[str, Any]:
        """The run's metadata that the framework knows (`specs/archive.md`)."""

    def sources(self, model: Any, names: Iterable[str]) -> dict[str, Any]:
        """The source text of the classes of the named sites, by qualified class name."""

    def seed(self, seed: int) -> None:
        """Set the framework's random generators."""

    def dtype(self, name: str) -> Any:
        """The framework's dtype of that name, as a user's function is given it."""

    def prepare(
        self,
        workload: Workload,
        *,
        dtype: str | None = None,
        input_dtype: str | None = None,
        device: str | None = None,
        inputs: Mapping[str, StoredInput] | None = None,
    ) -> Workload:
        """The workload with archived inputs, in another precision, on a device."""

    def perturb(self, workload: Workload, dtype: str) -> Workload:
        """The workload with what it is run on changed by the machine epsilon of a dtype."""

    def run(self, workload: Workload, *, grads: bool = False) -> None:
        """Run a workload once, and with `grads` a backward pass from the loss that it gives.

        Raises:
            UsageError: A backward pass is wanted, and the run gave no loss.
        """

    def attending_openly(self, workload: Workload) -> Workload | None:
        """The workload, its attention changed to one that computes its scores and rounds them.

        Returns:
            None if it does so already, or the model has no such choice.
        """

    def rerun(self, workload: Workload, substitution: Substitution, site: str, key: Key) -> Rerun | None:
        """Run a workload until a call of a module is over, which can then be made again.

        Args:
            workload: The reference's.
            substitution: What the target's calls were given and returned.
            site: The module.
            key: A tensor that its code makes: its result, or an argument of a call within it.

        Returns:
            The call; None if it did not come.
        """

    def export(self, workload: Workload, plan: CaptureOptions) -> Callable[[Recorder], None]:
        """Make a graph of a workload's model; what is returned runs it once and records its nodes.

        Raises:
            CaptureError: That cannot be done with this model.
        """

    def keep_inputs(self, inputs: Any, recorder: Recorder) -> None:
        """Record what a workload's own function is given, as slots `given.NAME` of the whole model."""

    def roots(
        self, pattern: str | None, take: Callable[[Any], bool]
    ) -> AbstractContextManager[list[CalledRoot]]:
        """Look out for the models that a program calls in the block (`specs/capture.md`, 9).

        Args:
            pattern: A glob for the class of the one that is looked for, or such a glob and `@N`.
            take: Is given it before its call goes on, and says whether it is content with it.
        """


def adapter_for(model: object) -> Adapter:
    """Find the adapter for a model by its class.

    Raises:
        UsageError: There is none.
    """
    for base in type(model).__mro__:
        # a class of ours that stands for a framework's model says which
        framework = getattr(base, "tensorcap_framework", base.__module__.partition(".")[0])
        if framework in _ADAPTERS:
            return adapter_named(framework)
    raise UsageError(
        f"no adapter for {type(model).__qualname__}, expected a model of: {', '.join(sorted(_ADAPTERS))}"
    )


def adapter_named(framework: str) -> Adapter:
    """The adapter of a framework.

    Raises:
        MissingPackageError: The framework is not installed.
    """
    module, _, name = _ADAPTERS[framework].partition(":")
    try:
        return cast("Adapter", getattr(import_module(module), name)())
    except ModuleNotFoundError as error:
        if error.name != framework:
            raise
        raise missing_package(f"capturing a {framework} model", framework, extra=framework) from None
