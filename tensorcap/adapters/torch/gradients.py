"""Gradients: of what modules are given and return, and of parameters.

A hook on a tensor is called by the backward pass with the whole gradient of that tensor, in the version that
it had when the hook was set: a later write in place does not matter. No node is put into the graph, nothing
is returned to it, and a hook keeps no tensor.

A reentrant checkpoint (`torch.utils.checkpoint` with `use_reentrant=True`) runs its part without a graph,
and again with one in the backward pass. What is called then is paired with the calls that it repeats.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final
from weakref import WeakKeyDictionary

import torch
from torch import nn

from tensorcap.adapters.torch.tensor_leaves import KINDS, TensorLeaves, untraced
from tensorcap.recording.point import Point
from tensorcap.recording.recorder import Call
from tensorcap.recording.structure import walk
from tensorcap_formats.keys import escape

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle

_NO_BACKWARD: Final = "no backward pass was seen in the block that reaches what the model returned"
_NO_GRAPH: Final = "nothing that the model returned required a gradient: under no_grad, or all is frozen"
_TAKEN_AWAY: Final = "another hook took the gradient away before ours"
_FEW: Final = 4  # as many modules are named, more are counted
_CHECKPOINT: Final = "torch.utils.checkpoint"


@dataclass(eq=False, slots=True)
class _Followed:
    """A call, and what of it has come.

    Attributes:
        call: The call.
        slots: Those whose tensors have a hook since the forward pass.
        times: How many gradients came, by slot.
    """

    call: Call
    slots: set[str] = field(default_factory=set)
    times: Counter[str] = field(default_factory=Counter)


@dataclass(slots=True)
class _Part:
    """What a reentrant checkpoint ran in the forward pass, by site, and how much of it was run again."""

    calls: dict[str, list[_Followed]] = field(default_factory=dict)
    repeated: Counter[str] = field(default_factory=Counter)


class Gradients:
    """Sets hooks as calls pass, and hands what they are called with to the recorder."""

    def __init__(self, leaves: TensorLeaves, *, inputs: bool) -> None:
        """Prepare.

        Args:
            leaves: Takes the gradients.
            inputs: Whether those of the inputs of modules are recorded too.
        """
        self.inputs = inputs
        self._leaves = leaves
        self._recorder = leaves.recorder
        self._handles: list[RemovableHandle] = []
        self._enough = 1024  # handles, before those of graphs that are gone are dropped
        self._step: int | None = None  # of which a gradient came last
        self._expected: dict[str, None] = {}  # sites, in the order of their calls
        self._came: set[str] = set()
        self._under_way: dict[int, _Followed] = {}  # by token
        self._parts: WeakKeyDictionary[Any, _Part] = WeakKeyDictionary()  # by node of the graph

    @contextmanager
    def watching(self, modules: Mapping[str, nn.Module]) -> Iterator[None]:
        """Record the gradients of parameters until the block ends; then take every hook away.

        Args:
            modules: By name; a parameter that several share is recorded at each of them.
        """
        holders: dict[nn.Parameter, list[tuple[Point, str]]] = {}
        for name, module in modules.items():
            point = self._recorder.points[name]
            for own, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
                if parameter.requires_grad and point.wanted is not False:
                    holders.setdefault(parameter, []).append((point, f"grad_param.{escape(own)}"))
        with ExitStack() as undo:
            for parameter, places in holders.items():
                undo.enter_context(_first_after(parameter, _OfParameter(self, places)))
            try:
                yield
            finally:
                for handle in self._handles:
                    handle.remove()
                self._tell_missing()

    def begin(self, call: Call) -> None:
        """A call of a module begins that is recorded."""
        self._begin(_Followed(call), call.point.site, call.token)

    def repeat(self, point: Point, token: int) -> None:
        """A backward pass calls a module; where a reentrant checkpoint does, it repeats a call."""
        self._under_way.pop(token, None)
        node = next(_nodes("backward"), None)
        part = None if node is None else self._parts.get(node)
        if part is not None and point.site in part.calls and self.is_recording:
            calls = part.calls[point.site]
            number = part.repeated[point.site] % len(calls)  # each pass repeats all of them
            part.repeated[point.site] += 1
            self._begin(calls[number], point.site, token)

    def _begin(self, followed: _Followed, site: str, token: int) -> None:
        self._under_way[token] = followed
        if not torch.is_grad_enabled():
            for node in _nodes("forward"):
                self._parts.setdefault(node, _Part()).calls.setdefault(site, []).append(followed)

    def end(self, token: int) -> None:
        """The call that began with the token is over."""
        self._under_way.pop(token, None)

    def follow(self, token: int, slot: str, value: object) -> None:
        """Have the gradient of every tensor of a value recorded, once a backward pass computes it.

        Args:
            token: That of the call under way which is given the value, or returns it.
            slot: As the value itself is recorded.
            value: Anything.
        """
        followed = self._under_way.get(token)
        if followed is not None:
            try:
                self._follow(followed, slot, value)
            except Exception as error:
                reason = f"{type(error).__name__}: {error}"
                self._recorder.lose(followed.call.point, f"grad_{slot}", reason)

    def _follow(self, followed: _Followed, slot: str, value: object) -> None:
        call, recorder = followed.call, self._recorder
        is_repeated = torch._C._current_graph_task_id() != -1
        for leaf in walk(value, KINDS):
            tensor = leaf.value
            if not leaf.is_tensor or type(tensor) not in (torch.Tensor, nn.Parameter):
                continue
            name = f"grad_{slot}.{escape(leaf.name)}" if leaf.name else f"grad_{slot}"
            is_wanted = recorder.wants(call, name)
            if is_wanted and slot == "output" and tensor.is_floating_point():
                self._expected[call.point.site] = None
            # of the model itself they are looked at in any case: they tell to which step a backward belongs
            if not (is_wanted or call.point is recorder.points[""]) or name in followed.slots:
                continue
            if tensor.requires_grad:
                self._keep(tensor.register_hook(_OfTensor(self, followed, name)))
                if not is_repeated:
                    followed.slots.add(name)

    def came(self, call: Call, slot: str, number: int, gradient: torch.Tensor | None) -> None:
        """Record a gradient.

        Args:
            call: Whose it is.
            slot: What it is the gradient of.
            number: How many came before, of this slot and call; the second is recorded as `SLOT:2`.
            gradient: Its values; None if a hook of somebody else took them away.
        """
        recorder = self._recorder
        if not recorder.wants(call, slot):
            return
        self._came.add(call.point.site)
        if gradient is None:
            recorder.lose(call.point, slot, _TAKEN_AWAY, call=call)
            return
        with torch.no_grad(), untraced():
            self._leaves.record(call, f"{slot}:{number + 1}" if number else slot, gradient)

    @property
    def is_recording(self) -> bool:
        """Whether a gradient that comes now is recorded."""
        return self._recorder.is_recording

    @property
    def step(self) -> int:
        """The step of which the gradient of an activation came last; before, the run's last step."""
        return max(0, self._recorder.last_step) if self._step is None else self._step

    @step.setter
    def step(self, step: int) -> None:
        self._step = step

    def _keep(self, handle: RemovableHandle) -> None:
        self._handles.append(handle)
        if len(self._handles) > self._enough:
            self._handles = [h for h in self._handles if h.hooks_dict_ref() is not None]
            self._enough = max(1024, 2 * len(self._handles))

    def _tell_missing(self) -> None:
        """Tell what no gradient came of: none at all is a loss, some may be as it should."""
        recorder = self._recorder
        if not self._came:
            if recorder.last_step >= 0:
                reason = _NO_BACKWARD if self._handles else _NO_GRAPH
                recorder.lose(recorder.points[""], "grad_output", reason, required=True)
            return
        silent = [site for site in self._expected if site not in self._came]
        if silent:
            more = f" and {len(silent) - _FEW} more" if len(silent) > _FEW else ""
            note = f"no gradient came to the outputs of {', '.join(silent[:_FEW])}{more}"
            recorder.facts.setdefault("notes", []).append(note)


class _OfTensor:
    """A hook on a tensor; called with None where a pass goes only through other results of its operator."""

    __torch_unserializable__ = True  # else a copy of the tensor would come with a warning

    def __init__(self, gradients: Gradients, followed: _Followed, slot: str) -> None:
        self._gradients = gradients
        self._followed = followed
        self._slot = slot

    def __call__(self, gradient: torch.Tensor | None) -> None:
        gradients, call, times = self._gradients, self._followed.call, self._followed.times
        if gradient is not None and gradients.is_recording:
            gradients.step = call.step
            gradients.came(call, self._slot, times[self._slot], gradient)
            times[self._slot] += 1


class _OfParameter:
    """A hook on a parameter, called when a gradient has been added to its `.grad`."""

    def __init__(self, gradients: Gradients, places: list[tuple[Point, str]]) -> None:
        self._gradients = gradients
        self._places = places
        self._step = -1
        self._times = 0
        self._ordinal = -1

    def __call__(self, parameter: torch.Tensor) -> None:
        if not self._gradients.is_recording:
            return
        step = self._gradients.step
        self._times = self._times + 1 if step == self._step else 0
        self._step = step
        self._ordinal += 1
        for point, slot in self._places:
            call = Call(point, step, 0, ordinal=self._ordinal)
            self._gradients.came(call, slot, self._times, parameter.grad)


@contextmanager
def _first_after(parameter: nn.Parameter, hook: Callable[[torch.Tensor], None]) -> Iterator[None]:
    """Have a hook called when the parameter's gradient is there, before those that may use it up."""
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

    The stack of frames is looked at since torch tells of a checkpoint in no other way.
    """
    module = sys.modules.get(_CHECKPOINT)
    if module is None:
        return
    code = getattr(module.CheckpointFunction, method).__code__
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code is code:
            yield frame.f_locals["ctx"]
        frame = frame.f_back  # type: ignore[assignment]
