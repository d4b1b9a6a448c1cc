"""Gradients of the arguments and results of modules, and of parameters; and the backward pass of a workload.

A hook on a tensor is called by the backward pass with the whole gradient of that tensor, in the version that
it had when the hook was set: a later write in place does not matter. No node is put into the graph, nothing
is returned to it, and a hook keeps no tensor.

A reentrant checkpoint (`torch.utils.checkpoint` with `use_reentrant=True`) runs its part without a graph,
and again with one in the backward pass. The calls in the backward pass are paired with those they repeat.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final
from weakref import WeakKeyDictionary

import torch
from torch import nn

from tensorcap.adapters.torch.modules import argument_names, unwrapped
from tensorcap.adapters.torch.tensor_leaves import KINDS, TensorLeaves, untraced
from tensorcap.recording import Call, Point, leaf_slot, walk
from tensorcap.wording import some
from tensorcap.workload import Workload, class_name
from tensorcap_formats.errors import UsageError
from tensorcap_formats.keys import escape

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle

_NO_BACKWARD: Final = "no backward pass was seen in the block that reaches what the model returned"
_NO_GRAPH: Final = "nothing that the model returned required a gradient: under no_grad, or all is frozen"
_HANDLES: Final = 1024  # that are kept before those of graphs that are gone are dropped
_FEW: Final = 4  # modules that are named; the others are counted


@dataclass(eq=False, slots=True)
class _TrackedCall:
    """A call whose gradients are awaited.

    Attributes:
        call: The call.
        slots: The slots whose tensors have a hook since the forward pass.
        times: How many gradients have come, by slot.
    """

    call: Call
    slots: set[str] = field(default_factory=set)
    times: Counter[str] = field(default_factory=Counter)


@dataclass(slots=True)
class _CheckpointPart:
    """The calls that a reentrant checkpoint made in the forward pass, by site, and how many it repeated."""

    calls: dict[str, list[_TrackedCall]] = field(default_factory=dict)
    repeated: Counter[str] = field(default_factory=Counter)


class Gradients:
    """Sets hooks on the tensors of calls, and gives the gradients that they get to the recorder."""

    def __init__(self, leaves: TensorLeaves, *, inputs: bool) -> None:
        """Prepare.

        Args:
            leaves: Takes the gradients.
            inputs: Whether those of the inputs of modules are recorded too.
        """
        self.inputs = inputs
        self._leaves = leaves
        self.recorder = leaves.recorder
        self._handles: list[RemovableHandle] = []
        self._enough = _HANDLES
        self._step: int | None = None  # the step of the last gradient
        self._expected: dict[str, None] = {}  # sites, in the order of their calls
        self._came: set[str] = set()
        self._under_way: dict[int, _TrackedCall] = {}  # by token
        self._parts: WeakKeyDictionary[Any, _CheckpointPart] = WeakKeyDictionary()  # by node of the graph

    @contextmanager
    def watch_parameters(self, modules: Mapping[str, nn.Module]) -> Iterator[None]:
        """Record the gradients of parameters until the block ends; then remove every hook.

        Args:
            modules: The modules by name; a parameter that several share is recorded at each of them.
        """
        places_by_parameter: dict[nn.Parameter, list[tuple[Point, str]]] = {}
        for name, module in modules.items():
            point = self.recorder.points[name]
            owner = unwrapped(module)
            for own, parameter in owner.named_parameters(recurse=False, remove_duplicate=False):
                if parameter.requires_grad and point.wanted is not False:
                    places_by_parameter.setdefault(parameter, []).append((point, f"grad_param.{escape(own)}"))
        with ExitStack() as undo:
            for parameter, places in places_by_parameter.items():
                undo.enter_context(_hook_first(parameter, _ParameterHook(self, places)))
            try:
                yield
            finally:
                for handle in self._handles:
                    handle.remove()
                self._report_missing()

    def begin(self, call: Call) -> None:
        """Begin a recorded call of a module."""
        self._begin(_TrackedCall(call), call.point.site, call.token)

    def repeat(self, point: Point, token: int) -> None:
        """Begin a call in a backward pass; if a reentrant checkpoint makes it, it repeats an earlier call."""
        self._under_way.pop(token, None)
        node = next(_nodes("backward"), None)
        part = None if node is None else self._parts.get(node)
        if part is not None and point.site in part.calls and self.recorder.is_recording:
            calls = part.calls[point.site]
            number = part.repeated[point.site] % len(calls)  # each pass repeats all of them
            part.repeated[point.site] += 1
            self._begin(calls[number], point.site, token)

    def _begin(self, tracked: _TrackedCall, site: str, token: int) -> None:
        self._under_way[token] = tracked
        if not torch.is_grad_enabled():
            for node in _nodes("forward"):
                self._parts.setdefault(node, _CheckpointPart()).calls.setdefault(site, []).append(tracked)

    def end(self, token: int) -> None:
        """End the call that began with the token."""
        self._under_way.pop(token, None)

    def follow(self, token: int, slot: str, value: object) -> None:
        """Record the gradient of every tensor of a value, once a backward pass computes it.

        Args:
            token: The token of the call under way that gets the value, or returns it.
            slot: The slot of the value itself.
            value: Anything.
        """
        tracked = self._under_way.get(token)
        if tracked is not None:
            try:
                self._follow(tracked, slot, value)
            except Exception as error:
                reason = f"{type(error).__name__}: {error}"
                self.recorder.lose(tracked.call.point, f"grad_{slot}", reason)

    def _follow(self, tracked: _TrackedCall, slot: str, value: object) -> None:
        call, recorder = tracked.call, self.recorder
        is_repeated = torch._C._current_graph_task_id() != -1
        for leaf in walk(value, KINDS):
            tensor = leaf.value
            if not leaf.is_tensor or type(tensor) not in (torch.Tensor, nn.Parameter):
                continue
            name = leaf_slot(f"grad_{slot}", leaf.name)
            is_wanted = recorder.wants(call, name)
            if is_wanted and slot == "output" and tensor.is_floating_point():
                self._expected[call.point.site] = None
            # those of the model itself always get hooks: they show which step a backward pass belongs to
            if not (is_wanted or call.point is recorder.points[""]) or name in tracked.slots:
                continue
            if tensor.requires_grad:
                self._keep(tensor.register_hook(_TensorHook(self, tracked, name)))
                if not is_repeated:
                    tracked.slots.add(name)

    def record(self, call: Call, slot: str, number: int, gradient: torch.Tensor | None) -> None:
        """Record a gradient.

        Args:
            call: The call that it belongs to.
            slot: The slot of the gradient.
            number: How many came before of this slot and call; the second is recorded as `SLOT:2`.
            gradient: Its values; None if another hook took them away.
        """
        recorder = self.recorder
        if not recorder.wants(call, slot):
            return
        self._came.add(call.point.site)
        if gradient is None:
            recorder.lose(call.point, slot, "another hook took the gradient away before ours", call=call)
            return
        with torch.no_grad(), untraced():
            self._leaves.record(call, f"{slot}:{number + 1}" if number else slot, gradient)

    @property
    def step(self) -> int:
        """The step of the last gradient of an activation; before the first, the run's last step."""
        return max(0, self.recorder.last_step) if self._step is None else self._step

    @step.setter
    def step(self, step: int) -> None:
        self._step = step

    def _keep(self, handle: RemovableHandle) -> None:
        self._handles.append(handle)
        if len(self._handles) > self._enough:
            self._handles = [h for h in self._handles if h.hooks_dict_ref() is not None]
            self._enough = max(_HANDLES, 2 * len(self._handles))

    def _report_missing(self) -> None:
        """Report missing gradients: a loss if there is none at all, else a note, since some may be absent."""
        recorder = self.recorder
        if not self._came:
            if recorder.last_step >= 0:
                reason = _NO_BACKWARD if self._handles else _NO_GRAPH
                recorder.lose(recorder.points[""], "grad_output", reason, required=True)
            return
        missing = [site for site in self._expected if site not in self._came]
        if missing:
            note = f"no gradient came to the outputs of {some(missing, _FEW)}"
            recorder.facts.setdefault("notes", []).append(note)


class _TensorHook:
    """A hook on a tensor; it gets None if a pass goes only through other results of the tensor's operator."""

    __torch_unserializable__ = True  # else a copy of the tensor would come with a warning

    def __init__(self, gradients: Gradients, tracked: _TrackedCall, slot: str) -> None:
        self._gradients = gradients
        self._followed = tracked
        self._slot = slot

    def __call__(self, gradient: torch.Tensor | None) -> None:
        gradients, call, times = self._gradients, self._followed.call, self._followed.times
        if gradient is not None and gradients.recorder.is_recording:
            gradients.step = call.step
            gradients.record(call, self._slot, times[self._slot], gradient)
            times[self._slot] += 1


class _ParameterHook:
    """A hook on a parameter, called when a gradient has been added to its `.grad`."""

    def __init__(self, gradients: Gradients, places: list[tuple[Point, str]]) -> None:
        self._gradients = gradients
        self._places = places
        self._step = -1
        self._times = 0
        self._ordinal = -1

    def __call__(self, parameter: torch.Tensor) -> None:
        if not self._gradients.recorder.is_recording:
            return
        step = self._gradients.step
        self._times = self._times + 1 if step == self._step else 0
        self._step = step
        self._ordinal += 1
        for point, slot in self._places:
            call = Call(point, step, 0, ordinal=self._ordinal)
            self._gradients.record(call, slot, self._times, parameter.grad)


@contextmanager
def _hook_first(parameter: nn.Parameter, hook: Callable[[torch.Tensor], None]) -> Iterator[None]:
    """Have a hook called when the parameter's gradient is complete, before hooks that may use it up."""
    had_any = parameter._post_accumulate_grad_hooks is not None
    handle = parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
    hooks: Any = parameter._post_accumulate_grad_hooks
    for key in [key for key in hooks if key != handle.id]:
        hooks[key] = hooks.pop(key)  # torch goes by the order of insertion alone
    try:
        yield
    finally:
        handle.remove()
        if not had_any and not hooks:
            parameter._post_accumulate_grad_hooks = None  # type: ignore[assignment] # as it was


def _nodes(method: str) -> Iterator[Any]:
    """The nodes of reentrant checkpoints whose method is under way in this thread, the innermost first.

    It looks at the stack of frames, since torch shows a checkpoint in no other way.
    """
    module = sys.modules.get("torch.utils.checkpoint")
    if module is None:
        return
    code = getattr(module.CheckpointFunction, method).__code__
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code is code:
            yield frame.f_locals["ctx"]
        frame = frame.f_back  # type: ignore[assignment]


def with_labels(workload: Workload) -> Workload:
    """Add labels to the inputs of a language model, so that it computes its own loss on its tokens."""
    model, inputs = workload.model, workload.inputs
    if workload.run is not None or not isinstance(inputs, Mapping) or "labels" in inputs:
        return workload
    config, can_generate = getattr(model, "config", None), getattr(model, "can_generate", None)
    is_decoder = not getattr(config, "is_encoder_decoder", True) and callable(can_generate) and can_generate()
    if not is_decoder or "input_ids" not in inputs or "labels" not in argument_names(model, {}):
        return workload
    return replace(workload, inputs={**inputs, "labels": inputs["input_ids"].clone()})


@contextmanager
def clear_gradients(model: nn.Module) -> Iterator[None]:
    """Clear the gradients of parameters for the block, and restore them afterwards."""
    before = {parameter: parameter.grad for parameter in model.parameters()}
    for parameter in before:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, gradient in before.items():
            parameter.grad = gradient


def backward(model: nn.Module, result: object) -> None:
    """Run a backward pass from the loss of a run, unless the run did so itself.

    Raises:
        UsageError: The run returned no loss.
    """
    if any(parameter.grad is not None for parameter in model.parameters()):
        return
    loss = _loss_of(result)
    if loss is None:
        raise UsageError(
            f"{class_name(model)}: the run gave no loss, and gradients are those of a loss",
            hint="Return one (a tensor of one element) from the model or from `run` of the Workload, or give "
            "a Hugging Face model `labels` among its inputs.",
        )
    loss.backward()  # type: ignore[no-untyped-call] # torch has not annotated it


def _loss_of(result: Any) -> torch.Tensor | None:
    """The loss in the result of a run: the result itself, or its member `loss`; None if it is none."""
    if not isinstance(result, torch.Tensor):
        result = result.get("loss") if isinstance(result, Mapping) else getattr(result, "loss", None)
    is_loss = isinstance(result, torch.Tensor) and result.numel() == 1 and result.requires_grad
    return result if is_loss else None
