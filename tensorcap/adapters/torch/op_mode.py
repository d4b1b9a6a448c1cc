"""A dispatch mode that records ops while a call of one of the wanted modules is under way."""

from __future__ import annotations

import fnmatch
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, Final, NamedTuple

import torch
from torch import nn
from torch.utils import _python_dispatch as dispatching

from tensorcap.adapters.torch.direct_calls import around_direct_calls
from tensorcap.adapters.torch.frames import TRACED, TRANSFORMED
from tensorcap.adapters.torch.op_recorder import OpRecorder
from tensorcap.adapters.torch.tensor_leaves import TensorLeaves
from tensorcap.recording import Point
from tensorcap.workload import class_name
from tensorcap_formats.errors import UsageError, abbreviate, did_you_mean

_CALL: Final = nn.Module._call_impl.__code__
_WHOLE_BLOCK: Final = 0  # a token that is the id of no frame
_set_eval_frame: Final = torch._C._dynamo.eval_frame.set_eval_frame


@contextmanager
def record_ops(
    root: nn.Module, modules: Mapping[str, nn.Module], ops_in: Sequence[str], leaves: TensorLeaves
) -> Iterator[None]:
    """Record the ops within calls of modules until the block ends.

    Without globs, ops outside of all calls are seen too in the thread that begins the block, so that their
    writes are known.

    Args:
        root: The model.
        modules: All its modules, by name.
        ops_in: Globs of modules: the ops in them and in all modules below them are recorded; all if empty.
        leaves: Takes the tensors.

    Raises:
        UsageError: A glob matches no module.
    """
    op_recorder = OpRecorder(modules, leaves)
    points = {name: leaves.recorder.points[name] for name in modules}
    names = modules_below(class_name(root), ops_in, points) if ops_in else list(modules)
    switch = _ModeSwitch(op_recorder)
    with ExitStack() as stack:
        stack.callback(op_recorder.finish)
        stack.callback(switch.close)
        for name in names:
            if points[name].is_capturable:
                stack.callback(modules[name].register_forward_pre_hook(_BeforeCall(switch)).remove)
                closing = modules[name].register_forward_hook(_AfterCall(switch), always_call=True)
                stack.callback(closing.remove)
        around = switch.around({id(modules[name]) for name in names})
        stack.enter_context(around_direct_calls(around))
        if not ops_in:
            switch.begin_call(_WHOLE_BLOCK)
        yield


def modules_below(model: str, globs: Sequence[str], points: Mapping[str, Point]) -> list[str]:
    """The names of the modules that match a glob, and of all modules below them.

    Raises:
        UsageError: A glob matches no module.
    """
    roots: set[str] = set()
    known = [site for point in points.values() for site in (point.site, *point.aliases)]
    for glob in globs:
        tops = [
            name
            for name, point in points.items()
            if any(fnmatch.fnmatchcase(site, glob) for site in (point.site, *point.aliases))
        ]
        if not tops:
            raise UsageError(
                f"{model}: no module matches {abbreviate(glob)!r}, whose ops are wanted, among {len(known)}",
                hint=did_you_mean(glob, known),
            )
        roots.update(tops)
    return [name for name in points if "" in roots or any(f"{name}.".startswith(f"{top}.") for top in roots)]


class _Call(NamedTuple):
    """A call of a module during which the mode is on.

    Attributes:
        token: Names it among the calls under way in its thread.
        gap: Why its ops are not recorded, if the ops themselves do not show it; empty if they are.
    """

    token: int
    gap: str


class _UnderWay(threading.local):
    """The calls under way in each thread, outermost first."""

    def __init__(self) -> None:
        self.calls: list[_Call] = []


class _Mode(dispatching.TorchDispatchMode):  # type: ignore[no-untyped-call] # torch's code
    """Gives every op to the op recorder."""

    supports_higher_order_operators = True

    def __init__(self, op_recorder: OpRecorder, under_way: _UnderWay) -> None:
        super().__init__()  # type: ignore[no-untyped-call] # torch's code
        self._op_recorder = op_recorder
        self._under_way = under_way

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # a wrapper would do it, which costs time and loads the compiler; see the dispatch

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True  # what is compiled stays compiled

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        before = _set_eval_frame(None)  # nothing of ours is compiled
        try:
            calls = self._under_way.calls
            gap = calls[-1].gap if calls else ""
            return self._op_recorder.run(func, args, kwargs or {}, gap=gap)
        finally:
            _set_eval_frame(before)


class _ModeSwitch:
    """Switches a mode on and off, in each thread by itself."""

    def __init__(self, op_recorder: OpRecorder) -> None:
        self._op_recorder = op_recorder
        self._under_way = _UnderWay()
        self._mode = _Mode(op_recorder, self._under_way)

    def begin_call(self, token: int) -> None:
        """Switch the mode on if this is the first call under way in this thread."""
        calls = self._under_way.calls
        if not calls:
            self._op_recorder.forget_records()
            self._mode.__enter__()  # type: ignore[no-untyped-call] # torch's code
        calls.append(_Call(token, _gap()))

    def end_call(self, token: int) -> None:
        """End a call, if it had begun, and those inside it; switch the mode off after the last."""
        calls = self._under_way.calls
        for i, call in enumerate(calls):
            if call.token == token:
                del calls[i:]
                if not calls:
                    self._switch_off()
                break

    def close(self) -> None:
        """End all calls of this thread."""
        if self._under_way.calls:
            self._under_way.calls.clear()
            self._switch_off()

    def around(self, modules: set[int]) -> Callable[[nn.Module], AbstractContextManager[None]]:
        """Contexts for direct calls of `forward`; they do nothing for modules without one of these ids."""

        @contextmanager
        def call() -> Iterator[None]:
            token = id(sys._getframe())
            self.begin_call(token)
            try:
                yield
            finally:
                self.end_call(token)

        return lambda module: call() if id(module) in modules else nullcontext()

    def _switch_off(self) -> None:
        """Take our mode off the stack, wherever it is: a hook may have put another one on it."""
        above = []
        while dispatching._get_current_dispatch_mode() not in (self._mode, None):
            above.append(dispatching._pop_mode())
        if dispatching._get_current_dispatch_mode() is not None:
            self._mode.__exit__(None, None, None)  # type: ignore[no-untyped-call] # torch's code
        for mode in reversed(above):
            dispatching._push_mode(mode)


class _Hook:
    """A hook of ours. A copy or a pickle of the model gets a hook in its place that does nothing."""

    def __init__(self, switch: _ModeSwitch) -> None:
        self._switch = switch

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (nullcontext(), "__exit__")  # takes any arguments and returns None


class _BeforeCall(_Hook):
    def __call__(self, *_: object) -> None:
        if not torch.compiler.is_compiling():
            self._switch.begin_call(_token())


class _AfterCall(_Hook):
    def __call__(self, *_: object) -> None:
        if not torch.compiler.is_compiling():
            self._switch.end_call(_token())


def _gap() -> str:
    """Find why the ops of a call that begins now are not those that the user wrote; empty if they are."""
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return TRANSFORMED
    return "" if torch._C._get_tracing_state() is None else TRACED


def _token() -> int:
    """The id of the frame of the module's call that runs this hook, also if it runs after an error."""
    frame = sys._getframe(2)
    while frame.f_code is not _CALL and frame.f_back is not None:
        frame = frame.f_back
    return id(frame)
